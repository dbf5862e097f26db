/* The product of rows in bfloat16 with a transposed matrix in a stored form, whose values are rounded to bfloat16 as decoding does,
   by instructions that multiply and add pairs of inputs: for processors that have them. */

#ifdef __AVX512BF16__

#include "pair_sums.h"
#include "stored_panels.h"

static ALWAYS_INLINE void store_rounded(floats first, floats second, long input, float *half)
{
    store_pair(first, second, alternating(), half + input / 2 * PANEL);
}

#define FILL(FORM)                                                                                                               \
    static void fill_##FORM(const product *p, long output, long pair, long pairs, panel_values *to)                              \
    {                                                                                                                            \
        fill_from_stored(p, output, 2 * pair, 2 * pairs, to, FORM, store_rounded);                                               \
    }
EACH_FORM(FILL)

void stored_pairs(const product_of_stored *p, int form, int threads)
{
#define NAMED(FORM) fill_##FORM,
    static fill_panel *const fills[] = {EACH_FORM(NAMED)};
#undef NAMED
    if (!p->given.rows)
        return;
#pragma omp parallel num_threads(threads)
    multiply_panels(&p->given, threads, PAIR_PANELS, fills[form], add_pair_panel);
}

#endif
