/* A block of rows times a plain matrix of bfloat16, in tiles of registers (AMX): lines of tiles are outputs as they lie in memory,
   and words of the others are rows. So the matrix is neither copied nor turned, and memory is read without a pause. An outcome is
   summed up as with panels, and has the same bits. */

#pragma once

#include "pair_sums.h"

#ifdef __AMX_BF16__

#include "squares.h"

#define STEPS_AHEAD 12 /* from what is read to what is asked for */

typedef char step_of_outputs[PANEL][LINE_OF_TILE];

/* A step of the outputs that there are, as far as they reach; zeros elsewhere. */
static void fill_step(const char *first, long size, long outputs, long left, step_of_outputs to)
{
    memset(to, 0, sizeof(step_of_outputs));
    for (long output = 0; output < outputs && left > 0; output++)
        memcpy(to[output], first + output * size, left < LINE_OF_TILE ? left : LINE_OF_TILE);
    __asm__ volatile("" : : : "memory"); /* tiles are read where a compiler does not see it */
}

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

/* Behind the last step come those of the next outputs. What lies behind the matrix is asked for in vain. */
static ALWAYS_INLINE void fetch_step(const char *first, long size, long step, long steps)
{
    const long later = step + STEPS_AHEAD, is_next = later >= steps;
    const char *at = first + is_next * PANEL * size + (later - is_next * steps) * LINE_OF_TILE;
#pragma GCC unroll 4
    for (long output = 0; output < PANEL; output++)
        __builtin_prefetch(at + output * size, 0, 2);
}

typedef float turned_sums[2][2][LINES_OF_TILE][LANES]; /* of rows above and below, on the left and on the right */

static ALWAYS_INLINE void multiply_outputs(const product *p, long output, turned_sums sums, int are_two)
{
    const long rows = p->rows, above = rows_above(rows), size = p->inputs * 2, steps = p->columns / STEP, there = p->outputs - output;
    const char *first = (const char *)p->data + output * size;
    _tile_zero(ABOVE_LEFT);
    _tile_zero(ABOVE_RIGHT);
    if (are_two) {
        _tile_zero(BELOW_LEFT);
        _tile_zero(BELOW_RIGHT);
    }
    __asm__ volatile("" : : : "memory");
    for (long step = 0; step < steps; step++) {
        const char *at = first + step * LINE_OF_TILE;
        const long left = size - step * LINE_OF_TILE;
        const float *x_above = p->x + step * STEP * above, *x_below = p->x + above * p->columns + step * STEP * (rows - above);
        step_of_outputs filled;
        fetch_step(first, size, step, steps);
        if (there >= PANEL && left >= LINE_OF_TILE) {
            multiply_step(at, size, x_above, x_below, rows, are_two);
        } else {
            fill_step(at, size, there < PANEL ? there : PANEL, left, filled);
            multiply_step(*filled, LINE_OF_TILE, x_above, x_below, rows, are_two);
        }
    }
    _tile_stored(ABOVE_LEFT, sums[0][0], LINE_OF_TILE);
    _tile_stored(ABOVE_RIGHT, sums[0][1], LINE_OF_TILE);
    if (are_two) {
        _tile_stored(BELOW_LEFT, sums[1][0], LINE_OF_TILE);
        _tile_stored(BELOW_RIGHT, sums[1][1], LINE_OF_TILE);
    }
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

/* Some outputs, for all rows. */
static void multiply_plain_outputs(const product *p, long output)
{
    const long above = rows_above(p->rows);
    _Alignas(64) turned_sums sums;
    use_turned_tiles_of(p->rows);
    if (p->rows > 1)
        multiply_outputs(p, output, sums, 1);
    else
        multiply_outputs(p, output, sums, 0);
    finish_turned(p, output, 0, above, sums[0]);
    if (p->rows > 1)
        finish_turned(p, output, above, p->rows - above, sums[1]);
}

#endif
