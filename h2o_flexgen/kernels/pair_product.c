/* The product of rows in bfloat16 with a transposed matrix of bfloat16 values, plain or decoded from tiles, by instructions that
   multiply and add pairs of inputs: for processors that have them. Panels hold pairs where those of other products hold inputs
   (panels.h), so a row and an output have one chain of operations here too. */

#ifdef __AVX512BF16__

#include "pair_sums.h"
#include "plain_rows.h"
#include "plain_tiles.h"
#include "tile_codes.h"

enum { PLAIN_PAIRS = 0 };

/* -- panels of pairs --------------------------------------------------------------------------------------------------------- */

/* The codes of a word are decoded where they lie: with a scale that is smaller by a power of two. */
static ALWAYS_INLINE void write_pairs(words codes, floats scale, floats minimum, float *to, int bits)
{
    const __m512i order = alternating();
#pragma GCC unroll 4
    for (int code = 0; code < 32 / bits; code += 2) {
        floats values[2];
#pragma GCC unroll 2
        for (int next = 0; next < 2; next++)
            values[next] = codes_of(codes, code + next, bits) * (scale * place_factor(code + next, bits)) + minimum;
        store_pair(values[0], values[1], order, to + code / 2 * PANEL);
    }
}

static ALWAYS_INLINE void fill_from_tiles(const product *p, long output, long pair, long pairs, panel_values *panel, int bits)
{
    const halves_of_panel from = find_halves(p, output, bits);
    for (long group = 0; group < pairs / (GROUP / 2); group++) {
        float *to = panel->values[group * GROUP / 2];
        floats scales[2], minima[2];
        load_scales(&from, pair / (GROUP / 2) + group, bits, scales, minima);
        for (int half = 0; half < 2; half++)
            for (long word = 0; word < GROUP * bits / 32; word++)
                write_pairs(load_codes(&from, half, pair / (GROUP / 2) + group, word, bits), scales[half], minima[half],
                            to + word * (16 / bits) * PANEL + half * LANES, bits);
    }
}

static void fill_4(const product *p, long output, long pair, long pairs, panel_values *to) { fill_from_tiles(p, output, pair, pairs, to, 4); }
static void fill_8(const product *p, long output, long pair, long pairs, panel_values *to) { fill_from_tiles(p, output, pair, pairs, to, 8); }

#ifndef __AMX_BF16__
static void fill_plain(const product *p, long output, long pair, long pairs, panel_values *to)
{
    fill_from_rows(p, output, 2 * pair, 2 * pairs, to, BF16, 0);
}
#endif

/* -- the product ------------------------------------------------------------------------------------------------------------- */

#ifdef __AMX_BF16__
/* A part of a product with one block of rows is a panel of outputs. */
static void multiply_plain(const void *given, long number, int member)
{
    const some_products *some = given;
    const long at = work_of_part(some->begins, some->count, number);
    const product *p = product_number(some, at);
    if (is_one_block(p)) {
        multiply_plain_outputs(p, (number - some->begins[at]) * PANEL);
        leave_tiles();
    } else {
        multiply_lines(some, number, fill_plain_lines);
    }
}
#else
static void multiply_plain(const void *some, long number, int member) { multiply_pairs(some, number, fill_plain); }
#endif
static void multiply_4(const void *some, long number, int member) { multiply_pairs(some, number, fill_4); }
static void multiply_8(const void *some, long number, int member) { multiply_pairs(some, number, fill_8); }

/* Some products, with rows each, of codes of 4 or 8 bits in tiles, or of plain values (0). */
void pair_product(const void *given, int threads)
{
    const some_products some = products_of(given, sizeof(product), PAIR_PANELS, threads);
    share_products(some, works_of, some.told == PLAIN_PAIRS ? multiply_plain : some.told == 4 ? multiply_4 : multiply_8);
}

#endif
