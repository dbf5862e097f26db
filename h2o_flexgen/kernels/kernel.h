/* Definitions that all kernels share. They are plain C: the compiler makes the vector code, in a library for each kind of
   processor, and Python loads the one that fits. Sizes and strides are in values unless a name says bytes. */

#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

static ALWAYS_INLINE float bf16_to_float(uint16_t half)
{
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static ALWAYS_INLINE uint16_t float_to_bf16(float value) /* rounds to nearest, ties to even; quiet NaNs stay as they are */
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* A group codec: 64 values share a scale and a minimum (bfloat16); there is one code per value, a byte, or four bits, where byte j
   of the group's 32 holds the codes of values j (low) and j + 32 (high). value = code * scale + minimum: the product is exact in
   float32, so it does not matter whether a compiler fuses the two. A row has all its codes first, then all scales, then all minima;
   its last group may be filled up. */

#define GROUP 64

static ALWAYS_INLINE long group_row_bytes(long columns, int bits)
{
    return (columns + GROUP - 1) / GROUP * (GROUP / 8 * bits + 4);
}

typedef struct {
    const uint8_t *codes;
    float scale, minimum;
} packed_group;

static ALWAYS_INLINE float load_bf16(const uint8_t *bytes) /* the address may be unaligned */
{
    uint16_t half;
    memcpy(&half, bytes, sizeof half);
    return bf16_to_float(half);
}

static ALWAYS_INLINE packed_group group_of_row(const uint8_t *row, long number, long columns, int bits)
{
    const long groups = (columns + GROUP - 1) / GROUP, code_bytes = GROUP / 8 * bits;
    const uint8_t *scales = row + groups * code_bytes, *minima = scales + 2 * groups;
    const packed_group found = {row + number * code_bytes, load_bf16(scales + 2 * number), load_bf16(minima + 2 * number)};
    return found;
}

static ALWAYS_INLINE void group_to_floats(packed_group from, int bits, float *restrict out)
{
    if (bits == 8) {
#pragma omp simd
        for (int at = 0; at < GROUP; at++)
            out[at] = (float)from.codes[at] * from.scale + from.minimum;
    } else {
#pragma omp simd
        for (int at = 0; at < GROUP / 2; at++) {
            out[at] = (float)(from.codes[at] & 15) * from.scale + from.minimum;
            out[at + GROUP / 2] = (float)(from.codes[at] >> 4) * from.scale + from.minimum;
        }
    }
}
