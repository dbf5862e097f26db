/* What this library promises to Python: counted up when a function's arguments change, so that one that was built from older sources
   is not called. */

int kernels_version(void)
{
    return 3;
}
