/* The product of rows in bfloat16 with a transposed matrix whose values are bfloat16, plain or decoded from tiles, by instructions
   that multiply and add pairs of inputs: for processors that have them. Panels hold pairs where those of other products hold inputs
   (panels.h), so a row and an output have one chain of operations here too. */

#ifdef __AVX512BF16__

#include "plain_rows.h"
#include "tile_codes.h"

enum { PLAIN_PAIRS = 0 };

#define PAIR_PANELS 2 /* their sums are in memory twice as often as those of float32 */

/* -- panels of pairs --------------------------------------------------------------------------------------------------------- */

/* The places of one input's and the next one's values behind each other, so that they alternate. */
static ALWAYS_INLINE __m512i alternating(void)
{
    uint16_t places[2 * LANES];
    for (int lane = 0; lane < LANES; lane++) {
        places[2 * lane] = (uint16_t)lane;
        places[2 * lane + 1] = (uint16_t)(lane + LANES);
    }
    return _mm512_loadu_si512(places);
}

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
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)values[1], (__m512)values[0]);
        _mm512_storeu_si512(to + code / 2 * PANEL, _mm512_permutexvar_epi16(order, both));
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

static void fill_plain(const product *p, long output, long pair, long pairs, panel_values *to)
{
    fill_from_rows(p, output, 2 * pair, 2 * pairs, to, BF16, 0);
}

/* -- products ---------------------------------------------------------------------------------------------------------------- */

static ALWAYS_INLINE void add_pairs(const float *x, long pairs, const panel_values *panel, floats (*total)[2], int rows)
{
    row_sums sums;
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
        sums[row][0] = total[row][0];
        sums[row][1] = total[row][1];
    }
    for (long pair = 0; pair < pairs; pair++) {
        const __m512bh one = (__m512bh)_mm512_loadu_ps(panel->values[pair]), other = (__m512bh)_mm512_loadu_ps(panel->values[pair] + LANES);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            const __m512bh with = (__m512bh)_mm512_set1_ps(x[pair * rows + row]);
            sums[row][0] = (floats)_mm512_dpbf16_ps((__m512)sums[row][0], one, with);
            sums[row][1] = (floats)_mm512_dpbf16_ps((__m512)sums[row][1], other, with);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
        total[row][0] = sums[row][0];
        total[row][1] = sums[row][1];
    }
}

typedef void (*pairs_action)(const float *x, long pairs, const panel_values *panel, floats (*total)[2]);

#define PAIRS(ROWS)                                                                                                              \
    static void add_pairs_##ROWS(const float *x, long pairs, const panel_values *panel, floats (*total)[2])                      \
    {                                                                                                                            \
        add_pairs(x, pairs, panel, total, ROWS);                                                                                 \
    }
EACH_NUMBER_OF_ROWS(PAIRS)

static void add(const product *p, long block, long pair, long pairs, const panel_values *panel, floats (*total)[2])
{
#define OF(ROWS) add_pairs_##ROWS,
    static const pairs_action actions[MOST_ROWS] = {EACH_NUMBER_OF_ROWS(OF)};
#undef OF
    const long rows = first_row(block + 1, p->rows) - first_row(block, p->rows);
    actions[rows - 1](block_of_x(p, block) + pair * rows, pairs, panel, total);
}

/* Codes of 4 or 8 bits in tiles, or plain values (0). */
void pair_product(const product *p, int bits, int threads)
{
    if (!p->rows)
        return;
#pragma omp parallel num_threads(threads)
    if (bits == PLAIN_PAIRS)
        multiply_panels(p, threads, PAIR_PANELS, fill_plain, add);
    else if (bits == 4)
        multiply_panels(p, threads, PAIR_PANELS, fill_4, add);
    else
        multiply_panels(p, threads, PAIR_PANELS, fill_8, add);
}

#endif
