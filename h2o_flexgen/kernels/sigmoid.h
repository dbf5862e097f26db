/* The sigmoid, and what it is made of. */

#pragma once

#include "vectors.h"

/* Of what is not above 0; 0 from -86 on: then an activation of -infinity is NaN, as it is in torch. */
static ALWAYS_INLINE floats exp_or_nothing(floats from)
{
    return (floats)((integers)exp_below_zero(from) & ~(integers)(from < -86.0f));
}

static ALWAYS_INLINE floats either(integers first, floats one, floats other)
{
    return (floats)(((integers)one & first) | ((integers)other & ~first));
}

static ALWAYS_INLINE floats sigmoid(floats x)
{
    const integers positive = x > 0.0f;
    const floats part = exp_or_nothing(either(positive, -x, x));
    return either(positive, all(1.0f), part) / (part + 1.0f);
}
