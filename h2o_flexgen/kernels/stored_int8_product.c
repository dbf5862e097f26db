/* The product of rows of int8 and a transposed matrix in a stored format of whole numbers. Inputs that share a scale are a part of a
   group of 64; the dot product of a part is a whole number, and so is the sum of its codes of x. Then, part behind part,
   value = value + (dot * scale of the output + sum of codes * minimum of the output), where there are minima, and group behind group
   sum = sum + value * scale of x, every operation rounded by itself. So an outcome has the same bits in every library and in torch,
   whatever lies beside its row.

   Some groups of some tiles of outputs are prepared at a time: turned round, so that neighbours are the same inputs of neighbouring
   outputs, which registers of dot products want. They stay in the cache for all rows. For a single row codes stay as they lie, and
   its dot products are turned, which are fewer. Where there are tiles of registers (int8_tiles.h), many rows use them. */

#include "asked_products.h"
#include "int8_dots.h"
#if LANES == 16
#define MOST_ROWS 4 /* the values of a group are there beside the dot products of its parts */
#endif
#include "int8_sums.h"
#include "int8_tiles.h"
#include "squares.h"
#include "stored_values.h"
#include "team.h"

#define GROUPS_OF_STRETCH (STRETCH / GROUP)
#define GROUPS_AT_ONCE (2 * GROUPS_OF_STRETCH)

typedef struct {
    factors of;
    const int32_t *wholes; /* (rows, parts of all groups): the sums of the codes of x */
    stored_matrix matrix;
} product;

/* What a loop over prepared blocks depends on. A block has a byte for each code, planes one behind the other, then the scales of each
   part and the minima of each part as float32. */
typedef struct {
    int bits, parts, minima;
} block_kind;

static ALWAYS_INLINE int bits_of(int format)
{
    const int most = largest_code(format);
    return most < 16 ? 4 : most < 32 ? 5 : most < 64 ? 6 : 8;
}

/* INT4 with zeros of its own has minima: a zero times its scale is exact. */
static ALWAYS_INLINE block_kind kind_of(const stored_matrix *matrix, int format)
{
    const long together = format == INT4 || format == FP4 ? 1l << matrix->scale_shift : sharing_inputs(format);
    const block_kind found = {bits_of(format), together < GROUP ? GROUP / (int)together : 1, has_minima(format) || matrix->zeros};
    return found;
}

static ALWAYS_INLINE long shares_at(block_kind kind, int number, int part) /* scales (number 0) or minima (number 1) */
{
    return TILE * (GROUP * planes_of(kind.bits) + 4 * (kind.parts * number + part));
}

static ALWAYS_INLINE long bytes_of(block_kind kind)
{
    return shares_at(kind, 1 + kind.minima, 0);
}

#define MOST_BYTES (TILE * (GROUP * (WHOLE_DWORDS ? 1 : 2) + 4 * 4)) /* Q8_0 has two planes and two scales, Q6_K four scales */

/* -- preparing ---------------------------------------------------------------------------------------------------------------- */

/* Bytes from an output to that of the next tiles. */
static ALWAYS_INLINE long next_tiles(const stored_matrix *matrix)
{
    return TILES * TILE * matrix->code_row;
}

/* Asks for the bytes so far behind: there are more outputs in turn than a processor notices as streams. */
static ALWAYS_INLINE void fetch_behind(const stored_row *row, long first, int format, long behind)
{
    const uint8_t *block = is_block(format) ? block_of_row(row, first, format) : row->codes + first / 2;
    const long within = block_values(format) == STRETCH ? first % STRETCH / GROUP * LINE : 0;
    __builtin_prefetch(block + within + behind, 0, 2);
}

#if LANES == 16
/* Two blocks of nibbles: low ones first, then high ones, of each. */
static ALWAYS_INLINE words nibbles_of_two(const uint8_t *one, const uint8_t *other)
{
    const __m512i both = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(LOAD(__m128i, one)), 0xff00, LOAD(__m128i, other));
    const __m512i shifts = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4);
    return (words)_mm512_and_si512(_mm512_srlv_epi64(both, shifts), _mm512_set1_epi8(15));
}
#endif

/* The codes of an output that a register holds, from an input on. Of a group that is not whole there are 32 inputs, and zeros. */
static ALWAYS_INLINE words register_of_codes(const stored_row *row, long first, int format, int whole)
{
    const stored_codes nothing = {0};
#if LANES == 16
    if (whole && (format == Q4_0 || format == Q4_1)) {
        const uint8_t *block = block_of_row(row, first, format) + (format == Q4_0 ? 2 : 4);
        return nibbles_of_two(block, block + stored_block_bytes(format));
    }
    const stored_codes one = stored_codes_of(row, first, format), other = whole ? stored_codes_of(row, first + PIECE, format) : nothing;
    return (words)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)one), (__m256i)other, 1);
#else
    const stored_codes one = whole || first % GROUP < PIECE ? stored_codes_of(row, first / PIECE * PIECE, format) : nothing;
    return LOAD(words, (const char *)&one + first % PIECE);
#endif
}

/* Codes from another zero on. */
static ALWAYS_INLINE words less(words codes, int zero)
{
    typedef uint8_t narrow __attribute__((vector_size(4 * LANES)));
    return (words)((narrow)codes - (uint8_t)zero);
}

/* The codes of a tile and a group, from their zero on and turned round. Only tiles of registers want another zero. */
static ALWAYS_INLINE void prepare_codes(const stored_row *rows, long first, int format, int whole, int zero, uint8_t *out)
{
    const long to_next = next_tiles(rows->matrix);
    for (int part = 0; part < PARTS; part++)
        for (int dword = 0; dword < X_DWORDS; dword += LANES) {
            words square[LANES];
#pragma GCC unroll 16
            for (int at = 0; at < LANES; at++) {
                if (!dword)
                    fetch_behind(rows + LANES * part + at, first, format, to_next);
                square[at] = register_of_codes(rows + LANES * part + at, first + 4 * dword, format, whole);
            }
            turn(square);
#pragma GCC unroll 16
            for (int at = 0; at < LANES; at++)
                for (int plane = 0, planes = planes_of(bits_of(format)); plane < planes; plane++) {
                    const words codes = WITH_TILES ? less(square[at], zero) : square[at];
                    const words of_plane = planes == 1 ? codes : codes >> (4 * plane) & 0x0f0f0f0f;
                    memcpy(out + 4 * (TILE * (X_DWORDS * plane + dword + at) + LANES * part), &of_plane, sizeof of_plane);
                }
        }
}

#define MOST_SHARES 16 /* numbers of a stretch that one output has: 16 scales, or 8 scales and 8 minima */

/* The scales and minima of an output, for each part of a stretch; zeros where the row has ended. */
static ALWAYS_INLINE void shares_of_row(const stored_row *row, long first, int format, block_kind kind, float *to)
{
    stored_shares shares;
    const long left = row->matrix->inputs - first, together = GROUP / kind.parts, step = together / sharing_inputs(format);
    const int parts = GROUPS_OF_STRETCH * kind.parts;
    read_shares(row, first, format, &shares);
    for (int at = 0; at < parts; at++)
        to[at] = shares.scales[at * step];
    if (kind.minima)
        for (int at = 0; at < parts; at++)
            to[MOST_SHARES / 2 + at] = format == INT4 ? (float)-shares.zeros[at * step] * to[at] : shares.minima[at * step];
    for (long at = left / together; left < STRETCH && at < parts; at++) {
        to[at] = 0.0f;
        if (kind.minima)
            to[MOST_SHARES / 2 + at] = 0.0f;
    }
}

/* Where one of these numbers belongs in the blocks of a stretch, or -1. */
static ALWAYS_INLINE long place_of_share(block_kind kind, int number)
{
    const int is_minimum = kind.minima && number >= MOST_SHARES / 2, part = number - is_minimum * MOST_SHARES / 2;
    if (part >= GROUPS_OF_STRETCH * kind.parts)
        return -1;
    return part / kind.parts * bytes_of(kind) + shares_at(kind, is_minimum, part % kind.parts);
}

/* The same of blocks that begin with them in float16: they are widened when those of all outputs lie side by side. */
static ALWAYS_INLINE void prepare_halves(const stored_row *rows, long first, int format, block_kind kind, uint8_t *out)
{
    for (int piece = 0; piece < STRETCH / PIECE; piece++)
        for (int part = 0; part < PARTS; part++) {
            uint32_t both[LANES] = {0};
            for (int at = 0; at < LANES && first + piece * PIECE < rows->matrix->inputs; at++)
                both[at] = LOAD(uint32_t, block_of_row(rows + LANES * part + at, first + piece * PIECE, format));
            const floats scales = floats_of_low_halves(LOAD(words, both)), minima = floats_of_low_halves(LOAD(words, both) >> 16);
            memcpy(out + place_of_share(kind, piece) + 4 * LANES * part, &scales, sizeof scales);
            if (kind.minima)
                memcpy(out + place_of_share(kind, MOST_SHARES / 2 + piece) + 4 * LANES * part, &minima, sizeof minima);
        }
}

/* The scales and minima of a tile and a stretch, turned round. */
static ALWAYS_INLINE void prepare_shares(const stored_row *rows, long first, int format, block_kind kind, uint8_t *out)
{
    if (begins_with_halves(format)) {
        prepare_halves(rows, first, format, kind, out);
        return;
    }
    float shares[TILE][MOST_SHARES] __attribute__((aligned(LINE))) = {{0}};
    for (int output = 0; output < TILE; output++)
        shares_of_row(rows + output, first, format, kind, shares[output]);
    for (int part = 0; part < PARTS; part++)
        for (int number = 0; number < MOST_SHARES; number += LANES) {
            words square[LANES];
#pragma GCC unroll 16
            for (int at = 0; at < LANES; at++)
                square[at] = LOAD(words, shares[LANES * part + at] + number);
            turn(square);
#pragma GCC unroll 16
            for (int at = 0; at < LANES; at++)
                if (place_of_share(kind, number + at) >= 0)
                    memcpy(out + place_of_share(kind, number + at) + 4 * LANES * part, square + at, sizeof *square);
        }
}

/* Behind the last output it is repeated. */
static ALWAYS_INLINE void rows_of_tile(const stored_matrix *matrix, int format, long tile, stored_row *rows)
{
    const long behind = matrix->outputs - tile * TILE, last = behind < TILE ? behind - 1 : TILE - 1;
    for (long at = 0; at < TILE; at++) {
        const long output = tile * TILE + (at < last ? at : last);
        rows[at] = is_block(format) ? (stored_row){matrix->codes + output * matrix->code_row, NULL, NULL, matrix}
                                  : stored_row_of(matrix, output);
    }
    __asm__("" : "+m"(*(stored_row(*)[TILE])rows)); /* or compilers run out of registers for their places */
}

/* Some groups of a tile, from the beginning of a stretch on. */
static ALWAYS_INLINE void prepare_tile(const stored_matrix *matrix, int format, long tile, long group, long groups, int zero, uint8_t *out)
{
    const block_kind kind = kind_of(matrix, format);
    stored_row rows[TILE];
    rows_of_tile(matrix, format, tile, rows);
    for (long at = 0; at < groups; at++)
        if ((group + at + 1) * GROUP <= matrix->inputs)
            prepare_codes(rows, (group + at) * GROUP, format, 1, zero, out + at * bytes_of(kind));
        else
            prepare_codes(rows, (group + at) * GROUP, format, 0, zero, out + at * bytes_of(kind));
    for (long at = 0; at < groups; at += GROUPS_OF_STRETCH)
        prepare_shares(rows, (group + at) * GROUP, format, kind, out + at * bytes_of(kind));
}

typedef void (*prepare_action)(const stored_matrix *matrix, long tile, long group, long groups, int zero, uint8_t *out);

#define PREPARE(FORM)                                                                                                            \
    static void prepare_##FORM(const stored_matrix *matrix, long tile, long group, long groups, int zero, uint8_t *out)          \
    {                                                                                                                            \
        prepare_tile(matrix, FORM, tile, group, groups, zero, out);                                                              \
    }
#define PREPARES(FORM) prepare_##FORM,

EACH_FORM(PREPARE)

static const prepare_action prepare_actions[] = {EACH_FORM(PREPARES)};

/* -- multiplying -------------------------------------------------------------------------------------------------------------- */

static ALWAYS_INLINE floats share_at(const uint8_t *block, block_kind kind, int number, int part, int place)
{
    return LOAD(floats, block + shares_at(kind, number, part) + 4 * LANES * place);
}

/* Adds some groups to the sums of some rows. `zero` is that of all codes. */
static ALWAYS_INLINE void multiply(const product *p, const uint8_t *blocks, long first, long groups, long row, int zero,
                                   floats (*sums)[REGISTERS], int rows, block_kind kind)
{
    const long x_row = p->of.groups * GROUP, dwords = X_DWORDS / kind.parts;
    floats held[MOST_ROWS][REGISTERS];
    memcpy(held, sums, rows * sizeof *held);
    for (long group = 0; group < groups; group++) {
        const long at_group = row * p->of.groups + first + group;
        const uint8_t *block[TILES];
        floats values[MOST_ROWS][REGISTERS];
#pragma GCC unroll 4
        for (int tile = 0; tile < TILES; tile++)
            block[tile] = blocks + (tile * GROUPS_AT_ONCE + group) * bytes_of(kind);
#pragma GCC unroll 4
        for (int part = 0; part < kind.parts; part++) {
            integers dots[MOST_ROWS][REGISTERS];
            int32_t wholes[MOST_ROWS];
#pragma GCC unroll 8
            for (int next = 0; next < rows; next++)
                wholes[next] = p->wholes[(at_group + next * p->of.groups) * kind.parts + part];
#pragma GCC unroll 8
            for (int next = 0; next < rows; next++)
#pragma GCC unroll 8
                for (int at = 0; at < REGISTERS; at++)
                    dots[next][at] = (kind.minima ? 0 : -zero * wholes[next]) - (integers){0};
            add_dots(block, p->of.codes + at_group * GROUP, x_row, rows, dwords * part, dwords, kind.bits, 1, dots);
#pragma GCC unroll 8
            for (int at = 0; at < REGISTERS; at++) {
                const floats scale = share_at(block[at / PARTS], kind, 0, part, at % PARTS);
                const floats minimum = kind.minima ? share_at(block[at / PARTS], kind, 1, part, at % PARTS) : scale;
#pragma GCC unroll 8
                for (int next = 0; next < rows; next++) {
                    floats value = rounded(__builtin_convertvector(dots[next][at], floats) * scale);
                    if (kind.minima)
                        value += rounded((float)wholes[next] * minimum);
                    values[next][at] = part ? values[next][at] + value : value;
                }
            }
        }
#pragma GCC unroll 8
        for (int next = 0; next < rows; next++)
#pragma GCC unroll 8
            for (int at = 0; at < REGISTERS; at++)
                held[next][at] += rounded(values[next][at] * p->of.scales[at_group + next * p->of.groups]);
    }
    memcpy(sums, held, rows * sizeof *held);
}

typedef void (*action)(const product *p, const uint8_t *blocks, long first, long groups, long row, int zero,
                       floats (*sums)[REGISTERS]);

#define DEFINED(ROWS, BITS, PARTED, MINIMA)                                                                                      \
    static void multiply_##ROWS##_##BITS##_##PARTED##_##MINIMA(const product *p, const uint8_t *blocks, long first, long groups, \
                                                               long row, int zero, floats (*sums)[REGISTERS])                    \
    {                                                                                                                            \
        multiply(p, blocks, first, groups, row, zero, sums, ROWS, (block_kind){BITS, PARTED, MINIMA});                           \
    }
#define NAMED(ROWS, BITS, PARTED, MINIMA) multiply_##ROWS##_##BITS##_##PARTED##_##MINIMA,

#if WHOLE_DWORDS /* bits of codes make no difference */
#define EACH_KIND(DO) DO(8, 1, 0) DO(8, 1, 1) DO(8, 2, 0) DO(8, 2, 1) DO(8, 4, 0)
#else
#define EACH_KIND(DO) DO(4, 1, 0) DO(4, 1, 1) DO(4, 2, 0) DO(4, 2, 1) DO(5, 2, 0) DO(5, 2, 1) DO(8, 2, 0) DO(6, 4, 0)
#endif

/* -- in tiles of registers ---------------------------------------------------------------------------------------------------- */

#if WITH_TILES

/* Adds some groups to the sums of some rows and a tile of outputs. */
static ALWAYS_INLINE void multiply_in_tiles(const product *p, const uint8_t *blocks, long first, long groups, long row,
                                            floats (*sums)[REGISTERS], int tile, int rows, block_kind kind)
{
    const long all_groups = p->of.groups, x_row = all_groups * GROUP, begin = row * all_groups + first;
    const uint8_t *from = blocks + tile * GROUPS_AT_ONCE * bytes_of(kind);
    _Alignas(LINE) dots_of_groups dots;
    floats held[LINES_OF_TILE];
    use_tiles_of(rows, kind.parts);
#pragma GCC unroll 16
    for (int next = 0; next < rows; next++)
        held[next] = sums[next][tile];
    dots_in_tiles(p->of.codes + begin * GROUP, x_row, from, kind.parts, !kind.minima, dots);
    for (long group = 0; group < groups; group++) {
        const uint8_t *block = from + group * bytes_of(kind);
        const float *scales_of_x = p->of.scales + begin + group;
        const int32_t *wholes = p->wholes + (begin + group) * kind.parts;
        floats scales[MOST_PARTS], minima[MOST_PARTS];
        if (group + 1 < groups)
            dots_in_tiles(p->of.codes + (begin + group + 1) * GROUP, x_row, block + bytes_of(kind), kind.parts, !kind.minima,
                          dots + (group + 1) % 2 * kind.parts);
#pragma GCC unroll 4
        for (int part = 0; part < kind.parts; part++) {
            scales[part] = share_at(block, kind, 0, part, 0);
            minima[part] = kind.minima ? share_at(block, kind, 1, part, 0) : scales[part];
        }
#pragma GCC unroll 16
        for (int next = 0; next < rows; next++) {
            floats values = {0};
#pragma GCC unroll 4
            for (int part = 0; part < kind.parts; part++) {
                const integers dot = LOAD(integers, dots[group % 2 * kind.parts + part][next]);
                floats value = rounded(__builtin_convertvector(dot, floats) * scales[part]);
                if (kind.minima) {
                    const integers whole = wholes[next * all_groups * kind.parts + part] - (integers){0};
                    value += rounded(__builtin_convertvector(whole, floats) * minima[part]);
                }
                values = part ? values + value : value;
            }
            held[next] += rounded(values * scales_of_x[next * all_groups]);
        }
    }
#pragma GCC unroll 16
    for (int next = 0; next < rows; next++)
        sums[next][tile] = held[next];
}

typedef void (*tiles_action)(const product *p, const uint8_t *blocks, long first, long groups, long row, floats (*sums)[REGISTERS],
                             int tile);

#define DEFINED_IN_TILES(ROWS, BITS, PARTED, MINIMA)                                                                             \
    static void in_tiles_##ROWS##_##BITS##_##PARTED##_##MINIMA(const product *p, const uint8_t *blocks, long first, long groups, \
                                                               long row, floats (*sums)[REGISTERS], int tile)                    \
    {                                                                                                                            \
        multiply_in_tiles(p, blocks, first, groups, row, sums, tile, ROWS, (block_kind){BITS, PARTED, MINIMA});                  \
    }
#define NAMED_IN_TILES(ROWS, BITS, PARTED, MINIMA) in_tiles_##ROWS##_##BITS##_##PARTED##_##MINIMA,
#define EACH_DEFINED_IN_TILES(...) EACH_IN_TILES(DEFINED_IN_TILES, __VA_ARGS__)
#define IN_TILES(...) {{__VA_ARGS__}, {ALL_ROWS(NAMED, __VA_ARGS__)}, {EACH_IN_TILES(NAMED_IN_TILES, __VA_ARGS__)}},

/* Where scaling takes longest, registers are as fast (measured). */
#define EACH_KIND_IN_TILES(DO) DO(8, 1, 0) DO(8, 1, 1) DO(8, 2, 0)
#define EACH_OTHER_KIND(DO) DO(8, 2, 1) DO(8, 4, 0)

EACH_KIND_IN_TILES(EACH_DEFINED_IN_TILES)

#else
#define EACH_KIND_IN_TILES(DO)
#define EACH_OTHER_KIND EACH_KIND
#endif

/* -- by kinds of blocks ------------------------------------------------------------------------------------------------------- */

#define EACH_DEFINED(...) ALL_ROWS(DEFINED, __VA_ARGS__)
#define EACH_LISTED(...) {{__VA_ARGS__}, {ALL_ROWS(NAMED, __VA_ARGS__)}},

EACH_KIND(EACH_DEFINED)

typedef struct {
    block_kind kind;
    action actions[MOST_ROWS];
#if WITH_TILES
    tiles_action in_tiles[NUMBERS_IN_TILES]; /* NULL: tiles would not be faster */
#endif
} kind_actions;

static const kind_actions kinds[] = {EACH_KIND_IN_TILES(IN_TILES) EACH_OTHER_KIND(EACH_LISTED)};

static const kind_actions *actions_of(block_kind kind)
{
    for (unsigned at = 0; at < sizeof kinds / sizeof *kinds; at++)
        if (kinds[at].kind.parts == kind.parts && kinds[at].kind.minima == kind.minima &&
            (WHOLE_DWORDS || kinds[at].kind.bits == kind.bits))
            return kinds + at;
    return kinds; /* there is no such format */
}

/* -- one row ------------------------------------------------------------------------------------------------------------------ */

/* The dot products of a register of codes, four by four. */
static ALWAYS_INLINE integers dots_of(words codes, words x, int format)
{
#if WHOLE_DWORDS
    return dots_added((integers){0}, codes, x);
#else
    if (largest_code(format) < 128)
        return pairs_added(pair_dots(codes, x));
    return pairs_added(pair_dots(codes & 0x0f0f0f0f, x)) + (pairs_added(pair_dots(codes >> 4 & 0x0f0f0f0f, x)) << 4);
#endif
}

/* Narrow registers are many: unrolled, the loop over those of a tile would take a compiler half a minute. */
#if LANES == 4
#define UNROLL_WIDE _Pragma("GCC unroll 1")
#else
#define UNROLL_WIDE _Pragma("GCC unroll 4")
#endif

/* The dot products with a group of a tile, of each part. */
static ALWAYS_INLINE void dots_of_tile(const stored_row *rows, long first, int format, int whole, const int8_t *x, int parts,
                                       integers (*dots)[PARTS])
{
    const long to_next = next_tiles(rows->matrix);
    UNROLL_WIDE
    for (int place = 0; place < PARTS; place++)
#pragma GCC unroll 4
        for (int dword = 0; dword < X_DWORDS; dword += LANES) {
            const words with = LOAD(words, x + 4 * dword);
            words square[LANES], sums[LANES / 4];
#pragma GCC unroll 16
            for (int at = 0; at < LANES; at++) {
                const stored_row *row = rows + LANES * place + at;
                if (!dword)
                    fetch_behind(row, first, format, to_next);
                square[at] = (words)dots_of(register_of_codes(row, first + 4 * dword, format, whole), with, format);
            }
            sum_quarters(square, sums);
#pragma GCC unroll 4
            for (int quarter = 0; quarter < LANES / 4; quarter++) {
                const int sixteen = dword / 4 + quarter, part = sixteen * parts / 4, begins = sixteen % (4 / parts) == 0;
                dots[part][place] = begins ? (integers)sums[quarter] : dots[part][place] + (integers)sums[quarter];
            }
        }
}

/* Adds a group of a tile to its sums. */
static ALWAYS_INLINE void add_group(const product *p, const stored_row *rows, const uint8_t *shares, long group, int format,
                                    block_kind kind, floats *sums)
{
    const long first = group * GROUP;
    const int8_t *x = p->of.codes + first;
    const int32_t *wholes = p->wholes + group * kind.parts;
    integers dots[4][PARTS];
    if (first + GROUP <= p->matrix.inputs)
        dots_of_tile(rows, first, format, 1, x, kind.parts, dots);
    else
        dots_of_tile(rows, first, format, 0, x, kind.parts, dots);
#pragma GCC unroll 4
    for (int place = 0; place < PARTS; place++) {
        floats values = {0};
#pragma GCC unroll 4
        for (int part = 0; part < kind.parts; part++) {
            const integers dot = dots[part][place] - (kind.minima ? 0 : usual_zero(format) * wholes[part]);
            floats value = rounded(__builtin_convertvector(dot, floats) * share_at(shares, kind, 0, part, place));
            if (kind.minima)
                value += rounded((float)wholes[part] * share_at(shares, kind, 1, part, place));
            values = part ? values + value : value;
        }
        sums[place] += rounded(values * p->of.scales[group]);
    }
}

/* The sums of a tile with the only row. */
static ALWAYS_INLINE void multiply_tile(const product *p, int format, long tile, floats *sums)
{
    const block_kind kind = kind_of(&p->matrix, format);
    uint8_t shares[GROUPS_OF_STRETCH * MOST_BYTES] __attribute__((aligned(LINE)));
    stored_row rows[TILE];
    rows_of_tile(&p->matrix, format, tile, rows);
    memset(sums, 0, PARTS * sizeof *sums);
    for (long group = 0; group < p->of.groups; group++) {
        const long within = group % GROUPS_OF_STRETCH;
        if (!within)
            prepare_shares(rows, group * GROUP, format, kind, shares);
        add_group(p, rows, shares + within * bytes_of(kind), group, format, kind, sums);
    }
}

typedef void (*tile_action)(const product *p, long tile, floats *sums);

#define MULTIPLY_TILE(FORM)                                                                                                      \
    static void multiply_tile_##FORM(const product *p, long tile, floats *sums)                                                  \
    {                                                                                                                            \
        multiply_tile(p, FORM, tile, sums);                                                                                      \
    }
#define MULTIPLIES_TILE(FORM) multiply_tile_##FORM,

EACH_FORM(MULTIPLY_TILE)

static const tile_action tile_actions[] = {EACH_FORM(MULTIPLIES_TILE)};

/* -- the order of the work ---------------------------------------------------------------------------------------------------- */

/* Some groups of some tiles that are prepared, as they lie in the cache. */
typedef struct {
    const uint8_t *blocks;
    long first, groups;
    const kind_actions *of_kind;
} prepared_tiles;

/* Adds them to the sums of some rows. `zero` is that of all codes. */
static void multiply_in_registers(const product *p, prepared_tiles with, long first_row, long rows, int zero, floats (*sums)[REGISTERS])
{
    const long parts = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (long part = 0, row = 0; part < parts; part++) {
        const long count = (rows - row + parts - part - 1) / (parts - part); /* about the same in each part */
        with.of_kind->actions[count - 1](p, with.blocks, with.first, with.groups, first_row + row, zero, sums + row);
        row += count;
    }
}

#if WITH_TILES
/* The same where codes begin at their zero, or have minima. */
static void multiply_many(const product *p, prepared_tiles with, long first_row, long rows, floats (*sums)[REGISTERS])
{
    for (long block = 0, blocks = blocks_in_tiles(rows); block < blocks; block++) {
        const long row = block * rows / blocks, count = (block + 1) * rows / blocks - row;
        const tiles_action multiply_block = with.of_kind->in_tiles[count - FEWEST_IN_TILES];
        for (int tile = 0; tile < TILES; tile++)
            multiply_block(p, with.blocks, with.first, with.groups, first_row + row, sums + row, tile);
    }
}

static ALWAYS_INLINE int are_many(const kind_actions *of_kind, long rows)
{
    return rows >= FEWEST_ROWS && *of_kind->in_tiles;
}
#else
static ALWAYS_INLINE void multiply_many(const product *p, prepared_tiles with, long first_row, long rows, floats (*sums)[REGISTERS]) {}

static ALWAYS_INLINE int are_many(const kind_actions *of_kind, long rows)
{
    return 0;
}
#endif

static ALWAYS_INLINE void multiply_tiles(const product *p, int format, const kind_actions *of_kind, long first_tile, long first_row)
{
    const long left = p->of.rows - first_row, rows = left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE;
    const long turns = (p->of.groups + GROUPS_AT_ONCE - 1) / GROUPS_AT_ONCE;
    const int in_tiles = are_many(of_kind, rows), zero = in_tiles && !of_kind->kind.minima ? usual_zero(format) : 0;
    floats sums[ROWS_AT_ONCE][REGISTERS];
    uint8_t room[TILES * GROUPS_AT_ONCE * MOST_BYTES] __attribute__((aligned(LINE)));
    const long size = bytes_of(kind_of(&p->matrix, format));
    memset(sums, 0, rows * sizeof *sums);
    for (long turn = 0; turn < turns; turn++) {
        const long group = turn * GROUPS_AT_ONCE, behind = p->of.groups - group;
        const long groups = behind < GROUPS_AT_ONCE ? behind : GROUPS_AT_ONCE;
        for (int tile = 0; tile < TILES; tile++)
            prepare_actions[format](&p->matrix, first_tile + tile, group, groups, zero, room + tile * GROUPS_AT_ONCE * size);
        const prepared_tiles with = {room, group, groups, of_kind};
        if (in_tiles)
            multiply_many(p, with, first_row, rows, sums);
        else
            multiply_in_registers(p, with, first_row, rows, usual_zero(format), sums);
    }
    finish(&p->of, first_row, rows, first_tile, sums);
}

static ALWAYS_INLINE void multiply_one_row(const product *p, int format, long first_tile)
{
    floats sums[1][REGISTERS];
    for (int tile = 0; tile < TILES; tile++)
        tile_actions[format](p, first_tile + tile, *sums + tile * PARTS);
    finish(&p->of, 0, 1, first_tile, sums);
}

typedef struct {
    const product *products;
    const kind_actions *of_kind;
    const long *begins; /* of the parts of each */
    long count;
    int format;
} some_products;

/* A part is the next tiles of a product, for all rows. */
static void multiply_part(const void *given, long number, int member)
{
    const some_products *some = given;
    const long at = work_of_part(some->begins, some->count, number);
    const product *p = some->products + at;
    const long first = (number - some->begins[at]) * TILES;
    if (p->of.rows == 1) {
        multiply_one_row(p, some->format, first);
        return;
    }
    for (long row = 0; row < p->of.rows; row += ROWS_AT_ONCE)
        multiply_tiles(p, some->format, some->of_kind, first, row);
    leave_tiles();
}

/* Some products with matrices of one format. */
void stored_int8_product(const void *given, int threads)
{
    const asked_products *asked = given;
    const product *products = asked->products;
    long begins[asked->count + 1];
    const some_products some = {products, actions_of(kind_of(&products->matrix, asked->told)), begins, asked->count, asked->told};
    begins[0] = 0;
    for (long at = 0; at < some.count; at++)
        begins[at + 1] = begins[at] + parts_of_product(&products[at].of);
    share_out(&some, begins[some.count], threads, multiply_part);
}
