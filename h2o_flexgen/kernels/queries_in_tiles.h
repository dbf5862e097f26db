/* Attention of one new token per row in tiles of registers (AMX), for `many_queries` where queries are bfloat16, and slots are, or are
   packed latents.

   Keys lie as they are wanted, and queries of a part are arranged in pairs once. Values are arranged in pairs of slots, some columns
   of a piece at a time; packed slots become bfloat16 before, piece by piece. Shares have more digits than bfloat16: they are split in
   two, which together are as near as 2^-17 of them. The sums of a query are scaled down where a later piece has a larger score. All
   sums are in float32.

   Tiles and registers are different parts of a processor, so both have work: while tiles have the scores of a piece, the shares of
   the one before are worked out in registers; and while shares meet values of some columns, the next ones are arranged. What is read
   from the cache behind the nearest one is said to be read once, so that it drives nothing out of the nearest. */

#pragma once

#include "group_values.h"
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
    uint32_t *values; /* (2, steps, 2, STEP, LANES): pairs of slots of 32 columns, and of the next ones */
    char *last;       /* slots of a step, filled up with zeros */
    float *scores;    /* (2, panels, STEP_SLOTS, LANES): of a piece and of the next one, where they are not kept */
    uint32_t *shares; /* (blocks, steps, 2, QUERIES_OF_BLOCK, STEP): pairs of slots */
    float *out;       /* (queries, dim); in the order of `values` */
    char *unpacked;   /* (2, STEP_SLOTS, dim), bfloat16: slots of a piece and of the next one, where they are packed */
} tile_rooms;

/* Some queries of a KV head of a row, from `first` on. */
typedef struct {
    long unit, row, head, first, count;
    float *scores; /* (panels, stride, LANES) */
    long stride;
    _Alignas(64) float tops[STEP_QUERIES];
    _Alignas(64) float totals[STEP_QUERIES]; /* of exponentials, as far as pieces have passed */
} tiled_queries;

/* Slots that lie as bfloat16. */
typedef struct {
    const char *data;
    long slot; /* bytes from one to the next */
} plain_slots;

/* A piece of slots. */
typedef struct {
    long start, count, steps;
    plain_slots keys, values;
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
                        from + m->tiled.out_at,
                        (char *)(from + m->tiled.unpacked_at)};
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

/* -- slots ----------------------------------------------------------------------------------------------------------------- */

static ALWAYS_INLINE void unpack_group(packed_group from, int bits, char *out)
{
    const decoder with = decoder_of(from);
    if (bits == 4) { /* all sixteen values are looked up */
        const __m512i values = _mm512_castsi256_si512((__m256i)bf16_of_floats(with.values));
        const __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)from.codes));
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(_mm512_and_si512(pairs, _mm512_set1_epi16(15)), values));
        _mm512_storeu_si512(out + GROUP, _mm512_permutexvar_epi16(_mm512_srli_epi16(pairs, 4), values));
    } else {
#pragma GCC unroll 4
        for (int at = 0; at < GROUP; at += LANES)
            store_floats(out + 2 * at, decoded_8(words_of_bytes(from.codes + at), with), BF16);
    }
}

static ALWAYS_INLINE void unpack_slot(const char *from, int bits, long dim, char *out)
{
    for (long at = 0; at < dim; at += GROUP) {
        const packed_group group = group_of_row((const uint8_t *)from, at / GROUP, dim, bits);
        char last[2 * GROUP];
        unpack_group(group, bits, at + GROUP <= dim ? out + 2 * at : last);
        if (at + GROUP > dim)
            memcpy(out + 2 * at, last, 2 * (dim - at));
    }
}

static void unpack_piece(const many *m, const tiled_queries *own, piece_here piece)
{
    const long nbytes = m->dim * itemsize_of(BF16);
    for (long slot = 0; slot < piece.count; slot++) {
        const char *from = slot_at(&m->keys, own->row, own->head, piece.start + slot);
        char *to = (char *)piece.keys.data + slot * nbytes;
        if (m->keys.kind == GROUP4)
            unpack_slot(from, 4, m->dim, to);
        else
            unpack_slot(from, 8, m->dim, to);
    }
}

/* There are no slots behind the last piece. Packed ones are both keys and values. */
static piece_here piece_at(const many *m, const tiled_queries *own, long start, tile_rooms room)
{
    const long left = m->held[own->row] - start, count = left < 0 ? 0 : left < STEP_SLOTS ? left : STEP_SLOTS;
    const long turn = start / STEP_SLOTS % 2, place = m->got ? start : turn * STEP_QUERIES / LANES * own->stride;
    piece_here piece = {start, count, rounded_up(count, SLOTS_OF_STEP) / SLOTS_OF_STEP,
                        {slot_at(&m->keys, own->row, own->head, start), m->keys.slot},
                        {slot_at(&m->values, own->row, own->head, start), m->values.slot},
                        own->scores + place * LANES};
    if (m->keys.kind >= GROUP4) {
        const long nbytes = m->dim * itemsize_of(BF16);
        piece.keys = piece.values = (plain_slots){room.unpacked + turn * STEP_SLOTS * nbytes, nbytes};
        unpack_piece(m, own, piece);
    }
    return piece;
}

/* What lies behind the last slot is not read. */
static plain_slots whole_step(piece_here piece, long from, long nbytes, char *last)
{
    for (long slot = 0; slot < SLOTS_OF_STEP; slot++)
        if (from + slot < piece.count)
            memcpy(last + slot * nbytes, piece.keys.data + (from + slot) * piece.keys.slot, nbytes);
        else
            memset(last + slot * nbytes, 0, nbytes);
    return (plain_slots){last, nbytes};
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

/* The shares of a piece on their way: panel by panel, and in each step by step. */
typedef struct {
    const many *m;
    tiled_queries *own;
    piece_here piece;
    tile_rooms room;
    long number, count; /* of steps of panels */
    int pair;           /* of the step */
    const float *scores;
    uint32_t *to;
    floats top, total;
    float powers;
    words upper[STEP], lower[STEP];
} sharing;

/* Begins with the shares of a panel: its largest scores so far, and its sums and totals scaled down to them. */
static void begin_panel(const many *m, tiled_queries *own, piece_here piece, long first, tile_rooms room)
{
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

static void begin_step(sharing *here)
{
    const long first = here->number / here->piece.steps * LANES, step = here->number % here->piece.steps;
    if (!step)
        begin_panel(here->m, here->own, here->piece, first, here->room);
    here->pair = 0;
    here->scores = here->piece.scores + first * here->own->stride + step * SLOTS_OF_STEP * LANES;
    here->to = here->room.shares + (first / QUERIES_OF_BLOCK * STEPS + step) * 2 * WORDS_OF_SHARES + first % QUERIES_OF_BLOCK * STEP;
    here->top = LOAD(floats, here->own->tops + first);
    here->total = LOAD(floats, here->own->totals + first);
}

static void begin_sharing(const many *m, tiled_queries *own, piece_here piece, tile_rooms room, sharing *here)
{
    here->m = m;
    here->own = own;
    here->piece = piece;
    here->room = room;
    here->number = 0;
    here->count = rounded_up(own->count, LANES) / LANES * piece.steps;
    here->powers = powers_of_scores(m);
    begin_step(here);
}

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

/* As tiles want them: (LANES, STEP). And the next step begins. */
static __attribute__((noinline)) void end_step(sharing *here)
{
    turn(here->upper);
    memcpy(here->to, here->upper, sizeof here->upper);
    turn(here->lower);
    memcpy(here->to + WORDS_OF_SHARES, here->lower, sizeof here->lower);
    memcpy(here->own->totals + here->number / here->piece.steps * LANES, &here->total, sizeof here->total);
    if (++here->number < here->count)
        begin_step(here);
}

/* The next few pairs of slots: a power of two, so that a step ends with some of them. */
static ALWAYS_INLINE void share_some(sharing *here, int few)
{
    const int pair = here->pair;
    if (here->number >= here->count)
        return;
#pragma GCC unroll 2
    for (int at = 0; at < few; at++)
        share_pair(here, pair + at);
    here->pair = pair + few;
    if (here->pair == STEP)
        end_step(here);
}

static void share_rest(sharing *here)
{
    while (here->number < here->count) {
#pragma GCC unroll 4
        for (int pair = here->pair; pair < STEP; pair++)
            share_pair(here, pair);
        end_step(here);
    }
}

/* -- scores ---------------------------------------------------------------------------------------------------------------- */

/* The scores of a step's slots and a block's queries; works out shares of the piece before meanwhile. */
static ALWAYS_INLINE void score_block(const char *keys, long slot, const uint32_t *q, long pairs, float *scores, long panel, int are_two,
                                      sharing *beside, int few)
{
    _tile_zero(ABOVE_LEFT);
    _tile_zero(BELOW_LEFT);
    if (are_two) {
        _tile_zero(ABOVE_RIGHT);
        _tile_zero(BELOW_RIGHT);
    }
    for (long pair = 0; pair < pairs; pair += STEP) {
        _tile_stream_loadd(LEFT, q + pair * LANES, LINE_OF_TILE);
        _tile_loadd(ABOVE, keys + 4 * pair, slot);
        _tile_dpbf16ps(ABOVE_LEFT, ABOVE, LEFT);
        if (are_two) {
            _tile_stream_loadd(RIGHT, q + (pairs + pair) * LANES, LINE_OF_TILE);
            _tile_dpbf16ps(ABOVE_RIGHT, ABOVE, RIGHT);
        }
        _tile_loadd(BELOW, keys + STEP * slot + 4 * pair, slot);
        _tile_dpbf16ps(BELOW_LEFT, BELOW, LEFT);
        if (are_two)
            _tile_dpbf16ps(BELOW_RIGHT, BELOW, RIGHT);
        if (beside && few == 2) /* as usual: it is unrolled */
            share_some(beside, 2);
        else if (beside)
            share_some(beside, few);
    }
    _tile_stored(ABOVE_LEFT, scores, LINE_OF_TILE);
    _tile_stored(BELOW_LEFT, scores + STEP * LANES, LINE_OF_TILE);
    if (are_two) {
        _tile_stored(ABOVE_RIGHT, scores + panel, LINE_OF_TILE);
        _tile_stored(BELOW_RIGHT, scores + panel + STEP * LANES, LINE_OF_TILE);
    }
}

/* Scores of a piece's slots, beside shares of the piece before. */
static void score_piece(const many *m, const tiled_queries *own, piece_here piece, tile_rooms room, sharing *beside)
{
    const long pairs = m->dim / 2, panel = own->stride * LANES, blocks = rounded_up(own->count, QUERIES_OF_BLOCK) / QUERIES_OF_BLOCK;
    const long products = piece.steps * blocks * (pairs / STEP);
    int few = 1;
    while (beside && few < STEP && few * products < beside->count * STEP)
        few *= 2;
    use_tiles_of(QUERIES_OF_BLOCK);
    for (long slot = 0; slot < piece.count; slot += SLOTS_OF_STEP) {
        const plain_slots there = {piece.keys.data + slot * piece.keys.slot, piece.keys.slot};
        const plain_slots keys = slot + SLOTS_OF_STEP <= piece.count ? there : whole_step(piece, slot, 4 * pairs, room.last);
        __asm__ volatile("" : : : "memory"); /* tiles are read where a compiler does not see it */
        for (long first = 0; first < own->count; first += QUERIES_OF_BLOCK) {
            const uint32_t *q = room.q + first * pairs;
            float *scores = piece.scores + first / LANES * panel + slot * LANES;
            const int are_two = own->count - first > LANES;
            if (are_two && beside)
                score_block(keys.data, keys.slot, q, pairs, scores, panel, 1, beside, few);
            else if (are_two)
                score_block(keys.data, keys.slot, q, pairs, scores, panel, 1, NULL, 0);
            else
                score_block(keys.data, keys.slot, q, pairs, scores, panel, 0, beside, few);
        }
    }
}

/* -- values ---------------------------------------------------------------------------------------------------------------- */

/* Values of 32 columns on their way into pairs of slots: a tile gets those whose numbers have no 4 in them, another one the rest. */
typedef struct {
    plain_slots from; /* of a piece */
    uint32_t *to;
    long count;
} arranged_columns;

/* Some pairs of a step. */
static ALWAYS_INLINE void arrange_pairs(const arranged_columns *here, long step, long first, long behind)
{
    const __m512i nothing = _mm512_setzero_si512();
    uint32_t *to = here->to + step * 2 * WORDS_OF_TILE;
    for (long pair = first; pair < behind; pair++) {
        const long slot = step * SLOTS_OF_STEP + 2 * pair;
        const char *from = here->from.data + slot * here->from.slot;
        const __m512i one = slot < here->count ? _mm512_loadu_si512(from) : nothing;
        const __m512i other = slot + 1 < here->count ? _mm512_loadu_si512(from + here->from.slot) : nothing;
        _mm512_storeu_si512(to + pair * LANES, _mm512_unpacklo_epi16(one, other));
        _mm512_storeu_si512(to + WORDS_OF_TILE + pair * LANES, _mm512_unpackhi_epi16(one, other));
    }
}

static ALWAYS_INLINE void add_shares(const uint32_t *shares, long above, int are_two)
{
    _tile_stream_loadd(ABOVE, shares, LINE_OF_TILE);
    _tile_dpbf16ps(ABOVE_LEFT, ABOVE, LEFT);
    _tile_dpbf16ps(ABOVE_RIGHT, ABOVE, RIGHT);
    if (are_two) {
        _tile_stream_loadd(BELOW, shares + above * STEP, LINE_OF_TILE);
        _tile_dpbf16ps(BELOW_LEFT, BELOW, LEFT);
        _tile_dpbf16ps(BELOW_RIGHT, BELOW, RIGHT);
    }
}

/* What a block's queries have of 32 columns of a piece, and with `adds` of those before it; arranges some of the next columns
   meanwhile: those pairs of each step. */
static ALWAYS_INLINE void add_columns(const uint32_t *shares, const uint32_t *values, long steps, float *out, long line, long rows,
                                      int are_two, int adds, const arranged_columns *next, long first, long behind)
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
    for (long at = 0; at < steps; at++, values += 2 * WORDS_OF_TILE, shares += 2 * WORDS_OF_SHARES) {
        _tile_loadd(LEFT, values, LINE_OF_TILE);
        _tile_loadd(RIGHT, values + WORDS_OF_TILE, LINE_OF_TILE);
        add_shares(shares, above, are_two);
        add_shares(shares + WORDS_OF_SHARES, above, are_two);
        if (next)
            arrange_pairs(next, at, first, behind);
    }
    _tile_stored(ABOVE_LEFT, out, 4 * line);
    _tile_stored(ABOVE_RIGHT, out + LANES, 4 * line);
    if (are_two) {
        _tile_stored(BELOW_LEFT, out + above * line, 4 * line);
        _tile_stored(BELOW_RIGHT, out + above * line + LANES, 4 * line);
    }
}

static ALWAYS_INLINE arranged_columns columns_of(piece_here piece, long at, tile_rooms room)
{
    const plain_slots from = {piece.values.data + at * LINE_OF_TILE, piece.values.slot};
    return (arranged_columns){from, room.values + at % 2 * STEPS * 2 * WORDS_OF_TILE, piece.count};
}

/* Adds what all queries have of a piece, columns by columns. */
static void add_piece(const many *m, const tiled_queries *own, piece_here piece, tile_rooms room)
{
    const long columns = m->dim / QUERIES_OF_BLOCK, blocks = rounded_up(own->count, QUERIES_OF_BLOCK) / QUERIES_OF_BLOCK;
    const arranged_columns begun = columns_of(piece, 0, room);
    for (long step = 0; step < piece.steps; step++)
        arrange_pairs(&begun, step, 0, STEP);
    for (long at = 0; at < columns; at++) {
        const arranged_columns next = columns_of(piece, at + 1, room);
        const uint32_t *values = room.values + at % 2 * STEPS * 2 * WORDS_OF_TILE;
        __asm__ volatile("" : : : "memory"); /* tiles are read where a compiler does not see it */
        for (long block = 0; block < blocks; block++) {
            const long left = own->count - block * QUERIES_OF_BLOCK, rows = left < QUERIES_OF_BLOCK ? left : QUERIES_OF_BLOCK;
            const uint32_t *shares = room.shares + block * STEPS * 2 * WORDS_OF_SHARES;
            float *out = room.out + block * QUERIES_OF_BLOCK * m->dim + at * QUERIES_OF_BLOCK;
            const long first = STEP * block / blocks, behind = STEP * (block + 1) / blocks;
            use_tiles_of(rows);
            if (rows > 1 && at + 1 < columns)
                add_columns(shares, values, piece.steps, out, m->dim, rows, 1, piece.start > 0, &next, first, behind);
            else if (rows > 1)
                add_columns(shares, values, piece.steps, out, m->dim, rows, 1, piece.start > 0, NULL, 0, 0);
            else
                add_columns(shares, values, piece.steps, out, m->dim, rows, 0, piece.start > 0, at + 1 < columns ? &next : NULL, first,
                            behind);
        }
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
    arrange_queries(m, &own, room);
    for (long query = 0; query < STEP_QUERIES; query++)
        own.tops[query] = -INFINITY;
    sharing beside;
    piece_here next = piece_at(m, &own, 0, room);
    score_piece(m, &own, next, room, NULL);
    while (next.count) {
        const piece_here piece = next;
        next = piece_at(m, &own, piece.start + STEP_SLOTS, room);
        begin_sharing(m, &own, piece, room, &beside);
        score_piece(m, &own, next, room, &beside);
        share_rest(&beside);
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
