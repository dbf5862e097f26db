/* Rows of x arranged for products with panels: blocks of rows, input by input, as float32. */

#include "arranging.h"

static ALWAYS_INLINE float sum_of_group(const float *values)
{
    float sums[16] = {0};
    for (long at = 0; at < GROUP; at += 16)
        for (int lane = 0; lane < 16; lane++)
            sums[lane] += values[at + lane];
    for (int half = 8; half; half /= 2)
        for (int lane = 0; lane < half; lane++)
            sums[lane] += sums[lane + half];
    return sums[0];
}

static ALWAYS_INLINE void load_group(const char *x, long count, int kind, float *values)
{
    for (long at = 0; at < count; at++)
        values[at] = load_value(x + at * itemsize_of(kind), kind);
    for (long at = count; at < GROUP; at++)
        values[at] = 0.0f;
}

/* A row of a block: its values lie `rows` apart. */
static ALWAYS_INLINE void arrange(const char *x, float *out, float *sums, long rows, long inputs, int kind, int bits)
{
    float values[GROUP];
    for (long first = 0; first < inputs; first += GROUP, out += GROUP * rows, sums += rows) {
        load_group(x + first * itemsize_of(kind), inputs - first < GROUP ? inputs - first : GROUP, kind, values);
        if (bits)
            *sums = sum_of_group(values);
        for (long at = 0; at < GROUP; at++)
            out[at * rows] = values[at] * place_factor(at, bits);
    }
}

#define OF(KIND, BITS)                                                                                                           \
    static void arrange_##KIND##_for_##BITS(const char *x, float *out, float *sums, long rows, long inputs)                      \
    {                                                                                                                            \
        arrange(x, out, sums, rows, inputs, KIND, BITS);                                                                         \
    }

OF(BF16, 4)
OF(BF16, 8)
OF(FLOAT, 4)
OF(FLOAT, 8)
OF(HALF, 4)
OF(HALF, 8)

#define OF_KIND(KIND)                                                                                                            \
    static void arrange_block_##KIND(const char *x, const product *p, long block, long nbytes)                                   \
    {                                                                                                                            \
        arrange_block(x, p, block, nbytes, KIND);                                                                                \
    }

OF_KIND(BF16)
OF_KIND(FLOAT)
OF_KIND(HALF)

/* Arranges rows for a matrix with codes of so many bits, or for a plain one (0), and sums up their groups for codes. */
void arrange_rows(const void *given, int threads)
{
    static const row_action actions[3][2] = {{arrange_BF16_for_4, arrange_BF16_for_8},
                                             {arrange_FLOAT_for_4, arrange_FLOAT_for_8},
                                             {arrange_HALF_for_4, arrange_HALF_for_8}};
    static const block_action blocks[] = {[BF16] = arrange_block_BF16, [FLOAT] = arrange_block_FLOAT, [HALF] = arrange_block_HALF};
    const rows_in_runs *of = given;
    arranging some = {of, NULL, of->inputs * itemsize_of(of->kind), of->columns};
    if (of->bits) {
        some.floats_of_row += of->columns / GROUP;
        some.of_rows = actions[of->kind][of->bits / 8];
    } else {
        some.of_blocks = blocks[of->kind];
    }
    arrange_runs(some, threads);
}
