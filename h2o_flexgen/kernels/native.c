#include <string.h>

#include "sizes.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* of arch_prctl, and of what a process may ask for */

/* Tiles of registers are more than a process has to save, so that the system gives them to those that ask. */
static int tiles_are_given(void)
{
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#else
static int tiles_are_given(void)
{
    return 0;
}
#endif

int kernels_version(void)
{
    return KERNELS_VERSION;
}

/* Whether the processor has the instructions that a library of this name is built with, as far as torch does not say it. Any library
   answers for any other one, also for one that was not built. */
int runs_here(const char *library)
{
    int vnni = 0, vnni_of_avx = 0, bf16 = 0, tiles = 0;
#if defined(__x86_64__)
    unsigned a, b, c, d;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) vnni = c >> 11 & 1, tiles = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) vnni_of_avx = a >> 4 & 1, bf16 = a >> 5 & 1;
#endif
    if (strcmp(library, "avx512amx") == 0) return vnni && bf16 && tiles && tiles_are_given();
    if (strcmp(library, "avx512bf16") == 0) return vnni && bf16;
    if (strcmp(library, "avx512vnni") == 0) return vnni;
    if (strcmp(library, "avxvnni") == 0) return vnni_of_avx;
    return 1;
}
