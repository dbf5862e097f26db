/* The product of rows with a transposed matrix in a stored format, exact: panels of it are written as float32, once for all rows. */

#include "plain_sums.h"
#include "stored_panels.h"

static ALWAYS_INLINE void store_both(floats first, floats second, long input, float *half)
{
    memcpy(half + input * PANEL, &first, sizeof first);
    memcpy(half + (input + 1) * PANEL, &second, sizeof second);
}

#define FILL(FORM)                                                                                                               \
    static void fill_##FORM(const product *p, long output, long input, long inputs, panel_values *to)                            \
    {                                                                                                                            \
        fill_from_stored(p, output, input, inputs, to->values[0], FORM, store_both);                                                        \
    }
EACH_FORM(FILL)

static void multiply_part(const void *given, long number, int member)
{
#define NAMED(FORM) fill_##FORM,
    static fill_panel *const fills[] = {EACH_FORM(NAMED)};
#undef NAMED
    const some_products *some = given;
    multiply_panels(some, number, fills[some->told], add_plain_panel);
}

/* Some products, with rows each, of matrices in one format. */
void stored_product(const void *given, int threads)
{
    share_products(products_of(given, sizeof(product_of_stored), GROUP_PANELS, threads), works_of, multiply_part);
}
