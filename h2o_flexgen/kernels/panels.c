/* Rows of x arranged for products with panels: blocks of rows, input by input, as float32. */

#include "panels.h"

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

typedef void (*row_action)(const char *x, float *out, float *sums, long rows, long inputs);

#define OF(KIND, BITS)                                                                                                           \
    static void arrange_##KIND##_for_##BITS(const char *x, float *out, float *sums, long rows, long inputs)                      \
    {                                                                                                                            \
        arrange(x, out, sums, rows, inputs, KIND, BITS);                                                                         \
    }

OF(BF16, 0)
OF(BF16, 4)
OF(BF16, 8)
OF(FLOAT, 0)
OF(FLOAT, 4)
OF(FLOAT, 8)
OF(HALF, 0)
OF(HALF, 4)
OF(HALF, 8)

/* Pairs of a row of a block, as they are: they lie `rows` apart. */
static void arrange_pairs(const char *x, float *out, long rows, long inputs)
{
    for (long first = 0; first < inputs; first += GROUP, out += GROUP / 2 * rows) {
        uint32_t pairs[GROUP / 2] = {0};
        memcpy(pairs, x + first * 2, (inputs - first < GROUP ? inputs - first : GROUP) * 2);
        for (long at = 0; at < GROUP / 2; at++)
            memcpy(out + at * rows, pairs + at, sizeof *pairs);
    }
}

/* Arranges x (rows, inputs) for a matrix whose codes have so many bits, or for a plain one (0), and sums up its groups for codes. */
void arrange_rows(const char *x, float *out, long rows, long inputs, int kind, int bits, int threads)
{
    static const row_action actions[3][3] = {{arrange_BF16_for_0, arrange_BF16_for_4, arrange_BF16_for_8},
                                             {arrange_FLOAT_for_0, arrange_FLOAT_for_4, arrange_FLOAT_for_8},
                                             {arrange_HALF_for_0, arrange_HALF_for_4, arrange_HALF_for_8}};
    const row_action action = actions[kind][bits / 4];
    const long columns = parts_of(inputs, GROUP) * GROUP;
    const product p = {.x = out, .rows = rows, .columns = columns};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long block = 0; block < parts_of(rows, MOST_ROWS); block++) {
        const long first = first_row(block, rows), count = first_row(block + 1, rows) - first;
        float *values = (float *)block_of_x(&p, block), *sums = (float *)block_of_group_sums(&p, block);
        for (long row = 0; row < count; row++)
            action(x + (first + row) * inputs * itemsize_of(kind), values + row, sums + row, count, inputs);
    }
}

/* Arranges x (rows, inputs), bfloat16, in pairs of inputs. */
void arrange_row_pairs(const char *x, float *out, long rows, long inputs, int threads)
{
    const product p = {.x = out, .rows = rows, .columns = parts_of(inputs, GROUP) * GROUP / 2};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long block = 0; block < parts_of(rows, MOST_ROWS); block++)
        for (long row = first_row(block, rows); row < first_row(block + 1, rows); row++)
            arrange_pairs(x + row * inputs * 2, (float *)block_of_x(&p, block) + row - first_row(block, rows),
                          first_row(block + 1, rows) - first_row(block, rows), inputs);
}
