/* Rows of bfloat16 arranged in pairs of inputs, for products with panels of pairs: words that are moved as they are. */

#ifdef __AVX512BF16__

#include "pair_tiles.h"

#include "arranging.h"

#ifdef __AMX_BF16__
/* Steps of a row stay together, and those of all rows of a block lie one behind the other. */
static void arrange_block_of_pairs(const char *x, const product *p, long block, long nbytes)
{
    const long rows = first_row(block + 1, p->rows) - first_row(block, p->rows), most = STEP * sizeof(float);
    for (long pair = 0; pair < p->columns; pair += SPAN) {
        const long pairs = p->columns - pair < SPAN ? p->columns - pair : SPAN;
        float *out = (float *)span_of_x(p, block, pair, pairs);
        for (long at = pair * sizeof *out; at < (long)((pair + pairs) * sizeof *out); at += most)
            for (long row = 0; row < rows; row++, out += STEP) {
                const long left = nbytes - at, there = left < 0 ? 0 : left < most ? left : most;
                memset((char *)out + there, 0, most - there);
                memcpy(out, x + row * nbytes + at, there);
            }
    }
}

/* Of a plain matrix: pairs of all rows side by side, those above first, where there are no more rows than a block has. */
static void arrange_for_plain(const char *x, const product *p, long block, long nbytes)
{
    const long above = rows_above(p->rows);
    if (!is_one_block(p)) {
        arrange_block_of_pairs(x, p, block, nbytes);
        return;
    }
    arrange_some(x, above, p->columns, nbytes, FLOAT, (float *)p->x);
    if (p->rows > above)
        arrange_some(x + above * nbytes, p->rows - above, p->columns, nbytes, FLOAT, (float *)p->x + above * p->columns);
}
#else
static void arrange_block_of_pairs(const char *x, const product *p, long block, long nbytes)
{
    arrange_block(x, p, block, nbytes, FLOAT);
}

#define arrange_for_plain arrange_block_of_pairs
#endif

/* Arranges rows for a matrix with codes of any number of bits, or for a plain one (0). */
void arrange_row_pairs(const void *given, int threads)
{
    const rows_in_runs *of = given;
    const block_action of_blocks = of->bits ? arrange_block_of_pairs : arrange_for_plain;
    arrange_runs((arranging){of, NULL, of->inputs * 2, of->columns, .of_blocks = of_blocks}, threads);
}

#endif
