/* Pairs of bfloat16 in panels, and their sums, for processors with instructions that multiply and add pairs: of registers, or of
   tiles of registers (AMX), which multiply as fast as a panel is made for a hundred rows. */

#pragma once

#include "pair_tiles.h"

#include "panels.h"

#ifdef __AMX_BF16__
#define PAIR_PANELS GROUP_PANELS
#else
#define PAIR_PANELS 4 /* of outputs together: fewer write too little of a row at once, and the sums of more fill the cache */
#endif

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

/* An input and the next one of a register of outputs, rounded to bfloat16. */
static ALWAYS_INLINE void store_pair(floats first, floats second, __m512i order, float *to)
{
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, both));
}

#ifdef __AMX_BF16__

static ALWAYS_INLINE void start_in_tiles(floats (*total)[2], long above, int is_first, int are_two)
{
    const long line = sizeof *total;
    if (is_first) {
        start_tiles(are_two);
        return;
    }
    _tile_stream_loadd(ABOVE_LEFT, total[0], line);
    _tile_stream_loadd(ABOVE_RIGHT, total[0] + 1, line);
    if (are_two) {
        _tile_stream_loadd(BELOW_LEFT, total[above], line);
        _tile_stream_loadd(BELOW_RIGHT, total[above] + 1, line);
    }
}

/* Rows and sums are read with the hint that they are wanted once, so that the panel stays in the nearest cache; and loads stand
   between products, which is faster than loads first. */
static ALWAYS_INLINE void add_to_tiles(const float *x, long pairs, const panel_values *panel, floats (*total)[2], long rows,
                                       int is_first, int are_two)
{
    const long above = rows_above(rows), line = sizeof *total;
    __asm__ volatile("" : : : "memory"); /* tiles are read where a compiler does not see it */
    start_in_tiles(total, above, is_first, are_two);
    for (long at = 0; at < pairs; at += STEP, x += STEP * rows) {
        _tile_loadd(LEFT, panel->values[at], sizeof *panel->values);
        _tile_stream_loadd(ABOVE, x, STEP * sizeof *x);
        _tile_dpbf16ps(ABOVE_LEFT, ABOVE, LEFT);
        _tile_loadd(RIGHT, panel->values[at] + LANES, sizeof *panel->values);
        _tile_dpbf16ps(ABOVE_RIGHT, ABOVE, RIGHT);
        if (are_two) {
            _tile_stream_loadd(BELOW, x + STEP * above, STEP * sizeof *x);
            _tile_dpbf16ps(BELOW_LEFT, BELOW, LEFT);
            _tile_dpbf16ps(BELOW_RIGHT, BELOW, RIGHT);
        }
    }
    _tile_stored(ABOVE_LEFT, total[0], line);
    _tile_stored(ABOVE_RIGHT, total[0] + 1, line);
    if (are_two) {
        _tile_stored(BELOW_LEFT, total[above], line);
        _tile_stored(BELOW_RIGHT, total[above] + 1, line);
    }
    __asm__ volatile("" : : : "memory");
}

static void add_pair_panel(const product *p, long block, long pair, long pairs, const panel_values *panel, floats (*total)[2])
{
    const long rows = first_row(block + 1, p->rows) - first_row(block, p->rows);
    const float *x = span_of_x(p, block, pair, pairs);
    use_tiles_of(rows);
    if (rows > 1)
        add_to_tiles(x, pairs, panel, total, rows, pair == 0, 1);
    else
        add_to_tiles(x, pairs, panel, total, rows, pair == 0, 0);
}

#else

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

static void add_pair_panel(const product *p, long block, long pair, long pairs, const panel_values *panel, floats (*total)[2])
{
#define OF(ROWS) add_pairs_##ROWS,
    static const pairs_action actions[MOST_ROWS] = {EACH_NUMBER_OF_ROWS(OF)};
#undef OF
    const long rows = first_row(block + 1, p->rows) - first_row(block, p->rows);
    actions[rows - 1](block_of_x(p, block) + pair * rows, pairs, panel, total);
}

#endif

/* The caller is a function for one kind of panels, which the compiler then knows. */
static ALWAYS_INLINE void multiply_pairs(const some_products *some, long number, fill_panel fill)
{
    multiply_panels(some, number, fill, add_pair_panel);
    leave_tiles();
}
