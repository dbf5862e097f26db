/* The product of rows of int8 and a transposed matrix in tiles of 4 or 8 bits. The dot product of a group is a whole number; then
   sum = sum + ((dot * scale of x) * scale of the output + sum of x * minimum of the output), group behind group, every operation
   rounded by itself. So an outcome has the same bits in every library and in torch, whatever lies beside its row.

   Some tiles pass at a time, some groups of them after each other: their blocks stay in the cache for all rows, while those that
   come next are fetched. Codes are taken apart anew for every few rows, which costs little beside dot products of dwords; where
   those are slower, or made in tiles of registers (int8_tiles.h), and rows many, they are taken apart once. */

#include "asked_products.h"
#include "int8_sums.h"
#include "int8_tiles.h"
#include "team.h"

#define GROUPS_AT_ONCE (16 / TILES)
#define PREPARED_ROWS 24 /* fewer do not pay for preparing blocks */

typedef struct {
    factors of;
    const uint8_t *data; /* (tiles, bytes of a tile) */
    const float *sums;   /* (rows, groups) */
} product;

/* Blocks of some groups of some tiles, and what is to be fetched from memory meanwhile. */
typedef struct {
    const uint8_t *tiles[TILES], *next[TILES];
    long first_group, groups, lines; /* lines of the cache, with each group and of each tile */
} blocks;

/* Adds some groups to the sums of some rows. */
static ALWAYS_INLINE void multiply(const product *p, const blocks *from, long row, floats (*sums)[REGISTERS], int rows, int bits,
                                   int prepared)
{
    const long x_row = p->of.groups * GROUP, size = prepared ? prepared_bytes(bits) : block_bytes(bits);
    floats held[MOST_ROWS][REGISTERS];
    memcpy(held, sums, rows * sizeof *held);
    for (long group = 0; group < from->groups; group++) {
        const long at_group = row * p->of.groups + from->first_group + group;
        const uint8_t *block[TILES];
        integers dots[MOST_ROWS][REGISTERS] = {0};
#pragma GCC unroll 4
        for (int tile = 0; tile < TILES; tile++)
            block[tile] = from->tiles[tile] + group * size;
        for (long line = 0; line < from->lines; line++)
#pragma GCC unroll 4
            for (int tile = 0; tile < TILES; tile++)
                __builtin_prefetch(from->next[tile] + (group * from->lines + line) * LINE);
        add_dots(block, p->of.codes + at_group * GROUP, x_row, rows, 0, X_DWORDS, bits, prepared, dots);
#pragma GCC unroll 8
        for (int at = 0; at < REGISTERS; at++) {
            const floats scale = shared_at(block[at / PARTS], 0, at % PARTS, bits, prepared);
            const floats minimum = shared_at(block[at / PARTS], 1, at % PARTS, bits, prepared);
#pragma GCC unroll 8
            for (int next = 0; next < rows; next++) {
                const long place = at_group + next * p->of.groups;
                const floats of_codes = __builtin_convertvector(dots[next][at], floats) * p->of.scales[place] * scale;
                held[next][at] += rounded(of_codes) + rounded(p->sums[place] * minimum);
            }
        }
    }
    memcpy(sums, held, rows * sizeof *held);
}

typedef void (*action)(const product *p, const blocks *from, long row, floats (*sums)[REGISTERS]);

#define DEFINED(ROWS, BITS, PREPARED)                                                                                            \
    static void multiply_##ROWS##_##BITS##_##PREPARED(const product *p, const blocks *from, long row, floats (*sums)[REGISTERS]) \
    {                                                                                                                            \
        multiply(p, from, row, sums, ROWS, BITS, PREPARED);                                                                      \
    }
#define NAMED(ROWS, BITS, PREPARED) multiply_##ROWS##_##BITS##_##PREPARED,

ALL_ROWS(DEFINED, 4, 0)
ALL_ROWS(DEFINED, 8, 0)
#if !WHOLE_DWORDS
ALL_ROWS(DEFINED, 4, 1)
ALL_ROWS(DEFINED, 8, 1)
#endif

/* By whether blocks are prepared, then by bits. */
static const action actions[][2][MOST_ROWS] = {
    {{ALL_ROWS(NAMED, 4, 0)}, {ALL_ROWS(NAMED, 8, 0)}},
#if !WHOLE_DWORDS
    {{ALL_ROWS(NAMED, 4, 1)}, {ALL_ROWS(NAMED, 8, 1)}},
#endif
};

/* -- in tiles of registers ---------------------------------------------------------------------------------------------------- */

#if WITH_TILES

/* Adds some groups to the sums of some rows and a tile of outputs. Codes of 4 bits are prepared. */
static ALWAYS_INLINE void multiply_in_tiles(const product *p, const blocks *from, long row, floats (*sums)[REGISTERS], int tile, int rows,
                                            int bits)
{
    const int prepared = bits == 4;
    const long all_groups = p->of.groups, x_row = all_groups * GROUP, begin = row * all_groups + from->first_group;
    const long size = prepared ? prepared_bytes(bits) : block_bytes(bits);
    _Alignas(LINE) dots_of_groups dots;
    floats held[LINES_OF_TILE];
    use_tiles_of(rows, 1);
#pragma GCC unroll 16
    for (int next = 0; next < rows; next++)
        held[next] = sums[next][tile];
    dots_in_tiles(p->of.codes + begin * GROUP, x_row, from->tiles[tile], 1, 0, dots);
    for (long group = 0; group < from->groups; group++) {
        const uint8_t *block = from->tiles[tile] + group * size;
        const float *scales_of_x = p->of.scales + begin + group, *sums_of_x = p->sums + begin + group;
        for (long line = 0; line < from->lines; line++)
            __builtin_prefetch(from->next[tile] + (group * from->lines + line) * LINE);
        if (group + 1 < from->groups)
            dots_in_tiles(p->of.codes + (begin + group + 1) * GROUP, x_row, block + size, 1, 0, dots + (group + 1) % 2);
        const floats scale = shared_at(block, 0, 0, bits, prepared), minimum = shared_at(block, 1, 0, bits, prepared);
#pragma GCC unroll 16
        for (int next = 0; next < rows; next++) {
            const integers dot = LOAD(integers, dots[group % 2][next]);
            const floats of_codes = __builtin_convertvector(dot, floats) * scales_of_x[next * all_groups] * scale;
            held[next] += rounded(of_codes) + rounded(sums_of_x[next * all_groups] * minimum);
        }
    }
#pragma GCC unroll 16
    for (int next = 0; next < rows; next++)
        sums[next][tile] = held[next];
}

typedef void (*tiles_action)(const product *p, const blocks *from, long row, floats (*sums)[REGISTERS], int tile);

#define DEFINED_IN_TILES(ROWS, BITS)                                                                                             \
    static void in_tiles_##ROWS##_##BITS(const product *p, const blocks *from, long row, floats (*sums)[REGISTERS], int tile)    \
    {                                                                                                                            \
        multiply_in_tiles(p, from, row, sums, tile, ROWS, BITS);                                                                 \
    }
#define NAMED_IN_TILES(ROWS, BITS) in_tiles_##ROWS##_##BITS,

EACH_IN_TILES(DEFINED_IN_TILES, 4)
EACH_IN_TILES(DEFINED_IN_TILES, 8)

/* By bits. */
static const tiles_action actions_in_tiles[][NUMBERS_IN_TILES] = {{EACH_IN_TILES(NAMED_IN_TILES, 4)}, {EACH_IN_TILES(NAMED_IN_TILES, 8)}};

#endif

/* -- the order of the work ---------------------------------------------------------------------------------------------------- */

/* The block of this group and tile; behind the last tile the last one is repeated, behind the last group come the next tiles. */
static ALWAYS_INLINE const uint8_t *block_at(const product *p, long tile, long group, int bits)
{
    const long last = (p->of.outputs - 1) / TILE, later = group < p->of.groups ? tile : tile + TILES;
    return p->data + ((later < last ? later : last) * p->of.groups + (group < p->of.groups ? group : 0)) * block_bytes(bits);
}

static ALWAYS_INLINE void prepare_blocks(blocks *from, uint8_t *room, int bits)
{
    for (int tile = 0; tile < TILES; tile++) {
        for (long group = 0; group < from->groups; group++)
            prepare(from->tiles[tile] + group * block_bytes(bits), room + group * prepared_bytes(bits), bits);
        from->tiles[tile] = room;
        room += GROUPS_AT_ONCE * prepared_bytes(bits);
    }
}

/* How many rows make use of tiles of registers, how many parts there are then, and whether blocks are prepared for them. */
typedef struct {
    int are_many, prepared;
    long parts;
} way;

static ALWAYS_INLINE way way_of(long rows, int bits)
{
#if WITH_TILES
    if (rows >= FEWEST_ROWS)
        return (way){1, bits == 4, blocks_in_tiles(rows)};
#endif
    return (way){0, !WHOLE_DWORDS && rows >= PREPARED_ROWS, (rows + MOST_ROWS - 1) / MOST_ROWS};
}

static ALWAYS_INLINE void multiply_part_of_rows(const product *p, const blocks *from, way how, long row, long count, int bits,
                                                floats (*sums)[REGISTERS])
{
#if WITH_TILES
    for (int tile = 0; how.are_many && tile < TILES; tile++)
        actions_in_tiles[bits == 8][count - FEWEST_IN_TILES](p, from, row, sums, tile);
    if (!how.are_many)
        actions[0][bits == 8][count - 1](p, from, row, sums);
#else
    actions[how.prepared][bits == 8][count - 1](p, from, row, sums);
#endif
}

static ALWAYS_INLINE void multiply_tiles(const product *p, long first_tile, long first_row, int bits)
{
    const long left = p->of.rows - first_row, rows = left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE;
    const way how = way_of(rows, bits);
    const long parts = how.parts, lines = (block_bytes(bits) / LINE + parts - 1) / parts;
    floats sums[ROWS_AT_ONCE][REGISTERS];
    uint8_t room[TILES * GROUPS_AT_ONCE * PREPARED_BYTES] __attribute__((aligned(LINE)));
    memset(sums, 0, rows * sizeof *sums);
    const long turns = (p->of.groups + GROUPS_AT_ONCE - 1) / GROUPS_AT_ONCE;
    for (long turn = 0; turn < turns; turn++) {
        const long group = p->of.groups * turn / turns, after = p->of.groups * (turn + 1) / turns, groups = after - group;
        blocks from = {{0}, {0}, group, groups, lines};
        for (int tile = 0; tile < TILES; tile++) {
            from.tiles[tile] = block_at(p, first_tile + tile, group, bits);
            from.next[tile] = block_at(p, first_tile + tile, after, bits);
        }
        if (how.prepared)
            prepare_blocks(&from, room, bits);
        for (long part = 0, row = 0; part < parts; part++) {
            const long count = (rows - row + parts - part - 1) / (parts - part); /* about the same in each part */
            multiply_part_of_rows(p, &from, how, first_row + row, count, bits, sums + row);
            row += count;
            for (int tile = 0; tile < TILES; tile++)
                from.next[tile] += groups * lines * LINE;
            if ((part + 1) * lines * LINE >= block_bytes(bits))
                from.lines = 0;
        }
    }
    finish(&p->of, first_row, rows, first_tile, sums);
}

typedef struct {
    const product *products;
    const long *begins; /* of the parts of each */
    long count;
} some_products;

/* A part is the next tiles of a product, for all rows. */
static ALWAYS_INLINE void multiply_part(const some_products *some, long number, int bits)
{
    const long at = work_of_part(some->begins, some->count, number);
    const product *p = some->products + at;
    for (long row = 0; row < p->of.rows; row += ROWS_AT_ONCE)
        multiply_tiles(p, (number - some->begins[at]) * TILES, row, bits);
    leave_tiles();
}

static void multiply_by_4(const void *some, long number, int member) { multiply_part(some, number, 4); }
static void multiply_by_8(const void *some, long number, int member) { multiply_part(some, number, 8); }

/* Some products with codes of 4 or 8 bits. */
void int8_product(const void *given, int threads)
{
    const asked_products *asked = given;
    long begins[asked->count + 1];
    const some_products some = {asked->products, begins, asked->count};
    begins[0] = 0;
    for (long at = 0; at < some.count; at++)
        begins[at + 1] = begins[at] + parts_of_product(&some.products[at].of);
    share_out(&some, begins[some.count], threads, asked->told == 4 ? multiply_by_4 : multiply_by_8);
}
