/* Attention of a step over packed slots in fixed point: queries, and shares times scales, have 16 bits and a factor for each group
   of values, and meet codes in products of integers, two at a time. That is finer than queries of bf16 or float16 are, and than what
   packing leaves of keys and values. Codes are never decoded: scale and minimum of a group are applied to sums, of keys to that of
   the group's products, of values to the shares.

   Scores: as many slots as a register has lanes are turned round, word by word, so that a lane is a slot and nothing has to be
   summed up across lanes. Values: a lane is a column, and two slots meet their shares at once. */

#pragma once

#include "sizes.h"
#include "slots.h"
#include "turn.h"
#include <math.h>

#define MOST_QUERIES 8 /* of a group, at once */
#define NEAR 64        /* slots with values that are read several times, from the nearest cache */
#define MOST_GROUPS ((STEP_HEAD_VALUES + GROUP - 1) / GROUP)
#define MOST_SUMS (LANES == 16 ? 16 : 8) /* sums that lie in registers */
#define FIXED 32767.0f                   /* the largest number in fixed point */

_Static_assert(NEAR % LANES == 0, "whole registers");

/* Some queries of the group of a KV head of a row. */
typedef struct {
    const slots *from;       /* keys or values */
    const int64_t *places;   /* of the slots; NULL: they lie one after the other */
    long row, head, held;
    const float *q;          /* (queries, dim) */
    float *out, *shares;     /* (queries, dim), (queries, capacity) */
    long queries, dim, capacity;
    float scale;
} queries_of_head;

#if LANES > 4
#define KEPT(value) __asm__("" : "+v"(value)) /* compilers would collect products first, and run out of registers */
#else
#define KEPT(value)
#endif

/* Adds the product of the lower halves of each word and that of the upper halves. */
static ALWAYS_INLINE void add_products(integers *to, words one, words other)
{
#if defined(__AVX512VNNI__)
    *to = (integers)_mm512_dpwssd_epi32((__m512i)*to, (__m512i)one, (__m512i)other);
#elif LANES == 16
    *to += (integers)_mm512_madd_epi16((__m512i)one, (__m512i)other);
#elif defined(__AVXVNNI__)
    *to = (integers)_mm256_dpwssd_avx_epi32((__m256i)*to, (__m256i)one, (__m256i)other);
#elif LANES == 8
    *to += (integers)_mm256_madd_epi16((__m256i)one, (__m256i)other);
#else
    *to += ((integers)one << 16 >> 16) * ((integers)other << 16 >> 16) + ((integers)one >> 16) * ((integers)other >> 16);
#endif
    KEPT(*to);
}

static ALWAYS_INLINE words all_of(uint32_t value)
{
    return value - (words){0};
}

/* The same of a pair of values in memory that all lanes meet. */
static ALWAYS_INLINE void add_products_with(integers *to, words one, const uint32_t *pair)
{
#if defined(__AVX512VNNI__)
    __asm__("vpdpwssd %1%{1to16%}, %2, %0" : "+v"(*to) : "m"(*pair), "v"(one)); /* compilers would load it by itself */
#else
    add_products(to, one, all_of(*pair));
#endif
}

static ALWAYS_INLINE floats floats_of(integers from)
{
    return __builtin_convertvector(from, floats);
}

/* Codes of two values: those that begin at this bit of each half word. */
static ALWAYS_INLINE words pairs_at(words from, int bit, int bits)
{
    const uint32_t mask = (1u << bits) - 1;
    return from >> bit & (mask << 16 | mask);
}

/* Puts values into fixed point and gives the factor that makes values of them; NaN where a value is none or is infinite. */
static ALWAYS_INLINE float to_fixed(const float *values, long count, int16_t *out)
{
    float top = 0.0f, nothing = 0.0f;
#pragma omp simd reduction(max : top) reduction(+ : nothing)
    for (long at = 0; at < count; at++) {
        const float size = fabsf(values[at]);
        top = size > top ? size : top;
        nothing += values[at] - values[at]; /* stays 0 unless a value is NaN or infinite */
    }
    const float factor = top / FIXED, inverse = top > 1e-30f && nothing == 0.0f ? FIXED / top : 0.0f;
#pragma omp simd
    for (long at = 0; at < count; at++)
        out[at] = (int16_t)(int)rintf(inverse > 0.0f ? values[at] * inverse : 0.0f);
    return nothing == 0.0f ? factor : NAN;
}

/* -- slots ----------------------------------------------------------------------------------------------------------------- */

typedef struct {
    floats scale, minimum; /* of a group in as many slots as there are lanes */
} group_steps;

static ALWAYS_INLINE floats bf16_half(words from, int upper)
{
    return (floats)(upper ? from & 0xffff0000u : from << 16);
}

/* A slot ends with the scales of its groups, then come the minima: both are turned round like codes, in blocks that end where the
   slot ends. */
static ALWAYS_INLINE void find_steps(const char *const *slots, long dim, group_steps *out, int bits)
{
    const long groups = groups_of(dim), blocks = (groups + BLOCK - 1) / BLOCK, end = group_row_bytes(dim, bits);
    words ends[(MOST_GROUPS + BLOCK - 1) / BLOCK * BLOCK];
    for (long block = 0; block < blocks; block++)
        turn(slots, end - (blocks - block) * 4 * BLOCK, ends + block * BLOCK);
    for (long number = 0; number < groups; number++) {
        const long scale = 2 * (blocks * BLOCK - groups) + number, minimum = scale + groups; /* places in half words */
        out[number] = (group_steps){bf16_half(ends[scale / 2], scale % 2), bf16_half(ends[minimum / 2], minimum % 2)};
    }
}

/* The ends of as many slots as there are lanes, word by word: the same as `find_steps` finds, without registers, which products
   want. What is laid here comes late to one that loads it at once. */
static ALWAYS_INLINE void lay_ends(const char *const *slots, long dim, words *out, int bits)
{
    const long groups = groups_of(dim), end = group_row_bytes(dim, bits) - 4 * groups;
    for (long word = 0; word < groups; word++)
#pragma GCC unroll 16
        for (int slot = 0; slot < LANES; slot++)
            memcpy((char *)(out + word) + 4 * slot, slots[slot] + end + 4 * word, 4);
}

static ALWAYS_INLINE group_steps steps_of(const words *ends, long number, long groups)
{
    const long minimum = number + groups; /* places in half words */
    return (group_steps){bf16_half(ends[number / 2], number % 2), bf16_half(ends[minimum / 2], minimum % 2)};
}

static ALWAYS_INLINE void foresee(const char *start, long count, long stride, long bytes)
{
    if (stride == bytes) { /* one behind the other */
        bytes *= count;
        count = 1;
    }
    for (long slot = 0; slot < count; slot++)
        for (long at = 0; at < bytes; at += 64)
            __builtin_prefetch(start + slot * stride + at);
}

/* The same where slots lie anywhere. */
static ALWAYS_INLINE void find_places(const queries_of_head *h, long first, long count, long bytes, const char **out)
{
    const int64_t *places = h->places + first, left = h->held - first - count, ahead = left < count ? left : count;
    for (long slot = 0; slot < count; slot++)
        out[slot] = slot_at(h->from, h->row, h->head, places[slot]);
    for (long slot = 0; slot < ahead; slot++)
        foresee(slot_at(h->from, h->row, h->head, places[count + slot]), 1, 0, bytes);
}

/* The addresses of neighbouring slots; behind the last one that is held, the last one again. Those that come next are prefetched:
   slots of a head may lie far apart. */
static ALWAYS_INLINE void find_slots(const queries_of_head *h, long first, long count, long bytes, const char **out)
{
    const long left = h->held - first, there = left < count ? left : count;
    if (h->places) {
        find_places(h, first, there, bytes, out);
    } else {
        const char *start = slot_at(h->from, h->row, h->head, first), *next = start;
        const long stride = h->from->slot;
#pragma GCC unroll 16
        for (long slot = 0; slot < count; slot++, next += stride)
            out[slot] = next;
        if (left > count)
            foresee(start + count * stride, left - count < count ? left - count : count, stride, bytes);
    }
    for (long slot = left; slot < count; slot++)
        out[slot] = out[left - 1];
}

/* Copies up to a register of values; a whole one without a call. */
static ALWAYS_INLINE void copy_lanes(void *to, const void *from, long count)
{
    if (count >= LANES)
        memcpy(to, from, LANES * sizeof(float));
    else
        memcpy(to, from, count * sizeof(float));
}

/* -- scores ---------------------------------------------------------------------------------------------------------------- */

typedef struct {
    uint32_t pairs[(STEP_HEAD_VALUES + GROUP) / 2 * MOST_QUERIES]; /* (words, pairs of a word, queries) */
    float factors[MOST_GROUPS * MOST_QUERIES];                     /* (groups, queries) */
    float sums[MOST_GROUPS * MOST_QUERIES];                        /* those of a query's values in a group */
} fixed_queries;

/* The place in its group of the first value of a pair, and how far the other one is. */
static ALWAYS_INLINE long first_of_pair(long word, int pair, int bits)
{
    return bits == 4 ? 4 * word + pair / 2 + GROUP / 2 * (pair % 2) : 4 * word + pair;
}

static ALWAYS_INLINE void arrange(const queries_of_head *h, fixed_queries *out, int queries, int bits)
{
    const int words_of_group = GROUP * bits / 32, pairs = 16 / bits;
    for (long number = 0; number < groups_of(h->dim); number++)
        for (long query = 0; query < queries; query++) {
            float values[GROUP] = {0}, sum = 0.0f;
            int16_t fixed[GROUP];
            const long left = h->dim - number * GROUP, count = query >= h->queries ? 0 : left < GROUP ? left : GROUP;
            for (long at = 0; at < count; at++)
                values[at] = h->q[query * h->dim + number * GROUP + at] * h->scale;
            for (int at = 0; at < GROUP; at++)
                sum += values[at];
            const long place = number * queries + query;
            out->factors[place] = to_fixed(values, GROUP, fixed);
            out->sums[place] = sum;
            uint32_t *own = out->pairs + number * (GROUP / 2) * queries + query;
            for (int word = 0; word < words_of_group; word++)
#pragma GCC unroll 4
                for (int pair = 0; pair < pairs; pair++) {
                    const long value = first_of_pair(word, pair, bits);
                    own[(word * pairs + pair) * queries] = (uint16_t)fixed[value] | (uint32_t)(uint16_t)fixed[value + 2] << 16;
                }
        }
}

/* `turned` is the first block of words of these slots. While a block meets the queries, the one behind it is turned, and in the end
   the first one of the next slots: products and turning want other parts of a processor. */
static ALWAYS_INLINE void score_tile(const char *const *slots, const char *const *next, const fixed_queries *q, long dim,
                                     turning *turned, floats *scores, int queries, int bits)
{
    const int blocks = GROUP * bits / 32 / BLOCK, pairs = 16 / bits;
    words ends[MOST_GROUPS];
    lay_ends(slots, dim, ends, bits);
#pragma GCC unroll 8
    for (int query = 0; query < queries; query++)
        scores[query] = (floats){0};
    for (long number = 0; number < groups_of(dim); number++) {
        integers sums[MOST_QUERIES][2];
#pragma GCC unroll 8
        for (int query = 0; query < queries; query++)
            sums[query][0] = sums[query][1] = (integers){0};
        for (int block = 0; block < blocks; block++) {
            const long here = number * blocks + block, is_last = here + 1 == groups_of(dim) * blocks;
            const char *const *coming = is_last ? next : slots;
            const long at = is_last ? 0 : (here + 1) * 4 * BLOCK;
            turning then;
            const uint32_t *those = q->pairs + here * BLOCK * pairs * queries;
#pragma GCC unroll 8
            for (int word = 0; word < BLOCK; word++) {
#pragma GCC unroll 4
                for (int pair = 0; pair < pairs; pair++) {
                    const words codes = pairs_at(turned->out[word], bits * pair, bits);
#pragma GCC unroll 8
                    for (int query = 0; query < queries; query++)
                        add_products_with(&sums[query][pair % 2], codes, &those[(word * pairs + pair) * queries + query]);
                }
                turn_part(coming, at, word, &then);
            }
#pragma GCC unroll 8
            for (int word = 0; word < BLOCK; word++)
                turned->out[word] = then.out[word];
        }
        const group_steps steps = steps_of(ends, number, groups_of(dim));
#pragma GCC unroll 8
        for (int query = 0; query < queries; query++) {
            const long place = number * queries + query;
            scores[query] += floats_of(sums[query][0] + sums[query][1]) * q->factors[place] * steps.scale +
                             steps.minimum * q->sums[place];
        }
    }
}

static ALWAYS_INLINE void score_packed(const queries_of_head *h, int queries, int bits)
{
    fixed_queries q;
    const char *slots[2][LANES];
    turning turned;
    if (h->held < 1)
        return;
    arrange(h, &q, queries, bits);
    find_slots(h, 0, LANES, group_row_bytes(h->dim, bits), slots[0]);
    turn(slots[0], 0, turned.out);
    for (long first = 0, own = 0; first < h->held; first += LANES, own = 1 - own) {
        floats scores[MOST_QUERIES];
        const int is_last = first + LANES >= h->held;
        if (!is_last)
            find_slots(h, first + LANES, LANES, group_row_bytes(h->dim, bits), slots[1 - own]);
        score_tile(slots[own], slots[is_last ? own : 1 - own], &q, h->dim, &turned, scores, queries, bits);
        for (long query = 0; query < h->queries; query++)
            copy_lanes(h->shares + query * h->capacity + first, &scores[query], h->held - first);
    }
}

/* -- values ---------------------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *slots[NEAR];
    int16_t weights[MOST_GROUPS * MOST_QUERIES * NEAR]; /* (groups, queries, NEAR): shares times scales */
    float factors[MOST_GROUPS * MOST_QUERIES];
    floats rest[MOST_GROUPS * MOST_QUERIES]; /* of all slots so far: sums of shares times minima */
} near_slots;

static ALWAYS_INLINE void weigh(near_slots *near, const queries_of_head *h, long first, long count, int queries, int bits)
{
    const long groups = groups_of(h->dim);
    float weights[MOST_GROUPS * queries][NEAR];
    memset(weights, 0, groups * queries * sizeof *weights);
    for (long at = 0; at < count; at += LANES) {
        const integers lanes = LANE_NUMBERS, is_there = lanes < (int)(count - at); /* the others are the last slot again */
        group_steps steps[MOST_GROUPS];
        find_steps(near->slots + at, h->dim, steps, bits);
        for (long query = 0; query < h->queries; query++) {
            floats share = {0};
            copy_lanes(&share, h->shares + query * h->capacity + first + at, count - at);
            for (long number = 0; number < groups; number++) {
                const long place = number * queries + query;
                const floats weight = share * (floats)((integers)steps[number].scale & is_there);
                near->rest[place] += share * (floats)((integers)steps[number].minimum & is_there);
                memcpy(weights[place] + at, &weight, sizeof weight);
            }
        }
    }
    for (long place = 0; place < groups * queries; place++)
        near->factors[place] = to_fixed(weights[place], NEAR, near->weights + place * NEAR);
}

/* A register has half words of codes of two slots. Its lane l holds column first_column + 2 * l of a code. */
static ALWAYS_INLINE long first_column(long number, int code, int bits)
{
    const long half = number * LANES, halves = GROUP * bits / 16;
    return half / halves * GROUP + 2 * (half % halves) + (bits == 4 ? code / 2 + GROUP / 2 * (code % 2) : code);
}

/* Adds the values of pairs of near slots to the sums of `width` registers and of some codes, for each query. */
static ALWAYS_INLINE void add_registers(const near_slots *near, long count, floats *sums, long all_sums, long number, int width,
                                        int code, int codes, int queries, int bits)
{
    const int of_half = 16 / bits, of_group = GROUP * bits / 16 / LANES;
    integers own[MOST_SUMS + MOST_QUERIES];
#pragma GCC unroll 16
    for (int at = 0; at < queries * width * codes; at++)
        own[at] = (integers){0};
    for (long slot = 0; slot < count; slot += 2) {
        const char *even = near->slots[slot] + number * 2 * LANES, *odd = near->slots[slot + 1] + number * 2 * LANES;
#pragma GCC unroll 4
        for (int at = 0; at < width; at++) {
            const words here = words_of_halves(even + at * 2 * LANES) | words_of_halves(odd + at * 2 * LANES) << 16;
            const int16_t *weights = near->weights + (number + at) / of_group * queries * NEAR + slot;
#pragma GCC unroll 4
            for (int next = 0; next < codes; next++) {
                const words both = pairs_at(here, bits * (code + next), bits);
#pragma GCC unroll 8
                for (int query = 0; query < queries; query++) {
                    uint32_t pair;
                    memcpy(&pair, weights + query * NEAR, sizeof pair);
                    add_products(&own[(query * width + at) * codes + next], both, all_of(pair));
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int query = 0; query < queries; query++)
#pragma GCC unroll 4
        for (int at = 0; at < width; at++) {
            const float factor = near->factors[(number + at) / of_group * queries + query];
#pragma GCC unroll 4
            for (int next = 0; next < codes; next++)
                sums[query * all_sums + (number + at) * of_half + code + next] +=
                    floats_of(own[(query * width + at) * codes + next]) * factor;
        }
}

static ALWAYS_INLINE void add_near(const near_slots *near, long count, floats *sums, long registers, int queries, int bits)
{
    const int codes = 16 / bits, at_once = MOST_SUMS / queries, some = at_once < codes ? at_once : codes;
    long number = 0;
    if (4 * codes <= at_once)
        for (; number + 4 <= registers; number += 4)
            add_registers(near, count, sums, registers * codes, number, 4, 0, codes, queries, bits);
    if (2 * codes <= at_once)
        for (; number + 2 <= registers; number += 2)
            add_registers(near, count, sums, registers * codes, number, 2, 0, codes, queries, bits);
    for (; number < registers; number++)
#pragma GCC unroll 4
        for (int code = 0; code < codes; code += some)
            add_registers(near, count, sums, registers * codes, number, 1, code, some, queries, bits);
}

static ALWAYS_INLINE void put_out(const queries_of_head *h, const floats *sums, const floats *rest, long registers, int queries,
                                  int bits)
{
    const int codes = 16 / bits, of_group = GROUP * bits / 16 / LANES;
    float whole[registers * LANES * codes];
    for (long query = 0; query < h->queries; query++) {
        for (long number = 0; number < registers; number++) {
            const float added = sum_of(rest[number / of_group * queries + query]);
#pragma GCC unroll 4
            for (int code = 0; code < codes; code++) {
                const floats here = sums[(query * registers + number) * codes + code] + added;
                float *out = whole + first_column(number, code, bits);
#pragma GCC unroll 16
                for (int lane = 0; lane < LANES; lane++)
                    out[2 * lane] = here[lane];
            }
        }
        memcpy(h->out + query * h->dim, whole, h->dim * sizeof(float));
    }
}

static ALWAYS_INLINE void sum_packed(const queries_of_head *h, int queries, int bits)
{
    const long groups = groups_of(h->dim), registers = groups * (GROUP * bits / 16 / LANES), all_sums = registers * (16 / bits);
    floats sums[queries * all_sums];
    near_slots near;
    memset(sums, 0, sizeof sums);
    memset(near.rest, 0, groups * queries * sizeof *near.rest);
    for (long first = 0; first < h->held; first += NEAR) {
        const long count = h->held - first < NEAR ? h->held - first : NEAR;
        find_slots(h, first, NEAR, group_row_bytes(h->dim, bits), near.slots);
        weigh(&near, h, first, count, queries, bits);
        add_near(&near, count, sums, registers, queries, bits);
    }
    put_out(h, sums, near.rest, registers, queries, bits);
}
