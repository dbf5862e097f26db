/* CUDA's driver for machines without a GPU: it takes what Triton asks of it, and counts launches instead of making them. */

#include <stddef.h>

typedef int Status;
typedef void (*Listener)(const void *config, void *function, void **parameters);

enum { MOST_THREADS_PER_BLOCK = 0, SHARED_BYTES = 232448, REGISTERS = 32, THREADS = 1024, NOT_SUPPORTED = 801 };

long launched;
static Listener listener;
static long modules;

/* What is told of each launch, in the thread that launches; NULL: nothing is. */
void listen(Listener told) { listener = told; }

Status cuInit(unsigned flags) { return 0; }
Status cuDriverGetVersion(int *version) { *version = 12080; return 0; }
Status cuDeviceGetCount(int *count) { *count = 1; return 0; }
Status cuDeviceGet(int *device, int number) { *device = number; return 0; }
Status cuDeviceGetAttribute(int *value, int attribute, int device) { *value = SHARED_BYTES; return 0; }
Status cuDevicePrimaryCtxRetain(void **context, int device) { *context = &launched; return 0; }
Status cuCtxGetCurrent(void **context) { *context = &launched; return 0; }
Status cuCtxSetCurrent(void *context) { return 0; }
Status cuCtxGetDevice(int *device) { *device = 0; return 0; }
Status cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
Status cuCtxSetLimit(int limit, size_t value) { return 0; }
Status cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == MOST_THREADS_PER_BLOCK ? THREADS : REGISTERS;
    return 0;
}
Status cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
Status cuFuncSetCacheConfig(void *function, int config) { return 0; }
Status cuGetErrorString(Status status, const char **words) { *words = "an error that is pretended"; return 0; }
Status cuModuleLoadData(void **module, const void *data) { *module = (void *)++modules; return 0; }
Status cuModuleUnload(void *module) { return 0; }
Status cuModuleGetFunction(void **function, void *module, const char *name) { *function = module; return 0; }
Status cuOccupancyMaxActiveClusters(int *clusters, void *function, void *config) { *clusters = 1; return 0; }
Status cuPointerGetAttribute(void *value, int attribute, unsigned long long address) {
    *(unsigned long long *)value = address;
    return 0;
}
Status cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
Status cuTensorMapEncodeTiled(void) { return NOT_SUPPORTED; }
Status cuTensorMapEncodeIm2col(void) { return NOT_SUPPORTED; }

Status cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra) {
    launched++;
    if (listener)
        listener(config, function, parameters);
    return 0;
}
