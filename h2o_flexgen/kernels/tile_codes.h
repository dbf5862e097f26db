/* Codes, scales and minima of tiles as registers of float32, for panels and for products that need none. */

#pragma once

#include "panels.h"
#include "tiles.h"

#define AHEAD 8 /* groups from what is read to what is asked for */

/* The codes that word `input / codes of a word` of each lane has for this input, times a power of two. */
static ALWAYS_INLINE floats codes_of(words from, long input, int bits)
{
    const int place = bits == 4 ? input % 4 * 8 + input / 4 % 2 * 4 : input % 4 * 8;
    const words codes = place + bits == 32 ? from >> place : from & (((1u << bits) - 1) << place);
    return __builtin_convertvector((integers)codes, floats);
}

/* Where the registers of a panel lie in blocks of tiles: the block of group 0, and the first output in it. Behind the last tile the
   last one is repeated: what comes of it is not stored. */
typedef struct {
    const uint8_t *block[2];
    long output[2];
} halves_of_panel;

static ALWAYS_INLINE halves_of_panel find_halves(const product *p, long output, int bits)
{
    halves_of_panel found;
    for (int half = 0; half < 2; half++) {
        const long at = output + half * LANES, last = (p->outputs - 1) / TILE, tile = at / TILE < last ? at / TILE : last;
        found.block[half] = p->data + tile * tile_bytes(p->inputs, bits);
        found.output[half] = at % TILE;
    }
    return found;
}

static ALWAYS_INLINE words load_codes(const halves_of_panel *from, int half, long group, long word, int bits)
{
    const uint8_t *at = from->block[half] + group * block_bytes(bits) + (TILE * word + from->output[half]) * 4;
    if (half == 0 || LANES == TILE) /* blocks that are read at once are too short to be noticed as streams */
        __builtin_prefetch(at + AHEAD * block_bytes(bits));
    return LOAD(words, at);
}

static ALWAYS_INLINE void load_scales(const halves_of_panel *from, long group, int bits, floats *scales, floats *minima)
{
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const uint8_t *block = from->block[half] + group * block_bytes(bits);
        scales[half] = load_floats((const char *)block_scales(block, bits) + 2 * from->output[half], BF16);
        minima[half] = load_floats((const char *)block_minima(block, bits) + 2 * from->output[half], BF16);
    }
}
