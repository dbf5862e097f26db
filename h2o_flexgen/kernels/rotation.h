/* The rotation of a head: pairs (j, j + half) of its first 2 * half values are turned, the rest stays. Each product is rounded to the
   type of the values, as torch does it. */

#pragma once

#include "vectors.h"

/* Some pairs; their second values lie `behind` (bytes) the first ones. */
static ALWAYS_INLINE void turn_pairs(const char *x, const char *cos, const char *sin, char *out, long behind, long count, int kind)
{
    const floats first = load_some(x, count, kind), second = load_some(x + behind, count, kind);
    const floats along = load_some(cos, count, kind), across = load_some(sin, count, kind);
    store_some(out, rounded_to(first * along, kind) - rounded_to(second * across, kind), count, kind);
    store_some(out + behind, rounded_to(second * along, kind) + rounded_to(first * across, kind), count, kind);
}

static ALWAYS_INLINE void turn_head(const char *x, const char *cos, const char *sin, char *out, long dim, long half, int kind)
{
    const long size = itemsize_of(kind);
#define TURN(AT, COUNT) turn_pairs(x + (AT)*size, cos + (AT)*size, sin + (AT)*size, out + (AT)*size, half * size, COUNT, kind)
    EACH_REGISTER(at, half, TURN);
#undef TURN
    memcpy(out + 2 * half * size, x + 2 * half * size, (dim - 2 * half) * size);
}
