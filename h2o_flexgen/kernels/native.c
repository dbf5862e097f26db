#include "sizes.h"

int kernels_version(void)
{
    return KERNELS_VERSION;
}

/* Whether the processor has the instructions that this library was built with, as far as torch does not ask for them. */
int runs_here(void)
{
#if defined(__AVX512BF16__)
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
#elif defined(__AVX512VNNI__)
    return __builtin_cpu_supports("avx512vnni") != 0;
#elif defined(__AVXVNNI__)
    return __builtin_cpu_supports("avxvnni") != 0;
#else
    return 1;
#endif
}
