/* The product of rows with a transposed matrix of plain values (outputs, inputs), whose values are widened to float32 and turned
   panel by panel: never more of them than fits into the nearest cache. */

#include "plain_rows.h"
#include "plain_sums.h"

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

/* Some products, with rows each. */
void wide_product(const product *products, long count, int kind, int threads)
{
#pragma omp parallel num_threads(threads)
    for (const product *p = products; p < products + count; p++)
        if (kind == BF16)
            multiply_panels(p, threads, GROUP_PANELS, fill_bf16, add_plain_panel);
        else if (kind == HALF)
            multiply_panels(p, threads, GROUP_PANELS, fill_half, add_plain_panel);
        else
            multiply_panels(p, threads, GROUP_PANELS, fill_float, add_plain_panel);
}
