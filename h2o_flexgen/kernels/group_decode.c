/* Decodes rows of a group codec to float32 or bfloat16. */

#include "kernel.h"

#ifdef __AVX512BW__

/* The values of all sixteen codes are worked out once for a group and then looked up. */
static ALWAYS_INLINE void decode_group_4_half(packed_group from, uint16_t *out)
{
    uint16_t table[32] = {0};
    for (int code = 0; code < 16; code++)
        table[code] = float_to_bf16((float)code * from.scale + from.minimum);
    const __m512i values = _mm512_loadu_si512(table);
    const __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)from.codes));
    const __m512i low = _mm512_and_si512(pairs, _mm512_set1_epi16(15)), high = _mm512_srli_epi16(pairs, 4);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(low, values));
    _mm512_storeu_si512(out + GROUP / 2, _mm512_permutexvar_epi16(high, values));
}

#endif

static ALWAYS_INLINE void decode_group(packed_group from, void *out, int bits, int wide)
{
    float values[GROUP];
#ifdef __AVX512BW__
    if (bits == 4 && !wide) {
        decode_group_4_half(from, out);
        return;
    }
#endif
    if (wide) {
        group_to_floats(from, bits, out);
        return;
    }
    group_to_floats(from, bits, values);
#pragma omp simd
    for (int at = 0; at < GROUP; at++)
        ((uint16_t *)out)[at] = float_to_bf16(values[at]);
}

static ALWAYS_INLINE void decode_row(const uint8_t *row, char *out, long columns, int bits, int wide)
{
    const long itemsize = wide ? 4 : 2;
    for (long start = 0; start < columns; start += GROUP) {
        const packed_group from = group_of_row(row, start / GROUP, columns, bits);
        if (columns - start >= GROUP) {
            decode_group(from, out + start * itemsize, bits, wide);
        } else {
            char last[GROUP * 4];
            decode_group(from, last, bits, wide);
            memcpy(out + start * itemsize, last, (columns - start) * itemsize);
        }
    }
}

/* Parallel regions call through a pointer: a region is compiled by itself, and would know nothing of what is constant outside of
   it. */

typedef void (*row_action)(const uint8_t *row, char *out, long columns);

static void decode_4_half(const uint8_t *row, char *out, long columns) { decode_row(row, out, columns, 4, 0); }
static void decode_4_wide(const uint8_t *row, char *out, long columns) { decode_row(row, out, columns, 4, 1); }
static void decode_8_half(const uint8_t *row, char *out, long columns) { decode_row(row, out, columns, 8, 0); }
static void decode_8_wide(const uint8_t *row, char *out, long columns) { decode_row(row, out, columns, 8, 1); }

void group_decode(const uint8_t *data, char *out, long rows, long columns, int bits, int wide, int threads)
{
    const row_action action = bits == 4 ? (wide ? decode_4_wide : decode_4_half) : (wide ? decode_8_wide : decode_8_half);
    const long row_bytes = group_row_bytes(columns, bits), out_bytes = columns * (wide ? 4 : 2);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long row = 0; row < rows; row++)
        action(data + row * row_bytes, out + row * out_bytes, columns);
}
