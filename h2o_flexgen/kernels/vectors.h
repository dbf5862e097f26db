/* Registers of float32, as wide as the processor's, and the functions that work with them. */

#pragma once

#include "kernel.h"

/* The number of values in a register. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t integers __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));

#define LOAD(type, from)                                                                                                         \
    ({                                                                                                                           \
        type loaded;                                                                                                             \
        memcpy(&loaded, from, sizeof loaded);                                                                                    \
        loaded;                                                                                                                  \
    })

static ALWAYS_INLINE floats all(float value)
{
    return value - (floats){0};
}

/* Has a vector worked out here, as it is written: compilers do not look through this. */
#if LANES == 16
#define IN_A_REGISTER(VALUE) __asm__("" : "+v"(VALUE))
#elif defined(__SSE__)
#define IN_A_REGISTER(VALUE) __asm__("" : "+x"(VALUE))
#elif defined(__aarch64__)
#define IN_A_REGISTER(VALUE) __asm__("" : "+w"(VALUE))
#else
#define IN_A_REGISTER(VALUE) __asm__("" : "+m"(VALUE))
#endif

#if LANES == 16
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif LANES == 8
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define LANE_NUMBERS {0, 1, 2, 3}
#endif

static ALWAYS_INLINE float sum_of(floats value)
{
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
        value += __builtin_shuffle(value, (integers)LANE_NUMBERS ^ half);
    return value[0];
}

/* The value itself, of which no product is fused with a sum: that would round once less. */
static ALWAYS_INLINE floats rounded(floats value)
{
    IN_A_REGISTER(value);
    return value;
}

static ALWAYS_INLINE words words_of_halves(const char *from)
{
#if LANES == 16
    return (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
#elif LANES == 8
    return (words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
#else
    return __builtin_convertvector(LOAD(halves, from), words);
#endif
}

/* Values of float16, converted without instructions for them as half_to_float does. */
static ALWAYS_INLINE floats floats_of_half_words(words from)
{
    const words magnitude = (from & 0x7fff) << 13, sign = (from & 0x8000) << 16, raised = magnitude + (112u << 23);
    const words small = (words)((floats)(raised + (1u << 23)) - float_of_bits(113u << 23));
    const words is_special = (words)(magnitude >= 0x7c00u << 13), is_small = (words)(magnitude < 0x0400u << 13);
    const words finite = (small & is_small) | (raised & ~is_small);
    return (floats)(sign | ((magnitude + (224u << 23)) & is_special) | (finite & ~is_special));
}

static ALWAYS_INLINE floats floats_of_halves(const char *from)
{
#if LANES == 16
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif LANES == 8
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    return floats_of_half_words(words_of_halves(from));
#endif
}

/* The same of the lower halves of words. */
static ALWAYS_INLINE floats floats_of_low_halves(words from)
{
    const halves low = __builtin_convertvector(from & 0xffff, halves);
    return floats_of_halves((const char *)&low);
}

/* A register of values that have a type of their own. */
static ALWAYS_INLINE floats load_floats(const char *from, int kind)
{
    return kind == FLOAT ? LOAD(floats, from) : kind == BF16 ? (floats)(words_of_halves(from) << 16) : floats_of_halves(from);
}

static ALWAYS_INLINE halves bf16_of_floats(floats from) /* as float_to_bf16 does */
{
    const words bits = (words)from, is_nan = (words)(from != from), number = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((number & ~is_nan) | (0x7fc0 & is_nan), halves);
}

/* Stores a register as values that have a type of their own. */
static ALWAYS_INLINE void store_floats(char *to, floats value, int kind)
{
    if (kind == FLOAT) {
        memcpy(to, &value, sizeof value);
    } else if (kind == BF16) {
        const halves narrow = bf16_of_floats(value);
        memcpy(to, &narrow, sizeof narrow);
    } else {
#if LANES == 16
        _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif LANES == 8
        _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#else
        for (int lane = 0; lane < LANES; lane++)
            store_value(to + 2 * lane, value[lane], HALF);
#endif
    }
}

/* Some values of a register, as many as there are; zeros behind them. */
static ALWAYS_INLINE floats load_some(const char *from, long count, int kind)
{
    char whole[4 * LANES] = {0};
    if (count < LANES)
        from = memcpy(whole, from, count * itemsize_of(kind));
    return load_floats(from, kind);
}

static ALWAYS_INLINE void store_some(char *to, floats value, long count, int kind)
{
    char whole[4 * LANES];
    store_floats(count < LANES ? whole : to, value, kind);
    if (count < LANES)
        memcpy(to, whole, count * itemsize_of(kind));
}

/* The nearest values of a type. */
static ALWAYS_INLINE floats rounded_to(floats value, int kind)
{
    char narrow[2 * LANES];
    if (kind == FLOAT)
        return rounded(value);
    store_floats(narrow, value, kind);
    return load_floats(narrow, kind);
}

/* Does something with each register of some values. Of whole ones the number of values is a constant. */
#define EACH_REGISTER(AT, COUNT, DO)                                                                                             \
    do {                                                                                                                         \
        long AT = 0;                                                                                                             \
        for (; AT + LANES <= (COUNT); AT += LANES)                                                                               \
            DO(AT, LANES);                                                                                                       \
        if (AT < (COUNT))                                                                                                        \
            DO(AT, (COUNT)-AT);                                                                                                  \
    } while (0)

static ALWAYS_INLINE floats larger(floats one, floats other)
{
#if LANES == 16
    return (floats)_mm512_max_ps((__m512)one, (__m512)other);
#elif LANES == 8
    return (floats)_mm256_max_ps((__m256)one, (__m256)other);
#else
    const integers mask = one > other;
    return (floats)(((integers)one & mask) | ((integers)other & ~mask));
#endif
}

/* The higher of numbers that are not below zero: their bits rank as they do, and those of a NaN, whatever its sign, above all. */
static ALWAYS_INLINE floats highest(floats one, floats other)
{
    const words mask = (words)((words)one > (words)other);
    return (floats)(((words)one & mask) | ((words)other & ~mask));
}

/* Relative error below 2e-7; results below 2^-124 may be 2^-124. NaN stays NaN. */
static ALWAYS_INLINE floats exp_below_zero(floats from)
{
    const floats x = larger(from, all(-86.0f));
    const float shift = 12582912.0f; /* 1.5 * 2^23: its last bits count whole powers */
    const floats shifted = x * 1.44269504f + shift, powers = shifted - shift;
    const floats rest = (x - powers * 0.693359375f) + powers * 2.12194440e-4f;
    floats value = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    value = value * rest + 8.3334519073e-3f;
    value = value * rest + 4.1665795894e-2f;
    value = value * rest + 1.6666665459e-1f;
    value = value * rest + 5.0000001201e-1f;
    value = value * (rest * rest) + rest + 1.0f;
    return (floats)(((integers)value + ((integers)shifted << 23)) | (from != from));
}
