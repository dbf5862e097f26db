/* The tiles of registers (AMX) that products of pairs use. */

#pragma once

#include "tile_registers.h"

#ifdef __AMX_BF16__

#define SUMS_IN_TILES
#define MOST_ROWS 32 /* of a block: of two tiles, which meet two tiles of a panel */
#define GROUP_PANELS 8  /* that a part of x meets: more rows of many inputs than a cache has come from memory less often */
#define GROUP_BLOCKS 12
#define STEP 16 /* pairs of a row that lie side by side in a tile */
#define PANEL_SPAN 256 /* pairs of a panel of codes: two thirds of the nearest cache, and sums move half as often as with 128 */

/* Numbers of tiles, as instructions are told them: rows above and below times a panel's outputs on the left and on the right. */
#define ABOVE_LEFT 0
#define ABOVE_RIGHT 1
#define BELOW_LEFT 2
#define BELOW_RIGHT 3
#define ABOVE 4
#define BELOW 5
#define LEFT 6
#define RIGHT 7

static ALWAYS_INLINE long rows_above(long rows)
{
    return (rows + 1) / 2;
}

/* Rows are lines. Tiles of rows, and of their sums, have a half of a block of rows each; a single row has no tile below. */
static inline void use_tiles_of(long rows)
{
    if (tiles_are_for == rows)
        return;
    const long above = rows_above(rows), below = rows - above;
    tile_sizes sizes = {0};
    size_tile(&sizes, ABOVE_LEFT, above, LINE_OF_TILE);
    size_tile(&sizes, ABOVE_RIGHT, above, LINE_OF_TILE);
    size_tile(&sizes, BELOW_LEFT, below, LINE_OF_TILE);
    size_tile(&sizes, BELOW_RIGHT, below, LINE_OF_TILE);
    size_tile(&sizes, ABOVE, above, LINE_OF_TILE);
    size_tile(&sizes, BELOW, below, LINE_OF_TILE);
    size_tile(&sizes, LEFT, STEP, LINE_OF_TILE);
    size_tile(&sizes, RIGHT, STEP, LINE_OF_TILE);
    take_tiles(sizes, rows);
}

/* Outputs are lines, and rows are words of them. */
static inline void use_turned_tiles_of(long rows)
{
    if (tiles_are_for == -rows)
        return;
    const long above = rows_above(rows) * sizeof(float), below = rows * sizeof(float) - above;
    tile_sizes sizes = {0};
    size_tile(&sizes, ABOVE_LEFT, LINES_OF_TILE, above);
    size_tile(&sizes, ABOVE_RIGHT, LINES_OF_TILE, above);
    size_tile(&sizes, BELOW_LEFT, below ? LINES_OF_TILE : 0, below);
    size_tile(&sizes, BELOW_RIGHT, below ? LINES_OF_TILE : 0, below);
    size_tile(&sizes, ABOVE, STEP, above);
    size_tile(&sizes, BELOW, below ? STEP : 0, below);
    size_tile(&sizes, LEFT, LINES_OF_TILE, LINE_OF_TILE);
    size_tile(&sizes, RIGHT, LINES_OF_TILE, LINE_OF_TILE);
    take_tiles(sizes, -rows);
}

/* Sums of nothing yet. */
static ALWAYS_INLINE void start_tiles(int are_two)
{
    _tile_zero(ABOVE_LEFT);
    _tile_zero(ABOVE_RIGHT);
    if (are_two) {
        _tile_zero(BELOW_LEFT);
        _tile_zero(BELOW_RIGHT);
    }
    __asm__ volatile("" : : : "memory"); /* tiles are read where a compiler does not see it */
}

#endif
