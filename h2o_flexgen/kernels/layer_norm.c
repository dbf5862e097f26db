/* Layer norm: values less their mean, divided by their standard deviation, times a weight, plus a bias; in float32 up to the outcome. A
   row is summed up lane by lane in the order of its values, and what becomes of it depends on nothing else. */

#include "team.h"
#include "vectors.h"
#include <math.h>

typedef struct {
    const char *x;             /* (rows, width) */
    const char *weight, *bias; /* (kinds, width); NULL: ones, and zeros */
    char *out;                 /* (rows, width), one behind the other */
    long rows, width, kinds, x_row; /* rows have the weights of each kind in turn; the last is in bytes */
    float eps;
    int kind;
} norm;

/* The mean of what values are above a middle, or of the squares of that. */
static ALWAYS_INLINE float mean_of(const char *x, long width, float middle, int squared, int kind)
{
    const long size = itemsize_of(kind);
    floats sums[4] = {{0}, {0}, {0}, {0}};
    float rest = 0.0f;
    long at = 0;
    for (; at + 4 * LANES <= width; at += 4 * LANES)
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) {
            const floats value = load_floats(x + (at + part * LANES) * size, kind) - middle;
            sums[part] += squared ? value * value : value;
        }
    for (; at + LANES <= width; at += LANES) {
        const floats value = load_floats(x + at * size, kind) - middle;
        sums[0] += squared ? value * value : value;
    }
    for (; at < width; at++) {
        const float value = load_value(x + at * size, kind) - middle;
        rest += squared ? value * value : value;
    }
    return (sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest) / (float)width;
}

static ALWAYS_INLINE floats or_else(const char *from, long at, long count, int kind, float otherwise)
{
    return from ? load_some(from + at * itemsize_of(kind), count, kind) : all(otherwise);
}

static ALWAYS_INLINE void norm_row(const norm *n, long row, int kind)
{
    const long size = itemsize_of(kind), own = row % n->kinds * n->width;
    const char *x = n->x + row * n->x_row;
    char *out = n->out + row * n->width * size;
    const float mean = mean_of(x, n->width, 0.0f, 0, kind);
    const float factor = 1.0f / sqrtf(mean_of(x, n->width, mean, 1, kind) + n->eps);
#define SCALE(AT, COUNT)                                                                                                         \
    store_some(out + (AT)*size,                                                                                                  \
               (load_some(x + (AT)*size, COUNT, kind) - mean) * factor * or_else(n->weight, own + (AT), COUNT, kind, 1.0f) +             \
                   or_else(n->bias, own + (AT), COUNT, kind, 0.0f),                                                                      \
               COUNT, kind)
    EACH_REGISTER(at, n->width, SCALE);
#undef SCALE
}

static void norm_bf16(const void *n, long row, int member) { norm_row(n, row, BF16); }
static void norm_float(const void *n, long row, int member) { norm_row(n, row, FLOAT); }
static void norm_half(const void *n, long row, int member) { norm_row(n, row, HALF); }

void layer_norm(const void *given, int threads)
{
    const norm *n = given;
    static part_action *const actions[] = {[BF16] = norm_bf16, [FLOAT] = norm_float, [HALF] = norm_half};
    share_out(given, n->rows, threads, actions[n->kind]);
}
