/* Matrices in the formats in which checkpoints store them: where codes, scales and zeros of a row lie, and 32 of its inputs as codes or
   as float32. Every format of whole numbers is seen in one way: a value is (code - zero) * scale + minimum, where codes are unsigned
   bytes in the order of the inputs, and 16 or 32 inputs share the rest. Products of a code and a scale are exact in float32, so it
   does not matter whether a compiler fuses them with a sum. A minimum of -0 changes nothing, not even the sign of a zero.

   `format` is a constant wherever it is an argument: what a format does not need is not compiled. */

#pragma once

#include "vectors.h"

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors wider than registers are never handed to a function that is called */

#define PIECE 32    /* inputs that are read at once */
#define STRETCH 256 /* inputs with scales that are read at once: a block of the formats with the longest ones */

/* Blocks are those of GGUF, the others lie in sections. Python reads their numbers here. */
enum format { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4, FP8, FP4, INT4, IQ4_NL, IQ4_XS };
#define EACH_FORM(DO) DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(MXFP4) DO(FP8) DO(FP4) DO(INT4) DO(IQ4_NL) DO(IQ4_XS)

enum { E8M0 = HALF + 1 }; /* a scale that is a power of two: its exponent, which 127 is added to, as a byte */

typedef struct {
    const uint8_t *codes;               /* or blocks */
    const uint8_t *scales, *zeros;      /* sections; zeros may be NULL: all are 8 */
    long code_row, scale_row, zero_row; /* bytes from one row (of scales: from some rows that share them) to the next */
    long scale_rows;                    /* rows that share the scales of a section */
    long outputs, inputs;               /* inputs are a multiple of 32, or of a whole block, but with FP8 */
    int scale_shift;                    /* so many inputs share a scale of a section, as a power of two: 32 or more */
    int scale_kind;                     /* of sections */
} stored_matrix;

typedef struct {
    const uint8_t *codes, *scales, *zeros;
    const stored_matrix *matrix;
} stored_row;

/* What the inputs of a stretch share, 16 or 32 of them in turn. */
typedef struct {
    float scales[STRETCH / 16], minima[STRETCH / 16];
    int32_t zeros[STRETCH / 16];
} stored_shares;

typedef uint8_t stored_codes __attribute__((vector_size(PIECE)));

/* -- what formats are --------------------------------------------------------------------------------------------------------- */

static ALWAYS_INLINE int is_block(int format)
{
    return format <= MXFP4 || format >= IQ4_NL;
}

static ALWAYS_INLINE long block_values(int format)
{
    return format == Q4_K || format == Q5_K || format == Q6_K || format == IQ4_XS ? 256 : 32;
}

static ALWAYS_INLINE long stored_block_bytes(int format)
{
    switch (format) {
    case Q4_0:
    case IQ4_NL: return 18;
    case Q4_1: return 20;
    case Q5_0: return 22;
    case Q5_1: return 24;
    case Q8_0: return 34;
    case IQ4_XS: return 136;
    case Q4_K: return 144;
    case Q5_K: return 176;
    case Q6_K: return 210;
    default: return 17;
    }
}

static ALWAYS_INLINE int is_iq4(int format) /* codes stand for values that lie closer together near zero */
{
    return format == IQ4_NL || format == IQ4_XS;
}

static ALWAYS_INLINE int sharing_inputs(int format) /* of a piece: 16 of them or all 32 share a scale */
{
    return format == Q6_K ? 16 : 32;
}

static ALWAYS_INLINE int has_minima(int format)
{
    return format == Q4_1 || format == Q5_1 || format == Q4_K || format == Q5_K;
}

/* Blocks that begin with a scale in float16, behind which their minimum stands if there is one. */
static ALWAYS_INLINE int begins_with_halves(int format)
{
    return format == Q4_0 || format == Q4_1 || format == Q5_0 || format == Q5_1 || format == Q8_0 || format == IQ4_NL;
}

/* The zero that all codes of a format have, but for those of INT4 with zeros of their own. */
static ALWAYS_INLINE int usual_zero(int format)
{
    switch (format) {
    case Q4_0:
    case INT4: return 8;
    case Q5_0: return 16;
    case Q8_0:
    case IQ4_NL:
    case IQ4_XS: return 128;
    case Q6_K: return 32;
    case MXFP4:
    case FP4: return 12;
    default: return 0;
    }
}

static ALWAYS_INLINE int largest_code(int format) /* of formats of whole numbers */
{
    switch (format) {
    case Q8_0: return 255;
    case IQ4_NL:
    case IQ4_XS: return 241; /* the value, and 128 */
    case Q6_K: return 63;
    case Q5_0:
    case Q5_1:
    case Q5_K: return 31;
    case MXFP4:
    case FP4: return 24; /* twice the value, and 12 */
    default: return 15;
    }
}

static ALWAYS_INLINE stored_row stored_row_of(const stored_matrix *m, long output)
{
    const stored_row found = {m->codes + output * m->code_row, m->scales + output / m->scale_rows * m->scale_row,
                              m->zeros ? m->zeros + output * m->zero_row : m->zeros, m};
    return found;
}

/* -- codes ------------------------------------------------------------------------------------------------------------------- */

typedef uint8_t bytes16 __attribute__((vector_size(16)));

static ALWAYS_INLINE stored_codes joined(bytes16 first, bytes16 second)
{
#ifdef __AVX2__
    return (stored_codes)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)first), (__m128i)second, 1);
#else
    stored_codes both;
    memcpy(&both, &first, sizeof first);
    memcpy((char *)&both + sizeof first, &second, sizeof second);
    return both;
#endif
}

/* Bytes shifted down together: compilers shift bytes one by one if they may be shifted by any number. */
static ALWAYS_INLINE bytes16 upper_nibbles(bytes16 from)
{
    typedef uint32_t words16 __attribute__((vector_size(16)));
    return (bytes16)((words16)from >> 4) & 15;
}

static ALWAYS_INLINE stored_codes some_bits(stored_codes from, int shift, uint8_t mask)
{
    typedef uint32_t words32 __attribute__((vector_size(PIECE)));
    return (stored_codes)((words32)from >> shift) & mask;
}

static ALWAYS_INLINE stored_codes raised(stored_codes from) /* by four bits: of codes below 16 */
{
    typedef uint32_t words32 __attribute__((vector_size(PIECE)));
    return (stored_codes)((words32)from << 4);
}

static ALWAYS_INLINE stored_codes nibbles_by_half(const uint8_t *from) /* low ones first, then high ones */
{
    const bytes16 both = LOAD(bytes16, from);
    return joined(both & 15, upper_nibbles(both));
}

static ALWAYS_INLINE stored_codes nibbles_in_turn(const uint8_t *from) /* low and high ones of each byte */
{
    const bytes16 both = LOAD(bytes16, from), low = both & 15, high = upper_nibbles(both);
#ifdef __AVX2__
    return joined((bytes16)_mm_unpacklo_epi8((__m128i)low, (__m128i)high), (bytes16)_mm_unpackhi_epi8((__m128i)low, (__m128i)high));
#else
    return joined(__builtin_shuffle(low, high, (bytes16){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}),
                  __builtin_shuffle(low, high, (bytes16){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31}));
#endif
}

/* Sixteen where a bit of a code is set, which lies by itself. */
static ALWAYS_INLINE stored_codes fifth_bits(const uint8_t *from)
{
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    return (stored_codes)_mm256_maskz_set1_epi8(LOAD(uint32_t, from), 16);
#elif defined(__AVX2__)
    const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201ull);
    const __m256i found = _mm256_shuffle_epi8(_mm256_set1_epi32((int)LOAD(uint32_t, from)), places);
    return (stored_codes)_mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(found, bit), bit), _mm256_set1_epi8(16));
#else
    uint8_t found[PIECE];
    for (int at = 0; at < PIECE; at++)
        found[at] = (uint8_t)((from[at / 8] >> at % 8 & 1) << 4);
    return LOAD(stored_codes, found);
#endif
}

static ALWAYS_INLINE stored_codes looked_up(stored_codes from, const uint8_t *table) /* of 16 codes */
{
#ifdef __AVX2__
    return (stored_codes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(LOAD(__m128i, table)), (__m256i)from);
#else
    uint8_t found[PIECE];
    for (int at = 0; at < PIECE; at++)
        found[at] = table[from[at]];
    return LOAD(stored_codes, found);
#endif
}

static ALWAYS_INLINE stored_codes codes_of_fp4(stored_codes from) /* twice the value of float4 e2m1, and 12 */
{
    static const uint8_t table[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return looked_up(from, table);
}

static ALWAYS_INLINE stored_codes codes_of_iq4(stored_codes from) /* values that lie closer together near zero, and 128 */
{
    static const uint8_t table[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
    return looked_up(from, table);
}

static ALWAYS_INLINE const uint8_t *block_of_row(const stored_row *row, long first, int format)
{
    return row->codes + first / block_values(format) * stored_block_bytes(format);
}

/* The bytes of FP8, and zeros behind the last input of a row. */
static ALWAYS_INLINE stored_codes codes_of_fp8(const stored_row *row, long first)
{
    const long left = row->matrix->inputs - first;
    uint8_t filled[PIECE] = {0};
    if (left >= PIECE)
        return LOAD(stored_codes, row->codes + first);
    memcpy(filled, row->codes + first, left);
    return LOAD(stored_codes, filled);
}

/* The codes of 32 inputs from `first` on, a multiple of 32. */
static ALWAYS_INLINE stored_codes stored_codes_of(const stored_row *row, long first, int format)
{
    const uint8_t *block = is_block(format) ? block_of_row(row, first, format) : row->codes + first / 2;
    const unsigned piece = (unsigned long)first / PIECE % 8;
    switch (format) {
    case Q4_0: return nibbles_by_half(block + 2);
    case Q4_1: return nibbles_by_half(block + 4);
    case Q5_0: return nibbles_by_half(block + 6) | fifth_bits(block + 2);
    case Q5_1: return nibbles_by_half(block + 8) | fifth_bits(block + 4);
    case Q8_0: return LOAD(stored_codes, block + 2) ^ 0x80;
    case Q4_K: return some_bits(LOAD(stored_codes, block + 16 + piece / 2 * 32), piece % 2 * 4, 15);
    case Q5_K:
        return some_bits(LOAD(stored_codes, block + 48 + piece / 2 * 32), piece % 2 * 4, 15) |
               raised(some_bits(LOAD(stored_codes, block + 16), piece, 1));
    case Q6_K:
        return some_bits(LOAD(stored_codes, block + piece / 4 * 64 + piece % 2 * 32), piece % 4 / 2 * 4, 15) |
               raised(some_bits(LOAD(stored_codes, block + 128 + piece / 4 * 32), piece % 4 * 2, 3));
    case IQ4_NL: return codes_of_iq4(nibbles_by_half(block + 2));
    case IQ4_XS: return codes_of_iq4(nibbles_by_half(block + 8 + piece * 16));
    case MXFP4: return codes_of_fp4(nibbles_by_half(block + 1));
    case FP4: return codes_of_fp4(nibbles_in_turn(block));
    case INT4: return nibbles_in_turn(block);
    default: return codes_of_fp8(row, first);
    }
}

/* -- what inputs share -------------------------------------------------------------------------------------------------------- */

static ALWAYS_INLINE float load_half(const uint8_t *from)
{
#ifdef __F16C__
    return _cvtsh_ss(LOAD(uint16_t, from));
#else
    return half_to_float(LOAD(uint16_t, from));
#endif
}

/* A power of two with a byte as exponent, or half of it: small ones are subnormal, and the largest byte is infinity. */
static ALWAYS_INLINE float float_of_e8m0(uint8_t exponent)
{
    return float_of_bits(exponent ? (uint32_t)exponent << 23 : 0x00400000u);
}

static ALWAYS_INLINE float half_of_e8m0(uint8_t exponent)
{
    return float_of_bits(exponent < 2 ? 0x00200000u << exponent : (uint32_t)(exponent - 1) << 23);
}

static ALWAYS_INLINE float load_scale(const uint8_t *scales, long number, int kind)
{
    return kind == E8M0 ? float_of_e8m0(scales[number])
                        : kind == HALF ? load_half(scales + 2 * number) : load_value((const char *)scales + number * itemsize_of(kind), kind);
}

/* Scales and minima of six bits each. */
static ALWAYS_INLINE void read_six_bits(const uint8_t *from, uint8_t *scales, uint8_t *minima)
{
    const uint32_t a = LOAD(uint32_t, from), b = LOAD(uint32_t, from + 4), c = LOAD(uint32_t, from + 8);
    const uint32_t lower[2] = {a & 0x3f3f3f3f, (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)};
    const uint32_t upper[2] = {b & 0x3f3f3f3f, (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)};
    memcpy(scales, lower, sizeof lower);
    memcpy(minima, upper, sizeof upper);
}

static ALWAYS_INLINE void read_shares_of_256(const uint8_t *block, int format, stored_shares *to)
{
    const float scale = load_half(block + (format == Q6_K ? 208 : 0));
    if (format == Q6_K) {
#pragma omp simd
        for (int at = 0; at < 16; at++)
            to->scales[at] = scale * (float)(int8_t)block[192 + at];
    } else if (format == IQ4_XS) {
        const unsigned upper = LOAD(uint16_t, block + 2), lower = LOAD(uint32_t, block + 4);
#pragma omp simd
        for (int at = 0; at < 8; at++)
            to->scales[at] = scale * (float)((int)((lower >> 4 * at & 15) | (upper >> 2 * at & 3) << 4) - 32);
    } else {
        const float minimum = load_half(block + 2);
        uint8_t scales[8], minima[8];
        read_six_bits(block + 4, scales, minima);
#pragma omp simd
        for (int at = 0; at < 8; at++) {
            to->scales[at] = scale * (float)scales[at];
            to->minima[at] = -(minimum * (float)minima[at]);
        }
    }
}

/* What the 32 inputs from `first` on share, of formats with one scale for them. */
static ALWAYS_INLINE void read_share(const stored_row *row, long first, int format, float *scale, float *minimum, int32_t *zero)
{
    const uint8_t *block = is_block(format) ? block_of_row(row, first, format) : row->codes;
    const long number = is_block(format) ? 0 : first >> row->matrix->scale_shift;
    *zero = format == INT4 && row->zeros ? row->zeros[number] : usual_zero(format);
    *minimum = has_minima(format) ? load_half(block + 2) : -0.0f;
    if (format == MXFP4 || format == FP4)
        *scale = half_of_e8m0(format == MXFP4 ? block[0] : row->scales[number]);
    else
        *scale = is_block(format) ? load_half(block) : load_scale(row->scales, number, row->matrix->scale_kind);
}

/* Eight values of float16, so many bytes apart. */
static ALWAYS_INLINE void read_eight_halves(const uint8_t *from, long step, float *to)
{
#ifdef __AVX2__
    uint64_t four[2];
    for (int at = 0; at < 2; at++, from += 4 * step)
        four[at] = LOAD(uint16_t, from) | (uint64_t)LOAD(uint16_t, from + step) << 16 |
                   (uint64_t)LOAD(uint16_t, from + 2 * step) << 32 | (uint64_t)LOAD(uint16_t, from + 3 * step) << 48;
    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_set_epi64x((long long)four[1], (long long)four[0])));
#else
    for (int at = 0; at < 8; at++)
        to[at] = load_half(from + at * step);
#endif
}

/* What a whole stretch shares, of blocks of 32 inputs with a scale in float16. */
static ALWAYS_INLINE void read_shares_of_blocks(const uint8_t *blocks, int format, stored_shares *to)
{
    read_eight_halves(blocks, stored_block_bytes(format), to->scales);
    if (has_minima(format))
        read_eight_halves(blocks + 2, stored_block_bytes(format), to->minima);
    for (int at = 0; at < STRETCH / PIECE; at++) {
        if (!has_minima(format))
            to->minima[at] = -0.0f;
        to->zeros[at] = usual_zero(format);
    }
}

/* What the inputs from `first` on share, a multiple of 256: those of a stretch, or all that are left. */
static ALWAYS_INLINE void read_shares(const stored_row *row, long first, int format, stored_shares *to)
{
    const long left = row->matrix->inputs - first, pieces = ((left < STRETCH ? left : STRETCH) + PIECE - 1) / PIECE;
    if (block_values(format) == STRETCH) {
        for (int at = 0; at < STRETCH / sharing_inputs(format); at++) {
            to->minima[at] = -0.0f;
            to->zeros[at] = usual_zero(format);
        }
        read_shares_of_256(block_of_row(row, first, format), format, to);
    } else if (is_block(format) && format != MXFP4 && left >= STRETCH) {
        read_shares_of_blocks(block_of_row(row, first, format), format, to);
    } else {
        const long same = is_block(format) ? 0 : (1l << row->matrix->scale_shift) / PIECE - 1; /* pieces behind one that has a scale */
        for (long at = 0; at < pieces; at++)
            if (at & same)
                to->scales[at] = to->scales[at - 1], to->minima[at] = to->minima[at - 1], to->zeros[at] = to->zeros[at - 1];
            else
                read_share(row, first + at * PIECE, format, to->scales + at, to->minima + at, to->zeros + at);
    }
}

/* -- values ------------------------------------------------------------------------------------------------------------------ */

/* Values of float8 e4m3fn in the lowest byte of each word: the exponent is 120 lower than that of a float. */
static ALWAYS_INLINE floats floats_of_fp8(words from)
{
    const words magnitude = from & 0x7f, sign = (from & 0x80) << 24, is_nan = (words)(magnitude == 0x7f) & 0x7fc00000;
    return (floats)(sign | (words)((floats)(magnitude << 20) * float_of_bits((127u + 120u) << 23)) | is_nan);
}

#ifdef __AVX2__

/* The same of bytes one by one, by way of float16. Its exponent is 8 higher, so the outcome is smaller by a power of two. */
static ALWAYS_INLINE void halves_of_fp8(stored_codes codes, floats *out)
{
#if LANES == 16
    const __m512i found = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16((__m256i)codes), 7), _mm512_set1_epi16((short)0xbf80));
    const __mmask32 is_nan = _mm512_testn_epi16_mask(_mm512_xor_si512(found, _mm512_set1_epi16(0x3f80)), _mm512_set1_epi16(0x3f80));
    const __m512i values = _mm512_mask_mov_epi16(found, is_nan, _mm512_set1_epi16(0x7e00));
    out[0] = (floats)_mm512_cvtph_ps(_mm512_castsi512_si256(values));
    out[1] = (floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(values, 1));
#else
    const __m256i most = _mm256_set1_epi16(0x3f80);
    for (int half = 0; half < 2; half++) {
        const __m128i own = half ? _mm256_extracti128_si256((__m256i)codes, 1) : _mm256_castsi256_si128((__m256i)codes);
        const __m256i found = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(own), 7), _mm256_set1_epi16((short)0xbf80));
        const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(found, most), most);
        const __m256i values = _mm256_or_si256(found, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00)));
        out[2 * half] = (floats)_mm256_cvtph_ps(_mm256_castsi256_si128(values));
        out[2 * half + 1] = (floats)_mm256_cvtph_ps(_mm256_extracti128_si256(values, 1));
    }
#endif
}

#endif

/* A register of the lowest of sixteen bytes, or of those behind. */
static ALWAYS_INLINE integers integers_of_bytes(bytes16 from, int part, int are_signed)
{
#if LANES == 16
    return (integers)(are_signed ? _mm512_cvtepi8_epi32((__m128i)from) : _mm512_cvtepu8_epi32((__m128i)from));
#elif LANES == 8
    const __m128i own = part ? _mm_srli_si128((__m128i)from, 8) : (__m128i)from;
    return (integers)(are_signed ? _mm256_cvtepi8_epi32(own) : _mm256_cvtepu8_epi32(own));
#else
    typedef int8_t small __attribute__((vector_size(LANES)));
    bytes some;
    memcpy(&some, (const char *)&from + part * LANES, sizeof some);
    return are_signed ? __builtin_convertvector((small)some, integers) : (integers)__builtin_convertvector(some, words);
#endif
}

/* The values of the codes of 32 inputs from `first` on, a multiple of 32, when the shares of their stretch are known. A code and a
   zero that all codes have are subtracted as bytes, which hold their difference. */
static ALWAYS_INLINE void floats_of_codes(stored_codes codes, long first, int format, const stored_shares *shares, floats *out)
{
    const int are_signed = format != INT4 && format != FP8;
    const stored_codes from_zero = are_signed ? codes - (uint8_t)usual_zero(format) : codes;
    bytes16 half[2];
    memcpy(half, &from_zero, sizeof half);
#ifdef __AVX2__
    if (format == FP8) {
        halves_of_fp8(codes, out);
        for (int at = 0; at < PIECE / LANES; at++)
            out[at] = out[at] * 256.0f * shares->scales[first % STRETCH / PIECE];
        return;
    }
#endif
#pragma GCC unroll 2
    for (int next = 0; next < 2; next++) {
        const unsigned long at = ((unsigned long)first % STRETCH + 16 * next) / sharing_inputs(format);
#pragma GCC unroll 4
        for (int part = 0; part < 16 / LANES; part++) {
            const integers from = integers_of_bytes(half[next], part, are_signed) - (format == INT4 ? shares->zeros[at] : 0);
            floats *to = out + (16 / LANES) * next + part;
            *to = (format == FP8 ? floats_of_fp8((words)from) : __builtin_convertvector(from, floats)) * shares->scales[at];
            if (has_minima(format))
                *to += shares->minima[at];
        }
    }
}

static ALWAYS_INLINE void stored_floats_of(const stored_row *row, long first, int format, const stored_shares *shares, floats *out)
{
    floats_of_codes(stored_codes_of(row, first, format), first, format, shares, out);
}
