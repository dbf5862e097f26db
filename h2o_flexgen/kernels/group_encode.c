/* Encodes rows of values with a group codec, bit for bit as the twin in torch does: the minimum is rounded down to
   bfloat16 and the scale up, so that the codes reach from the least to the largest value. */

#include "kernel.h"
#include "team.h"
#include <math.h>

static ALWAYS_INLINE uint16_t next_bf16(uint16_t half, int up) /* the next number above or below */
{
    if ((half & 0x7fff) == 0) /* the neighbour of either zero */
        return up ? 0x0001 : 0x8001;
    const int away_from_zero = (half >> 15) != up;
    return away_from_zero ? half + 1 : half - 1;
}

static ALWAYS_INLINE uint16_t bf16_not_above(float value)
{
    const uint16_t near = float_to_bf16(value);
    return bf16_to_float(near) > value ? next_bf16(near, 0) : near;
}

static ALWAYS_INLINE uint16_t bf16_not_below(float value)
{
    const uint16_t near = float_to_bf16(value);
    return bf16_to_float(near) < value ? next_bf16(near, 1) : near;
}

static ALWAYS_INLINE int is_finite(uint16_t half)
{
    return (half & 0x7f80) != 0x7f80;
}

/* Encodes 64 values and gives scale and minimum as bfloat16. A group with a NaN or an infinity becomes NaN altogether. */
static ALWAYS_INLINE void encode_group(const float *values, int bits, uint8_t *codes, uint16_t *scale, uint16_t *minimum)
{
    const float most = (float)((1 << bits) - 1);
    float least = values[0], largest = values[0], nothing = 0.0f;
#pragma omp simd reduction(min : least) reduction(max : largest) reduction(+ : nothing)
    for (int at = 0; at < GROUP; at++) {
        nothing += values[at] - values[at]; /* stays 0 unless a value is NaN or infinite */
        least = values[at] < least ? values[at] : least;
        largest = values[at] > largest ? values[at] : largest;
    }
    *minimum = bf16_not_above(least + 0.0f); /* makes -0 positive */
    const float from = bf16_to_float(*minimum);
    *scale = bf16_not_below((largest - from + 0.0f) / most);
    if (nothing != 0.0f || !is_finite(*scale) || !is_finite(*minimum)) { /* the values cannot be told apart */
        *minimum = 0x7fc0; /* NaN */
        *scale = 0;
        memset(codes, 0, GROUP / 8 * bits);
        return;
    }
    const float step = bf16_to_float(*scale) > 0.0f ? bf16_to_float(*scale) : 1.0f; /* a constant group has codes of 0 */
    uint8_t each[GROUP];
#pragma omp simd
    for (int at = 0; at < GROUP; at++) {
        float code = rintf((values[at] - from) / step);
        code = code < 0.0f ? 0.0f : code > most ? most : code;
        each[at] = (uint8_t)(int)code;
    }
    if (bits == 8) {
        memcpy(codes, each, GROUP);
    } else {
        for (int at = 0; at < GROUP / 2; at++)
            codes[at] = each[at] | each[at + GROUP / 2] << 4;
    }
}

/* The last group is filled with the row's last value, which changes neither extreme. */
static ALWAYS_INLINE void encode_row(const char *row, uint8_t *out, long columns, int bits, int kind)
{
    const long groups = groups_of(columns), code_bytes = GROUP / 8 * bits;
    uint8_t *scales = out + groups * code_bytes, *minima = scales + 2 * groups;
    for (long number = 0; number < groups; number++) {
        float values[GROUP];
        for (int at = 0; at < GROUP; at++) {
            const long column = number * GROUP + at < columns ? number * GROUP + at : columns - 1;
            values[at] = load_value(row + column * itemsize_of(kind), kind);
        }
        uint16_t scale, minimum;
        encode_group(values, bits, out + number * code_bytes, &scale, &minimum);
        memcpy(scales + 2 * number, &scale, sizeof scale);
        memcpy(minima + 2 * number, &minimum, sizeof minimum);
    }
}

typedef struct {
    const char *values; /* (rows, columns) */
    uint8_t *out;
    long rows, columns;
    int bits, kind;
} encoding;

static ALWAYS_INLINE void encode_number(const encoding *e, long row, int bits, int kind)
{
    encode_row(e->values + row * e->columns * itemsize_of(kind), e->out + row * group_row_bytes(e->columns, bits), e->columns, bits, kind);
}

#define FOR_KIND(KIND)                                                                                                           \
    static void encode_4_##KIND(const void *e, long row, int member) { encode_number(e, row, 4, KIND); }                         \
    static void encode_8_##KIND(const void *e, long row, int member) { encode_number(e, row, 8, KIND); }

FOR_KIND(BF16)
FOR_KIND(FLOAT)
FOR_KIND(HALF)

#define ACTIONS(KIND) {encode_4_##KIND, encode_8_##KIND}

void group_encode(const void *given, int threads)
{
    const encoding *e = given;
    static part_action *const actions[][2] = {ACTIONS(BF16), ACTIONS(FLOAT), ACTIONS(HALF)};
    share_out(given, e->rows, threads, actions[e->kind][e->bits == 8]);
}
