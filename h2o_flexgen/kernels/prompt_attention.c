/* Attention of a prompt: every new token attends what its row held before and the new tokens up to itself, or the nearest of them
   where there is a window; and, where asked, the attention each key got from all of them, the sum or the highest share. Products
   of queries and keys are computed once: a block of queries has its scores, for all the keys it sees, in a few hundred kilobytes,
   where they become shares, are gathered by key, and are multiplied with the values.

   A (row, KV head), or where many heads attend it a part of these, is worked on by one thread from its first query to its last. Each
   query sums over its keys from the first on, and parts depend on the number of heads alone: so a row's outcome depends only on the
   row itself and on the largest number of earlier keys in its batch. All sums are in float32. */

#include "query_blocks.h"
#include "team.h"

typedef struct {
    slots q, keys, values;  /* (rows, heads or kv_heads, new or all tokens, dim), all of the kind of the outcome */
    const int64_t *before;  /* (rows): keys that exist before the new ones; there is room for all_tokens - new_tokens */
    const float *weights;   /* (rows, new_tokens): how much queries count in what keys get; NULL: it is not needed */
    char *out;              /* (rows, new_tokens, heads, dim) */
    float *got;             /* (rows, kv_heads, all_tokens) */
    float *of_parts;        /* (rows, kv_heads, parts, all_tokens): the same of each part, where there are several */
    more_keys more;         /* for each of (rows, new_tokens, heads) */
    float *room;            /* rooms of all threads, one behind the other */
    prompt_room wide;       /* the layout of each room */
    long rows, heads, kv_heads, new_tokens, all_tokens, dim;
    long window; /* tokens that a token sees, itself included */
    long parts;  /* of the heads of a KV head, which threads attend one by one */
    float scale;
    int is_highest; /* keys get the highest share of all queries, not the sum of all */
    float cap;      /* of scores; 0: there is none */
} prompt;

/* Adds the attention that keys get from a block of queries, each with its factor, to `got`; or has the highest of both there. */
static ALWAYS_INLINE void gather_columns(const float *shares, long stride, const float *factors, long queries, float *got,
                                         long keys, int is_highest)
{
    for (long key = 0; key < keys; key += 4 * LANES) {
        floats here[4] = {{0}, {0}, {0}, {0}};
        for (long query = 0; query < queries; query++) {
            const floats factor = all(factors[query]);
#pragma GCC unroll 4
            for (int at = 0; at < 4; at++) {
                const floats share = LOAD(floats, shares + query * stride + key + at * LANES);
                here[at] = is_highest ? highest(here[at], factor * share) : here[at] + factor * share;
            }
        }
#pragma GCC unroll 4
        for (int at = 0; at < 4; at++) {
            const floats before = LOAD(floats, got + key + at * LANES);
            const floats now = is_highest ? highest(before, here[at]) : before + here[at];
            memcpy(got + key + at * LANES, &now, sizeof now);
        }
    }
}

/* -- a head ---------------------------------------------------------------------------------------------------------------- */

static ALWAYS_INLINE long query_at(const prompt *p, long row, long token, long head)
{
    return (row * p->new_tokens + token) * p->heads + head;
}

/* The place of the first key that a token sees: those before the new ones stand from 0 on, the new ones behind their room. */
static ALWAYS_INLINE long first_seen(const prompt *p, long row, long token)
{
    const long before = p->before[row], oldest = before + token + 1 - p->window; /* among those that there are */
    return oldest <= 0 ? 0 : oldest < before ? oldest : oldest - before + p->all_tokens - p->new_tokens;
}

static ALWAYS_INLINE long not_below(long least, long at)
{
    return at > least ? at - least : 0;
}

/* Attends a block of queries of one head from `first` on: writes their outcome, and gathers what keys got. */
static ALWAYS_INLINE void attend_block(const prompt *p, long row, long head, long first, rooms room, int kind)
{
    const prompt_room wide = p->wide;
    const long held = p->all_tokens - p->new_tokens, left = p->new_tokens - first;
    const long queries = left < PROMPT_QUERIES ? left : PROMPT_QUERIES;
    const long tiles_here = (queries + TILE_ROWS - 1) / TILE_ROWS, end = held + first + queries;
    const long start = first_seen(p, row, first) / NEAR * NEAR; /* no query of the block sees keys before it */
    for (long query = 0; query < queries; query++) {
        foresee(&p->q, row, head, first + query + AHEAD, p->new_tokens, p->dim);
        widen_row(slot_at(&p->q, row, head, first + query), room.q + query * wide.dim, p->dim, p->scale, kind);
    }
    memset(room.q + queries * wide.dim, 0, (tiles_here * TILE_ROWS - queries) * wide.dim * sizeof(float));

    for (long key = start; key < end; key += PANEL)
        for (long at = 0; at < tiles_here; at++) {
            const long last = held + first + (at + 1) * TILE_ROWS, seen = last < end ? last : end;
            if (key < seen)
                tile_of(seen - key, 0)(room.q + at * TILE_ROWS * wide.dim, wide.dim, room.keys + key * wide.dim, PANEL,
                                       room.scores + at * TILE_ROWS * wide.stride + key, wide.stride, p->dim);
        }

    float parts[PROMPT_QUERIES], factors[PROMPT_QUERIES], more[PROMPT_QUERIES], any = 0.0f;
    for (long query = 0; query < queries; query++) {
        float *scores = room.scores + query * wide.stride + start, top = -INFINITY;
        const long from = first_seen(p, row, first + query) - start, seen = held + first + query + 1 - start;
        const float score = score_of_more(p->more, query_at(p, row, first + query, head));
        if (score != -INFINITY)
            top = score;
        cap_scores(scores, from, seen, p->cap);
        float total = exponentials(scores, from, not_below(start, p->before[row]), not_below(start, held), seen,
                                   rounded_up(end, 4 * LANES) - start, &top);
        more[query] = score != -INFINITY ? exponential(score - top) : 0.0f;
        if (score != -INFINITY)
            total += more[query];
        parts[query] = 1.0f / total;
        factors[query] = p->weights ? p->weights[row * p->new_tokens + first + query] * parts[query] : 0.0f;
        any += factors[query] != 0.0f;
    }
    if (any && p->is_highest)
        gather_columns(room.scores + start, wide.stride, factors, queries, room.got + start, end - start, 1);
    else if (any)
        gather_columns(room.scores + start, wide.stride, factors, queries, room.got + start, end - start, 0);

    for (long key = start; key < end; key += NEAR)
        for (long at = 0; at < tiles_here; at++) {
            const long last = held + first + (at + 1) * TILE_ROWS, seen = last < end ? last : end;
            for (long column = 0; column < p->dim && key < seen; column += PANEL)
                tile_of(p->dim - column, key > start)(room.scores + at * TILE_ROWS * wide.stride + key, wide.stride,
                                                      room.values + key * wide.dim + column, wide.dim,
                                                      room.out + at * TILE_ROWS * wide.dim + column, wide.dim,
                                                      seen - key < NEAR ? seen - key : NEAR);
        }
    for (long query = 0; query < queries; query++) {
        const long at = query_at(p, row, first + query, head);
        float *out = room.out + query * wide.dim;
        add_more(p->more, at, more[query], out, p->dim);
        narrow_row(out, p->out + at * p->dim * itemsize_of(kind), p->dim, parts[query], kind);
    }
}

static ALWAYS_INLINE void attend(const prompt *p, long row, long kv_head, long part, float *from, int kind)
{
    const prompt_room wide = p->wide;
    const long group = p->heads / p->kv_heads;
    const rooms room = rooms_of(from, wide);
    lay_keys(&p->keys, row, kv_head, 0, p->all_tokens, p->dim, wide.dim, room.keys, kind);
    for (long key = 0; key < p->all_tokens; key++) {
        foresee(&p->values, row, kv_head, key + AHEAD, p->all_tokens, p->dim);
        widen_row(slot_at(&p->values, row, kv_head, key), room.values + key * wide.dim, p->dim, 1.0f, kind);
    }
    memset(room.got, 0, wide.keys * sizeof(float));
    for (long head = kv_head * group + group * part / p->parts; head < kv_head * group + group * (part + 1) / p->parts; head++)
        for (long first = 0; first < p->new_tokens; first += PROMPT_QUERIES)
            attend_block(p, row, head, first, room, kind);
    if (p->weights)
        memcpy((p->of_parts ? p->of_parts : p->got) + ((row * p->kv_heads + kv_head) * p->parts + part) * p->all_tokens, room.got,
               p->all_tokens * sizeof(float));
}

static ALWAYS_INLINE void attend_part(const prompt *p, long number, int member, int kind)
{
    const long unit = number / p->parts;
    attend(p, unit / p->kv_heads, unit % p->kv_heads, number % p->parts, p->room + member * p->wide.end, kind);
}

/* What the keys of a KV head got from all parts, in their order. */
static void join_parts(const void *given, long unit, int member)
{
    const prompt *p = given;
    const float *of_parts = p->of_parts + unit * p->parts * p->all_tokens;
    float *got = p->got + unit * p->all_tokens;
    memcpy(got, of_parts, p->all_tokens * sizeof *got);
    for (long part = 1; part < p->parts; part++)
        for (long key = 0; key < p->all_tokens; key++) {
            const float own = of_parts[part * p->all_tokens + key];
            if (!p->is_highest)
                got[key] += own;
            else if (bits_of_float(own) > bits_of_float(got[key])) /* see highest(..) */
                got[key] = own;
        }
}

static void attend_bf16(const void *p, long number, int member) { attend_part(p, number, member, BF16); }
static void attend_float(const void *p, long number, int member) { attend_part(p, number, member, FLOAT); }
static void attend_half(const void *p, long number, int member) { attend_part(p, number, member, HALF); }

void prompt_attention(const void *given, int threads)
{
    const prompt *p = given;
    static part_action *const actions[] = {[BF16] = attend_bf16, [FLOAT] = attend_float, [HALF] = attend_half};
    share_out(given, p->rows * p->kv_heads * p->parts, threads, actions[p->q.kind]);
    if (p->weights && p->of_parts)
        share_out(given, p->rows * p->kv_heads, threads, join_parts);
}
