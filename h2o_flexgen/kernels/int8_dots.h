/* Integer dot products in registers of dwords. A dword of codes (unsigned) belongs to one output and meets the dword of x (signed)
   for the same four inputs. Codes below 16 never saturate, nor do sums of 8 such products in 16 bits: 8 * 2 * 15 * 127 < 2^15. So
   without instructions for whole dwords, codes of 8 bits are multiplied in two planes, their lower and their upper halves. */

#pragma once

#include "tiles.h"
#include "vectors.h"

#define PARTS (TILE / LANES) /* registers of a tile */
#define X_DWORDS (GROUP / 4) /* of a group */

typedef int16_t shorts __attribute__((vector_size(4 * LANES)));

static ALWAYS_INLINE words same_word(const int8_t *from)
{
    return LOAD(uint32_t, from) - (words){0};
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

#define WHOLE_DWORDS 1

static ALWAYS_INLINE integers dots_added(integers sums, words codes, words x)
{
#if defined(__AVX512VNNI__)
    return (integers)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)x);
#else
    return (integers)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, (__m256i)x);
#endif
}

#else

#define WHOLE_DWORDS 0

static ALWAYS_INLINE shorts pair_dots(words codes, words x)
{
#if LANES == 16
    return (shorts)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
#elif LANES == 8
    return (shorts)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
#else
    const shorts even = (shorts)(codes & 0x00ff00ff), odd = (shorts)(codes >> 8 & 0x00ff00ff);
    return even * ((shorts)(x << 8) >> 8) + odd * ((shorts)x >> 8);
#endif
}

static ALWAYS_INLINE integers pairs_added(shorts pairs)
{
#if LANES == 16
    return (integers)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
#elif LANES == 8
    return (integers)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
#else
    return ((integers)((words)pairs << 16) >> 16) + ((integers)pairs >> 16);
#endif
}

#endif

static ALWAYS_INLINE int planes_of(int bits)
{
    return WHOLE_DWORDS ? 1 : bits / 4;
}

#define PREPARED_BYTES (TILE * (GROUP * (WHOLE_DWORDS ? 1 : 2) + 8)) /* of a block of 8 bits, which has most */

/* A prepared block has a byte for each code, planes one behind the other, then the scales and the minima as float32. */
static ALWAYS_INLINE long prepared_bytes(int bits)
{
    return TILE * (GROUP * planes_of(bits) + 8);
}

/* A register of the codes that meet dword `dword` of x. */
static ALWAYS_INLINE words codes_at(const uint8_t *block, int dword, int part, int plane, int bits, int prepared)
{
    const long at = 4 * LANES * part;
    if (prepared)
        return LOAD(words, block + 4 * TILE * (X_DWORDS * plane + dword) + at);
    const int shift = bits == 4 ? dword % 2 * 4 : plane * 4;
    const words found = LOAD(words, block + 4 * TILE * (bits == 4 ? dword / 2 : dword) + at);
    return bits == 8 && planes_of(bits) == 1 ? found : found >> shift & 0x0f0f0f0f;
}

/* A register of the scales (number 0) or the minima (number 1) of a block. */
static ALWAYS_INLINE floats shared_at(const uint8_t *block, int number, int part, int bits, int prepared)
{
    if (prepared)
        return LOAD(floats, block + TILE * (GROUP * planes_of(bits) + 4 * number) + 4 * LANES * part);
    return load_floats((const char *)block + block_code_bytes(bits) + 2 * (TILE * number + LANES * part), BF16);
}

static ALWAYS_INLINE void prepare(const uint8_t *block, uint8_t *out, int bits)
{
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
        for (int plane = 0; plane < planes_of(bits); plane++)
#pragma GCC unroll 16
            for (int dword = 0; dword < X_DWORDS; dword++) {
                const words codes = codes_at(block, dword, part, plane, bits, 0);
                memcpy(out + 4 * (TILE * (X_DWORDS * plane + dword) + LANES * part), &codes, sizeof codes);
            }
#pragma GCC unroll 2
        for (int number = 0; number < 2; number++) {
            const floats values = shared_at(block, number, part, bits, 0);
            memcpy(out + TILE * (GROUP * planes_of(bits) + 4 * number) + 4 * LANES * part, &values, sizeof values);
        }
    }
}
