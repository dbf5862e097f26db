/* Rows of bfloat16 arranged in pairs of inputs, for products with panels of pairs: words that are moved as they are. */

#ifdef __AVX512BF16__

#include "pair_tiles.h"

#include "arranging.h"

#ifdef __AMX_BF16__
/* Steps of a row stay together, and those of all rows of a block lie one behind the other. A row is read as it lies. */
static ALWAYS_INLINE void arrange_block_of_pairs(const char *x, const product *p, long block, long nbytes)
{
    const long rows = first_row(block + 1, p->rows) - first_row(block, p->rows);
    for (long pair = 0; pair < p->columns; pair += PANEL_SPAN) {
        const long pairs = p->columns - pair < PANEL_SPAN ? p->columns - pair : PANEL_SPAN;
        float *out = (float *)span_of_x(p, block, pair, pairs);
        for (long row = 0; row < rows; row++)
            for (long step = 0; step < pairs; step += STEP) {
                const long at = (pair + step) * (long)sizeof *out;
                const words own = words_of_row(x + row * nbytes + at, nbytes - at, FLOAT);
                memcpy(out + step * rows + row * STEP, &own, sizeof own);
            }
    }
}

/* One step of some rows, of which so many bytes are left: pairs of all of them side by side. */
static ALWAYS_INLINE void turn_step(const char *x, long rows, long left, long nbytes, float *out)
{
    const __mmask16 there = (__mmask16)((1u << rows) - 1);
    words square[LANES];
    for (long row = 0; row < LANES; row++)
        square[row] = row < rows ? words_of_row(x + row * nbytes, left, FLOAT) : (words){0};
    turn(square);
#pragma GCC unroll 16
    for (long pair = 0; pair < STEP; pair++)
        _mm512_mask_storeu_epi32(out + pair * rows, there, (__m512i)square[pair]);
}

/* For tiles whose lines are outputs: step by step, those of the rows above and then those of the rows below. */
static void arrange_for_lines(const char *x, const product *p, long block, long nbytes)
{
    const long rows = first_row(block + 1, p->rows) - first_row(block, p->rows), above = rows_above(rows);
    for (long pair = 0; pair < p->columns; pair += SPAN) {
        const long behind = p->columns - pair < SPAN ? p->columns : pair + SPAN;
        float *out = (float *)span_of_x(p, block, pair, behind - pair);
        for (long step = pair; step < behind; step += STEP, out += STEP * rows) {
            const long at = step * (long)sizeof *out;
            turn_step(x + at, above, nbytes - at, nbytes, out);
            if (rows > above)
                turn_step(x + above * nbytes + at, rows - above, nbytes - at, nbytes, out + STEP * above);
        }
    }
}
#else
static void arrange_block_of_pairs(const char *x, const product *p, long block, long nbytes)
{
    arrange_block(x, p, block, nbytes, FLOAT);
}

#define arrange_for_lines arrange_block_of_pairs
#endif

/* Arranges rows for a matrix in tiles, with codes of any number of bits, or for one whose outputs lie row by row (0). */
void arrange_row_pairs(const void *given, int threads)
{
    const rows_in_runs *of = given;
    const block_action of_blocks = of->bits ? arrange_block_of_pairs : arrange_for_lines;
    arrange_runs((arranging){of, NULL, of->inputs * 2, of->columns, .of_blocks = of_blocks}, threads);
}

#endif
