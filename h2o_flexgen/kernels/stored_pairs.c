/* The product of rows in bfloat16 with a transposed matrix in a stored format. Its values are rounded to bfloat16 as decoding does,
   by instructions that multiply and add pairs of inputs: for processors that have them. */

#ifdef __AVX512BF16__

#include "line_tiles.h"
#include "stored_panels.h"

#ifdef __AMX_BF16__

/* What comes next of an output is asked for meanwhile: there are more of them in turn than a processor notices as streams. */
static ALWAYS_INLINE void fetch_ahead(const stored_row *row, long input, int format)
{
    const uint8_t *now = is_block(format) ? block_of_row(row, input, format) : row->codes + input / (format == FP8 ? 1 : 2);
    const long size = is_block(format) ? 2 * SPAN / block_values(format) * stored_block_bytes(format) : 2 * SPAN / (format == FP8 ? 1 : 2);
    for (long at = 0; at < size; at += LINE_OF_TILE)
        __builtin_prefetch(now + size + at, 0, 2);
}

static ALWAYS_INLINE int is_of_nibbles(int format) /* 16 bytes with the codes of 32 inputs: low halves first */
{
    return format == Q4_0 || format == Q4_1 || format == IQ4_NL || format == MXFP4;
}

/* What the sixteen codes are before they are scaled. */
static ALWAYS_INLINE floats numbers_of_nibbles(int format)
{
    static const uint8_t all_codes[PIECE] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const stored_codes each = LOAD(stored_codes, all_codes);
    const stored_codes codes = format == IQ4_NL ? codes_of_iq4(each) : format == MXFP4 ? codes_of_fp4(each) : each;
    const stored_codes from_zero = codes - (uint8_t)usual_zero(format);
    return __builtin_convertvector(integers_of_bytes(LOAD(bytes16, &from_zero), 0, 1), floats);
}

/* Inputs looked up among the values of all codes: an index has the bits of two codes, so the table is there twice. */
static ALWAYS_INLINE __m512i line_of_nibbles(const uint8_t *codes, floats values)
{
    const __m256i low = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)codes));
    const __m512i places = _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_srli_epi16(low, 4), 1);
    return _mm512_permutexvar_epi16(places, _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh((__m512)values)));
}

static ALWAYS_INLINE __m512i line_of(const stored_row *row, long input, int format, const stored_shares *shares, floats numbers)
{
    const long at = input % STRETCH / PIECE;
    floats values[2];
    if (is_of_nibbles(format)) {
        const uint8_t *codes = block_of_row(row, input, format) + stored_block_bytes(format) - PIECE / 2;
        return line_of_nibbles(codes, has_minima(format) ? numbers * shares->scales[at] + shares->minima[at] : numbers * shares->scales[at]);
    }
    stored_floats_of(row, input, format, shares, values);
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)values[1], (__m512)values[0]);
}

/* A span of pairs is a stretch of inputs. */
static ALWAYS_INLINE void fill_stored(const product *p, long output, long pair, long pairs, lines_of_panel panel, int format)
{
    const stored_matrix *m = &((const product_of_stored *)p)->matrix;
    const floats numbers = is_of_nibbles(format) ? numbers_of_nibbles(format) : (floats){0};
    for (long at = 0; at < PANEL; at++) {
        const stored_row row = stored_row_of(m, output + at < m->outputs ? output + at : m->outputs - 1);
        stored_shares shares;
        fetch_ahead(&row, 2 * pair, format);
        read_shares(&row, 2 * pair, format, &shares);
        for (long step = 0; step < pairs / STEP; step++) {
            const long input = 2 * (pair + step * STEP);
            const __m512i line = input < m->inputs ? line_of(&row, input, format, &shares, numbers) : _mm512_setzero_si512();
            _mm512_store_si512(panel[step][at], line);
        }
    }
}

#define FILL(FORM)                                                                                                               \
    static void fill_##FORM(const product *p, long output, long pair, long pairs, lines_of_panel panel)                          \
    {                                                                                                                            \
        fill_stored(p, output, pair, pairs, panel, FORM);                                                                        \
    }
typedef fill_lines fill_action;
#define MULTIPLY multiply_lines

#else

static ALWAYS_INLINE void store_rounded(floats first, floats second, long input, float *half)
{
    store_pair(first, second, alternating(), half + input / 2 * PANEL);
}

/* A panel has a span of pairs: twice as many inputs. */
static ALWAYS_INLINE void fill_pairs(const product *p, long output, long input, long inputs, panel_values *to, int format)
{
    for (long at = 0; at < inputs; at += SPAN)
        fill_from_stored(p, output, input + at, inputs - at < SPAN ? inputs - at : SPAN, to->values[at / 2], format, store_rounded);
}

#define FILL(FORM)                                                                                                               \
    static void fill_##FORM(const product *p, long output, long pair, long pairs, panel_values *to)                              \
    {                                                                                                                            \
        fill_pairs(p, output, 2 * pair, 2 * pairs, to, FORM);                                                                    \
    }
typedef fill_panel fill_action;
#define MULTIPLY multiply_pairs

#endif

EACH_FORM(FILL)

static void multiply_part(const void *given, long number, int member)
{
#define NAMED(FORM) fill_##FORM,
    static fill_action *const fills[] = {EACH_FORM(NAMED)};
#undef NAMED
    const some_products *some = given;
    MULTIPLY(some, number, fills[some->told]);
}

/* Some products, with rows each, of matrices in one format. */
void stored_pairs(const void *given, int threads)
{
    share_products(products_of(given, sizeof(product_of_stored), PAIR_PANELS, threads), works_of, multiply_part);
}

#endif
