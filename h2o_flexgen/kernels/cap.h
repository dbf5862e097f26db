/* Scores of attention that come near a cap and no further. */

#pragma once

#include "vectors.h"

/* Scores stay between -cap and cap, near which they hardly grow any more: cap * tanh(score / cap). 0: they are as large as they
   are. */
static ALWAYS_INLINE floats capped(floats scores, float cap)
{
    const floats size = larger(scores, -scores), faded = exp_below_zero(size * (-2.0f / cap));
    const floats tanh_of_size = (1.0f - faded) / (1.0f + faded);
    const integers is_negative = scores < (floats){0};
    return cap * (floats)(((integers)tanh_of_size & ~is_negative) | ((integers)-tanh_of_size & is_negative));
}

static ALWAYS_INLINE void cap_scores(float *scores, long first, long end, float cap)
{
    for (long at = first; cap > 0.0f && at < end; at += LANES) {
        const long left = end - at < LANES ? end - at : LANES;
        floats some = {0};
        memcpy(&some, scores + at, left * sizeof *scores);
        some = capped(some, cap);
        memcpy(scores + at, &some, left * sizeof *scores);
    }
}
