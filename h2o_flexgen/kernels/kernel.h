/* Definitions that all kernels share. They are plain C: the compiler makes the vector code, in a library for each kind of
   processor, and Python loads the one that fits. Sizes and strides are in values unless a name says bytes. */

#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

/* How values are kept: in a type of their own, as DTYPES of sizes.py numbers them, or packed. */
enum kind { BF16, FLOAT, HALF, GROUP4, GROUP8 };

static ALWAYS_INLINE long itemsize_of(int kind) /* bytes of a value that has a type of its own */
{
    return kind == FLOAT ? 4 : 2;
}

static ALWAYS_INLINE uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static ALWAYS_INLINE float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static ALWAYS_INLINE float bf16_to_float(uint16_t half)
{
    return float_of_bits((uint32_t)half << 16);
}

static ALWAYS_INLINE uint16_t float_to_bf16(float value) /* rounds to nearest, ties to even; a NaN becomes a quiet one */
{
    const uint32_t bits = bits_of_float(value), number = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : number); /* the bits of a NaN may be all ones: no sum */
}

/* float16, "half": the exponent is 112 lower than that of a float, and of the fraction the upper 10 bits are there. Where the
   exponent is 0, in a subnormal, subtracting the float with the same exponent gives the value. */

static ALWAYS_INLINE float half_to_float(uint16_t half)
{
    const uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t raised = magnitude + (112u << 23);
    const uint32_t special = magnitude + (224u << 23); /* infinity, or NaN */
    const uint32_t small = bits_of_float(float_of_bits(raised + (1u << 23)) - float_of_bits(113u << 23));
    return float_of_bits(sign | (magnitude >= 0x7c00u << 13 ? special : magnitude < 0x0400u << 13 ? small : raised));
}

static ALWAYS_INLINE uint16_t float_to_half(float value) /* rounds to nearest, ties to even; a NaN becomes a quiet one */
{
    const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
    const uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
    const uint32_t small = bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f); /* the sum rounds */
    const uint32_t finite = magnitude < 113u << 23 ? small : magnitude < 0x477ff000u ? normal : 0x7c00u; /* too large: infinity */
    return (uint16_t)(sign | (magnitude > 0x7f800000u ? 0x7e00u : finite));
}

/* Values that have types of their own, one by one. */

static ALWAYS_INLINE float load_value(const char *from, int kind) /* the address may be unaligned */
{
    uint16_t half;
    float value;
    if (kind == FLOAT)
        return memcpy(&value, from, sizeof value), value;
    memcpy(&half, from, sizeof half);
    return kind == BF16 ? bf16_to_float(half) : half_to_float(half);
}

static ALWAYS_INLINE void store_value(char *to, float value, int kind)
{
    const uint16_t half = kind == BF16 ? float_to_bf16(value) : float_to_half(value);
    if (kind == FLOAT)
        memcpy(to, &value, sizeof value);
    else
        memcpy(to, &half, sizeof half);
}

/* A group codec: 64 values share a scale and a minimum (bfloat16); there is one code per value, a byte, or four bits, where byte j
   of the group's 32 holds the codes of values j (low) and j + 32 (high). value = code * scale + minimum: the product is exact in
   float32, so it does not matter whether a compiler fuses the two. A row has all its codes first, then all scales, then all minima;
   its last group may be filled up. */

#define GROUP 64

static ALWAYS_INLINE long groups_of(long columns)
{
    return (columns + GROUP - 1) / GROUP;
}

static ALWAYS_INLINE long group_row_bytes(long columns, int bits)
{
    return groups_of(columns) * (GROUP / 8 * bits + 4);
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
    const long groups = groups_of(columns), code_bytes = GROUP / 8 * bits;
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
