/* The product of rows with a transposed matrix in tiles, exact: codes are multiplied with float32 values of x and summed up over a
   group, and the sum is multiplied with the scale of the group; its minimum is multiplied with the sum of the x of the group.

   A code is not shifted down but masked where it lies: x is smaller by the power of two that makes up for it (panels.c). Few rows
   meet the codes straight from their words; for many rows they are written as panels first, once for all of them. */

#include "tile_codes.h"

#define FEW_BLOCKS 2 /* of rows that meet codes straight from their words */

/* Adds what a group comes to: its sums of codes times x, and the sum of its x. */
static ALWAYS_INLINE void add_group(row_sums total, row_sums sums, const floats *scales, const floats *minima, const float *x_sums,
                                    int rows)
{
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
        const floats with = all(x_sums[row]);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            total[row][half] += sums[row][half] * scales[half];
            total[row][half] += with * minima[half];
        }
    }
}

/* -- few rows ---------------------------------------------------------------------------------------------------------------- */

/* So many groups are multiplied at once that sums need not wait for each other. */
static ALWAYS_INLINE int groups_at_once(int rows)
{
    return rows == 1 ? 4 : rows == 2 ? 2 : 1;
}

static ALWAYS_INLINE void add_groups(row_sums total, const halves_of_panel *from, long group, const float *x, const float *x_sums,
                                     int rows, int bits, int groups)
{
    row_sums sums[4];
#pragma GCC unroll 4
    for (int next = 0; next < groups; next++)
        start(sums[next], rows);
    for (long word = 0; word < GROUP * bits / 32; word++)
#pragma GCC unroll 4
        for (int next = 0; next < groups; next++) {
            const words one = load_codes(from, 0, group + next, word, bits), other = load_codes(from, 1, group + next, word, bits);
#pragma GCC unroll 8
            for (int code = 0; code < 32 / bits; code++)
                add_input(sums[next], codes_of(one, code, bits), codes_of(other, code, bits),
                          x + ((group + next) * GROUP + word * (32 / bits) + code) * rows, rows);
        }
#pragma GCC unroll 4
    for (int next = 0; next < groups; next++) {
        floats scales[2], minima[2];
        load_scales(from, group + next, bits, scales, minima);
        add_group(total, sums[next], scales, minima, x_sums + (group + next) * rows, rows);
    }
}

static ALWAYS_INLINE void multiply_codes(const product *p, long output, long block, int rows, int bits)
{
    const halves_of_panel from = find_halves(p, output, bits);
    const float *x = block_of_x(p, block), *x_sums = block_of_group_sums(p, block);
    const long groups = p->columns / GROUP, first = first_row(block, p->rows);
    row_sums total;
    long group = 0;
    start(total, rows);
    for (; group + groups_at_once(rows) <= groups; group += groups_at_once(rows))
        add_groups(total, &from, group, x, x_sums, rows, bits, groups_at_once(rows));
    for (; group < groups; group++)
        add_groups(total, &from, group, x, x_sums, rows, bits, 1);
    for (int row = 0; row < rows; row++)
        finish(p, first + row, output, total[row]);
}

typedef void (*codes_action)(const product *p, long output, long block);

#define FOR_ROWS(ROWS)                                                                                                           \
    static void multiply_##ROWS##_by_4(const product *p, long output, long block) { multiply_codes(p, output, block, ROWS, 4); } \
    static void multiply_##ROWS##_by_8(const product *p, long output, long block) { multiply_codes(p, output, block, ROWS, 8); }
EACH_NUMBER_OF_ROWS(FOR_ROWS)

/* A part is a panel, for all rows. */
static ALWAYS_INLINE void multiply_few(const product *p, long panel, int bits)
{
#define OF(ROWS) {multiply_##ROWS##_by_4, multiply_##ROWS##_by_8},
    static const codes_action actions[MOST_ROWS][2] = {EACH_NUMBER_OF_ROWS(OF)};
#undef OF
    for (long block = 0; block < parts_of(p->rows, MOST_ROWS); block++)
        actions[first_row(block + 1, p->rows) - first_row(block, p->rows) - 1][bits == 8](p, panel * PANEL, block);
}

/* -- many rows --------------------------------------------------------------------------------------------------------------- */

static ALWAYS_INLINE void fill(const product *p, long output, long input, long inputs, panel_values *panel, int bits)
{
    const halves_of_panel from = find_halves(p, output, bits);
    for (long group = 0; group < inputs / GROUP; group++) {
        float *to = panel->values[group * GROUP];
        for (long word = 0; word < GROUP * bits / 32; word++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const words codes = load_codes(&from, half, input / GROUP + group, word, bits);
#pragma GCC unroll 8
                for (int code = 0; code < 32 / bits; code++) {
                    const floats values = codes_of(codes, code, bits);
                    memcpy(to + (word * (32 / bits) + code) * PANEL + half * LANES, &values, sizeof values);
                }
            }
        floats scales[2], minima[2];
        load_scales(&from, input / GROUP + group, bits, scales, minima);
        memcpy(panel->scales[group], scales, sizeof scales);
        memcpy(panel->minima[group], minima, sizeof minima);
    }
}

static void fill_4(const product *p, long output, long input, long inputs, panel_values *to) { fill(p, output, input, inputs, to, 4); }
static void fill_8(const product *p, long output, long input, long inputs, panel_values *to) { fill(p, output, input, inputs, to, 8); }

static ALWAYS_INLINE void add_scaled(const float *x, const float *x_sums, long inputs, const panel_values *panel,
                                     floats (*total)[2], int rows)
{
    for (long group = 0; group < inputs / GROUP; group++, x += GROUP * rows, x_sums += rows) {
        row_sums sums;
        start(sums, rows);
        add_inputs(sums, panel->values[group * GROUP], x, GROUP, rows);
        const float *scales = panel->scales[group], *minima = panel->minima[group];
        const floats scale[2] = {LOAD(floats, scales), LOAD(floats, scales + LANES)};
        const floats minimum[2] = {LOAD(floats, minima), LOAD(floats, minima + LANES)};
        add_group(total, sums, scale, minimum, x_sums, rows);
    }
}

typedef void (*scaled_action)(const float *x, const float *x_sums, long inputs, const panel_values *panel, floats (*total)[2]);

#define SCALED(ROWS)                                                                                                             \
    static void add_scaled_##ROWS(const float *x, const float *x_sums, long inputs, const panel_values *panel, floats (*total)[2]) \
    {                                                                                                                            \
        add_scaled(x, x_sums, inputs, panel, total, ROWS);                                                                       \
    }
EACH_NUMBER_OF_ROWS(SCALED)

static void add(const product *p, long block, long input, long inputs, const panel_values *panel, floats (*total)[2])
{
#define OF(ROWS) add_scaled_##ROWS,
    static const scaled_action actions[MOST_ROWS] = {EACH_NUMBER_OF_ROWS(OF)};
#undef OF
    const long rows = first_row(block + 1, p->rows) - first_row(block, p->rows);
    const float *x = block_of_x(p, block) + input * rows, *x_sums = block_of_group_sums(p, block) + input / GROUP * rows;
    actions[rows - 1](x, x_sums, inputs, panel, total);
}

static int are_few(const product *p)
{
    return parts_of(p->rows, MOST_ROWS) <= FEW_BLOCKS;
}

static long parts_of_product(const product *p, long threads, long at_most)
{
    return are_few(p) ? parts_of(p->outputs, PANEL) : works_of(p, threads, at_most);
}

static ALWAYS_INLINE void multiply_part(const some_products *some, long number, fill_panel fill_own, int bits)
{
    const long at = work_of_part(some->begins, some->count, number);
    if (are_few(product_number(some, at)))
        multiply_few(product_number(some, at), number - some->begins[at], bits);
    else
        multiply_panels(some, number, fill_own, add);
}

static void multiply_by_4(const void *some, long number, int member) { multiply_part(some, number, fill_4, 4); }
static void multiply_by_8(const void *some, long number, int member) { multiply_part(some, number, fill_8, 8); }

/* Some products, with rows each, of codes of 4 or 8 bits. */
void tile_product(const void *given, int threads)
{
    const some_products some = products_of(given, sizeof(product), GROUP_PANELS, threads);
    share_products(some, parts_of_product, some.told == 4 ? multiply_by_4 : multiply_by_8);
}
