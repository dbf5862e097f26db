/* The slot of each head that ranks lowest among those that may go; among equals, the oldest token's. */

#include "kernel.h"
#include "team.h"
#include <math.h>
#include <stddef.h>

typedef struct {
    const int32_t *positions; /* (rows, heads, slots): positions of tokens in their text */
    const float *ranks;       /* (rows, heads, slots); NULL: slots rank by position */
    const int64_t *held;      /* (rows) */
    const int64_t *from, *to; /* (rows): positions from `from` up to but not including `to` may go */
    int64_t *out;             /* (rows, heads) */
    long rows, heads, slots;
} ranking;

static ALWAYS_INLINE long lowest(const int32_t *positions, const float *ranks, long held, int64_t from, int64_t to)
{
    const int32_t first = from < INT32_MIN ? INT32_MIN : from > INT32_MAX ? INT32_MAX : (int32_t)from;
    const int32_t end = to < INT32_MIN ? INT32_MIN : to > INT32_MAX ? INT32_MAX : (int32_t)to;
    float least = INFINITY;
    if (ranks) {
#pragma omp simd reduction(min : least)
        for (long slot = 0; slot < held; slot++) {
            const float rank = (positions[slot] >= first) & (positions[slot] < end) ? ranks[slot] : INFINITY;
            least = rank < least ? rank : least;
        }
    }
    int32_t oldest = INT32_MAX;
#pragma omp simd reduction(min : oldest)
    for (long slot = 0; slot < held; slot++) {
        const int goes = (positions[slot] >= first) & (positions[slot] < end) & (ranks ? ranks[slot] == least : 1);
        const int32_t position = goes ? positions[slot] : INT32_MAX;
        oldest = position < oldest ? position : oldest;
    }
    for (long slot = 0; slot < held; slot++)
        if (positions[slot] == oldest)
            return slot;
    return held - 1;
}

static void by_rank(const void *given, long row, int member)
{
    const ranking *r = given;
    for (long head = row * r->heads; head < (row + 1) * r->heads; head++)
        r->out[head] = lowest(r->positions + head * r->slots, r->ranks + head * r->slots, r->held[row], r->from[row], r->to[row]);
}

static void by_age(const void *given, long row, int member)
{
    const ranking *r = given;
    for (long head = row * r->heads; head < (row + 1) * r->heads; head++)
        r->out[head] = lowest(r->positions + head * r->slots, NULL, r->held[row], r->from[row], r->to[row]);
}

void lowest_slot(const void *given, int threads)
{
    const ranking *r = given;
    share_out(given, r->rows, threads, r->ranks ? by_rank : by_age);
}
