/* The addresses of the values of heads: contiguous within a row, head and slot (or token), and any strides between these. */

#pragma once

#include "kernel.h"
#include <math.h>

typedef struct {
    const char *data;
    long row, head, slot; /* strides in bytes */
    int kind; /* how the values are kept: one of enum kind */
} slots;

static ALWAYS_INLINE const char *slot_at(const slots *from, long row, long head, long slot)
{
    return from->data + row * from->row + head * from->head + slot * from->slot;
}

/* A number of each head. */
typedef struct {
    const char *data; /* (heads); NULL: there are none */
    int kind;
} of_heads;

static ALWAYS_INLINE float number_of_head(of_heads from, long head, float otherwise)
{
    return from.data ? load_value(from.data + head * itemsize_of(from.kind), from.kind) : otherwise;
}

/* What a policy notes of each slot: (rows, heads, slots), the numbers of a head side by side. */
typedef struct {
    int32_t *positions; /* of tokens in their text */
    float *scores, *worth; /* NULL: there are none */
    long row, head; /* strides in numbers */
} slot_notes;

/* One more key for each query, which stands for keys that are attended elsewhere: the logarithm of the sum of their exponentials is
   its score, -INFINITY where a query has none, and their outcome is its value. */
typedef struct {
    const float *scores; /* one for each query; NULL: none has one */
    const float *values; /* (queries, dim); NULL: all are 0 */
} more_keys;

static ALWAYS_INLINE float score_of_more(more_keys from, long query)
{
    return from.scores ? from.scores[query] : -INFINITY;
}

static ALWAYS_INLINE void add_more(more_keys from, long query, float share, float *out, long dim)
{
    if (from.values && score_of_more(from, query) != -INFINITY)
        for (long at = 0; at < dim; at++)
            out[at] += share * from.values[query * dim + at];
}
