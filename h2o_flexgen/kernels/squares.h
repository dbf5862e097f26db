/* Squares of words, turned: what is a lane of each register becomes a register. */

#pragma once

#include "vectors.h"

#if LANES == 16
#define LOW(ONE, OTHER) (words)_mm512_unpacklo_epi32((__m512i)(ONE), (__m512i)(OTHER))
#define HIGH(ONE, OTHER) (words)_mm512_unpackhi_epi32((__m512i)(ONE), (__m512i)(OTHER))
#define LOW_PAIR(ONE, OTHER) (words)_mm512_unpacklo_epi64((__m512i)(ONE), (__m512i)(OTHER))
#define HIGH_PAIR(ONE, OTHER) (words)_mm512_unpackhi_epi64((__m512i)(ONE), (__m512i)(OTHER))
#elif LANES == 8
#define LOW(ONE, OTHER) (words)_mm256_unpacklo_epi32((__m256i)(ONE), (__m256i)(OTHER))
#define HIGH(ONE, OTHER) (words)_mm256_unpackhi_epi32((__m256i)(ONE), (__m256i)(OTHER))
#define LOW_PAIR(ONE, OTHER) (words)_mm256_unpacklo_epi64((__m256i)(ONE), (__m256i)(OTHER))
#define HIGH_PAIR(ONE, OTHER) (words)_mm256_unpackhi_epi64((__m256i)(ONE), (__m256i)(OTHER))
#else
#define LOW(ONE, OTHER) __builtin_shuffle(ONE, OTHER, (words){0, 4, 1, 5})
#define HIGH(ONE, OTHER) __builtin_shuffle(ONE, OTHER, (words){2, 6, 3, 7})
#define LOW_PAIR(ONE, OTHER) __builtin_shuffle(ONE, OTHER, (words){0, 1, 4, 5})
#define HIGH_PAIR(ONE, OTHER) __builtin_shuffle(ONE, OTHER, (words){2, 3, 6, 7})
#endif

/* Turns squares of four by four: lane 4 i + k of register j goes to lane 4 i + j of register k, for each four registers. */
static ALWAYS_INLINE void turn_squares(words *square)
{
    words pairs[LANES];
#pragma GCC unroll 8
    for (int at = 0; at < LANES; at += 2) {
        pairs[at] = LOW(square[at], square[at + 1]);
        pairs[at + 1] = HIGH(square[at], square[at + 1]);
    }
#pragma GCC unroll 4
    for (int at = 0; at < LANES; at += 4) {
        square[at] = LOW_PAIR(pairs[at], pairs[at + 2]);
        square[at + 1] = HIGH_PAIR(pairs[at], pairs[at + 2]);
        square[at + 2] = LOW_PAIR(pairs[at + 1], pairs[at + 3]);
        square[at + 3] = HIGH_PAIR(pairs[at + 1], pairs[at + 3]);
    }
}

/* Turns as many registers as they have lanes. */
static ALWAYS_INLINE void turn(words *square)
{
    turn_squares(square);
#if LANES == 8
#pragma GCC unroll 4
    for (int at = 0; at < 4; at++) {
        const __m256i one = (__m256i)square[at], other = (__m256i)square[4 + at];
        square[at] = (words)_mm256_permute2x128_si256(one, other, 0x20);
        square[4 + at] = (words)_mm256_permute2x128_si256(one, other, 0x31);
    }
#elif LANES == 16
#pragma GCC unroll 4
    for (int at = 0; at < 4; at++) {
        const __m512i a = (__m512i)square[at], b = (__m512i)square[4 + at];
        const __m512i c = (__m512i)square[8 + at], d = (__m512i)square[12 + at];
        const __m512i even = _mm512_shuffle_i32x4(a, b, 0x88), odd = _mm512_shuffle_i32x4(a, b, 0xdd);
        const __m512i even_behind = _mm512_shuffle_i32x4(c, d, 0x88), odd_behind = _mm512_shuffle_i32x4(c, d, 0xdd);
        square[at] = (words)_mm512_shuffle_i32x4(even, even_behind, 0x88);
        square[8 + at] = (words)_mm512_shuffle_i32x4(even, even_behind, 0xdd);
        square[4 + at] = (words)_mm512_shuffle_i32x4(odd, odd_behind, 0x88);
        square[12 + at] = (words)_mm512_shuffle_i32x4(odd, odd_behind, 0xdd);
    }
#endif
}

/* Lane j of sums[q] is the sum of the four words in quarter q of register j. */
static ALWAYS_INLINE void sum_quarters(const words *square, words *sums)
{
    words pairs[LANES / 2], fours[LANES / 4];
#pragma GCC unroll 8
    for (int at = 0; at < LANES / 2; at++)
        pairs[at] = LOW(square[2 * at], square[2 * at + 1]) + HIGH(square[2 * at], square[2 * at + 1]);
#pragma GCC unroll 4
    for (int at = 0; at < LANES / 4; at++)
        fours[at] = LOW_PAIR(pairs[2 * at], pairs[2 * at + 1]) + HIGH_PAIR(pairs[2 * at], pairs[2 * at + 1]);
#if LANES == 4
    sums[0] = fours[0];
#elif LANES == 8
    sums[0] = (words)_mm256_permute2x128_si256((__m256i)fours[0], (__m256i)fours[1], 0x20);
    sums[1] = (words)_mm256_permute2x128_si256((__m256i)fours[0], (__m256i)fours[1], 0x31);
#else
    const __m512i a = (__m512i)fours[0], b = (__m512i)fours[1], c = (__m512i)fours[2], d = (__m512i)fours[3];
    const __m512i even = _mm512_shuffle_i32x4(a, b, 0x88), odd = _mm512_shuffle_i32x4(a, b, 0xdd);
    const __m512i even_behind = _mm512_shuffle_i32x4(c, d, 0x88), odd_behind = _mm512_shuffle_i32x4(c, d, 0xdd);
    sums[0] = (words)_mm512_shuffle_i32x4(even, even_behind, 0x88);
    sums[1] = (words)_mm512_shuffle_i32x4(odd, odd_behind, 0x88);
    sums[2] = (words)_mm512_shuffle_i32x4(even, even_behind, 0xdd);
    sums[3] = (words)_mm512_shuffle_i32x4(odd, odd_behind, 0xdd);
#endif
}
