/* Words of neighbouring slots turned round: a register has the same word of as many slots as it has lanes. */

#pragma once

#include "vectors.h"

#define BLOCK 8 /* words of each slot that are turned at once */

#if LANES == 16

static ALWAYS_INLINE __m256i block_of(const char *slot)
{
    return _mm256_loadu_si256((const __m256i *)slot);
}

/* What is being turned, part by part: others work meanwhile. Eight slots at a time are two to a register. Quarter 0 of a register
   in `halves` has words 0 to 3 of the lower four of these, quarter 1 words 4 to 7, and the other quarters have those of the upper
   four. */
typedef struct {
    __m512i both[4], halves[2][4];
    words out[BLOCK];
} turning;

/* Does one of BLOCK parts of turning the block of words that lies `at` this byte of each slot. */
static ALWAYS_INLINE void turn_part(const char *const *slots, long at, int part, turning *t)
{
    __m512i *both = t->both;
    const int half = part / 3;
    if (half < 2 && part % 3 == 0) {
#pragma GCC unroll 4
        for (int slot = 0; slot < 4; slot++)
            both[slot] = _mm512_inserti64x4(_mm512_castsi256_si512(block_of(slots[8 * half + slot] + at)),
                                            block_of(slots[8 * half + slot + 4] + at), 1);
    } else if (half < 2 && part % 3 == 1) {
        const __m512i a = _mm512_unpacklo_epi32(both[0], both[1]), b = _mm512_unpackhi_epi32(both[0], both[1]);
        const __m512i c = _mm512_unpacklo_epi32(both[2], both[3]), d = _mm512_unpackhi_epi32(both[2], both[3]);
        both[0] = a, both[1] = b, both[2] = c, both[3] = d;
    } else if (half < 2) {
        t->halves[half][0] = _mm512_unpacklo_epi64(both[0], both[2]);
        t->halves[half][1] = _mm512_unpackhi_epi64(both[0], both[2]);
        t->halves[half][2] = _mm512_unpacklo_epi64(both[1], both[3]);
        t->halves[half][3] = _mm512_unpackhi_epi64(both[1], both[3]);
    } else {
#pragma GCC unroll 4
        for (int word = 0; word < 4; word++) {
            const __m512i first = t->halves[0][word], last = t->halves[1][word];
            t->out[4 * (part - 6) + word] =
                (words)(part == 6 ? _mm512_shuffle_i32x4(first, last, 0x88) : _mm512_shuffle_i32x4(first, last, 0xdd));
        }
    }
}

#else

/* Half a block of a slot, and in wider registers of the slot that is four further. */
static ALWAYS_INLINE words half_block_of(const char *const *slots, long at)
{
#if LANES == 8
    const __m128i low = _mm_loadu_si128((const __m128i *)(slots[0] + at)), high = _mm_loadu_si128((const __m128i *)(slots[4] + at));
    return (words)_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
#else
    return LOAD(words, slots[0] + at);
#endif
}

#if LANES == 8
#define LOW_PAIRS {0, 8, 1, 9, 4, 12, 5, 13}
#define HIGH_PAIRS {2, 10, 3, 11, 6, 14, 7, 15}
#define LOW_HALVES {0, 1, 8, 9, 4, 5, 12, 13}
#define HIGH_HALVES {2, 3, 10, 11, 6, 7, 14, 15}
#else
#define LOW_PAIRS {0, 4, 1, 5}
#define HIGH_PAIRS {2, 6, 3, 7}
#define LOW_HALVES {0, 1, 4, 5}
#define HIGH_HALVES {2, 3, 6, 7}
#endif

typedef struct {
    words out[BLOCK];
} turning;

static ALWAYS_INLINE void turn_part(const char *const *slots, long at, int part, turning *t)
{
    words *out = t->out;
    if (part < BLOCK - 1) /* registers are too few for one block beside another */
        return;
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        words rows[4];
#pragma GCC unroll 4
        for (int slot = 0; slot < 4; slot++)
            rows[slot] = half_block_of(slots + slot, at + half * 2 * BLOCK);
        const words a = __builtin_shuffle(rows[0], rows[1], (words)LOW_PAIRS);
        const words b = __builtin_shuffle(rows[0], rows[1], (words)HIGH_PAIRS);
        const words c = __builtin_shuffle(rows[2], rows[3], (words)LOW_PAIRS);
        const words d = __builtin_shuffle(rows[2], rows[3], (words)HIGH_PAIRS);
        out[4 * half] = __builtin_shuffle(a, c, (words)LOW_HALVES);
        out[4 * half + 1] = __builtin_shuffle(a, c, (words)HIGH_HALVES);
        out[4 * half + 2] = __builtin_shuffle(b, d, (words)LOW_HALVES);
        out[4 * half + 3] = __builtin_shuffle(b, d, (words)HIGH_HALVES);
    }
}

#endif

/* The block of words that lies `at` this byte of each slot. */
static ALWAYS_INLINE void turn(const char *const *slots, long at, words *out)
{
    turning whole;
#pragma GCC unroll 8
    for (int part = 0; part < BLOCK; part++)
        turn_part(slots, at, part, &whole);
#pragma GCC unroll 8
    for (int word = 0; word < BLOCK; word++)
        out[word] = whole.out[word];
}
