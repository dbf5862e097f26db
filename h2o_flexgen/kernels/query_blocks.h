/* The parts of attention of many queries at once: products with tiles in registers, and a head's keys and values as these
   need them, in float32. All sums are in float32. */

#pragma once

#include "cap.h"
#include "sizes.h"
#include "slots.h"
#include "squares.h"

/* A tile of a product lies in registers: TILE_ROWS rows, and up to TILE_WIDTH registers of columns. */
#if LANES == 16
#define TILE_WIDTH 4
#else
#define TILE_WIDTH 2 /* there are 16 registers */
#endif
#define PANEL (TILE_WIDTH * LANES) /* columns of a tile */
#define AHEAD 16                   /* tokens that are prefetched */
#define NEAR 64                    /* keys with values that stay in the nearest cache for a block of queries */

_Static_assert(NEAR % PANEL == 0 && NEAR % (4 * LANES) == 0, "what begins near is a whole tile");
_Static_assert(PROMPT_KEYS % PANEL == 0 && PROMPT_KEYS % (4 * LANES) == 0 && REGISTER_VALUES % LANES == 0 &&
                   PROMPT_QUERIES % TILE_ROWS == 0,
               "whole tiles");

/* The layout of a thread's room, in values: widths of its parts, where each begins behind the keys, and the end. Python works it
   out (PromptRoom in sizes.py). */
typedef struct {
    long keys, dim, stride;
    long values_at, got_at, scores_at, queries_at, out_at, end;
} prompt_room;

static ALWAYS_INLINE long rounded_up(long count, long to)
{
    return (count + to - 1) / to * to;
}

/* -- products -------------------------------------------------------------------------------------------------------------- */

/* c = a . b, or c += a . b if it adds: a (TILE_ROWS, depth), b (depth, width registers), strides in values. */
static ALWAYS_INLINE void tile(const float *a, long a_row, const float *b, long b_row, float *c, long c_row, long depth,
                               int width, int adds)
{
    floats sums[TILE_ROWS][TILE_WIDTH];
#pragma GCC unroll 6
    for (int row = 0; row < TILE_ROWS; row++)
#pragma GCC unroll 4
        for (int at = 0; at < width; at++)
            sums[row][at] = adds ? LOAD(floats, c + row * c_row + at * LANES) : (floats){0};
    for (long step = 0; step < depth; step++) {
        floats those[TILE_WIDTH];
#pragma GCC unroll 4
        for (int at = 0; at < width; at++)
            those[at] = LOAD(floats, b + step * b_row + at * LANES);
#pragma GCC unroll 6
        for (int row = 0; row < TILE_ROWS; row++) {
            const floats one = all(a[row * a_row + step]);
#pragma GCC unroll 4
            for (int at = 0; at < width; at++)
                sums[row][at] += one * those[at];
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < TILE_ROWS; row++)
#pragma GCC unroll 4
        for (int at = 0; at < width; at++)
            memcpy(c + row * c_row + at * LANES, &sums[row][at], sizeof(floats));
}

typedef void (*product)(const float *a, long a_row, const float *b, long b_row, float *c, long c_row, long depth);

#define TILES(WIDTH)                                                                                                             \
    static void tile_##WIDTH(const float *a, long a_row, const float *b, long b_row, float *c, long c_row, long depth)           \
    {                                                                                                                            \
        tile(a, a_row, b, b_row, c, c_row, depth, WIDTH, 0);                                                                     \
    }                                                                                                                            \
    static void add_tile_##WIDTH(const float *a, long a_row, const float *b, long b_row, float *c, long c_row, long depth)       \
    {                                                                                                                            \
        tile(a, a_row, b, b_row, c, c_row, depth, WIDTH, 1);                                                                     \
    }

TILES(1)
TILES(2)
#if TILE_WIDTH == 4
TILES(3)
TILES(4)
static const product tiles[2][TILE_WIDTH] = {{tile_1, tile_2, tile_3, tile_4},
                                             {add_tile_1, add_tile_2, add_tile_3, add_tile_4}};
#else
static const product tiles[2][TILE_WIDTH] = {{tile_1, tile_2}, {add_tile_1, add_tile_2}};
#endif

static ALWAYS_INLINE product tile_of(long columns, int adds) /* the narrowest that has this many columns, or the widest */
{
    return tiles[adds][columns >= PANEL ? TILE_WIDTH - 1 : (columns - 1) / LANES];
}

/* -- values as the products want them -------------------------------------------------------------------------------------- */

/* A register of values, of which `left` are there; zeros behind them. */
static ALWAYS_INLINE floats widened(const char *from, long left, int kind)
{
    char whole[4 * LANES] = {0};
    if (left < LANES)
        from = memcpy(whole, from, left * itemsize_of(kind));
    return load_floats(from, kind);
}

static ALWAYS_INLINE void widen_row(const char *from, float *out, long dim, float scale, int kind)
{
    for (long at = 0; at < dim; at += LANES) {
        const floats values = widened(from + at * itemsize_of(kind), dim - at, kind) * scale;
        memcpy(out + at, &values, sizeof values);
    }
}

static ALWAYS_INLINE void narrow_row(const float *from, char *out, long dim, float scale, int kind)
{
    for (long at = 0; at < dim; at++)
        store_value(out + at * itemsize_of(kind), from[at] * scale, kind);
}

/* Prefetches: tokens of a head lie far apart, and the processor does not foresee where the next ones are. */
static ALWAYS_INLINE void foresee(const slots *from, long row, long head, long token, long count, long dim)
{
    if (token < count)
        for (long at = 0; at < dim * itemsize_of(from->kind); at += 64)
            __builtin_prefetch(slot_at(from, row, head, token) + at);
}

/* Keys of a head from `start` on as panels of columns, (panels, width, PANEL); zeros behind the last key. */
static ALWAYS_INLINE void lay_keys(const slots *from, long row, long head, long start, long count, long dim, long width, float *out,
                                   int kind)
{
    const long itemsize = itemsize_of(kind);
    for (long first = 0; first < rounded_up(count, PANEL); first += LANES) {
        float *panel = out + first / PANEL * PANEL * width + first % PANEL;
        for (long at = 0; at < dim; at += LANES) {
            words block[LANES];
#pragma GCC unroll 16
            for (int key = 0; key < LANES; key++) {
                const int is_there = first + key < count;
                const char *slot = slot_at(from, row, head, start + first + key) + at * itemsize;
                block[key] = is_there ? (words)widened(slot, dim - at, kind) : (words){0};
            }
            turn(block);
#pragma GCC unroll 16
            for (int column = 0; column < LANES; column++)
                memcpy(panel + (at + column) * PANEL, &block[column], sizeof *block);
        }
    }
}

/* -- shares ---------------------------------------------------------------------------------------------------------------- */

/* Turns the scores of a query into exp(score - largest score) and gives their sum. Those from `first` up to `seen` count, except
   those between `before` and `hidden`; the others, up to `end`, become zero. `largest` is that of scores elsewhere, and becomes
   that of all. */
static ALWAYS_INLINE float exponentials(float *scores, long first, long before, long hidden, long seen, long end, float *largest)
{
    const long whole = rounded_up(seen, LANES);
    float lanes[LANES], top = *largest, total = 0.0f;
    floats tops = all(top), totals = {0};
    for (long key = 0; key < first; key++)
        scores[key] = -INFINITY;
    for (long key = before; key < hidden; key++)
        scores[key] = -INFINITY;
    for (long key = seen; key < whole; key++)
        scores[key] = -INFINITY;
    for (long key = 0; key < whole; key += LANES)
        tops = larger(LOAD(floats, scores + key), tops);
    memcpy(lanes, &tops, sizeof lanes);
    for (int lane = 0; lane < LANES; lane++)
        top = lanes[lane] > top ? lanes[lane] : top;
    for (long key = 0; key < whole; key += LANES) {
        const floats one = exp_below_zero(LOAD(floats, scores + key) - top); /* next to nothing where it does not count */
        totals += one;
        memcpy(scores + key, &one, sizeof one);
    }
    memset(scores, 0, first * sizeof *scores);
    memset(scores + before, 0, (hidden - before) * sizeof *scores);
    memset(scores + seen, 0, (end - seen) * sizeof *scores);
    memcpy(lanes, &totals, sizeof lanes);
    for (int lane = 0; lane < LANES; lane++)
        total += lanes[lane];
    *largest = top;
    return total;
}

static ALWAYS_INLINE float exponential(float from) /* of a number that is not above 0 */
{
    return exp_below_zero(all(from))[0];
}

/* The parts of a thread's room. */
typedef struct {
    float *keys, *values, *got, *scores, *q, *out;
} rooms;

static ALWAYS_INLINE rooms rooms_of(float *from, prompt_room wide)
{
    return (rooms){from,
                   from + wide.values_at,
                   from + wide.got_at,
                   from + wide.scores_at,
                   from + wide.queries_at,
                   from + wide.out_at};
}
