/* RMS norm: the root of the mean square in float32; what is divided by it is rounded to its type before the weight is applied.
   If the weight says what is added to one, or is wider than the values, or there is none, only the outcome is rounded. A row's
   squares are summed up lane by lane in the order of its values, and what becomes of it depends on nothing else. */

#include "team.h"
#include "vectors.h"
#include <math.h>

typedef struct {
    const char *x, *weight; /* (rows, width), (width) or NULL */
    char *out;              /* (rows, width) */
    long rows, width;
    float eps;
    int kind, weighing;
} norm;

enum { WEIGHT, ABOVE_ONE, WIDE_WEIGHT, BARE }; /* what is said: a weight, by how much it is above one, one in float32, nothing */

static ALWAYS_INLINE void scale(const char *x, const char *weight, char *out, floats factor, long count, int kind, int weighing)
{
    const floats wide = load_some(x, count, kind) * factor;
    if (weighing == BARE) {
        store_some(out, wide, count, kind);
        return;
    }
    const floats said = load_some(weight, count, weighing == WIDE_WEIGHT ? FLOAT : kind);
    const floats exact = wide * (weighing == ABOVE_ONE ? said + 1.0f : said);
    store_some(out, weighing == WEIGHT ? rounded_to(wide, kind) * said : exact, count, kind);
}

static ALWAYS_INLINE float mean_square(const char *x, long width, int kind)
{
    const long size = itemsize_of(kind);
    floats sums[4] = {{0}, {0}, {0}, {0}};
    long at = 0;
    for (; at + 4 * LANES <= width; at += 4 * LANES)
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) {
            const floats value = load_floats(x + (at + part * LANES) * size, kind);
            sums[part] += value * value;
        }
    for (; at < width; at += LANES) {
        const floats value = load_some(x + at * size, width - at, kind);
        sums[0] += value * value;
    }
    return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) / (float)width;
}

static ALWAYS_INLINE void norm_row(const norm *n, long row, int kind)
{
    const long size = itemsize_of(kind), said_size = n->weighing == WIDE_WEIGHT ? 4 : size, width = n->width;
    const char *x = n->x + row * width * size;
    char *out = n->out + row * width * size;
    const floats factor = all(1.0f / sqrtf(mean_square(x, width, kind) + n->eps));
#define SCALE(AT, COUNT) scale(x + (AT)*size, n->weight + (AT)*said_size, out + (AT)*size, factor, COUNT, kind, n->weighing)
    EACH_REGISTER(at, width, SCALE);
#undef SCALE
}

static void norm_bf16(const void *n, long row, int member) { norm_row(n, row, BF16); }
static void norm_float(const void *n, long row, int member) { norm_row(n, row, FLOAT); }
static void norm_half(const void *n, long row, int member) { norm_row(n, row, HALF); }

void rms_norm(const void *given, int threads)
{
    const norm *n = given;
    static part_action *const actions[] = {[BF16] = norm_bf16, [FLOAT] = norm_float, [HALF] = norm_half};
    share_out(given, n->rows, threads, actions[n->kind]);
}
