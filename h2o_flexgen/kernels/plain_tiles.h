/* A block of rows times a plain matrix of bfloat16, in tiles of registers (AMX): lines of tiles are outputs as they lie in memory,
   and words of the others are rows. So the matrix is neither copied nor turned, and memory is read without a pause. An outcome is
   summed up as with panels, and has the same bits. */

#pragma once

#include "line_tiles.h"

#ifdef __AMX_BF16__

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

/* Behind the last step come those of the next outputs. What lies behind the matrix is asked for in vain. */
static ALWAYS_INLINE void fetch_step(const char *first, long size, long step, long steps)
{
    const long later = step + STEPS_AHEAD, is_next = later >= steps;
    const char *at = first + is_next * PANEL * size + (later - is_next * steps) * LINE_OF_TILE;
#pragma GCC unroll 4
    for (long output = 0; output < PANEL; output++)
        __builtin_prefetch(at + output * size, 0, 2);
}

static ALWAYS_INLINE void multiply_outputs(const product *p, long output, turned_sums sums, int are_two)
{
    const long rows = p->rows, above = rows_above(rows), size = p->inputs * 2, steps = p->columns / STEP, there = p->outputs - output;
    const char *first = (const char *)p->data + output * size;
    start_tiles(are_two);
    for (long step = 0; step < steps; step++) {
        const char *at = first + step * LINE_OF_TILE;
        const long left = size - step * LINE_OF_TILE;
        const float *x_above = p->x + step * STEP * rows, *x_below = x_above + STEP * above;
        step_of_outputs filled;
        fetch_step(first, size, step, steps);
        if (there >= PANEL && left >= LINE_OF_TILE) {
            multiply_step(at, size, x_above, x_below, rows, are_two);
        } else {
            fill_step(at, size, there < PANEL ? there : PANEL, left, filled);
            multiply_step(*filled, LINE_OF_TILE, x_above, x_below, rows, are_two);
        }
    }
    store_turned(sums, are_two);
}

/* Some outputs, for all rows. */
static void multiply_plain_outputs(const product *p, long output)
{
    _Alignas(64) turned_sums sums;
    use_turned_tiles_of(p->rows);
    if (p->rows > 1)
        multiply_outputs(p, output, sums, 1);
    else
        multiply_outputs(p, output, sums, 0);
    finish_block(p, output, 0, p->rows, sums);
}

/* The same for more rows than a block has: lines are copied, as those of outputs that lie far apart would share places of a cache. */
static void fill_plain_lines(const product *p, long output, long pair, long pairs, lines_of_panel panel)
{
    const long size = p->inputs * 2, ends = p->columns - pair <= pairs;
    for (long at = 0; at < PANEL; at++) {
        const char *from = row_of(p, output + at, 2) + pair * 4, *ahead = ends ? row_of(p, output + at + PANEL, 2) : from + pairs * 4;
        for (long step = 0; step < pairs / STEP; step++) {
            const long left = size - pair * 4 - step * LINE_OF_TILE;
            __m512i line = _mm512_setzero_si512();
            __builtin_prefetch(ahead + step * LINE_OF_TILE, 0, 2);
            if (left >= LINE_OF_TILE)
                line = _mm512_loadu_si512(from + step * LINE_OF_TILE);
            else if (left > 0)
                memcpy(&line, from + step * LINE_OF_TILE, left);
            _mm512_store_si512(panel[step][at], line);
        }
    }
}

#endif
