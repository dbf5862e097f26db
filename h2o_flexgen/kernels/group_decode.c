/* Decodes rows of a group codec to values of a type. */

#include "kernel.h"
#include "team.h"

#ifdef __AVX512BW__

/* The values of all sixteen codes are worked out once for a group and then looked up. */
static ALWAYS_INLINE void decode_group_4_short(packed_group from, uint16_t *out, int kind)
{
    uint16_t table[32] = {0};
    for (int code = 0; code < 16; code++)
        store_value((char *)(table + code), (float)code * from.scale + from.minimum, kind);
    const __m512i values = _mm512_loadu_si512(table);
    const __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)from.codes));
    const __m512i low = _mm512_and_si512(pairs, _mm512_set1_epi16(15)), high = _mm512_srli_epi16(pairs, 4);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(low, values));
    _mm512_storeu_si512(out + GROUP / 2, _mm512_permutexvar_epi16(high, values));
}

#endif

static ALWAYS_INLINE void decode_group(packed_group from, void *out, int bits, int kind)
{
    float values[GROUP];
#ifdef __AVX512BW__
    if (bits == 4 && kind != FLOAT) {
        decode_group_4_short(from, out, kind);
        return;
    }
#endif
    if (kind == FLOAT) {
        group_to_floats(from, bits, out);
        return;
    }
    group_to_floats(from, bits, values);
#pragma omp simd
    for (int at = 0; at < GROUP; at++)
        store_value((char *)out + 2 * at, values[at], kind);
}

static ALWAYS_INLINE void decode_row(const uint8_t *row, char *out, long columns, int bits, int kind)
{
    const long itemsize = itemsize_of(kind);
    for (long start = 0; start < columns; start += GROUP) {
        const packed_group from = group_of_row(row, start / GROUP, columns, bits);
        if (columns - start >= GROUP) {
            decode_group(from, out + start * itemsize, bits, kind);
        } else {
            char last[GROUP * 4];
            decode_group(from, last, bits, kind);
            memcpy(out + start * itemsize, last, (columns - start) * itemsize);
        }
    }
}

typedef struct {
    const uint8_t *data;
    char *out; /* (rows, columns) */
    long rows, columns;
    int bits, kind;
} decoding;

static ALWAYS_INLINE void decode_number(const decoding *d, long row, int bits, int kind)
{
    decode_row(d->data + row * group_row_bytes(d->columns, bits), d->out + row * d->columns * itemsize_of(kind), d->columns, bits, kind);
}

#define FOR_KIND(KIND)                                                                                                           \
    static void decode_4_##KIND(const void *d, long row, int member) { decode_number(d, row, 4, KIND); }                         \
    static void decode_8_##KIND(const void *d, long row, int member) { decode_number(d, row, 8, KIND); }

FOR_KIND(BF16)
FOR_KIND(FLOAT)
FOR_KIND(HALF)

#define ACTIONS(KIND) {decode_4_##KIND, decode_8_##KIND}

void group_decode(const void *given, int threads)
{
    const decoding *d = given;
    static part_action *const actions[][2] = {ACTIONS(BF16), ACTIONS(FLOAT), ACTIONS(HALF)};
    share_out(given, d->rows, threads, actions[d->kind][d->bits == 8]);
}
