/* Matrices in stored formats as lines of tiles (AMX): a line is 32 inputs of an output, rounded to bfloat16 as decoding does. For one
   or two blocks of rows a panel is decoded step by step, and tiles hold its sums from the first step to the last one. */

#pragma once

#include "line_tiles.h"
#include "stored_product.h"

#ifdef __AMX_BF16__

/* Some outputs, and what the inputs of two stretches share: those of one are read while another one is decoded. */
typedef struct {
    stored_row rows[PANEL];
    stored_shares shares[2][PANEL];
} stored_panel;

/* Behind the last output anything may stand: what comes of it is not stored. */
static void find_rows(const product *p, long output, stored_panel *of)
{
    const stored_matrix *m = &((const product_of_stored *)p)->matrix;
    for (long at = 0; at < PANEL; at++)
        of->rows[at] = stored_row_of(m, output + at < m->outputs ? output + at : m->outputs - 1);
}

/* What the inputs of a stretch share: of most formats scales alone. */
static ALWAYS_INLINE void read_stretch(stored_panel *of, long stretch, long first, long behind, int format)
{
    const long input = stretch * STRETCH, size = stored_block_bytes(format), left = of->rows->matrix->inputs - input;
    const int are_scales = begins_with_halves(format) && !has_minima(format);
    for (long at = first; at < behind; at++) {
        stored_shares *to = &of->shares[stretch % 2][at];
        if (are_scales && left >= STRETCH)
            read_eight_halves(block_of_row(&of->rows[at], input, format), size, to->scales);
        else if (are_scales)
            for (long piece = 0; piece < left / PIECE; piece++)
                to->scales[piece] = load_half(block_of_row(&of->rows[at], input, format) + piece * size);
        else
            read_shares(&of->rows[at], input, format, to);
    }
}

typedef char line_of_tile[LINE_OF_TILE];

/* -- codes of four bits ------------------------------------------------------------------------------------------------------- */

static ALWAYS_INLINE int has_sixteen_codes(int format)
{
    const int are_whole = format == Q4_0 || format == Q4_1 || format == Q4_K || format == INT4;
    return are_whole || is_iq4(format) || format == MXFP4 || format == FP4;
}

/* Low and high ones of each byte; others have the low ones of 16 bytes first. */
static ALWAYS_INLINE int has_codes_in_turn(int format)
{
    return format == FP4 || format == INT4;
}

/* What the sixteen codes are before they are scaled. */
static ALWAYS_INLINE floats numbers_of_codes(int format)
{
    static const uint8_t all_codes[PIECE] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const stored_codes each = LOAD(stored_codes, all_codes);
    const int are_fp4 = format == MXFP4 || format == FP4;
    const stored_codes codes = is_iq4(format) ? codes_of_iq4(each) : are_fp4 ? codes_of_fp4(each) : each;
    const stored_codes from_zero = format == INT4 ? codes : codes - (uint8_t)usual_zero(format);
    return __builtin_convertvector(integers_of_bytes(LOAD(bytes16, &from_zero), 0, 1), floats);
}

/* The values of all sixteen codes of a piece. */
static ALWAYS_INLINE floats values_of_codes(floats numbers, const stored_shares *shares, long piece, int format)
{
    const floats from_zero = format == INT4 ? numbers - (float)shares->zeros[piece] : numbers;
    const floats scaled = from_zero * shares->scales[piece];
    return has_minima(format) ? scaled + shares->minima[piece] : scaled;
}

typedef uint16_t table_of_codes[16]; /* in bfloat16 */

static ALWAYS_INLINE const uint8_t *codes_of_line(const stored_row *row, long input, int format)
{
    const uint8_t *block = is_block(format) ? block_of_row(row, input, format) : row->codes + input / 2;
    const long piece = input % STRETCH / PIECE;
    switch (format) {
    case Q4_K: return block + 16 + piece / 2 * PIECE;
    case IQ4_XS: return block + 8 + piece * PIECE / 2;
    default: return is_block(format) ? block + stored_block_bytes(format) - PIECE / 2 : block;
    }
}

/* A line's codes as the lowest bits of words. What lies above them is another code. */
static ALWAYS_INLINE __m512i places_in_table(const stored_row *row, long input, int format)
{
    const uint8_t *codes = codes_of_line(row, input, format);
    uint16_t order[PIECE], shifts[PIECE];
    if (format == Q4_K) {
        const __m128i shift = _mm_cvtsi32_si128((int)(input / PIECE % 2 * 4));
        return _mm512_srl_epi16(_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)codes)), shift);
    }
    for (int at = 0; at < PIECE; at++) {
        order[at] = (uint16_t)(0x8000 | (has_codes_in_turn(format) ? at / 2 : at % 16));
        shifts[at] = (uint16_t)((has_codes_in_turn(format) ? at % 2 : at / 16) * 4);
    }
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)codes));
    return _mm512_srlv_epi16(_mm512_shuffle_epi8(all, _mm512_loadu_si512(order)), _mm512_loadu_si512(shifts));
}

/* A place has five bits: the table is there twice, so that what lies above a code does not matter. Tables pass through the cache, as
   copies of a half are made by loads, and the port that has permutations is the busiest one. */
static ALWAYS_INLINE void look_up_lines(const stored_panel *of, long first, long behind, long input, line_of_tile *to,
                                        int format)
{
    const long piece = input % STRETCH / PIECE;
    const stored_shares *shares = of->shares[input / STRETCH % 2];
    const floats numbers = numbers_of_codes(format);
    _Alignas(64) table_of_codes tables[PANEL];
#pragma GCC unroll 4
    for (long at = first; at < behind; at += 2) {
        const floats one = values_of_codes(numbers, shares + at, piece, format);
        const floats other = values_of_codes(numbers, shares + at + 1, piece, format);
        _mm512_store_si512(tables[at], (__m512i)_mm512_cvtne2ps_pbh((__m512)other, (__m512)one));
    }
#pragma GCC unroll 4
    for (long at = first; at < behind; at++) {
        const __m512i table = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i *)tables[at]));
        const __m512i places = places_in_table(&of->rows[at], input, format);
        _mm512_store_si512(to[at - first], _mm512_permutexvar_epi16(places, table));
    }
}

/* -- steps of a panel ---------------------------------------------------------------------------------------------------------- */

/* A step of some outputs. */
static ALWAYS_INLINE void decode_lines(const stored_panel *of, long first, long behind, long step, line_of_tile *to, int format)
{
    const long input = step * PIECE;
    const stored_shares *shares = of->shares[input / STRETCH % 2];
    if (input >= of->rows->matrix->inputs) {
        memset(to, 0, (behind - first) * sizeof *to);
        return;
    }
    if (has_sixteen_codes(format)) {
        look_up_lines(of, first, behind, input, to, format);
        return;
    }
    for (long at = first; at < behind; at++) {
        floats values[2];
        stored_floats_of(&of->rows[at], input, format, shares + at, values);
        _mm512_store_si512(to[at - first], (__m512i)_mm512_cvtne2ps_pbh((__m512)values[1], (__m512)values[0]));
    }
}

typedef struct {
    void (*read)(stored_panel *of, long stretch, long first, long behind);
    void (*decode)(const stored_panel *of, long first, long behind, long step, line_of_tile *to);
} line_actions;

#define LINES_OF(FORM)                                                                                                           \
    static void read_##FORM(stored_panel *of, long stretch, long first, long behind)                                             \
    {                                                                                                                            \
        read_stretch(of, stretch, first, behind, FORM);                                                                          \
    }                                                                                                                            \
    static void decode_##FORM(const stored_panel *of, long first, long behind, long step, line_of_tile *to)                      \
    {                                                                                                                            \
        decode_lines(of, first, behind, step, to, FORM);                                                                         \
    }
EACH_FORM(LINES_OF)

#define NAMED(FORM) {read_##FORM, decode_##FORM},
static const line_actions actions_of_formats[] = {EACH_FORM(NAMED)};
#undef NAMED

#define STEPS (STRETCH / PIECE) /* of a stretch */
#define AHEAD 2 /* steps; no product has fewer */

/* The next stretch of each output: there are more of them in turn than a processor notices as streams. */
static ALWAYS_INLINE void fetch_stretch(const stored_panel *of, long stretch)
{
    const stored_matrix *m = of->rows->matrix;
    const long size = STRETCH * m->code_row / m->inputs;
    for (long output = 0; output < PANEL; output++)
        for (long at = 0; at < size; at += LINE_OF_TILE)
            __builtin_prefetch(of->rows[output].codes + (stretch + 1) * size + at, 0, 2);
}

/* The next panel's bytes are asked for, as many at each step: they lie side by side. */
static ALWAYS_INLINE void fetch_part(const stored_panel *of, long step, long steps)
{
    const long size = PANEL * of->rows->matrix->code_row;
    const uint8_t *next = of->rows->codes + size;
    for (long at = step * size / steps / LINE_OF_TILE; at < (step + 1) * size / steps / LINE_OF_TILE; at++)
        __builtin_prefetch(next + at * LINE_OF_TILE, 0, 2);
}

/* -- one block of rows --------------------------------------------------------------------------------------------------------- */

/* Lines are decoded some steps before tiles load them: what has just been stored is not yet where tiles load from. What the next
   stretch shares is read in the first half of one. */
static ALWAYS_INLINE void add_by_block(const product *p, const line_actions *how, stored_panel *of, int are_two)
{
    const long steps = p->columns / STEP, stretches = parts_of(p->columns, SPAN), below = STEP * rows_above(p->rows);
    const float *x = p->x;
    _Alignas(64) lines_of_step lines[AHEAD + 1];
    how->read(of, 0, 0, PANEL);
    for (long step = 0; step < AHEAD; step++)
        how->decode(of, 0, PANEL, step, lines[step]);
    start_tiles(are_two);
    for (long step = 0; step < steps; step++, x += STEP * p->rows) {
        const long stretch = step / STEPS + 1, first = step % STEPS * (2 * PANEL / STEPS), later = step + AHEAD;
        multiply_step(*lines[step % (AHEAD + 1)], LINE_OF_TILE, x, x + below, p->rows, are_two);
        fetch_part(of, step, steps);
        if (stretch < stretches && first < PANEL)
            how->read(of, stretch, first, first + 2 * PANEL / STEPS);
        if (later < steps)
            how->decode(of, 0, PANEL, later, lines[later % (AHEAD + 1)]);
    }
}

/* Some outputs, for all rows, where they are one block. Tiles hold the sums until the last step. */
static void multiply_stored_by_block(const product *p, long output, const line_actions *how)
{
    _Alignas(64) turned_sums sums;
    stored_panel of;
    find_rows(p, output, &of);
    use_turned_tiles_of(p->rows);
    if (p->rows > 1) {
        add_by_block(p, how, &of, 1);
        store_turned(sums, 1);
    } else {
        add_by_block(p, how, &of, 0);
        store_turned(sums, 0);
    }
    finish_block(p, output, 0, p->rows, sums);
}

/* -- two blocks of rows -------------------------------------------------------------------------------------------------------- */

/* Numbers of tiles: halves of two blocks, each with a half of a panel's outputs. Three hold rows, as two of four halves are alike. */
#define FIRST 4
#define SECOND 5
#define THIRD 6
#define OUTPUTS 7

static ALWAYS_INLINE long half_of_block(long rows, int half) /* rows of one of four halves of two blocks */
{
    const long first = first_row(1, rows), own = half < 2 ? first : rows - first;
    return half % 2 ? own - rows_above(own) : rows_above(own);
}

static inline void use_tiles_of_two(long rows)
{
    if (tiles_are_for == -rows)
        return;
    tile_sizes sizes = {0};
    for (int half = 0; half < 4; half++)
        size_tile(&sizes, half, LINES_OF_TILE, half_of_block(rows, half) * sizeof(float));
    for (int half = 0; half < 3; half++)
        size_tile(&sizes, FIRST + half, STEP, half_of_block(rows, half) * sizeof(float));
    size_tile(&sizes, OUTPUTS, LINES_OF_TILE, LINE_OF_TILE);
    take_tiles(sizes, -rows);
}

/* What lies beside each other of two blocks at a step. */
typedef struct {
    const float *x[4];
    long bytes[4];
    int is_like_second; /* the last half; otherwise it is like the third one */
} halves_of_two;

static ALWAYS_INLINE void multiply_two(const char *outputs, halves_of_two with)
{
    _tile_loadd(OUTPUTS, outputs, LINE_OF_TILE);
    _tile_loadd(FIRST, with.x[0], with.bytes[0]);
    _tile_dpbf16ps(0, OUTPUTS, FIRST);
    _tile_loadd(SECOND, with.x[1], with.bytes[1]);
    _tile_dpbf16ps(1, OUTPUTS, SECOND);
    _tile_loadd(THIRD, with.x[2], with.bytes[2]);
    _tile_dpbf16ps(2, OUTPUTS, THIRD);
    if (with.is_like_second) {
        _tile_loadd(SECOND, with.x[3], with.bytes[3]);
        _tile_dpbf16ps(3, OUTPUTS, SECOND);
    } else {
        _tile_loadd(THIRD, with.x[3], with.bytes[3]);
        _tile_dpbf16ps(3, OUTPUTS, THIRD);
    }
}

static ALWAYS_INLINE halves_of_two halves_at(const product *p, long step)
{
    const long pair = step / STEPS * SPAN, pairs = p->columns - pair < SPAN ? p->columns - pair : SPAN;
    halves_of_two found;
    for (int block = 0; block < 2; block++) {
        const long above = half_of_block(p->rows, 2 * block), below = half_of_block(p->rows, 2 * block + 1);
        found.x[2 * block] = span_of_x(p, block, pair, pairs) + step % STEPS * STEP * (above + below);
        found.x[2 * block + 1] = found.x[2 * block] + STEP * above;
        found.bytes[2 * block] = above * sizeof(float);
        found.bytes[2 * block + 1] = below * sizeof(float);
    }
    found.is_like_second = found.bytes[3] == found.bytes[1];
    return found;
}

static ALWAYS_INLINE void add_by_two(const product *p, const line_actions *how, stored_panel *of, long first)
{
    const long steps = p->columns / STEP, stretches = parts_of(p->columns, SPAN);
    _Alignas(64) line_of_tile lines[AHEAD + 1][LINES_OF_TILE];
    how->read(of, 0, first, first + LINES_OF_TILE);
    for (long step = 0; step < AHEAD; step++)
        how->decode(of, first, first + LINES_OF_TILE, step, lines[step]);
    start_tiles(1);
    for (long step = 0; step < steps; step++) {
        const long stretch = step / STEPS + 1, at = step % STEPS * (2 * LINES_OF_TILE / STEPS), later = step + AHEAD;
        multiply_two(*lines[step % (AHEAD + 1)], halves_at(p, step));
        fetch_part(of, first / LINES_OF_TILE * steps + step, 2 * steps);
        if (stretch < stretches && at < LINES_OF_TILE)
            how->read(of, stretch, first + at, first + at + 2 * LINES_OF_TILE / STEPS);
        if (later < steps)
            how->decode(of, first, first + LINES_OF_TILE, later, lines[later % (AHEAD + 1)]);
    }
}

/* The same for two blocks: a half of the outputs meets both. */
static void multiply_stored_by_two(const product *p, long output, const line_actions *how)
{
    _Alignas(64) turned_sums sums[2];
    stored_panel of;
    find_rows(p, output, &of);
    use_tiles_of_two(p->rows);
    for (int half = 0; half < 2; half++) {
        add_by_two(p, how, &of, half * LINES_OF_TILE);
        _tile_stored(0, sums[0][0][half], LINE_OF_TILE);
        _tile_stored(1, sums[0][1][half], LINE_OF_TILE);
        _tile_stored(2, sums[1][0][half], LINE_OF_TILE);
        _tile_stored(3, sums[1][1][half], LINE_OF_TILE);
        __asm__ volatile("" : : : "memory");
    }
    finish_block(p, output, 0, first_row(1, p->rows), sums[0]);
    finish_block(p, output, first_row(1, p->rows), p->rows - first_row(1, p->rows), sums[1]);
}

/* Some panels of outputs, for all rows of one block or two. */
static void multiply_few_blocks(const product *p, work part, const line_actions *how)
{
    for (long panel = part.panel; panel < part.panel + part.panels; panel++)
        if (is_one_block(p))
            multiply_stored_by_block(p, panel * PANEL, how);
        else
            multiply_stored_by_two(p, panel * PANEL, how);
    leave_tiles();
}

#endif
