/* Rows of x as int8: the 64 values of a group share a scale, their largest magnitude over 127. What is not finite makes the scale
   NaN, and values too small for a scale become 0. Plain IEEE arithmetic in a fixed order, as in torch: the same bits everywhere. */

#include "int8_dots.h"

typedef struct {
    const char *x;        /* (rows, columns) */
    int8_t *codes;        /* (rows, groups * 64) */
    float *scales, *sums; /* (rows, groups): sums are those of the codes, times the scale */
    int32_t *wholes;      /* (rows, parts): sums of the codes of each part of a group, or NULL */
    long columns, part;   /* values of a part */
} rows_of_x;

#define REGISTERS (GROUP / LANES)

static ALWAYS_INLINE void load_group(const char *x, long count, int kind, floats *values)
{
    char filled[GROUP * 4] = {0};
    if (count < GROUP)
        x = memcpy(filled, x, count * itemsize_of(kind));
#pragma GCC unroll 16
    for (int at = 0; at < REGISTERS; at++)
        values[at] = load_floats(x + itemsize_of(kind) * LANES * at, kind);
}

static ALWAYS_INLINE float largest_magnitude(const floats *values) /* NaN, if there is one: as integers they are the largest */
{
    integers most = {0};
#pragma GCC unroll 16
    for (int at = 0; at < REGISTERS; at++) {
        const integers next = (integers)values[at] & 0x7fffffff, mask = next > most;
        most = (next & mask) | (most & ~mask);
    }
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) {
        const integers next = __builtin_shuffle(most, (integers)LANE_NUMBERS ^ half), mask = next > most;
        most = (next & mask) | (most & ~mask);
    }
    return float_of_bits((uint32_t)most[0]);
}

static ALWAYS_INLINE void store_bytes(const integers *values, int8_t *out) /* GCC narrows 256 bits value by value */
{
#if LANES == 8
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int at = 0; at < REGISTERS; at += 4) {
        const __m256i first = _mm256_packs_epi32((__m256i)values[at], (__m256i)values[at + 1]);
        const __m256i second = _mm256_packs_epi32((__m256i)values[at + 2], (__m256i)values[at + 3]);
        const __m256i bytes_of_four = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order);
        _mm256_storeu_si256((__m256i *)(out + LANES * at), bytes_of_four);
    }
#else
    typedef int8_t small __attribute__((vector_size(LANES)));
#pragma GCC unroll 16
    for (int at = 0; at < REGISTERS; at++) {
        const small narrow = __builtin_convertvector(values[at], small);
        memcpy(out + LANES * at, &narrow, sizeof narrow);
    }
#endif
}

/* Writes the codes of a group and returns their sum. */
static ALWAYS_INLINE int32_t encode(const floats *values, float inverse, int8_t *codes)
{
    const floats shift = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to whole numbers, ties to even */
    integers whole[REGISTERS], sums = {0};
#pragma GCC unroll 16
    for (int at = 0; at < REGISTERS; at++) {
        whole[at] = (integers)(rounded(values[at] * inverse) + shift) - (integers)shift;
        sums += whole[at];
    }
    store_bytes(whole, codes);
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
        sums += __builtin_shuffle(sums, (integers)LANE_NUMBERS ^ half);
    return sums[0];
}

static ALWAYS_INLINE void sum_equal_parts(const int8_t *codes, int32_t *wholes, long part)
{
    for (long at = 0; at < GROUP; at += part) {
        int32_t sum = 0;
        for (long next = at; next < at + part; next++)
            sum += codes[next];
        wholes[at / part] = sum;
    }
}

/* There are no other parts. Loops whose length is known become a few instructions. */
static ALWAYS_INLINE void sum_parts(const int8_t *codes, int32_t *wholes, long part)
{
    if (part == 16)
        sum_equal_parts(codes, wholes, 16);
    else if (part == 32)
        sum_equal_parts(codes, wholes, 32);
    else
        sum_equal_parts(codes, wholes, GROUP);
}

static ALWAYS_INLINE void encode_row(const rows_of_x *p, long row, int kind)
{
    const long groups = groups_of(p->columns);
    const char *x = p->x + row * p->columns * itemsize_of(kind);
    for (long group = 0; group < groups; group++) {
        const long first = group * GROUP, count = p->columns - first < GROUP ? p->columns - first : GROUP;
        int8_t *codes = p->codes + row * groups * GROUP + first;
        floats values[REGISTERS];
        load_group(x + first * itemsize_of(kind), count, kind, values);
        const float most = largest_magnitude(values);
        const int finite = most <= 3.40282347e38f, some = most >= 1e-30f;
        float scale = finite ? 0.0f : __builtin_nanf("");
        int32_t sum = 0;
        if (finite && some) {
            scale = most / 127.0f;
            sum = encode(values, 127.0f / most, codes);
        } else {
            memset(codes, 0, GROUP);
        }
        p->scales[row * groups + group] = scale;
        p->sums[row * groups + group] = scale * (float)sum;
        if (p->wholes)
            sum_parts(codes, p->wholes + (row * groups + group) * (GROUP / p->part), p->part);
    }
}

void int8_rows(const char *x, int8_t *codes, float *scales, float *sums, int32_t *wholes, long rows, long columns, long part,
               int kind, int threads)
{
    const rows_of_x given = {x, codes, scales, sums, wholes, columns, part};
    if (!rows)
        return;
#pragma omp parallel for num_threads(threads < rows ? threads : (int)rows) schedule(static)
    for (long row = 0; row < rows; row++)
        if (kind == BF16)
            encode_row(&given, row, BF16);
        else if (kind == FLOAT)
            encode_row(&given, row, FLOAT);
        else
            encode_row(&given, row, HALF);
}
