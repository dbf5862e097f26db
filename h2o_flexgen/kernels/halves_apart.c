/* Rows of values of which the first are neighbours that belong together, with those that come first before those that come second. The
   rest of a row stays. */

#include "kernel.h"
#include "team.h"

typedef struct {
    const char *x;          /* (rows, width) */
    char *out;              /* alike */
    long rows, half, rest, nbytes; /* pairs and other values of a row, bytes of a value */
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

static void part_row(const void *given, long row, int member)
{
    const pairs *p = given;
    const long paired = 2 * p->half * p->nbytes, beside = p->rest * p->nbytes, at = row * (paired + beside);
    if (p->nbytes == 4)
        part_words((const uint32_t *)(p->x + at), (uint32_t *)(p->out + at), p->half);
    else
        part_shorts((const uint16_t *)(p->x + at), (uint16_t *)(p->out + at), p->half);
    memcpy(p->out + at + paired, p->x + at + paired, beside);
}

void halves_apart(const void *given, int threads)
{
    const pairs *p = given;
    share_out(given, p->rows, threads, part_row);
}
