/* The product of rows with a transposed matrix of plain values (outputs, inputs), whose values are widened to float32 and turned
   panel by panel: never more of them than fits into the nearest cache. */

#include "panels.h"
#include "plain_rows.h"

static void fill_bf16(const product *p, long output, long input, long inputs, panel_values *to)
{
    fill_from_rows(p, output, input, inputs, to, BF16, 1);
}

static void fill_float(const product *p, long output, long input, long inputs, panel_values *to)
{
    fill_from_rows(p, output, input, inputs, to, FLOAT, 1);
}

static void fill_half(const product *p, long output, long input, long inputs, panel_values *to)
{
    fill_from_rows(p, output, input, inputs, to, HALF, 1);
}

static ALWAYS_INLINE void add_plain(const float *x, long inputs, const panel_values *panel, floats (*total)[2], int rows)
{
    row_sums sums;
    start(sums, rows);
    add_inputs(sums, panel->values[0], x, inputs, rows);
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
        total[row][0] += sums[row][0];
        total[row][1] += sums[row][1];
    }
}

typedef void (*plain_action)(const float *x, long inputs, const panel_values *panel, floats (*total)[2]);

#define PLAIN(ROWS)                                                                                                              \
    static void add_plain_##ROWS(const float *x, long inputs, const panel_values *panel, floats (*total)[2])                     \
    {                                                                                                                            \
        add_plain(x, inputs, panel, total, ROWS);                                                                                \
    }
EACH_NUMBER_OF_ROWS(PLAIN)

static void add(const product *p, long block, long input, long inputs, const panel_values *panel, floats (*total)[2])
{
#define OF(ROWS) add_plain_##ROWS,
    static const plain_action actions[MOST_ROWS] = {EACH_NUMBER_OF_ROWS(OF)};
#undef OF
    const long rows = first_row(block + 1, p->rows) - first_row(block, p->rows);
    actions[rows - 1](block_of_x(p, block) + input * rows, inputs, panel, total);
}

void wide_product(const product *p, int kind, int threads)
{
    if (!p->rows)
        return;
#pragma omp parallel num_threads(threads)
    if (kind == BF16)
        multiply_panels(p, threads, GROUP_PANELS, fill_bf16, add);
    else if (kind == HALF)
        multiply_panels(p, threads, GROUP_PANELS, fill_half, add);
    else
        multiply_panels(p, threads, GROUP_PANELS, fill_float, add);
}
