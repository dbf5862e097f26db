#include "sizes.h"

int kernels_version(void)
{
    return KERNELS_VERSION;
}
