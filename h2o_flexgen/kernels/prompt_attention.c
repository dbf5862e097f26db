/* Attention of a prompt: every new token attends what its row held before and the new tokens up to itself; and, where asked, the
   attention each key received from all of them. Products of queries and keys are computed once: a block of queries has its scores,
   for all the keys it sees, in a few hundred kilobytes, where they become shares, are summed up by key, and are multiplied with the
   values.

   A (row, KV head) is worked on by one thread from its first query to its last, and each query sums over its keys from the first
   on, so a row's outcome depends only on the row itself and on the largest number of earlier keys in its batch. All sums are in
   float32. */

#include "sizes.h"
#include "slots.h"
#include "squares.h"
#include <math.h>
#include <omp.h>

/* A tile of a product lies in registers: TILE_ROWS rows, and up to TILE_WIDTH registers of columns. */
#define TILE_ROWS 6
#if LANES == 16
#define TILE_WIDTH 4
#else
#define TILE_WIDTH 2 /* there are 16 registers */
#endif
#define PANEL (TILE_WIDTH * LANES) /* columns of a tile */
#define AHEAD 16                   /* tokens that are prefetched */
#define NEAR 64                    /* keys whose values stay in the nearest cache for a block of queries */

_Static_assert(PROMPT_KEYS % PANEL == 0 && PROMPT_KEYS % (4 * LANES) == 0 && REGISTER_VALUES % LANES == 0 &&
                   PROMPT_QUERIES % TILE_ROWS == 0,
               "whole tiles");

/* The layout of a thread's room, in values: widths of its parts, where each begins behind the keys, and the end. Python works it
   out (PromptRoom in sizes.py). */
typedef struct {
    long keys, dim, stride;
    long values_at, sums_at, scores_at, queries_at, out_at, end;
} prompt_room;

typedef struct {
    slots q, keys, values;  /* (rows, heads or kv_heads, new or all tokens, dim), all of the kind of the outcome */
    const int64_t *before;  /* (rows): keys that exist before the new ones; there is room for all_tokens - new_tokens */
    const float *weights;   /* (rows, new_tokens): weights of queries in the sums; NULL: no sums */
    char *out;              /* (rows, new_tokens, heads, dim) */
    float *sums;            /* (rows, kv_heads, all_tokens) */
    float *room;            /* rooms of all threads, one behind the other */
    prompt_room wide;       /* the layout of each room */
    long rows, heads, kv_heads, new_tokens, all_tokens, dim;
    float scale;
} prompt;

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

/* The keys of a head as panels of columns, (panels, dim, PANEL); zeros behind the last key. */
static ALWAYS_INLINE void lay_keys(const prompt *p, long row, long head, float *out, int kind)
{
    const long itemsize = itemsize_of(kind);
    for (long first = 0; first < rounded_up(p->all_tokens, PANEL); first += LANES) {
        float *panel = out + first / PANEL * PANEL * p->wide.dim + first % PANEL;
        for (long at = 0; at < p->dim; at += LANES) {
            words block[LANES];
#pragma GCC unroll 16
            for (int key = 0; key < LANES; key++) {
                const int is_there = first + key < p->all_tokens;
                const char *from = slot_at(&p->keys, row, head, first + key) + at * itemsize;
                block[key] = is_there ? (words)widened(from, p->dim - at, kind) : (words){0};
            }
            turn(block);
#pragma GCC unroll 16
            for (int column = 0; column < LANES; column++)
                memcpy(panel + (at + column) * PANEL, &block[column], sizeof *block);
        }
    }
}

/* -- shares ---------------------------------------------------------------------------------------------------------------- */

/* Turns the scores of a query into exp(score - largest score) and gives their sum. The first `seen` count, except those between
   `before` and `hidden`; the others, up to `end`, become zero. */
static ALWAYS_INLINE float exponentials(float *scores, long before, long hidden, long seen, long end)
{
    const long whole = rounded_up(seen, LANES);
    float lanes[LANES], top = -INFINITY, total = 0.0f;
    floats tops = all(-INFINITY), totals = {0};
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
    memset(scores + before, 0, (hidden - before) * sizeof *scores);
    memset(scores + seen, 0, (end - seen) * sizeof *scores);
    memcpy(lanes, &totals, sizeof lanes);
    for (int lane = 0; lane < LANES; lane++)
        total += lanes[lane];
    return total;
}

/* Adds the attention that keys receive from a block of queries, each with its factor, to `sums`. */
static ALWAYS_INLINE void add_columns(const float *shares, long stride, const float *factors, long queries, float *sums, long keys)
{
    for (long key = 0; key < keys; key += 4 * LANES) {
        floats here[4] = {{0}, {0}, {0}, {0}};
        for (long query = 0; query < queries; query++) {
            const floats factor = all(factors[query]);
#pragma GCC unroll 4
            for (int at = 0; at < 4; at++)
                here[at] += factor * LOAD(floats, shares + query * stride + key + at * LANES);
        }
#pragma GCC unroll 4
        for (int at = 0; at < 4; at++) {
            const floats sum = LOAD(floats, sums + key + at * LANES) + here[at];
            memcpy(sums + key + at * LANES, &sum, sizeof sum);
        }
    }
}

/* -- a head ---------------------------------------------------------------------------------------------------------------- */

typedef struct {
    float *keys, *values, *sums, *scores, *q, *out;
} rooms;

/* Attends a block of queries of one head from `first` on: writes their outcome, and adds to the sums of the keys. */
static ALWAYS_INLINE void attend_block(const prompt *p, long row, long head, long first, rooms room, int kind)
{
    const prompt_room wide = p->wide;
    const long held = p->all_tokens - p->new_tokens, left = p->new_tokens - first;
    const long queries = left < PROMPT_QUERIES ? left : PROMPT_QUERIES;
    const long tiles_here = (queries + TILE_ROWS - 1) / TILE_ROWS, end = held + first + queries;
    for (long query = 0; query < queries; query++) {
        foresee(&p->q, row, head, first + query + AHEAD, p->new_tokens, p->dim);
        widen_row(slot_at(&p->q, row, head, first + query), room.q + query * wide.dim, p->dim, p->scale, kind);
    }
    memset(room.q + queries * wide.dim, 0, (tiles_here * TILE_ROWS - queries) * wide.dim * sizeof(float));

    for (long key = 0; key < end; key += PANEL)
        for (long at = 0; at < tiles_here; at++) {
            const long last = held + first + (at + 1) * TILE_ROWS, seen = last < end ? last : end;
            if (key < seen)
                tile_of(seen - key, 0)(room.q + at * TILE_ROWS * wide.dim, wide.dim, room.keys + key * wide.dim, PANEL,
                                       room.scores + at * TILE_ROWS * wide.stride + key, wide.stride, p->dim);
        }

    float parts[PROMPT_QUERIES], factors[PROMPT_QUERIES], any = 0.0f;
    for (long query = 0; query < queries; query++) {
        float *scores = room.scores + query * wide.stride;
        parts[query] = 1.0f / exponentials(scores, p->before[row], held, held + first + query + 1, rounded_up(end, 4 * LANES));
        factors[query] = p->weights ? p->weights[row * p->new_tokens + first + query] * parts[query] : 0.0f;
        any += factors[query] != 0.0f;
    }
    if (any)
        add_columns(room.scores, wide.stride, factors, queries, room.sums, end);

    for (long key = 0; key < end; key += NEAR)
        for (long at = 0; at < tiles_here; at++) {
            const long last = held + first + (at + 1) * TILE_ROWS, seen = last < end ? last : end;
            for (long column = 0; column < p->dim && key < seen; column += PANEL)
                tile_of(p->dim - column, key > 0)(room.scores + at * TILE_ROWS * wide.stride + key, wide.stride,
                                                  room.values + key * wide.dim + column, wide.dim,
                                                  room.out + at * TILE_ROWS * wide.dim + column, wide.dim,
                                                  seen - key < NEAR ? seen - key : NEAR);
        }
    const long itemsize = itemsize_of(kind);
    for (long query = 0; query < queries; query++)
        narrow_row(room.out + query * wide.dim,
                   p->out + ((row * p->new_tokens + first + query) * p->heads + head) * p->dim * itemsize, p->dim, parts[query],
                   kind);
}

static ALWAYS_INLINE void attend(const prompt *p, long row, long kv_head, float *from, int kind)
{
    const prompt_room wide = p->wide;
    const long group = p->heads / p->kv_heads;
    const rooms room = {from,
                        from + wide.values_at,
                        from + wide.sums_at,
                        from + wide.scores_at,
                        from + wide.queries_at,
                        from + wide.out_at};
    lay_keys(p, row, kv_head, room.keys, kind);
    for (long key = 0; key < p->all_tokens; key++) {
        foresee(&p->values, row, kv_head, key + AHEAD, p->all_tokens, p->dim);
        widen_row(slot_at(&p->values, row, kv_head, key), room.values + key * wide.dim, p->dim, 1.0f, kind);
    }
    memset(room.sums, 0, wide.keys * sizeof(float));
    for (long head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (long first = 0; first < p->new_tokens; first += PROMPT_QUERIES)
            attend_block(p, row, head, first, room, kind);
    if (p->weights)
        memcpy(p->sums + (row * p->kv_heads + kv_head) * p->all_tokens, room.sums, p->all_tokens * sizeof(float));
}

typedef void (*head_action)(const prompt *p, long row, long kv_head, float *room);

static void attend_bf16(const prompt *p, long row, long kv_head, float *room) { attend(p, row, kv_head, room, BF16); }
static void attend_float(const prompt *p, long row, long kv_head, float *room) { attend(p, row, kv_head, room, FLOAT); }
static void attend_half(const prompt *p, long row, long kv_head, float *room) { attend(p, row, kv_head, room, HALF); }

void prompt_attention(const prompt *p, int threads)
{
    static const head_action actions[] = {[BF16] = attend_bf16, [FLOAT] = attend_float, [HALF] = attend_half};
    const head_action action = actions[p->q.kind];
#pragma omp parallel for collapse(2) num_threads(threads) schedule(dynamic, 1)
    for (long row = 0; row < p->rows; row++)
        for (long kv_head = 0; kv_head < p->kv_heads; kv_head++)
            action(p, row, kv_head, p->room + omp_get_thread_num() * p->wide.end);
}
