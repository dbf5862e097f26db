/* Attention of one new token per row over slots that a KV head of its row holds, all of the first ones or chosen ones: the same
   bits for the same slots in the same order, wherever they lie. decode_attention.c and chosen_attention.c are made of it, and
   choose_slots.c scores with it. */

#pragma once

#include "cap.h"
#include "fixed_attention.h"
#include "group_values.h"
#include "sizes.h"
#include "slots.h"
#include "team.h"

#define TOGETHER 4 /* slots per pass over the sums, so that these are loaded and stored less often */
#define AWAITED 4096 /* bytes of slots that are asked for before a head comes to them: behind these, a stream has been noticed */

/* The sums of four registers. */
static ALWAYS_INLINE void sums_of(const floats *of, float *out)
{
#if LANES == 16
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)of[0], (__m512)of[1]), _mm512_unpackhi_ps((__m512)of[0], (__m512)of[1]));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)of[2], (__m512)of[3]), _mm512_unpackhi_ps((__m512)of[2], (__m512)of[3]));
    const __m512 low = _mm512_shuffle_ps(ab, cd, 0x44), high = _mm512_shuffle_ps(ab, cd, 0xee);
    const __m512 each = _mm512_add_ps(low, high); /* each quarter has the sums over itself */
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(each), _mm512_extractf32x8_ps(each, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif LANES == 8
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps((__m256)of[0], (__m256)of[1]), _mm256_hadd_ps((__m256)of[2], (__m256)of[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
    for (int at = 0; at < 4; at++)
        out[at] = (of[at][0] + of[at][2]) + (of[at][1] + of[at][3]);
#endif
}

/* The values of a slot in registers; whatever is behind the last one does no harm, because queries are zero there. */
static ALWAYS_INLINE void widen(const char *slot, long dim, long registers, int kind, floats *out)
{
    if (kind < GROUP4) {
        for (long at = 0; at < registers; at++)
            out[at] = load_floats(slot + itemsize_of(kind) * LANES * at, kind);
    } else {
        const int bits = kind == GROUP4 ? 4 : 8;
        for (long number = 0; number * GROUP < dim; number++) {
            const packed_group from = group_of_row((const uint8_t *)slot, number, dim, bits);
            const decoder with = decoder_of(from);
            floats *own = out + number * (GROUP / LANES);
            for (int at = 0; at < GROUP / LANES * bits / 8; at++) {
                const words codes = words_of_bytes(from.codes + LANES * at);
                own[at] = bits == 8 ? decoded_8(codes, with) : decoded_4(codes, with);
                if (bits == 4)
                    own[at + GROUP / 2 / LANES] = decoded_4(codes >> 4, with);
            }
        }
    }
}

/* A slot with values that do not fill their registers is copied first, so that nothing behind it is read. */
static ALWAYS_INLINE const char *filled(const char *slot, long dim, long registers, int kind, char *room)
{
    if (kind >= GROUP4 || registers * LANES == dim)
        return slot;
    const long itemsize = itemsize_of(kind);
    memset(room, 0, registers * LANES * itemsize);
    memcpy(room, slot, dim * itemsize);
    return room;
}

/* Has the first bytes of a slot come nearer. */
static ALWAYS_INLINE void await_slot(const char *slot, long bytes)
{
    for (long at = 0; at < bytes; at += 64)
        __builtin_prefetch(slot + at);
}

/* The same to the second cache, for slots that lie anywhere. */
static ALWAYS_INLINE void foresee_slot(const slots *from, long row, long head, long number, long bytes)
{
    const char *slot = slot_at(from, row, head, number);
    for (long at = 0; at < bytes; at += 64)
        __builtin_prefetch(slot + at, 0, 2);
}

#define AHEAD 96 /* slots that are on their way to the second cache while one is read: the first one could await few at a time */

/* A slot of those that are attended: one after the other, or where they lie. */
static ALWAYS_INLINE const char *attended(const slots *from, const int64_t *places, long row, long head, long number, long held,
                                          long bytes)
{
    if (places && number + AHEAD < held)
        foresee_slot(from, row, head, places[number + AHEAD], bytes);
    return slot_at(from, row, head, places ? places[number] : number);
}

/* Has the first slots come nearer, for which no slot before them asks. */
static ALWAYS_INLINE void foresee_first(const slots *from, const int64_t *places, long row, long head, long held, long bytes)
{
    for (long number = 0; number < AHEAD && number < held; number++)
        foresee_slot(from, row, head, places[number], bytes);
}

static ALWAYS_INLINE long bytes_of_slot(long dim, int kind)
{
    return kind < GROUP4 ? dim * itemsize_of(kind) : group_row_bytes(dim, kind == GROUP4 ? 4 : 8);
}

/* Makes exponentials of scores, in place, all of them over the same one. Gives their sum, and in it the exponential of a score that
   is none of a slot's, if there is one. */
static ALWAYS_INLINE float exponentials(float *restrict scores, long held, float more, float *own)
{
    const long whole = held / LANES * LANES;
    float top = scores[0], total = 0.0f, lanes[LANES];
    floats tops = all(top), totals = {0};
    for (long slot = 0; slot < whole; slot += LANES)
        tops = larger(LOAD(floats, scores + slot), tops);
    memcpy(lanes, &tops, sizeof lanes);
    for (int lane = 0; lane < LANES; lane++)
        top = lanes[lane] > top ? lanes[lane] : top;
    for (long slot = whole; slot < held; slot++)
        top = scores[slot] > top ? scores[slot] : top;
    if (more != -INFINITY)
        top = more > top ? more : top;

    for (long slot = 0; slot < whole; slot += LANES) {
        const floats shares = exp_below_zero(LOAD(floats, scores + slot) - top);
        totals += shares;
        memcpy(scores + slot, &shares, sizeof shares);
    }
    if (whole < held) {
        floats last = all(top);
        memcpy(&last, scores + whole, (held - whole) * sizeof(float));
        last = exp_below_zero(last - top);
        memcpy(scores + whole, &last, (held - whole) * sizeof(float));
    }
    memcpy(lanes, &totals, sizeof lanes);
    for (int lane = 0; lane < LANES; lane++)
        total += lanes[lane];
    for (long slot = whole; slot < held; slot++)
        total += scores[slot];
    *own = more != -INFINITY ? exp_below_zero(all(more - top))[0] : 0.0f;
    return more != -INFINITY ? total + *own : total;
}

/* Works in place. `got` may be NULL. Gives the share of a score that is none of a slot's, if there is one. */
static ALWAYS_INLINE float softmax(float *restrict scores, float *restrict got, long held, float more, int is_highest)
{
    float own;
    const float part = 1.0f / exponentials(scores, held, more, &own);
    if (!got) {
        for (long slot = 0; slot < held; slot++)
            scores[slot] *= part;
    } else if (is_highest) {
        for (long slot = 0; slot < held; slot++) {
            scores[slot] *= part;
            const uint32_t own = bits_of_float(scores[slot]), before = bits_of_float(got[slot]); /* see highest(..) */
            got[slot] = float_of_bits(own > before ? own : before);
        }
    } else {
        for (long slot = 0; slot < held; slot++) {
            scores[slot] *= part;
            got[slot] += scores[slot];
        }
    }
    return own * part;
}

/* The functions from here on work on one KV head of one row. `q` and `out` are (group, registers), zeros behind the last value;
   `shares` is (group, capacity). Sizes are arguments, so that the compiler can know them. */

static ALWAYS_INLINE void score_slots(const floats *q, const slots *keys, const int64_t *places, long row, long head, float *shares,
                                      long held, long capacity, long group, long dim, long registers, float scale, int key_kind)
{
    const long bytes = bytes_of_slot(dim, key_kind);
    floats wide[registers + GROUP / LANES], scores[group * TOGETHER];
    char room[4 * (STEP_HEAD_VALUES + LANES)];
    for (long first = 0; first < held; first += TOGETHER) {
        const long count = held - first < TOGETHER ? held - first : TOGETHER;
        for (long next = 0; next < count; next++) {
            const char *slot = attended(keys, places, row, head, first + next, held, bytes);
            widen(filled(slot, dim, registers, key_kind, room), dim, registers, key_kind, wide);
            for (long g = 0; g < group; g++) {
                floats even = wide[0] * q[g * registers], odd = {0};
#pragma GCC unroll 8
                for (long at = 1; at < registers; at++) {
                    if (at % 2)
                        odd += wide[at] * q[g * registers + at];
                    else
                        even += wide[at] * q[g * registers + at];
                }
                scores[g * TOGETHER + next] = even + odd;
            }
        }
        for (long g = 0; g < group; g++) {
            float sums_here[TOGETHER];
            for (long next = count; next < TOGETHER; next++)
                scores[g * TOGETHER + next] = (floats){0};
            sums_of(scores + g * TOGETHER, sums_here);
            for (long next = 0; next < count; next++)
                shares[g * capacity + first + next] = sums_here[next] * scale;
        }
    }
}

static ALWAYS_INLINE void sum_values(const float *shares, const slots *values, const int64_t *places, long row, long head, floats *out,
                                     long held, long capacity, long group, long dim, long registers, int value_kind)
{
    const long room_of = registers + GROUP / LANES, bytes = bytes_of_slot(dim, value_kind);
    floats wide[TOGETHER * room_of];
    char room[4 * (STEP_HEAD_VALUES + LANES)];
    memset(out, 0, group * registers * sizeof *out);
    if (group == 1) { /* the sums stay in registers */
        for (long slot = 0; slot < held; slot++) {
            const floats share = all(shares[slot]);
            const char *own = attended(values, places, row, head, slot, held, bytes);
            widen(filled(own, dim, registers, value_kind, room), dim, registers, value_kind, wide);
#pragma GCC unroll 8
            for (long at = 0; at < registers; at++)
                out[at] += share * wide[at];
        }
        return;
    }
    for (long first = 0; first < held; first += TOGETHER) {
        const long count = held - first < TOGETHER ? held - first : TOGETHER;
        memset(wide + count * room_of, 0, (TOGETHER - count) * room_of * sizeof *wide);
        for (long next = 0; next < count; next++) {
            const char *slot = attended(values, places, row, head, first + next, held, bytes);
            widen(filled(slot, dim, registers, value_kind, room), dim, registers, value_kind, wide + next * room_of);
        }
        for (long g = 0; g < group; g++) {
            float own[TOGETHER] = {0};
            memcpy(own, shares + g * capacity + first, count * sizeof *own);
            const floats share[TOGETHER] = {all(own[0]), all(own[1]), all(own[2]), all(own[3])};
            floats *sum = out + g * registers;
#pragma GCC unroll 8
            for (long at = 0; at < registers; at++)
                sum[at] += (share[0] * wide[at] + share[1] * wide[room_of + at]) +
                           (share[2] * wide[2 * room_of + at] + share[3] * wide[3 * room_of + at]);
        }
    }
}

typedef struct {
    const char *q;       /* (rows, kv_heads, group, dim) */
    slots keys, values;
    more_keys more;      /* for each of (rows, kv_heads, group) */
    const int64_t *held; /* (rows), the new token included */
    char *out;           /* shaped as q, and of its type */
    float *wide_q, *wide_out; /* where both are float32: room, unless they are anyway */
    float *got;          /* (rows, kv_heads, capacity); 0 behind what is held; NULL: it is not wanted */
    float *shares;       /* (rows, kv_heads, group, capacity) */
    long rows, kv_heads, group, dim, capacity;
    float scale;
    int kind;       /* the type of queries */
    int is_highest; /* slots get the highest share of their group's queries, not the sum of all */
    float cap;      /* of scores; 0: there is none */
    const int64_t *places; /* (rows, kv_heads, capacity): slots that are attended, as many as held; NULL: the first ones */
} attention;

/* Packed slots and queries of 16 bits (packed_slots.c): for 4 and 8 bits, for each number of queries that a function knows. */

typedef void (*fixed_action)(const queries_of_head *h);
typedef const fixed_action (*fixed_actions)[4];
extern const fixed_action scoring[2][4], summing[2][4] __attribute__((visibility("hidden")));

/* A single query is as fast in float32 where registers are wide enough for a table of a group's values, and integers would have no
   instruction for their products in the narrowest ones. */
static ALWAYS_INLINE int is_fixed(int kind_of_queries, long group, int kind)
{
    return LANES > 4 && kind_of_queries != FLOAT && (kind == GROUP4 || kind == GROUP8) && (group > 1 || LANES == 8);
}

static ALWAYS_INLINE fixed_action fixed_action_for(fixed_actions actions, int kind, long queries)
{
    return actions[kind == GROUP8][queries > 4 ? 3 : queries > 2 ? 2 : queries > 1];
}

static ALWAYS_INLINE void in_fixed_point(fixed_actions actions, const attention *a, const slots *from, const int64_t *places,
                                         long row, long head)
{
    for (long first = 0; first < a->group; first += MOST_QUERIES) {
        const long left = a->group - first, queries = left < MOST_QUERIES ? left : MOST_QUERIES;
        const long at = (row * a->kv_heads + head) * a->group + first;
        const queries_of_head here = {from, places, row, head, a->held[row], a->wide_q + at * a->dim, a->wide_out + at * a->dim,
                                      a->shares + at * a->capacity, queries, a->dim, a->capacity, a->scale};
        fixed_action_for(actions, from->kind, queries)(&here);
    }
}

/* Values of 16 bits as float32, and back. */

static ALWAYS_INLINE void widen_queries(const char *from, float *to, long count, int kind)
{
#define WIDEN(AT, COUNT) store_some((char *)(to + (AT)), load_some(from + 2 * (AT), COUNT, kind), COUNT, FLOAT)
    EACH_REGISTER(at, count, WIDEN);
#undef WIDEN
}

static ALWAYS_INLINE void narrow_outcome(const float *from, char *to, long count, int kind)
{
#define NARROW(AT, COUNT) store_some(to + 2 * (AT), load_some((const char *)(from + (AT)), COUNT, FLOAT), COUNT, kind)
    EACH_REGISTER(at, count, NARROW);
#undef NARROW
}

/* Has the first slots of a head come nearer before they are read: where few are held, no stream is noticed in time. */
static ALWAYS_INLINE void await_slots(const slots *from, long row, long head, long held, long bytes)
{
    const long nbytes = (held - 1) * from->slot + bytes;
    await_slot(slot_at(from, row, head, 0), nbytes < AWAITED ? nbytes : AWAITED);
}

static ALWAYS_INLINE void attend(const attention *a, const int64_t *all_places, long row, long head, long group, long dim,
                                 int key_kind, int value_kind)
{
    const long registers = (dim + LANES - 1) / LANES, unit = row * a->kv_heads + head;
    floats q[group * registers], out[group * registers];
    float more[group];
    float *wide_q = a->wide_q + unit * group * dim, *wide_out = a->wide_out + unit * group * dim;
    if (a->kind != FLOAT)
        widen_queries(a->q + 2 * unit * group * dim, wide_q, group * dim, a->kind);
    memset(q, 0, sizeof q);
    for (long g = 0; g < group; g++)
        memcpy(q + g * registers, wide_q + g * dim, dim * sizeof(float));
    const int64_t *places = all_places ? all_places + unit * a->capacity : NULL;
    float *shares = a->shares + unit * group * a->capacity, *got = places ? NULL : a->got + unit * a->capacity;
    const long held = a->held[row];
    if (places)
        foresee_first(&a->keys, places, row, head, held, bytes_of_slot(dim, key_kind));
    else
        await_slots(&a->values, row, head, held, bytes_of_slot(dim, value_kind));
    if (is_fixed(a->kind, group, key_kind))
        in_fixed_point(scoring, a, &a->keys, places, row, head);
    else
        score_slots(q, &a->keys, places, row, head, shares, held, a->capacity, group, dim, registers, a->scale, key_kind);
    if (places)
        foresee_first(&a->values, places, row, head, held, bytes_of_slot(dim, value_kind));
    if (got)
        memset(got, 0, a->capacity * sizeof *got);
    for (long g = 0; g < group; g++)
        cap_scores(shares + g * a->capacity, 0, held, a->cap);
    for (long g = 0; g < group; g++)
        more[g] = softmax(shares + g * a->capacity, got, held, score_of_more(a->more, unit * group + g), a->is_highest);
    if (!places && unit + 1 < a->rows * a->kv_heads)
        await_slots(&a->keys, (unit + 1) / a->kv_heads, (unit + 1) % a->kv_heads, held, bytes_of_slot(dim, key_kind));
    if (is_fixed(a->kind, group, value_kind)) {
        in_fixed_point(summing, a, &a->values, places, row, head);
    } else {
        sum_values(shares, &a->values, places, row, head, out, held, a->capacity, group, dim, registers, value_kind);
        for (long g = 0; g < group; g++)
            memcpy(wide_out + g * dim, out + g * registers, dim * sizeof(float));
    }
    for (long g = 0; g < group; g++)
        add_more(a->more, unit * group + g, more[g], wide_out + g * dim, dim);
    if (a->kind != FLOAT)
        narrow_outcome(wide_out, a->out + 2 * unit * group * dim, group * dim, a->kind);
}

/* The same body for usual sizes, which the compiler then knows. A part is a KV head of a row. */

static ALWAYS_INLINE void attend_part(const attention *a, const int64_t *places, long number, long group, long dim, int key_kind,
                                      int value_kind)
{
    attend(a, places, number / a->kv_heads, number % a->kv_heads, group, dim, key_kind, value_kind);
}

#define FOR_SIZES(NAME, KIND, GROUP_SIZE, DIM)                                                                                   \
    static void attend_##NAME##_##KIND(const void *given, long number, int member)                                               \
    {                                                                                                                            \
        const attention *a = given;                                                                                              \
        attend_part(a, PLACES(a), number, GROUP_SIZE, DIM, KIND, KIND);                                                          \
    }
#define FOR_KIND(KIND)                                                                                                           \
    FOR_SIZES(64, KIND, 1, 64)                                                                                                   \
    FOR_SIZES(groups_64, KIND, a->group, 64)                                                                                     \
    FOR_SIZES(128, KIND, 1, 128)                                                                                                 \
    FOR_SIZES(4_128, KIND, 4, 128)                                                                                               \
    FOR_SIZES(groups_128, KIND, a->group, 128)                                                                                   \
    FOR_SIZES(any, KIND, a->group, a->dim)

#define ACTIONS(KIND)                                                                                                            \
    {attend_64_##KIND, attend_groups_64_##KIND, attend_128_##KIND, attend_4_128_##KIND, attend_groups_128_##KIND, attend_any_##KIND}

static ALWAYS_INLINE part_action *for_sizes(part_action *const *of_kind, const attention *a)
{
    if (a->dim == 64)
        return of_kind[a->group == 1 ? 0 : 1];
    if (a->dim == 128)
        return of_kind[a->group == 1 ? 2 : a->group == 4 ? 3 : 4];
    return of_kind[5];
}
