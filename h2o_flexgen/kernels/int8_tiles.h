/* Dot products of rows of int8 with prepared blocks, by tiles of registers (AMX). An instruction multiplies a part of a group of all
   rows and of a tile of outputs. Its whole numbers pass through the nearest cache to where they are scaled, while the next group is
   multiplied: the same numbers as in registers, so outcomes have the same bits. */

#pragma once

#include "int8_sums.h"
#include "tile_registers.h"

#ifdef __AMX_INT8__

#define WITH_TILES 1
#define FEWEST_ROWS 17    /* fewer are multiplied sooner in registers (measured) */
#define FEWEST_IN_TILES 8 /* rows of a block, when as many are parted into blocks that are as equal as can be */
#define MOST_PARTS 2      /* of a group: with more of them, scaling takes longer than multiplying anyway */

/* Numbers of tiles, as instructions are told them. Tiles of sums have the numbers of the parts. */
#define EVEN_X 4
#define EVEN_CODES 5
#define ODD_X 6
#define ODD_CODES 7

typedef int32_t part_dots[LINES_OF_TILE][TILE]; /* of each row and output */

/* Those of two groups: of one that is being scaled, and of the next one. */
typedef part_dots dots_of_groups[2 * MOST_PARTS];

static ALWAYS_INLINE long blocks_in_tiles(long rows)
{
    return (rows + LINES_OF_TILE - 1) / LINES_OF_TILE;
}

static void use_tiles_of(long rows, int parts)
{
    const long what_for = rows * (MOST_PARTS + 1) + parts;
    tile_sizes sizes = {0};
    if (tiles_are_for == what_for)
        return;
    for (int part = 0; part < parts; part++)
        size_tile(&sizes, part, rows, LINE_OF_TILE);
    for (int is_odd = 0; is_odd < 2; is_odd++) {
        size_tile(&sizes, is_odd ? ODD_X : EVEN_X, rows, GROUP / parts);
        size_tile(&sizes, is_odd ? ODD_CODES : EVEN_CODES, X_DWORDS / parts, LINE_OF_TILE);
    }
    take_tiles(sizes, what_for);
}

#define DOTS_OF_PART(PART, X, CODES)                                                                                             \
    if (PART < parts) {                                                                                                          \
        _tile_zero(PART);                                                                                                        \
        _tile_loadd(X, x + GROUP / parts * PART, x_row);                                                                         \
        _tile_loadd(CODES, codes + TILE * GROUP / parts * PART, LINE_OF_TILE);                                                   \
        if (are_signed)                                                                                                          \
            _tile_dpbssd(PART, X, CODES);                                                                                        \
        else                                                                                                                     \
            _tile_dpbsud(PART, X, CODES);                                                                                        \
        _tile_stored(PART, dots[PART], LINE_OF_TILE);                                                                            \
    }

/* The dot products of a group of some rows, `x_row` bytes apart, with the codes of a tile. */
static ALWAYS_INLINE void dots_in_tiles(const int8_t *x, long x_row, const uint8_t *codes, int parts, int are_signed, part_dots *dots)
{
    DOTS_OF_PART(0, EVEN_X, EVEN_CODES)
    DOTS_OF_PART(1, ODD_X, ODD_CODES)
}

/* Functions for each number of rows that a block has. */
#define EACH_IN_TILES(OF, ...)                                                                                                   \
    OF(8, __VA_ARGS__)                                                                                                           \
    OF(9, __VA_ARGS__)                                                                                                           \
    OF(10, __VA_ARGS__)                                                                                                          \
    OF(11, __VA_ARGS__)                                                                                                          \
    OF(12, __VA_ARGS__)                                                                                                          \
    OF(13, __VA_ARGS__)                                                                                                          \
    OF(14, __VA_ARGS__)                                                                                                          \
    OF(15, __VA_ARGS__)                                                                                                          \
    OF(16, __VA_ARGS__)
#define NUMBERS_IN_TILES (LINES_OF_TILE - FEWEST_IN_TILES + 1)

#else

#define WITH_TILES 0

#endif
