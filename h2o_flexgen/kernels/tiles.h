/* The codec of tiles: 16 outputs by 64 inputs of a transposed matrix make a block, with the values of kernel.h's group codec. A block
   has its codes first, as dwords in the order of the outputs, then 16 scales, then 16 minima (bfloat16). With 8 bits byte j of dword
   (i, output) is the code of input 4 i + j; with 4 bits its lower half is the code of input 8 i + j, its upper half that of
   8 i + 4 + j. Blocks lie group behind group, tile behind tile; the last tile is filled up with zeros. */

#pragma once

#include "kernel.h"

#define TILE 16 /* outputs */

static ALWAYS_INLINE long block_code_bytes(int bits)
{
    return TILE * GROUP / 8 * bits;
}

static ALWAYS_INLINE long block_bytes(int bits)
{
    return block_code_bytes(bits) + TILE * 4;
}

static ALWAYS_INLINE long tile_bytes(long columns, int bits)
{
    return groups_of(columns) * block_bytes(bits);
}

static ALWAYS_INLINE const uint8_t *block_scales(const uint8_t *block, int bits)
{
    return block + block_code_bytes(bits);
}

static ALWAYS_INLINE const uint8_t *block_minima(const uint8_t *block, int bits)
{
    return block + block_code_bytes(bits) + TILE * 2;
}
