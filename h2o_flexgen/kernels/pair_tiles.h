/* Tiles of registers (AMX): each thread says how large they are before it uses them, and gives them back. */

#pragma once

#ifdef __AMX_BF16__

#define MOST_ROWS 32 /* of a block: of two tiles, which meet two tiles of a panel */
#define GROUP_PANELS 2
#define GROUP_BLOCKS 24
#define STEP 16 /* pairs of a row that lie side by side in a tile */

#include "kernel.h"

#include <immintrin.h>
#include <stdint.h>

enum { TILES = 8, LINE_OF_TILE = 64 };

/* Numbers of tiles, as instructions are told them: rows above and below times a panel's outputs on the left and on the right. */
#define ABOVE_LEFT 0
#define ABOVE_RIGHT 1
#define BELOW_LEFT 2
#define BELOW_RIGHT 3
#define ABOVE 4
#define BELOW 5
#define LEFT 6
#define RIGHT 7

typedef struct {
    uint8_t palette, start, none[14];
    uint16_t bytes[16]; /* of a line of each tile */
    uint8_t lines[16];
} tile_sizes;

static _Thread_local long rows_of_tiles; /* 0: there are none */

static ALWAYS_INLINE long rows_above(long rows)
{
    return (rows + 1) / 2;
}

/* Tiles of rows, and of their sums, have a half of a block of rows each. */
static inline void use_tiles_of(long rows)
{
    if (rows_of_tiles == rows)
        return;
    tile_sizes sizes = {.palette = 1};
    for (int tile = 0; tile < TILES; tile++) {
        const int is_below = tile == BELOW || tile == BELOW_LEFT || tile == BELOW_RIGHT;
        const long lines = tile >= LEFT ? STEP : is_below ? rows - rows_above(rows) : rows_above(rows);
        sizes.bytes[tile] = lines ? LINE_OF_TILE : 0; /* a single row has no tile below */
        sizes.lines[tile] = lines;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(sizes)); /* GCC 12's own function says that eight bytes are read, and drops the rest */
    rows_of_tiles = rows;
}

static inline void leave_tiles(void)
{
    if (rows_of_tiles)
        _tile_release();
    rows_of_tiles = 0;
}

#else

static inline void leave_tiles(void) {}

#endif
