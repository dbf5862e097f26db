/* Attention of many queries over one text that they share. Keys and values of a head are read once for hundreds of queries, piece by
   piece: a piece lies in the nearest caches, as float32, while one block of queries after the other passes it. The sums of a query
   over earlier pieces are scaled down where a larger score comes. Beside the outcome, its largest score and its sum of exponentials
   say what it weighs beside other keys.

   A query sums over keys from the first on, piece by piece, so its outcome depends on nothing but itself. All sums are in float32. */

#include "query_blocks.h"
#include "team.h"

typedef struct {
    slots q;              /* (1, heads, queries, dim) */
    slots keys, values;   /* (1, kv_heads, length, dim); they may be packed */
    float *out;           /* (queries, heads, dim) */
    float *scores;        /* (queries, heads): the logarithm of the sum of exponentials of scores */
    float *room;          /* rooms of all threads, one behind the other */
    prompt_room wide;     /* the layout of each room */
    long queries, heads, kv_heads, length, dim;
    float scale;
    float cap; /* of scores; 0: there is none */
} sharing;

_Static_assert(SHARED_QUERIES % PROMPT_QUERIES == 0, "whole blocks");

/* What a thread does at once: queries of a KV head's group, numbered query by query and in each head by head. */
typedef struct {
    long kv_head, group, first, count;
} part;

typedef struct {
    long start, count;
} piece;

/* What the queries of a part have of the pieces so far. */
typedef struct {
    float *sums; /* of shares times values, in the thread's room */
    float tops[SHARED_QUERIES], totals[SHARED_QUERIES];
} progress;

static ALWAYS_INLINE long head_of(part own, long number)
{
    return own.kv_head * own.group + (own.first + number) % own.group;
}

static ALWAYS_INLINE long query_of(part own, long number)
{
    return (own.first + number) / own.group;
}

/* -- a piece --------------------------------------------------------------------------------------------------------------- */

static ALWAYS_INLINE void unpack_row(const char *from, float *out, long dim, int bits)
{
    for (long number = 0; number * GROUP < dim; number++) {
        const long left = dim - number * GROUP;
        float values[GROUP];
        group_to_floats(group_of_row((const uint8_t *)from, number, dim, bits), bits, values);
        memcpy(out + number * GROUP, values, (left < GROUP ? left : GROUP) * sizeof *values);
    }
}

static ALWAYS_INLINE void widen_slots(const sharing *s, const slots *from, long head, piece here, float *out, int kind)
{
    for (long slot = 0; slot < here.count; slot++) {
        const char *values = slot_at(from, 0, head, here.start + slot);
        if (kind < GROUP4)
            widen_row(values, out + slot * s->wide.dim, s->dim, 1.0f, kind);
        else
            unpack_row(values, out + slot * s->wide.dim, s->dim, kind == GROUP4 ? 4 : 8);
    }
}

/* Packed keys are unpacked to where the values will be, and laid from there. */
static ALWAYS_INLINE void lay_piece(const sharing *s, long head, piece here, rooms room, int kind)
{
    if (kind < GROUP4) {
        lay_keys(&s->keys, 0, head, here.start, here.count, s->dim, s->wide.dim, room.keys, kind);
    } else {
        const slots unpacked = {(const char *)room.values, 0, 0, s->wide.dim * (long)sizeof(float), FLOAT};
        widen_slots(s, &s->keys, head, here, room.values, kind);
        lay_keys(&unpacked, 0, 0, 0, here.count, s->dim, s->wide.dim, room.keys, FLOAT);
    }
    widen_slots(s, &s->values, head, here, room.values, kind);
}

/* -- a block of queries ---------------------------------------------------------------------------------------------------- */

/* Scales a query's sums so far to the largest score of all keys up to this piece. `total` is the piece's sum of exponentials. */
static ALWAYS_INLINE void bring_down(progress *done, long number, piece here, float top, float total, float *sums, long width)
{
    if (here.start == 0) {
        memset(sums, 0, width * sizeof *sums);
        done->totals[number] = total;
    } else if (top == done->tops[number]) {
        done->totals[number] += total;
    } else {
        const float factor = exponential(done->tops[number] - top);
        for (long at = 0; at < width; at++)
            sums[at] *= factor;
        done->totals[number] = done->totals[number] * factor + total;
    }
    done->tops[number] = top;
}

static ALWAYS_INLINE void attend_block(const sharing *s, part own, piece here, long first, rooms room, progress *done)
{
    const prompt_room wide = s->wide;
    const long left = own.count - first, queries = left < PROMPT_QUERIES ? left : PROMPT_QUERIES;
    const long tiles_here = (queries + TILE_ROWS - 1) / TILE_ROWS, filling = tiles_here * TILE_ROWS - queries;
    float *sums = done->sums + first * wide.dim;
    for (long query = 0; query < queries; query++) {
        const char *from = slot_at(&s->q, 0, head_of(own, first + query), query_of(own, first + query));
        widen_row(from, room.q + query * wide.dim, s->dim, s->scale, s->q.kind);
    }
    memset(room.q + queries * wide.dim, 0, filling * wide.dim * sizeof(float));
    memset(sums + queries * wide.dim, 0, filling * wide.dim * sizeof(float));

    for (long key = 0; key < here.count; key += PANEL)
        for (long at = 0; at < tiles_here; at++)
            tile_of(here.count - key, 0)(room.q + at * TILE_ROWS * wide.dim, wide.dim, room.keys + key * wide.dim, PANEL,
                                         room.scores + at * TILE_ROWS * wide.stride + key, wide.stride, s->dim);

    for (long query = 0; query < queries; query++) {
        float top = here.start ? done->tops[first + query] : -INFINITY;
        cap_scores(room.scores + query * wide.stride, 0, here.count, s->cap);
        const float total = exponentials(room.scores + query * wide.stride, 0, 0, 0, here.count, here.count, &top);
        bring_down(done, first + query, here, top, total, sums + query * wide.dim, wide.dim);
    }

    for (long key = 0; key < here.count; key += NEAR)
        for (long at = 0; at < tiles_here; at++)
            for (long column = 0; column < s->dim; column += PANEL)
                tile_of(s->dim - column, 1)(room.scores + at * TILE_ROWS * wide.stride + key, wide.stride,
                                            room.values + key * wide.dim + column, wide.dim,
                                            sums + at * TILE_ROWS * wide.dim + column, wide.dim,
                                            here.count - key < NEAR ? here.count - key : NEAR);
}

static ALWAYS_INLINE void put_out(const sharing *s, part own, const progress *done)
{
    for (long number = 0; number < own.count; number++) {
        const long place = query_of(own, number) * s->heads + head_of(own, number);
        const float part = 1.0f / done->totals[number];
        s->scores[place] = done->tops[number] + logf(done->totals[number]);
        for (long at = 0; at < s->dim; at++)
            s->out[place * s->dim + at] = done->sums[number * s->wide.dim + at] * part;
    }
}

static ALWAYS_INLINE void attend(const sharing *s, part own, float *from, int kind)
{
    const rooms room = rooms_of(from, s->wide);
    progress done;
    done.sums = room.out;
    for (piece here = {0, 0}; here.start < s->length; here.start += SHARED_KEYS) {
        const long left = s->length - here.start;
        here.count = left < SHARED_KEYS ? left : SHARED_KEYS;
        lay_piece(s, own.kv_head, here, room, kind);
        for (long first = 0; first < own.count; first += PROMPT_QUERIES)
            attend_block(s, own, here, first, room, &done);
    }
    put_out(s, own, &done);
}

typedef struct {
    const sharing *of;
    long parts; /* of each KV head */
} shared_parts;

static ALWAYS_INLINE void attend_part(const shared_parts *given, long number, int member, int kind)
{
    const sharing *s = given->of;
    const long group = s->heads / s->kv_heads, all_here = s->queries * group, at = number % given->parts;
    const long first = all_here * at / given->parts, behind = all_here * (at + 1) / given->parts;
    const part own = {number / given->parts, group, first, behind - first};
    attend(s, own, s->room + member * s->wide.end, kind);
}

static void attend_bf16(const void *s, long number, int member) { attend_part(s, number, member, BF16); }
static void attend_float(const void *s, long number, int member) { attend_part(s, number, member, FLOAT); }
static void attend_half(const void *s, long number, int member) { attend_part(s, number, member, HALF); }
static void attend_group4(const void *s, long number, int member) { attend_part(s, number, member, GROUP4); }
static void attend_group8(const void *s, long number, int member) { attend_part(s, number, member, GROUP8); }

/* Where there are fewer KV heads than threads, some threads share a head's queries. */
void shared_attention(const void *given, int threads)
{
    const sharing *s = given;
    static part_action *const actions[] = {
        [BF16] = attend_bf16, [FLOAT] = attend_float, [HALF] = attend_half, [GROUP4] = attend_group4, [GROUP8] = attend_group8};
    const long all_here = s->queries * (s->heads / s->kv_heads);
    const long needed = (all_here + SHARED_QUERIES - 1) / SHARED_QUERIES, wanted = (threads + s->kv_heads - 1) / s->kv_heads;
    const shared_parts some = {s, needed > wanted ? needed : wanted};
    share_out(&some, s->kv_heads * some.parts, threads, actions[s->keys.kind]);
}
