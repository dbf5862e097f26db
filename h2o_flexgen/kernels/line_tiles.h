/* Products of pairs in tiles of registers (AMX) whose lines are outputs, with the inputs of each in their order, and whose words of
   the others are rows. Most matrices lie so, or are decoded so, and need not be turned; rows are turned instead, of which there are
   fewer. An outcome is summed up as with panels of inputs, and has the same bits. */

#pragma once

#include "pair_sums.h"

#ifdef __AMX_BF16__

#include "squares.h"

typedef char lines_of_step[PANEL][LINE_OF_TILE];
typedef lines_of_step lines_of_panel[SPAN / STEP]; /* some inputs of some outputs, step by step */
typedef float turned_sums[2][2][LINES_OF_TILE][LANES]; /* of rows above and below, on the left and on the right */

static ALWAYS_INLINE void multiply_step(const char *outputs, long size, const float *x_above, const float *x_below, long rows, int are_two)
{
    const long above = rows_above(rows) * sizeof(float);
    _tile_loadd(LEFT, outputs, size);
    _tile_loadd(RIGHT, outputs + LINES_OF_TILE * size, size);
    _tile_loadd(ABOVE, x_above, above);
    _tile_dpbf16ps(ABOVE_LEFT, LEFT, ABOVE);
    _tile_dpbf16ps(ABOVE_RIGHT, RIGHT, ABOVE);
    if (are_two) {
        _tile_loadd(BELOW, x_below, rows * sizeof(float) - above);
        _tile_dpbf16ps(BELOW_LEFT, LEFT, BELOW);
        _tile_dpbf16ps(BELOW_RIGHT, RIGHT, BELOW);
    }
}

static ALWAYS_INLINE void load_turned(turned_sums sums, int are_two)
{
    __asm__ volatile("" : : : "memory");
    _tile_loadd(ABOVE_LEFT, sums[0][0], LINE_OF_TILE);
    _tile_loadd(ABOVE_RIGHT, sums[0][1], LINE_OF_TILE);
    if (are_two) {
        _tile_loadd(BELOW_LEFT, sums[1][0], LINE_OF_TILE);
        _tile_loadd(BELOW_RIGHT, sums[1][1], LINE_OF_TILE);
    }
}

static ALWAYS_INLINE void store_turned(turned_sums sums, int are_two)
{
    _tile_stored(ABOVE_LEFT, sums[0][0], LINE_OF_TILE);
    _tile_stored(ABOVE_RIGHT, sums[0][1], LINE_OF_TILE);
    if (are_two) {
        _tile_stored(BELOW_LEFT, sums[1][0], LINE_OF_TILE);
        _tile_stored(BELOW_RIGHT, sums[1][1], LINE_OF_TILE);
    }
    __asm__ volatile("" : : : "memory");
}

/* Stores the sums of some rows, which are words of the outputs' lines. */
static void finish_turned(const product *p, long output, long first, long rows, float (*sums)[LINES_OF_TILE][LANES])
{
    words square[2][LINES_OF_TILE];
    memcpy(square, sums, sizeof square);
    turn(square[0]);
    turn(square[1]);
    for (long row = 0; row < rows; row++) {
        const floats both[2] = {(floats)square[0][row], (floats)square[1][row]};
        finish(p, first + row, output, both);
    }
}

static void finish_block(const product *p, long output, long first, long rows, turned_sums sums)
{
    const long above = rows_above(rows);
    finish_turned(p, output, first, above, sums[0]);
    if (rows > above)
        finish_turned(p, output, first + above, rows - above, sums[1]);
}

/* -- panels of lines ----------------------------------------------------------------------------------------------------------- */

/* Fills lines with the outputs from `output` on and a number of pairs (whole steps) from `pair` on, zeros behind the last input.
   Behind the last output anything may stand: what comes of it is not stored. */
typedef void fill_lines(const product *p, long output, long pair, long pairs, lines_of_panel panel);

static ALWAYS_INLINE void add_some_lines(const float *x, long steps, lines_of_panel panel, turned_sums sums, long rows, int is_first,
                                         int are_two)
{
    if (is_first)
        start_tiles(are_two);
    else
        load_turned(sums, are_two);
    for (long step = 0; step < steps; step++, x += STEP * rows)
        multiply_step(*panel[step], LINE_OF_TILE, x, x + STEP * rows_above(rows), rows, are_two);
    store_turned(sums, are_two);
}

static ALWAYS_INLINE void add_lines(const product *p, long block, long pair, long pairs, lines_of_panel panel, turned_sums sums)
{
    const long rows = first_row(block + 1, p->rows) - first_row(block, p->rows);
    const float *x = span_of_x(p, block, pair, pairs);
    use_turned_tiles_of(rows);
    if (rows > 1)
        add_some_lines(x, pairs / STEP, panel, sums, rows, pair == 0, 1);
    else
        add_some_lines(x, pairs / STEP, panel, sums, rows, pair == 0, 0);
}

static ALWAYS_INLINE void multiply_work_by_lines(const product *p, work part, fill_lines fill)
{
    _Alignas(64) turned_sums sums[GROUP_PANELS][GROUP_BLOCKS];
    _Alignas(64) lines_of_panel lines;
    for (long pair = 0; pair < p->columns; pair += SPAN) {
        const long pairs = p->columns - pair < SPAN ? p->columns - pair : SPAN;
        for (long panel = 0; panel < part.panels; panel++) {
            fill(p, (part.panel + panel) * PANEL, pair, pairs, lines);
            for (long block = 0; block < part.blocks; block++)
                add_lines(p, part.block + block, pair, pairs, lines, sums[panel][block]);
        }
    }
    for (long block = 0; block < part.blocks; block++) {
        const long first = first_row(part.block + block, p->rows), behind = first_row(part.block + block + 1, p->rows);
        for (long panel = 0; panel < part.panels; panel++)
            finish_block(p, (part.panel + panel) * PANEL, first, behind - first, sums[panel][block]);
    }
    leave_tiles();
}

/* The caller is a function for one kind of matrices, which the compiler then knows. */
static ALWAYS_INLINE void multiply_lines(const some_products *some, long number, fill_lines fill)
{
    const long at = work_of_part(some->begins, some->count, number);
    const product *p = product_number(some, at);
    const long panels = panels_together(p, some->threads, some->at_most);
    multiply_work_by_lines(p, work_number(p, number - some->begins[at], panels, groups_of_blocks(p)), fill);
}

#endif
