/* The product of rows in bfloat16 with a transposed matrix in a stored format. Its values are rounded to bfloat16 as decoding does,
   by instructions that multiply and add pairs of inputs: for processors that have them. */

#ifdef __AVX512BF16__

#include "stored_lines.h"
#include "stored_panels.h"

#ifdef __AMX_BF16__

/* A span of pairs is a stretch of inputs. */
static ALWAYS_INLINE void fill_stored(const product *p, long output, long pair, long pairs, lines_of_panel panel, line_actions how)
{
    const long stretch = pair / SPAN;
    stored_panel of;
    find_rows(p, output, &of);
    fetch_stretch(&of, stretch);
    how.read(&of, stretch, 0, PANEL);
    for (long step = 0; step < pairs / STEP; step++)
        how.decode(&of, 0, PANEL, stretch * STEPS + step, panel[step]);
}

#define FILL(FORM)                                                                                                               \
    static void fill_##FORM(const product *p, long output, long pair, long pairs, lines_of_panel panel)                          \
    {                                                                                                                            \
        fill_stored(p, output, pair, pairs, panel, actions_of_formats[FORM]);                                                    \
    }
typedef fill_lines fill_action;
#define MULTIPLY multiply_lines

#else

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
typedef fill_panel fill_action;
#define MULTIPLY multiply_pairs

#endif

EACH_FORM(FILL)

static void multiply_part(const void *given, long number, int member)
{
#define NAMED(FORM) fill_##FORM,
    static fill_action *const fills[] = {EACH_FORM(NAMED)};
#undef NAMED
    const some_products *some = given;
#ifdef __AMX_BF16__
    const long at = work_of_part(some->begins, some->count, number);
    const product *p = product_number(some, at);
    if (parts_of(p->rows, MOST_ROWS) <= 2) {
        const work part = work_number(p, number - some->begins[at], panels_together(p, some->threads, some->at_most), 1);
        multiply_few_blocks(p, part, &actions_of_formats[some->told]);
        return;
    }
#endif
    MULTIPLY(some, number, fills[some->told]);
}

/* Some products, with rows each, of matrices in one format. */
void stored_pairs(const void *given, int threads)
{
    share_products(products_of(given, sizeof(product_of_stored), PAIR_PANELS, threads), works_of, multiply_part);
}

#endif
