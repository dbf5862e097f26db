/* Tiles of registers (AMX): each thread says how large they are before it uses them, and gives them back. */

#pragma once

#ifdef __AMX_TILE__

#include "kernel.h"

#include <immintrin.h>
#include <stdint.h>

enum { NUMBER_OF_TILES = 8, LINES_OF_TILE = 16, LINE_OF_TILE = 64 }; /* bytes of a line */

typedef struct {
    uint8_t palette, start, none[14];
    uint16_t bytes[16]; /* of a line of each tile */
    uint8_t lines[16];
} tile_sizes;

static _Thread_local long tiles_are_for; /* what their sizes were made for; 0: there are none */

/* A tile without lines is not used. */
static ALWAYS_INLINE void size_tile(tile_sizes *sizes, int tile, long lines, long bytes)
{
    sizes->lines[tile] = (uint8_t)lines;
    sizes->bytes[tile] = (uint16_t)(lines ? bytes : 0);
}

static ALWAYS_INLINE void take_tiles(tile_sizes sizes, long what_for)
{
    sizes.palette = 1;
    __asm__ volatile("ldtilecfg %0" : : "m"(sizes)); /* GCC 12's own function says that eight bytes are read, and drops the rest */
    tiles_are_for = what_for;
}

static inline void leave_tiles(void)
{
    if (tiles_are_for)
        _tile_release();
    tiles_are_for = 0;
}

#else

static inline void leave_tiles(void) {}

#endif
