/* The product of rows of int8 and a transposed matrix in tiles of 4 or 8 bits. The dot product of a group is a whole number; then
   sum = sum + ((dot * scale of x) * scale of the output + sum of x * minimum of the output), group behind group, every operation
   rounded by itself. So an outcome has the same bits in every library and in torch, whatever lies beside its row.

   Few rows are multiplied with the blocks as they lie. For many, blocks of some tiles and groups are prepared once and stay in the
   cache while all rows pass. */

#include "int8_dots.h"

#if LANES == 16
#define MOST_ROWS 6 /* at once, with TILES tiles: the dot products of a group fill the registers */
#define TILES 2
#else
#define MOST_ROWS 4
#define TILES 1
#endif
#define REGISTERS (TILES * PARTS)
#define GROUPS_AT_ONCE 8 /* whose prepared blocks lie in the cache */
#define ROWS_AT_ONCE 256 /* whose sums are kept between groups */

typedef struct {
    const uint8_t *data; /* (tiles, bytes of a tile) */
    const int8_t *codes; /* (rows, groups * 64) */
    const float *scales; /* (rows, groups) */
    const float *sums;   /* (rows, groups) */
    const float *bias;   /* (outputs), or NULL */
    char *out;           /* (rows, outputs) */
    long rows, groups, outputs;
    int kind; /* type of the outcome */
} product;

/* Blocks of the same groups in some tiles. */
typedef struct {
    const uint8_t *tiles[TILES];
    long first_group, groups;
} blocks;

static ALWAYS_INLINE void add_dots(const uint8_t *const *block, const int8_t *x, long x_row, int rows, int bits, int prepared,
                                   integers (*dots)[REGISTERS])
{
#if WHOLE_DWORDS
#pragma GCC unroll 16
    for (int dword = 0; dword < X_DWORDS; dword++) {
        words codes[REGISTERS];
#pragma GCC unroll 8
        for (int at = 0; at < REGISTERS; at++)
            codes[at] = codes_at(block[at / PARTS], dword, at % PARTS, 0, bits, prepared);
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            const words with = same_word(x + row * x_row + 4 * dword);
#pragma GCC unroll 8
            for (int at = 0; at < REGISTERS; at++)
                dots[row][at] = dots_added(dots[row][at], codes[at], with);
        }
    }
#else
#pragma GCC unroll 2
    for (int plane = 0; plane < planes_of(bits); plane++)
#pragma GCC unroll 2
        for (int first = 0; first < X_DWORDS; first += 8) {
            shorts pairs[MOST_ROWS][REGISTERS];
#pragma GCC unroll 8
            for (int dword = first; dword < first + 8; dword++) {
                words codes[REGISTERS];
#pragma GCC unroll 8
                for (int at = 0; at < REGISTERS; at++)
                    codes[at] = codes_at(block[at / PARTS], dword, at % PARTS, plane, bits, prepared);
#pragma GCC unroll 8
                for (int row = 0; row < rows; row++) {
                    const words with = same_word(x + row * x_row + 4 * dword);
#pragma GCC unroll 8
                    for (int at = 0; at < REGISTERS; at++) {
                        const shorts next = pair_dots(codes[at], with);
                        pairs[row][at] = dword == first ? next : pairs[row][at] + next;
                    }
                }
            }
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
                for (int at = 0; at < REGISTERS; at++)
                    dots[row][at] += pairs_added(pairs[row][at]) << (4 * plane);
        }
#endif
}

/* Adds some groups to the sums of some rows. */
static ALWAYS_INLINE void multiply(const product *p, const blocks *from, long row, floats (*sums)[REGISTERS], int rows, int bits,
                                   int prepared)
{
    const long x_row = p->groups * GROUP, size = prepared ? prepared_bytes(bits) : block_bytes(bits);
    floats held[MOST_ROWS][REGISTERS];
    memcpy(held, sums, rows * sizeof *held);
    for (long group = 0; group < from->groups; group++) {
        const long at_group = row * p->groups + from->first_group + group;
        const uint8_t *block[TILES];
        integers dots[MOST_ROWS][REGISTERS] = {0};
#pragma GCC unroll 4
        for (int tile = 0; tile < TILES; tile++)
            block[tile] = from->tiles[tile] + group * size;
        add_dots(block, p->codes + at_group * GROUP, x_row, rows, bits, prepared, dots);
#pragma GCC unroll 8
        for (int at = 0; at < REGISTERS; at++) {
            const floats scale = shared_at(block[at / PARTS], 0, at % PARTS, bits, prepared);
            const floats minimum = shared_at(block[at / PARTS], 1, at % PARTS, bits, prepared);
#pragma GCC unroll 8
            for (int next = 0; next < rows; next++) {
                const long place = at_group + next * p->groups;
                const floats of_codes = __builtin_convertvector(dots[next][at], floats) * p->scales[place] * scale;
                held[next][at] += rounded(of_codes) + rounded(p->sums[place] * minimum);
            }
        }
    }
    memcpy(sums, held, rows * sizeof *held);
}

static ALWAYS_INLINE void finish_as(const product *p, long row, long rows, long first_tile, floats (*sums)[REGISTERS], int kind)
{
    const long first = first_tile * TILE, left = p->outputs - first, outputs = left < TILES * TILE ? left : TILES * TILE;
    for (long next = 0; next < rows; next++) {
        float values[TILES * TILE];
        char *out = p->out + ((row + next) * p->outputs + first) * itemsize_of(kind);
        memcpy(values, sums[next], sizeof values);
        for (long output = 0; p->bias && output < outputs; output++)
            values[output] += p->bias[first + output];
        for (long output = 0; output < outputs; output++)
            store_value(out + output * itemsize_of(kind), values[output], kind);
    }
}

static void finish(const product *p, long row, long rows, long first_tile, floats (*sums)[REGISTERS])
{
    if (p->kind == BF16)
        finish_as(p, row, rows, first_tile, sums, BF16);
    else if (p->kind == FLOAT)
        finish_as(p, row, rows, first_tile, sums, FLOAT);
    else
        finish_as(p, row, rows, first_tile, sums, HALF);
}

/* Parallel regions call through a pointer: a region is compiled by itself, and would know nothing of what is constant outside of
   it. */

typedef void (*action)(const product *p, const blocks *from, long row, floats (*sums)[REGISTERS]);

#define FOR_ROWS(ROWS, BITS, PREPARED, NAME)                                                                                     \
    static void multiply_##ROWS##_##NAME(const product *p, const blocks *from, long row, floats (*sums)[REGISTERS])              \
    {                                                                                                                            \
        multiply(p, from, row, sums, ROWS, BITS, PREPARED);                                                                      \
    }
#define FOR_ALL_ROWS(BITS, PREPARED, NAME)                                                                                       \
    FOR_ROWS(1, BITS, PREPARED, NAME)                                                                                            \
    FOR_ROWS(2, BITS, PREPARED, NAME)                                                                                            \
    FOR_ROWS(3, BITS, PREPARED, NAME)                                                                                            \
    FOR_ROWS(4, BITS, PREPARED, NAME)                                                                                            \
    FOR_MORE_ROWS(BITS, PREPARED, NAME)
#if MOST_ROWS == 6
#define FOR_MORE_ROWS(BITS, PREPARED, NAME)                                                                                      \
    FOR_ROWS(5, BITS, PREPARED, NAME)                                                                                            \
    FOR_ROWS(6, BITS, PREPARED, NAME)
#define ACTIONS(NAME)                                                                                                            \
    {multiply_1_##NAME, multiply_2_##NAME, multiply_3_##NAME, multiply_4_##NAME, multiply_5_##NAME, multiply_6_##NAME}
#else
#define FOR_MORE_ROWS(BITS, PREPARED, NAME)
#define ACTIONS(NAME) {multiply_1_##NAME, multiply_2_##NAME, multiply_3_##NAME, multiply_4_##NAME}
#endif

FOR_ALL_ROWS(4, 0, by_4_bits)
FOR_ALL_ROWS(8, 0, by_8_bits)
FOR_ALL_ROWS(4, 1, by_prepared_4_bits)
FOR_ALL_ROWS(8, 1, by_prepared_8_bits)

/* The tiles from this one on; where there are no more, the last one is repeated. */
static ALWAYS_INLINE blocks blocks_of(const product *p, long first_tile, int bits)
{
    const long last = (p->outputs - 1) / TILE;
    blocks found = {{0}, 0, p->groups};
    for (int tile = 0; tile < TILES; tile++)
        found.tiles[tile] = p->data + (first_tile + tile < last ? first_tile + tile : last) * p->groups * block_bytes(bits);
    return found;
}

static ALWAYS_INLINE void few_rows(const product *p, long first_tile, int bits, action multiply_as_they_lie)
{
    floats sums[MOST_ROWS][REGISTERS] = {0};
    const blocks from = blocks_of(p, first_tile, bits);
    multiply_as_they_lie(p, &from, 0, sums);
    finish(p, 0, p->rows, first_tile, sums);
}

static ALWAYS_INLINE void many_rows(const product *p, long first_tile, long first_row, int bits, const action *multiply_prepared)
{
    const long left = p->rows - first_row, rows = left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE;
    const blocks from = blocks_of(p, first_tile, bits);
    floats sums[ROWS_AT_ONCE][REGISTERS];
    uint8_t prepared[TILES * GROUPS_AT_ONCE * PREPARED_BYTES] __attribute__((aligned(64)));
    memset(sums, 0, rows * sizeof *sums);
    for (long group = 0; group < p->groups; group += GROUPS_AT_ONCE) {
        blocks part = {{0}, group, p->groups - group < GROUPS_AT_ONCE ? p->groups - group : GROUPS_AT_ONCE};
        for (int tile = 0; tile < TILES; tile++) {
            uint8_t *to = prepared + tile * GROUPS_AT_ONCE * prepared_bytes(bits);
            part.tiles[tile] = to;
            for (long next = 0; next < part.groups; next++)
                prepare(from.tiles[tile] + (group + next) * block_bytes(bits), to + next * prepared_bytes(bits), bits);
        }
        for (long row = 0; row < rows; row += MOST_ROWS)
            multiply_prepared[(rows - row < MOST_ROWS ? rows - row : MOST_ROWS) - 1](p, &part, first_row + row, sums + row);
    }
    finish(p, first_row, rows, first_tile, sums);
}

void int8_product(const product *p, int bits, int threads)
{
    static const action as_they_lie[2][MOST_ROWS] = {ACTIONS(by_4_bits), ACTIONS(by_8_bits)};
    static const action prepared[2][MOST_ROWS] = {ACTIONS(by_prepared_4_bits), ACTIONS(by_prepared_8_bits)};
    if (!p->rows)
        return;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long tile = 0; tile < (p->outputs + TILE - 1) / TILE; tile += TILES) {
        if (p->rows <= MOST_ROWS) {
            if (bits == 4)
                few_rows(p, tile, 4, as_they_lie[0][p->rows - 1]);
            else
                few_rows(p, tile, 8, as_they_lie[1][p->rows - 1]);
        } else {
            for (long row = 0; row < p->rows; row += ROWS_AT_ONCE)
                if (bits == 4)
                    many_rows(p, tile, row, 4, prepared[0]);
                else
                    many_rows(p, tile, row, 8, prepared[1]);
        }
    }
}
