/* Attention of one new token per row where many query heads attend a KV head: these are a product, with tiles in registers. Keys and
   values pass piece by piece, as float32 in the nearest caches, while all queries of a part meet them. Where it is
   wanted what slots got, the shares of all are kept.

   A part is some queries of a KV head of a row. A query sums over the slots from the first on, so its outcome depends on nothing but
   the row, whatever the parts are. All sums are in float32. */

#include "query_blocks.h"
#include "team.h"

/* The layout of a thread's room where tiles of registers are used, in words. Python works it out (TiledRoom). */
typedef struct {
    long values_at, last_at, scores_at, shares_at, out_at, unpacked_at, end;
} tiled_room;

typedef struct {
    const char *q;       /* (rows, kv_heads, group, dim) */
    slots keys, values;  /* (rows, kv_heads, capacity, dim); they may be packed */
    more_keys more;      /* for each of (rows, kv_heads, group) */
    const int64_t *held; /* (rows), the new token included */
    char *out;           /* shaped as q, and of its type */
    float *got;          /* (rows, kv_heads, capacity), 0 behind what is held; NULL: it is not wanted */
    float *shares;       /* (rows, kv_heads, queries, stride); without `got` (threads, PROMPT_QUERIES, stride). In tiles of registers:
                            scores, (rows, kv_heads, queries / LANES, stride, LANES), and behind them (rows, kv_heads, 2, queries) */
    float *room;         /* rooms of all threads, one behind the other */
    prompt_room wide;    /* the layout of each room */
    tiled_room tiled;    /* the same where tiles of registers are used */
    long rows, kv_heads, group, dim, capacity;
    long queries, stride; /* the group filled up to whole tiles of either kind, and slots filled up to whole pieces */
    float scale;
    int kind;       /* the type of queries */
    int is_highest; /* slots get the highest share of their group's queries, not the sum of all */
    float cap;      /* of scores; 0: there is none */
} many;

#define SLOTS_AT_ONCE 512 /* of which it is summed up what they got */

_Static_assert(SHARED_KEYS >= NEAR && NEAR % PANEL == 0, "a piece has room");

static ALWAYS_INLINE void unpack(const char *from, float *out, long dim, int kind)
{
    const int bits = kind == GROUP4 ? 4 : 8;
    for (long number = 0; number * GROUP < dim; number++) {
        const long left = dim - number * GROUP;
        float values[GROUP];
        group_to_floats(group_of_row((const uint8_t *)from, number, dim, bits), bits, values);
        memcpy(out + number * GROUP, values, (left < GROUP ? left : GROUP) * sizeof *values);
    }
}

static ALWAYS_INLINE void widen_piece(const many *m, const slots *from, long row, long head, long start, long count, float *out)
{
    for (long slot = 0; slot < count; slot++) {
        const char *values = slot_at(from, row, head, start + slot);
        if (from->kind >= GROUP4)
            unpack(values, out + slot * m->wide.dim, m->dim, from->kind);
        else
            widen_row(values, out + slot * m->wide.dim, m->dim, 1.0f, from->kind);
    }
}

static void lay_piece(const many *m, long row, long head, long start, long count, rooms room)
{
    if (m->keys.kind < GROUP4) {
        lay_keys(&m->keys, row, head, start, count, m->dim, m->wide.dim, room.keys, m->keys.kind);
        return;
    }
    const slots unpacked = {(const char *)room.values, 0, 0, m->wide.dim * (long)sizeof(float), FLOAT};
    widen_piece(m, &m->keys, row, head, start, count, room.values);
    lay_keys(&unpacked, 0, 0, 0, count, m->dim, m->wide.dim, room.keys, FLOAT);
}

/* Some queries of a KV head of a row, from `first` on. */
typedef struct {
    long row, head, first, count, tiles;
    float *shares;
} queries_here;

static void score(const many *m, queries_here own, rooms room)
{
    const long width = m->wide.dim, held = m->held[own.row];
    for (long start = 0; start < held; start += NEAR) {
        const long count = held - start < NEAR ? held - start : NEAR;
        lay_piece(m, own.row, own.head, start, count, room);
        for (long key = 0; key < count; key += PANEL)
            for (long at = 0; at < own.tiles; at++)
                tile_of(count - key, 0)(room.q + at * TILE_ROWS * width, width, room.keys + key * width, PANEL,
                                        own.shares + at * TILE_ROWS * m->stride + start + key, m->stride, m->dim);
    }
}

/* Turns the scores of a query into shares of all. Gives the share of a score that is none of a slot's, if there is one. */
static ALWAYS_INLINE float share_out_query(const many *m, float *scores, long held, float more)
{
    float top = more;
    cap_scores(scores, 0, held, m->cap);
    float total = exponentials(scores, 0, 0, 0, held, rounded_up(held, NEAR), &top);
    const float own = more != -INFINITY ? exponential(more - top) : 0.0f;
    const float part = 1.0f / (total + own);
    for (long slot = 0; slot < held; slot++)
        scores[slot] *= part;
    return own * part;
}

static void sum_values(const many *m, queries_here own, rooms room)
{
    const long width = m->wide.dim, held = m->held[own.row];
    memset(room.out, 0, own.tiles * TILE_ROWS * width * sizeof(float));
    for (long start = 0; start < held; start += NEAR) {
        const long count = held - start < NEAR ? held - start : NEAR;
        widen_piece(m, &m->values, own.row, own.head, start, count, room.values);
        for (long at = 0; at < own.tiles; at++)
            for (long column = 0; column < m->dim; column += PANEL)
                tile_of(m->dim - column, 1)(own.shares + at * TILE_ROWS * m->stride + start, m->stride, room.values + column, width,
                                            room.out + at * TILE_ROWS * width + column, width, count);
    }
}

typedef struct {
    const many *of;
    long parts; /* of each KV head */
} many_parts;

static void attend_part(const void *given, long number, int member)
{
    const many_parts *some = given;
    const many *m = some->of;
    const long unit = number / some->parts, tiles = (m->group + TILE_ROWS - 1) / TILE_ROWS, at = number % some->parts;
    const long begin = tiles * at / some->parts * TILE_ROWS, end = tiles * (at + 1) / some->parts * TILE_ROWS;
    const long behind = end < m->group ? end : m->group, itemsize = itemsize_of(m->kind), width = m->wide.dim;
    const queries_here own = {unit / m->kv_heads, unit % m->kv_heads, begin, behind - begin, (end - begin) / TILE_ROWS,
                              m->shares + (m->got ? unit * m->queries + begin : member * PROMPT_QUERIES) * m->stride};
    const rooms room = rooms_of(m->room + member * m->wide.end, m->wide);
    for (long query = 0; query < own.count; query++)
        widen_row(m->q + (unit * m->group + begin + query) * m->dim * itemsize, room.q + query * width, m->dim, m->scale, m->kind);
    memset(room.q + own.count * width, 0, (own.tiles * TILE_ROWS - own.count) * width * sizeof(float));
    score(m, own, room);
    float more[PROMPT_QUERIES];
    for (long query = 0; query < own.count; query++)
        more[query] = share_out_query(m, own.shares + query * m->stride, m->held[own.row],
                                      score_of_more(m->more, unit * m->group + begin + query));
    sum_values(m, own, room);
    for (long query = 0; query < own.count; query++) {
        const long place = unit * m->group + begin + query;
        float *out = room.out + query * width;
        add_more(m->more, place, more[query], out, m->dim);
#define NARROW(AT, COUNT)                                                                                                        \
    store_some(m->out + (place * m->dim + (AT)) * itemsize, load_some((const char *)(out + (AT)), COUNT, FLOAT), COUNT, m->kind)
        EACH_REGISTER(value, m->dim, NARROW);
#undef NARROW
    }
}

/* Some slots of a KV head, and what they got. */
typedef struct {
    long unit, first, seen; /* those behind are empty */
    float *got;             /* from the first slot of all on */
} slots_here;

static ALWAYS_INLINE slots_here slots_of_part(const many *m, long number)
{
    const long pieces = (m->capacity + SLOTS_AT_ONCE - 1) / SLOTS_AT_ONCE, unit = number / pieces;
    const long first = number % pieces * SLOTS_AT_ONCE, held = m->held[unit / m->kv_heads];
    const long end = first + SLOTS_AT_ONCE < m->capacity ? first + SLOTS_AT_ONCE : m->capacity;
    float *got = m->got + unit * m->capacity;
    memset(got + first, 0, (end - first) * sizeof *got);
    return (slots_here){unit, first, held < end ? held : end, got};
}

/* What some slots of a KV head got from its queries, in their order. */
static void gather_part(const void *given, long number, int member)
{
    const many *m = given;
    const slots_here own = slots_of_part(m, number);
    for (long query = 0; query < m->group; query++) {
        const float *shares = m->shares + (own.unit * m->queries + query) * m->stride;
        if (m->is_highest)
            for (long slot = own.first; slot < own.seen; slot++) {
                const uint32_t one = bits_of_float(shares[slot]), before = bits_of_float(own.got[slot]); /* see highest(..) */
                own.got[slot] = float_of_bits(one > before ? one : before);
            }
        else
            for (long slot = own.first; slot < own.seen; slot++)
                own.got[slot] += shares[slot];
    }
}

#ifdef __AMX_BF16__
#include "queries_in_tiles.h"
#endif

/* What is shared out: blocks of queries that are attended at once, at most so many by a thread. */
typedef struct {
    part_action *attend, *gather;
    long blocks, most;
} way;

static way way_of(const many *m)
{
#ifdef __AMX_BF16__
    const int are_plain = m->keys.kind == BF16 && m->values.kind == BF16, are_one = m->keys.data == m->values.data;
    if (m->kind == BF16 && m->dim % QUERIES_OF_BLOCK == 0 && (are_plain || (are_one && m->keys.kind >= GROUP4)))
        return (way){attend_in_tiles, gather_from_tiles, m->queries / QUERIES_OF_BLOCK, STEP_QUERIES / QUERIES_OF_BLOCK};
#endif
    return (way){attend_part, gather_part, (m->group + TILE_ROWS - 1) / TILE_ROWS, PROMPT_QUERIES / TILE_ROWS};
}

/* Where there are fewer KV heads than threads, some threads share a head's queries. */
void many_queries(const void *given, int threads)
{
    const many *m = given;
    const way how = way_of(m);
    const long units = m->rows * m->kv_heads;
    const long needed = (how.blocks + how.most - 1) / how.most, wanted = (threads + units - 1) / units;
    const long parts = needed > wanted ? needed : wanted;
    const many_parts some = {m, parts < how.blocks ? parts : how.blocks};
    share_out(&some, units * some.parts, threads, how.attend);
    if (m->got)
        share_out(m, units * ((m->capacity + SLOTS_AT_ONCE - 1) / SLOTS_AT_ONCE), threads, how.gather);
}
