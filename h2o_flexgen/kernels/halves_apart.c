/* Rows of values of which neighbours belong together, with those that come first before those that come second. */

#include "kernel.h"

typedef struct {
    const char *x;          /* (rows, width) */
    char *out;              /* alike */
    long rows, half, nbytes; /* half a row in values, bytes of a value */
} pairs;

static ALWAYS_INLINE void part_words(const uint32_t *restrict x, uint32_t *restrict out, long half)
{
    for (long at = 0; at < half; at++) {
        out[at] = x[2 * at];
        out[half + at] = x[2 * at + 1];
    }
}

static ALWAYS_INLINE void part_shorts(const uint16_t *restrict x, uint16_t *restrict out, long half)
{
    for (long at = 0; at < half; at++) {
        out[at] = x[2 * at];
        out[half + at] = x[2 * at + 1];
    }
}

static void part_row(const pairs *p, long row)
{
    const long at = row * 2 * p->half * p->nbytes;
    if (p->nbytes == 4)
        part_words((const uint32_t *)(p->x + at), (uint32_t *)(p->out + at), p->half);
    else
        part_shorts((const uint16_t *)(p->x + at), (uint16_t *)(p->out + at), p->half);
}

void halves_apart(const pairs *p, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long row = 0; row < p->rows; row++)
        part_row(p, row);
}
