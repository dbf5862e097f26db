/* Attention of one new token per row in tiles of registers (AMX), for `many_queries` where queries and slots are bfloat16.

   Keys lie as they are wanted, and queries of a part are arranged in pairs once. Values are arranged in pairs of slots, piece by
   piece. Shares have more digits than bfloat16: they are split in two, which together are as near as 2^-17 of them. The sums of
   a query are scaled down where a later piece has a larger score. All sums are in float32.

   Tiles and registers are different parts of a processor: while the shares of some queries meet values in tiles, those of the next
   ones are worked out in registers. */

#pragma once

#include "pair_tiles.h"

enum {
    QUERIES_OF_BLOCK = 2 * LANES, /* two panels of a register each: what is multiplied at once */
    SLOTS_OF_STEP = 2 * STEP,     /* slots are summed up in pairs */
    STEPS = STEP_SLOTS / SLOTS_OF_STEP,
    WORDS_OF_TILE = STEP * LANES,
    WORDS_OF_SHARES = QUERIES_OF_BLOCK * STEP /* of a block and a step: of either half of their digits */
};

_Static_assert(QUERIES_OF_BLOCK == STEP_BLOCK && SLOTS_OF_STEP == STEP_BLOCK && STEP_QUERIES % STEP_BLOCK == 0 &&
                   STEP_SLOTS % STEP_BLOCK == 0,
               "whole blocks");

/* The parts of a thread's room. */
typedef struct {
    uint32_t *q;      /* (panels, pairs, LANES): pairs of values */
    uint32_t *values; /* (steps, columns / 32, 2, STEP, LANES): pairs of slots */
    char *last;       /* slots of a step, filled up with zeros */
    float *scores;    /* (panels, STEP_SLOTS, LANES), where they are not kept */
    uint32_t *shares; /* (blocks, steps, 2, QUERIES_OF_BLOCK, STEP): pairs of slots */
    float *out;       /* (queries, dim); in the order of `values` */
} tile_rooms;

/* Some queries of a KV head of a row, from `first` on. */
typedef struct {
    long unit, row, head, first, count;
    float *scores; /* (panels, stride, LANES) */
    long stride;
    _Alignas(64) float tops[STEP_QUERIES];
    _Alignas(64) float totals[STEP_QUERIES]; /* of exponentials, as far as pieces have passed */
} tiled_queries;

/* A piece of slots. */
typedef struct {
    long start, count, steps;
    float *scores;
} piece_here;

static ALWAYS_INLINE tile_rooms tile_rooms_of(const many *m, int member)
{
    float *from = m->room + member * m->wide.end;
    return (tile_rooms){(uint32_t *)from,
                        (uint32_t *)from + m->tiled.values_at,
                        (char *)(from + m->tiled.last_at),
                        from + m->tiled.scores_at,
                        (uint32_t *)from + m->tiled.shares_at,
                        from + m->tiled.out_at};
}

static ALWAYS_INLINE const char *query_of(const many *m, const tiled_queries *own, long query)
{
    return m->q + (own->unit * m->group + own->first + query) * m->dim * itemsize_of(BF16);
}

static void arrange_queries(const many *m, const tiled_queries *own, tile_rooms room)
{
    const long pairs = m->dim / 2;
    for (long first = 0; first < rounded_up(own->count, QUERIES_OF_BLOCK); first += LANES)
        for (long pair = 0; pair < pairs; pair += LANES) {
            words block[LANES];
#pragma GCC unroll 16
            for (int query = 0; query < LANES; query++)
                block[query] = first + query < own->count ? LOAD(words, query_of(m, own, first + query) + 4 * pair) : (words){0};
            turn(block);
            memcpy(room.q + (first / LANES * pairs + pair) * LANES, block, sizeof block);
        }
}

/* The scores of a step's slots and a block's queries. */
static ALWAYS_INLINE void score_block(const char *keys, long slot, const uint32_t *q, long pairs, float *scores, long panel)
{
    _tile_zero(ABOVE_LEFT);
    _tile_zero(ABOVE_RIGHT);
    _tile_zero(BELOW_LEFT);
    _tile_zero(BELOW_RIGHT);
    for (long pair = 0; pair < pairs; pair += STEP) {
        _tile_loadd(LEFT, q + pair * LANES, LINE_OF_TILE);
        _tile_loadd(ABOVE, keys + 4 * pair, slot);
        _tile_dpbf16ps(ABOVE_LEFT, ABOVE, LEFT);
        _tile_loadd(RIGHT, q + (pairs + pair) * LANES, LINE_OF_TILE);
        _tile_dpbf16ps(ABOVE_RIGHT, ABOVE, RIGHT);
        _tile_loadd(BELOW, keys + STEP * slot + 4 * pair, slot);
        _tile_dpbf16ps(BELOW_LEFT, BELOW, LEFT);
        _tile_dpbf16ps(BELOW_RIGHT, BELOW, RIGHT);
    }
    _tile_stored(ABOVE_LEFT, scores, LINE_OF_TILE);
    _tile_stored(ABOVE_RIGHT, scores + panel, LINE_OF_TILE);
    _tile_stored(BELOW_LEFT, scores + STEP * LANES, LINE_OF_TILE);
    _tile_stored(BELOW_RIGHT, scores + panel + STEP * LANES, LINE_OF_TILE);
}

/* What lies behind the last slot is not read. */
static const char *whole_step(const many *m, const tiled_queries *own, long start, long count, char *last)
{
    const long nbytes = m->dim * itemsize_of(BF16);
    for (long slot = 0; slot < SLOTS_OF_STEP; slot++)
        if (slot < count)
            memcpy(last + slot * nbytes, slot_at(&m->keys, own->row, own->head, start + slot), nbytes);
        else
            memset(last + slot * nbytes, 0, nbytes);
    return last;
}

/* Values of a step's slots, in pairs: of each 32 columns a tile gets those whose numbers have no 4 in them, another one the rest. */
static void arrange_step(const many *m, const tiled_queries *own, long start, long count, uint32_t *values)
{
    const __m512i nothing = _mm512_setzero_si512();
    for (long at = 0; at < m->dim / QUERIES_OF_BLOCK; at++, values += 2 * WORDS_OF_TILE)
        for (long pair = 0; pair < STEP; pair++) {
            const char *first = slot_at(&m->values, own->row, own->head, start + 2 * pair) + at * LINE_OF_TILE;
            const __m512i one = 2 * pair < count ? _mm512_loadu_si512(first) : nothing;
            const __m512i other = 2 * pair + 1 < count ? _mm512_loadu_si512(first + m->values.slot) : nothing;
            _mm512_storeu_si512(values + pair * LANES, _mm512_unpacklo_epi16(one, other));
            _mm512_storeu_si512(values + WORDS_OF_TILE + pair * LANES, _mm512_unpackhi_epi16(one, other));
        }
}

/* Scores of a piece's slots; and its values are arranged while they are near, for they may lie in the keys. */
static void score_piece(const many *m, const tiled_queries *own, piece_here piece, tile_rooms room)
{
    const long pairs = m->dim / 2, panel = own->stride * LANES;
    use_tiles_of(QUERIES_OF_BLOCK);
    for (long slot = 0; slot < piece.count; slot += SLOTS_OF_STEP) {
        const int is_whole = slot + SLOTS_OF_STEP <= piece.count;
        const char *keys = is_whole ? slot_at(&m->keys, own->row, own->head, piece.start + slot)
                                    : whole_step(m, own, piece.start + slot, piece.count - slot, room.last);
        const long stride = is_whole ? m->keys.slot : m->dim * itemsize_of(BF16);
        __asm__ volatile("" : : : "memory"); /* tiles are read where a compiler does not see it */
        for (long first = 0; first < own->count; first += QUERIES_OF_BLOCK)
            score_block(keys, stride, room.q + first * pairs, pairs, piece.scores + first / LANES * panel + slot * LANES, panel);
        arrange_step(m, own, piece.start + slot, piece.count - slot,
                     room.values + slot / STEP * m->dim / QUERIES_OF_BLOCK * WORDS_OF_TILE);
    }
}

/* -- shares ---------------------------------------------------------------------------------------------------------------- */

#define POWERS_OF_E 1.44269504f /* scores become powers of two */

/* 2 to this power, with a relative error below 2e-7; next to nothing where it is far below 0. NaN stays NaN. */
static ALWAYS_INLINE floats power_of_two(floats of)
{
    const __m512 x = _mm512_max_ps((__m512)all(-126.0f), (__m512)of);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT);
    const floats rest = (floats)(x - whole);
    floats value = rest * 1.535336188e-4f + 1.339887440e-3f;
    value = value * rest + 9.618437357e-3f;
    value = value * rest + 5.550332471e-2f;
    value = value * rest + 2.402264791e-1f;
    value = value * rest + 6.931472028e-1f;
    value = value * rest + 1.0f;
    return (floats)_mm512_scalef_ps((__m512)value, whole);
}

/* Powers of two of each score, where a cap has changed them, or not. */
static ALWAYS_INLINE float powers_of_scores(const many *m)
{
    return m->cap > 0.0f ? POWERS_OF_E : m->scale * POWERS_OF_E;
}

/* Brings the scores of a panel below the cap, and fills them up to whole steps with what counts for next to nothing. Gives the largest
   of them, in powers of two. */
static ALWAYS_INLINE floats largest_score(const many *m, float *scores, long count)
{
    const __m512 nothing = (__m512)all(-INFINITY);
    __m512 tops[] = {nothing, nothing, nothing, nothing};
    for (long slot = 0; m->cap > 0.0f && slot < count; slot++) {
        const floats one = capped(LOAD(floats, scores + slot * LANES) * m->scale, m->cap);
        memcpy(scores + slot * LANES, &one, sizeof one);
    }
    for (long slot = count; slot < rounded_up(count, SLOTS_OF_STEP); slot++)
        _mm512_storeu_ps(scores + slot * LANES, nothing);
    for (long slot = 0; slot < count; slot += 4) /* a step is a multiple of four */
#pragma GCC unroll 4
        for (int at = 0; at < 4; at++)
            tops[at] = _mm512_max_ps(_mm512_loadu_ps(scores + (slot + at) * LANES), tops[at]); /* a NaN is none */
    const __m512 top = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
    return (floats)top * powers_of_scores(m);
}

/* The shares of a panel's queries in a step, on their way. */
typedef struct {
    const float *scores;
    uint32_t *to;
    floats top, total;
    float powers;
    words upper[STEP], lower[STEP];
} sharing;

/* The upper half of a float is a bfloat16, and of the rest another one. */
static ALWAYS_INLINE void share_pair(sharing *here, int pair)
{
    const float *scores = here->scores + 2 * pair * LANES;
    const words mask = (words){0} + 0xffff0000u;
    const words first = (words)power_of_two(LOAD(floats, scores) * here->powers - here->top);
    const words second = (words)power_of_two(LOAD(floats, scores + LANES) * here->powers - here->top);
    const words of_first = (words)((floats)first - (floats)(first & mask)) + 0x8000; /* rounds to the nearest */
    const words of_second = (words)((floats)second - (floats)(second & mask)) + 0x8000;
    here->upper[pair] = first >> 16 | (second & mask);
    here->lower[pair] = of_first >> 16 | (of_second & mask);
    here->total += (floats)first + (floats)second;
}

/* As tiles want them: (LANES, STEP). */
static ALWAYS_INLINE void store_shares(sharing *here)
{
    turn(here->upper);
    memcpy(here->to, here->upper, sizeof here->upper);
    turn(here->lower);
    memcpy(here->to + WORDS_OF_SHARES, here->lower, sizeof here->lower);
}

static ALWAYS_INLINE void share_step(sharing *here)
{
#pragma GCC unroll 4
    for (int pair = 0; pair < STEP; pair++)
        share_pair(here, pair);
    store_shares(here);
}

/* Begins with the shares of a block: its largest scores so far, and its sums and totals scaled down to them. */
static void begin_block(const many *m, tiled_queries *own, piece_here piece, long block, tile_rooms room)
{
    for (long first = block; first < own->count && first < block + QUERIES_OF_BLOCK; first += LANES) {
        const floats before = LOAD(floats, own->tops + first);
        const floats top = larger(largest_score(m, piece.scores + first * own->stride, piece.count), before);
        const floats factors = piece.start ? power_of_two(before - top) : all(1.0f), total = LOAD(floats, own->totals + first) * factors;
        memcpy(own->tops + first, &top, sizeof top);
        memcpy(own->totals + first, &total, sizeof total);
        for (long query = 0; query < LANES && first + query < own->count; query++)
            if (factors[query] != 1.0f)
                for (long at = 0; at < m->dim; at++)
                    room.out[(first + query) * m->dim + at] *= factors[query];
    }
}

/* The next of a block's shares: panel by panel, and in each step by step. Says whether there are any. */
static ALWAYS_INLINE int begin_shares(const many *m, const tiled_queries *own, piece_here piece, long block, long number,
                                      tile_rooms room, sharing *here)
{
    const long first = block + number / piece.steps * LANES, step = number % piece.steps;
    if (first >= own->count || number >= 2 * piece.steps)
        return 0;
    here->scores = piece.scores + first * own->stride + step * SLOTS_OF_STEP * LANES;
    here->to = room.shares + (block / QUERIES_OF_BLOCK * STEPS + step) * 2 * WORDS_OF_SHARES + first % QUERIES_OF_BLOCK * STEP;
    here->top = LOAD(floats, own->tops + first);
    here->total = LOAD(floats, own->totals + first);
    here->powers = powers_of_scores(m);
    return 1;
}

static ALWAYS_INLINE void note_total(tiled_queries *own, piece_here piece, long block, long number, const sharing *here)
{
    memcpy(own->totals + block + number / piece.steps * LANES, &here->total, sizeof here->total);
}

static void share_rest(const many *m, tiled_queries *own, piece_here piece, long block, long number, tile_rooms room)
{
    for (sharing here; begin_shares(m, own, piece, block, number, room, &here); number++) {
        share_step(&here);
        note_total(own, piece, block, number, &here);
    }
}

/* -- values ---------------------------------------------------------------------------------------------------------------- */

static ALWAYS_INLINE void add_shares(const uint32_t *shares, long above, int are_two)
{
    _tile_loadd(ABOVE, shares, LINE_OF_TILE);
    _tile_dpbf16ps(ABOVE_LEFT, ABOVE, LEFT);
    _tile_dpbf16ps(ABOVE_RIGHT, ABOVE, RIGHT);
    if (are_two) {
        _tile_loadd(BELOW, shares + above * STEP, LINE_OF_TILE);
        _tile_dpbf16ps(BELOW_LEFT, BELOW, LEFT);
        _tile_dpbf16ps(BELOW_RIGHT, BELOW, RIGHT);
    }
}

/* What a block's queries have of 32 columns of a piece, and with `adds` of those before it; works out shares of others meanwhile. */
static ALWAYS_INLINE void add_columns(const uint32_t *shares, const uint32_t *values, long step, long steps, float *out, long line,
                                      long rows, int are_two, int adds, sharing *beside)
{
    const long above = rows_above(rows);
    if (adds) {
        _tile_loadd(ABOVE_LEFT, out, 4 * line);
        _tile_loadd(ABOVE_RIGHT, out + LANES, 4 * line);
        if (are_two) {
            _tile_loadd(BELOW_LEFT, out + above * line, 4 * line);
            _tile_loadd(BELOW_RIGHT, out + above * line + LANES, 4 * line);
        }
    } else {
        _tile_zero(ABOVE_LEFT);
        _tile_zero(ABOVE_RIGHT);
        if (are_two) {
            _tile_zero(BELOW_LEFT);
            _tile_zero(BELOW_RIGHT);
        }
    }
    for (long at = 0; at < steps; at++, values += step, shares += 2 * WORDS_OF_SHARES) {
        _tile_loadd(LEFT, values, LINE_OF_TILE);
        _tile_loadd(RIGHT, values + WORDS_OF_TILE, LINE_OF_TILE);
        add_shares(shares, above, are_two);
        add_shares(shares + WORDS_OF_SHARES, above, are_two);
        if (beside)
            for (long pair = at * STEP / steps; pair < (at + 1) * STEP / steps; pair++)
                share_pair(beside, pair);
    }
    if (beside)
        store_shares(beside);
    _tile_stored(ABOVE_LEFT, out, 4 * line);
    _tile_stored(ABOVE_RIGHT, out + LANES, 4 * line);
    if (are_two) {
        _tile_stored(BELOW_LEFT, out + above * line, 4 * line);
        _tile_stored(BELOW_RIGHT, out + above * line + LANES, 4 * line);
    }
}

/* Adds what a block's queries have of a piece, and works out the shares of the next block. */
static void add_block(const many *m, tiled_queries *own, piece_here piece, long block, tile_rooms room)
{
    const long columns = m->dim / QUERIES_OF_BLOCK, left = own->count - block, rows = left < QUERIES_OF_BLOCK ? left : QUERIES_OF_BLOCK;
    const uint32_t *shares = room.shares + block / QUERIES_OF_BLOCK * STEPS * 2 * WORDS_OF_SHARES;
    const long next = block + QUERIES_OF_BLOCK;
    use_tiles_of(rows);
    __asm__ volatile("" : : : "memory"); /* tiles are read where a compiler does not see it */
    for (long at = 0; at < columns; at++) {
        const uint32_t *values = room.values + at * 2 * WORDS_OF_TILE;
        float *out = room.out + block * m->dim + at * QUERIES_OF_BLOCK;
        sharing beside;
        if (begin_shares(m, own, piece, next, at, room, &beside)) { /* a block that has a next one is whole */
            add_columns(shares, values, columns * 2 * WORDS_OF_TILE, piece.steps, out, m->dim, rows, 1, piece.start > 0, &beside);
            note_total(own, piece, next, at, &beside);
        } else if (rows > 1) {
            add_columns(shares, values, columns * 2 * WORDS_OF_TILE, piece.steps, out, m->dim, rows, 1, piece.start > 0, NULL);
        } else {
            add_columns(shares, values, columns * 2 * WORDS_OF_TILE, piece.steps, out, m->dim, rows, 0, piece.start > 0, NULL);
        }
    }
    share_rest(m, own, piece, next, columns, room);
}

/* Adds what all queries have of a piece. */
static void add_piece(const many *m, tiled_queries *own, piece_here piece, tile_rooms room)
{
    begin_block(m, own, piece, 0, room);
    share_rest(m, own, piece, 0, 0, room);
    for (long block = 0; block < own->count; block += QUERIES_OF_BLOCK) {
        begin_block(m, own, piece, block + QUERIES_OF_BLOCK, room);
        add_block(m, own, piece, block, room);
    }
}

/* -- all of it --------------------------------------------------------------------------------------------------------------- */

/* Columns of a query in their order, times a factor. */
static ALWAYS_INLINE void order_columns(float *out, long dim, float factor)
{
    const __m512i lower = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), upper = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (long at = 0; at < dim; at += QUERIES_OF_BLOCK) {
        const floats one = LOAD(floats, out + at) * factor, other = LOAD(floats, out + at + LANES) * factor;
        _mm512_storeu_si512(out + at, _mm512_permutex2var_epi64((__m512i)one, lower, (__m512i)other));
        _mm512_storeu_si512(out + at + LANES, _mm512_permutex2var_epi64((__m512i)one, upper, (__m512i)other));
    }
}

/* Where what slots got is wanted: the largest score of each query, and the share of its exponential. */
static ALWAYS_INLINE float *summary_of(const many *m, long unit)
{
    return m->shares + m->rows * m->kv_heads * m->queries * m->stride + unit * 2 * m->queries;
}

static void finish_queries(const many *m, const tiled_queries *own, tile_rooms room)
{
    for (long query = 0; query < own->count; query++) {
        const long place = own->unit * m->group + own->first + query;
        const float more = score_of_more(m->more, place) * POWERS_OF_E, before = own->tops[query], top = more > before ? more : before;
        const float factor = top == before ? 1.0f : power_of_two(all(before - top))[0];
        const float beside = more != -INFINITY ? power_of_two(all(more - top))[0] : 0.0f;
        const float part = 1.0f / (own->totals[query] * factor + beside);
        float *out = room.out + query * m->dim;
        order_columns(out, m->dim, factor * part);
        add_more(m->more, place, beside * part, out, m->dim);
        for (long at = 0; at < m->dim; at += LANES)
            store_floats(m->out + (place * m->dim + at) * itemsize_of(BF16), LOAD(floats, out + at), BF16);
        if (m->got) {
            summary_of(m, own->unit)[own->first + query] = top;
            summary_of(m, own->unit)[m->queries + own->first + query] = part;
        }
    }
}

static void attend_in_tiles(const void *given, long number, int member)
{
    const many_parts *some = given;
    const many *m = some->of;
    const long unit = number / some->parts, at = number % some->parts, blocks = m->queries / QUERIES_OF_BLOCK;
    const long begin = blocks * at / some->parts * QUERIES_OF_BLOCK, end = blocks * (at + 1) / some->parts * QUERIES_OF_BLOCK;
    const tile_rooms room = tile_rooms_of(m, member);
    tiled_queries own = {unit, unit / m->kv_heads, unit % m->kv_heads, begin, (end < m->group ? end : m->group) - begin,
                         m->got ? m->shares + (unit * m->queries + begin) * m->stride : room.scores, m->got ? m->stride : STEP_SLOTS};
    const long held = m->held[own.row];
    arrange_queries(m, &own, room);
    for (long query = 0; query < STEP_QUERIES; query++)
        own.tops[query] = -INFINITY;
    for (long start = 0; start < held; start += STEP_SLOTS) {
        const long count = held - start < STEP_SLOTS ? held - start : STEP_SLOTS;
        const piece_here piece = {start, count, rounded_up(count, SLOTS_OF_STEP) / SLOTS_OF_STEP,
                                  own.scores + (m->got ? start : 0) * LANES};
        score_piece(m, &own, piece, room);
        add_piece(m, &own, piece, room);
    }
    finish_queries(m, &own, room);
    leave_tiles();
}

static ALWAYS_INLINE float highest_of(floats values)
{
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
        values = highest(values, __builtin_shuffle(values, (integers)LANE_NUMBERS ^ half));
    return values[0];
}

/* What some slots of a KV head got from its queries. */
static void gather_from_tiles(const void *given, long number, int member)
{
    const many *m = given;
    const slots_here own = slots_of_part(m, number);
    const float *tops = summary_of(m, own.unit), *parts = tops + m->queries, powers = powers_of_scores(m);
    const float *scores = m->shares + own.unit * m->queries * m->stride;
    for (long slot = own.first; slot < own.seen; slot++) {
        floats found = {0};
        for (long first = 0; first < m->group; first += LANES) {
            const floats score = LOAD(floats, scores + first * m->stride + slot * LANES);
            const floats share = power_of_two(score * powers - LOAD(floats, tops + first)) * LOAD(floats, parts + first);
            const integers is_there = (integers)LANE_NUMBERS < (int)(m->group - first);
            const floats counted = (floats)((integers)share & is_there);
            found = m->is_highest ? highest(counted, found) : found + counted;
        }
        own.got[slot] = m->is_highest ? highest_of(found) : sum_of(found);
    }
}
