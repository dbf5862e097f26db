/* The product of rows with a transposed matrix of plain values (outputs, inputs), which are widened to float32 and turned
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

static void multiply_bf16(const void *some, long number, int member) { multiply_panels(some, number, fill_bf16, add_plain_panel); }
static void multiply_float(const void *some, long number, int member) { multiply_panels(some, number, fill_float, add_plain_panel); }
static void multiply_half(const void *some, long number, int member) { multiply_panels(some, number, fill_half, add_plain_panel); }

/* Some products, with rows each, of values of one kind. */
void wide_product(const void *given, int threads)
{
    static part_action *const actions[] = {[BF16] = multiply_bf16, [FLOAT] = multiply_float, [HALF] = multiply_half};
    const some_products some = products_of(given, sizeof(product), GROUP_PANELS, threads);
    share_products(some, works_of, actions[some.told]);
}
