/* The product of rows in bfloat16 with a transposed matrix in a stored format. Its values are rounded to bfloat16 as decoding does,
   by instructions that multiply and add pairs of inputs: for processors that have them. */

#ifdef __AVX512BF16__

#include "pair_sums.h"
#include "stored_panels.h"

static ALWAYS_INLINE void store_rounded(floats first, floats second, long input, float *half)
{
    store_pair(first, second, alternating(), half + input / 2 * PANEL);
}

/* A panel has a span of pairs: twice as many inputs. */
static ALWAYS_INLINE void fill_pairs(const product *p, long output, long input, long inputs, panel_values *to, int format)
{
    for (long at = 0; at < inputs; at += SPAN)
        fill_from_stored(p, output, input + at, inputs - at < SPAN ? inputs - at : SPAN, to->values[at / 2], format, store_rounded);
}

#define FILL(FORM)                                                                                                               \
    static void fill_##FORM(const product *p, long output, long pair, long pairs, panel_values *to)                              \
    {                                                                                                                            \
        fill_pairs(p, output, 2 * pair, 2 * pairs, to, FORM);                                                                    \
    }
EACH_FORM(FILL)

static void multiply_part(const void *given, long number, int member)
{
#define NAMED(FORM) fill_##FORM,
    static fill_panel *const fills[] = {EACH_FORM(NAMED)};
#undef NAMED
    const some_products *some = given;
    multiply_pairs(some, number, fills[some->told]);
}

/* Some products, with rows each, of matrices in one format. */
void stored_pairs(const void *given, int threads)
{
    share_products(products_of(given, sizeof(product_of_stored), PAIR_PANELS, threads), works_of, multiply_part);
}

#endif
