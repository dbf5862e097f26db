/* Rows of x as int8: the 64 values of a group share a scale, their largest magnitude over 127. What is not finite makes the scale
   NaN, and values too small for a scale become 0. Plain IEEE arithmetic in a fixed order, as in torch: the same bits everywhere. */

#include "int8_dots.h"
#include "team.h"

typedef struct {
    const char *x;        /* (rows, columns) */
    int8_t *codes;        /* (rows, groups * 64) */
    float *scales, *sums; /* (rows, groups): sums are those of the codes, times the scale */
    int32_t *wholes;      /* (rows, parts): sums of the codes of each part of a group, or NULL */
    long rows, columns, part;
    int kind;
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

static ALWAYS_INLINE int32_t sum_of_integers(integers value)
{
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
        value += __builtin_shuffle(value, (integers)LANE_NUMBERS ^ half);
    return value[0];
}

/* Writes the codes of a group and the sums of its parts, and returns the sum of all. */
static ALWAYS_INLINE int32_t encode(const floats *values, float inverse, int8_t *codes, int32_t *wholes, int part)
{
    const floats shift = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to whole numbers, ties to even */
    integers whole[REGISTERS];
    int32_t all_parts = 0;
#pragma GCC unroll 16
    for (int at = 0; at < REGISTERS; at++)
        whole[at] = (integers)(rounded(values[at] * inverse) + shift) - (integers)shift;
    store_bytes(whole, codes);
#pragma GCC unroll 4
    for (int first = 0; first < GROUP; first += part) {
        integers sums = {0};
#pragma GCC unroll 16
        for (int at = first / LANES; at < (first + part) / LANES; at++)
            sums += whole[at];
        wholes[first / part] = sum_of_integers(sums);
        all_parts += wholes[first / part];
    }
    return all_parts;
}

static ALWAYS_INLINE void encode_row(const rows_of_x *p, long row, int kind, int part)
{
    const long groups = groups_of(p->columns);
    const char *x = p->x + row * p->columns * itemsize_of(kind);
    for (long group = 0; group < groups; group++) {
        const long first = group * GROUP, left = p->columns - first, at = row * groups + group;
        int8_t *codes = p->codes + row * groups * GROUP + first;
        floats values[REGISTERS];
        int32_t wholes[GROUP / 16] = {0};
        if (left < GROUP)
            load_group(x + first * itemsize_of(kind), left, kind, values);
        else
            load_group(x + first * itemsize_of(kind), GROUP, kind, values);
        const float most = largest_magnitude(values);
        const int finite = most <= 3.40282347e38f, some = most >= 1e-30f;
        float scale = finite ? 0.0f : __builtin_nanf("");
        int32_t sum = 0;
        if (finite && some) {
            scale = most / 127.0f;
            sum = encode(values, 127.0f / most, codes, wholes, part);
        } else {
            memset(codes, 0, GROUP);
        }
        p->scales[at] = scale;
        p->sums[at] = scale * (float)sum;
        if (p->wholes)
            memcpy(p->wholes + at * (GROUP / part), wholes, GROUP / part * sizeof *wholes);
    }
}

#define OF(KIND, PART)                                                                                                           \
    static void encode_##KIND##_by_##PART(const void *p, long row, int member)                                                   \
    {                                                                                                                            \
        encode_row(p, row, KIND, PART);                                                                                          \
    }
#define OF_KIND(KIND) OF(KIND, 16) OF(KIND, 32) OF(KIND, 64)

OF_KIND(BF16)
OF_KIND(FLOAT)
OF_KIND(HALF)

void int8_rows(const void *given, int threads)
{
    const rows_of_x *r = given;
    static part_action *const actions[3][3] = {{encode_BF16_by_16, encode_BF16_by_32, encode_BF16_by_64},
                                               {encode_FLOAT_by_16, encode_FLOAT_by_32, encode_FLOAT_by_64},
                                               {encode_HALF_by_16, encode_HALF_by_32, encode_HALF_by_64}};
    share_out(given, r->rows, threads, actions[r->kind][r->part / 32]); /* there are no other parts */
}
