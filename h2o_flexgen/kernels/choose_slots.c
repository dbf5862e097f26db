/* The slots that a step attends where it reads a share of them: those that its queries would give most attention, as an index of
   packed keys says it.

   First come the scores of all queries: a score depends on its slot alone. Then each KV head by itself makes shares of them and
   finds the slots whose sums over its query heads are highest. These sums are not negative, so that their bits rank as they do.
   Counting how many have the same upper bits finds the lowest one that is chosen, in three rounds of ever lower bits.

   A thread does both for a whole KV head of a row, with room of its own. Where there are fewer of these than threads, each has its
   room, and the threads share the pieces. Either way the bits are the same.

   Where the KV heads of a row choose together, what a slot is worth to them is summed up in their order, and all have the outcome. */

#include "step_attention.h"

#define PIECE 1024  /* slots that are scored as one part */
#define DIGITS 2048 /* numbers of 11 bits, of which a round looks at so many at most */
#define MOST_VALUES (STEP_HEAD_VALUES + LANES) /* of a query, in whole registers */

typedef struct {
    const char *q;         /* (rows, kv_heads, group, dim) */
    slots index;           /* keys in 4 bits */
    more_keys more;        /* for each of (rows, kv_heads, group); their values are not used */
    const int64_t *held;   /* (rows) */
    const int64_t *counts; /* (rows): how many slots are chosen */
    float *room;           /* for each KV head of a row, or for each thread if these are fewer: (group + 1, capacity). If heads choose
                              together: for each KV head (capacity), and behind these for each thread (group, capacity) */
    int64_t *out;          /* (rows, kv_heads, most) */
    long rows, kv_heads, group, dim, capacity, most;
    long first, recent;    /* slots that are chosen whatever they are worth: so many of the first, and of the newest */
    float scale;
    int kind; /* the type of queries */
    float cap;
    int together; /* whether all KV heads of a row choose the same */
} choosing;

static ALWAYS_INLINE long least(long one, long other)
{
    return one < other ? one : other;
}

/* -- scores ---------------------------------------------------------------------------------------------------------------- */

#define FOR_REGISTERS(NAME, QUERIES, DIM)                                                                                        \
    static void score_##NAME(const queries_of_head *h, const floats *q)                                                          \
    {                                                                                                                            \
        const long dim = DIM, registers = (dim + LANES - 1) / LANES;                                                             \
        score_slots(q, h->from, NULL, h->row, h->head, h->shares, h->held, h->capacity, QUERIES, dim, registers, h->scale,       \
                    GROUP4);                                                                                                     \
    }

FOR_REGISTERS(1_64, 1, 64)
FOR_REGISTERS(1_128, 1, 128)
FOR_REGISTERS(4_128, 4, 128)
FOR_REGISTERS(any, h->queries, h->dim)

static ALWAYS_INLINE void score_in_float(const queries_of_head *h)
{
    const long registers = (h->dim + LANES - 1) / LANES;
    floats q[MOST_QUERIES * MOST_VALUES / LANES];
    memset(q, 0, h->queries * registers * sizeof *q);
    for (long query = 0; query < h->queries; query++)
        memcpy(q + query * registers, h->q + query * h->dim, h->dim * sizeof(float));
    if (h->queries == 1 && h->dim == 64)
        score_1_64(h, q);
    else if (h->queries == 1 && h->dim == 128)
        score_1_128(h, q);
    else if (h->queries == 4 && h->dim == 128)
        score_4_128(h, q);
    else
        score_any(h, q);
}

/* The shares of a KV head's queries; behind them stands what its slots are worth. */
static ALWAYS_INLINE float *room_at(const choosing *c, long number)
{
    return c->room + number * (c->group + 1) * c->capacity;
}

/* Scores the slots that begin at `start`, so many at most. */
static void score(const choosing *c, long unit, long start, long count, float *shares)
{
    const long row = unit / c->kv_heads, head = unit % c->kv_heads, held = least(c->held[row] - start, count);
    slots from = c->index;
    from.data += start * from.slot;
    for (long query = 0; query < c->group; query += MOST_QUERIES) {
        const long queries = least(c->group - query, MOST_QUERIES), at = unit * c->group + query, values = queries * c->dim;
        float wide[MOST_QUERIES * STEP_HEAD_VALUES];
        const char *own = c->q + itemsize_of(c->kind) * at * c->dim;
        if (c->kind == FLOAT)
            memcpy(wide, own, values * sizeof(float));
        else
            widen_queries(own, wide, values, c->kind);
        float *own_shares = shares + query * c->capacity + start;
        const queries_of_head here = {&from, NULL, row, head, held, wide, NULL, own_shares, queries, c->dim, c->capacity, c->scale};
        if (is_fixed(c->kind, c->group, from.kind))
            fixed_action_for(scoring, from.kind, queries)(&here);
        else
            score_in_float(&here);
        for (long next = 0; next < queries; next++)
            cap_scores(own_shares + next * c->capacity, 0, held, c->cap);
    }
}

/* -- the choice ------------------------------------------------------------------------------------------------------------ */

/* What a round counts numbers by: some bits, of those that have the wanted bits above. */
typedef struct {
    uint32_t mask, wanted, digit;
    int shift;
} counted_bits;

/* Finds the digit of the lowest number that is among the highest `*left`, and how many with this digit are left then. */
static ALWAYS_INLINE void find_digit(const uint32_t *numbers, long count, counted_bits *by, long *left)
{
    uint32_t counts[DIGITS] = {0}, digit = by->digit;
    for (long at = 0; at < count; at++)
        counts[numbers[at] >> by->shift & by->digit]++;
    for (; digit > 0 && counts[digit] < *left; digit--)
        *left -= counts[digit];
    by->wanted |= digit << by->shift;
    by->mask |= by->digit << by->shift;
}

#if LANES == 16

/* A register of numbers, of which those with the wanted bits are put side by side. */
static ALWAYS_INLINE long put_wanted(const uint32_t *numbers, counted_bits by, uint32_t *out)
{
    const words here = LOAD(words, numbers), wanted = by.wanted - (words){0};
    const __mmask16 which = _mm512_cmpeq_epi32_mask((__m512i)(here & by.mask), (__m512i)wanted);
    const long count = __builtin_popcount(which);
    _mm512_mask_storeu_epi32(out, (__mmask16)((1u << count) - 1), _mm512_maskz_compress_epi32(which, (__m512i)here));
    return count;
}

static ALWAYS_INLINE long put_slots(long first, uint32_t which, int64_t *out)
{
    const words lanes = LANE_NUMBERS;
    const __m512i slots = _mm512_maskz_compress_epi32((__mmask16)which, (__m512i)(lanes + (uint32_t)first));
    const long count = __builtin_popcount(which);
    const uint32_t there = (1u << count) - 1;
    _mm512_mask_storeu_epi64(out, (__mmask8)there, _mm512_cvtepi32_epi64(_mm512_castsi512_si256(slots)));
    _mm512_mask_storeu_epi64(out + 8, (__mmask8)(there >> 8), _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(slots, 1)));
    return count;
}

/* Of a register of slots those that are worth more than the lowest one, and the first of its equals, as many as are left. */
static ALWAYS_INLINE long put_highest(const uint32_t *worth, long first, uint32_t lowest, long *equal, int64_t *out)
{
    const words here = LOAD(words, worth + first), limit = lowest - (words){0};
    const uint32_t equals = _mm512_cmpeq_epi32_mask((__m512i)here, (__m512i)limit);
    const uint32_t taken = _pdep_u32(*equal < LANES ? (1u << *equal) - 1 : ~0u, equals);
    *equal -= __builtin_popcount(taken);
    return put_slots(first, _mm512_cmpgt_epu32_mask((__m512i)here, (__m512i)limit) | taken, out);
}

#endif

/* The numbers that have the wanted bits, which may come to lie where they lay. */
static ALWAYS_INLINE long with_wanted(const uint32_t *numbers, long count, counted_bits by, uint32_t *out)
{
    long found = 0, at = 0;
#if LANES == 16
    for (; at + LANES <= count; at += LANES)
        found += put_wanted(numbers + at, by, out + found);
#endif
    for (; at < count; at++) {
        const uint32_t number = numbers[at];
        out[found] = number;
        found += (number & by.mask) == by.wanted;
    }
    return found;
}

/* The lowest number that is among the highest `*left`, of which so many equal ones are left then. The room is for as many numbers. */
static ALWAYS_INLINE uint32_t lowest_chosen(const uint32_t *numbers, long count, uint32_t *room, long *left)
{
    counted_bits by = {0, 0, (1u << 11) - 1, 21};
    find_digit(numbers, count, &by, left);
    count = with_wanted(numbers, count, by, room);
    by.shift = 10;
    find_digit(room, count, &by, left);
    count = with_wanted(room, count, by, room);
    by.shift = 0;
    by.digit = (1u << 10) - 1;
    find_digit(room, count, &by, left);
    return by.wanted;
}

static ALWAYS_INLINE void put_chosen(const uint32_t *worth, long held, long count, uint32_t *room, int64_t *out)
{
    long equal = count, chosen = 0, slot = 0;
    const uint32_t lowest = lowest_chosen(worth, held, room, &equal);
#if LANES == 16
    for (; slot + LANES <= held; slot += LANES)
        chosen += put_highest(worth, slot, lowest, &equal, out + chosen);
#endif
    for (; slot < held && chosen < count; slot++) {
        const int is_equal = (worth[slot] == lowest) & (equal > 0);
        out[chosen] = slot;
        chosen += (worth[slot] > lowest) | is_equal;
        equal -= is_equal;
    }
}

/* The bits of what slots are worth. */
static ALWAYS_INLINE void find_worth(const choosing *c, long unit, long held, float *shares, uint32_t *worth)
{
    float parts[c->group], own;
    for (long g = 0; g < c->group; g++)
        parts[g] = 1.0f / exponentials(shares + g * c->capacity, held, score_of_more(c->more, unit * c->group + g), &own);
#define ADD_UP(AT, COUNT)                                                                                                        \
    do {                                                                                                                         \
        floats sum = {0};                                                                                                        \
        for (long g = 0; g < c->group; g++)                                                                                      \
            sum += load_some((const char *)(shares + g * c->capacity + (AT)), COUNT, FLOAT) * parts[g];                          \
        const floats known = (floats)((integers)sum & (sum == sum)); /* NaN, which would rank above all, is worth nothing */     \
        store_some((char *)(worth + (AT)), known, COUNT, FLOAT);                                                                 \
    } while (0)
    EACH_REGISTER(at, held, ADD_UP);
#undef ADD_UP
    for (long slot = 0; slot < least(c->first, held); slot++)
        worth[slot] = bits_of_float(INFINITY);
    for (long slot = held > c->recent ? held - c->recent : 0; slot < held; slot++)
        worth[slot] = bits_of_float(INFINITY);
}

static void choose(const choosing *c, long unit, float *shares)
{
    const long row = unit / c->kv_heads, held = c->held[row], count = c->counts[row];
    uint32_t *worth = (uint32_t *)(shares + c->group * c->capacity), *room = (uint32_t *)shares; /* of shares that are summed up */
    int64_t *out = c->out + unit * c->most;
    find_worth(c, unit, held, shares, worth);
    put_chosen(worth, held, count, room, out);
    memset(out + count, 0, (c->most - count) * sizeof *out);
}

static int takes_all(const choosing *c, long unit)
{
    const long row = unit / c->kv_heads;
    return c->counts[row] >= c->held[row];
}

static void take_all(const choosing *c, long unit)
{
    int64_t *out = c->out + unit * c->most;
    for (long slot = 0; slot < c->most; slot++)
        out[slot] = slot < c->held[unit / c->kv_heads] ? slot : 0;
}

static void choose_of_head(const void *given, long unit, int member)
{
    const choosing *c = given;
    float *shares = room_at(c, member);
    if (takes_all(c, unit)) {
        take_all(c, unit);
        return;
    }
    score(c, unit, 0, c->capacity, shares);
    choose(c, unit, shares);
}

static long pieces_of(const choosing *c)
{
    return (c->capacity + PIECE - 1) / PIECE;
}

static void score_piece(const void *given, long number, int member)
{
    const choosing *c = given;
    const long unit = number / pieces_of(c), start = number % pieces_of(c) * PIECE;
    if (!takes_all(c, unit) && start < c->held[unit / c->kv_heads])
        score(c, unit, start, PIECE, room_at(c, unit));
}

static void choose_of_scored(const void *given, long unit, int member)
{
    const choosing *c = given;
    if (takes_all(c, unit))
        take_all(c, unit);
    else
        choose(c, unit, room_at(c, unit));
}

/* -- together -------------------------------------------------------------------------------------------------------------- */

static ALWAYS_INLINE uint32_t *worth_to(const choosing *c, long unit)
{
    return (uint32_t *)c->room + unit * c->capacity;
}

static ALWAYS_INLINE float *room_of_thread(const choosing *c, int member)
{
    return c->room + (c->rows * c->kv_heads + member * c->group) * c->capacity;
}

static void find_worth_to(const void *given, long unit, int member)
{
    const choosing *c = given;
    const long held = c->held[unit / c->kv_heads];
    float *shares = room_of_thread(c, member);
    if (takes_all(c, unit))
        return;
    score(c, unit, 0, held, shares);
    find_worth(c, unit, held, shares, worth_to(c, unit));
}

/* Adds what slots are worth to one more head. */
static ALWAYS_INLINE void add_worth(uint32_t *worth, const uint32_t *more, long held)
{
#define ADD_MORE(AT, COUNT)                                                                                                      \
    do {                                                                                                                         \
        const floats own = load_some((const char *)(worth + (AT)), COUNT, FLOAT);                                                \
        store_some((char *)(worth + (AT)), own + load_some((const char *)(more + (AT)), COUNT, FLOAT), COUNT, FLOAT);            \
    } while (0)
    EACH_REGISTER(at, held, ADD_MORE);
#undef ADD_MORE
}

static void choose_for_all(const void *given, long row, int member)
{
    const choosing *c = given;
    const long first = row * c->kv_heads, held = c->held[row], count = c->counts[row];
    int64_t *out = c->out + first * c->most;
    uint32_t *worth = worth_to(c, first);
    if (takes_all(c, first)) {
        take_all(c, first);
    } else {
        for (long head = 1; head < c->kv_heads; head++)
            add_worth(worth, worth_to(c, first + head), held);
        put_chosen(worth, held, count, (uint32_t *)room_of_thread(c, member), out);
        memset(out + count, 0, (c->most - count) * sizeof *out);
    }
    for (long head = 1; head < c->kv_heads; head++)
        memcpy(out + head * c->most, out, c->most * sizeof *out);
}

void choose_slots(const void *given, int threads)
{
    const choosing *c = given;
    const long units = c->rows * c->kv_heads;
    if (c->together) {
        share_out(given, units, threads, find_worth_to);
        share_out(given, c->rows, threads, choose_for_all);
    } else if (units >= threads) {
        share_out(given, units, threads, choose_of_head);
    } else {
        share_out(given, units * pieces_of(c), threads, score_piece);
        share_out(given, units, threads, choose_of_scored);
    }
}
