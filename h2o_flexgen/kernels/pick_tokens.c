/* Picks a token for each row of logits: the likeliest, or one that is drawn. A row is worked on by one thread, and what comes of it
   depends on nothing but the row.

   What a row draws from is its scores: the logits, or a copy in float32 in which some are changed. A token weighs exp((score - best)
   / temperature), in float64. A number below 1 that depends on seed, row, step and completion says which share of all weights is
   passed before the token. Tokens that are filtered are passed from the likeliest on, and equal ones by number. They are not sorted:
   parting them around one of them, again and again, finds the one that is wanted. */

#include "team.h"
#include "vectors.h"
#include <math.h>
#include <stdlib.h>

#define BLOCK 64 /* tokens of which the highest score, or the weight, is known while a row is drawn from */

typedef struct {
    uint64_t key[2], counter[2]; /* seed and row, step and completion */
    double temperature, nucleus, least; /* a temperature of 0: the likeliest token; a nucleus of infinity, and 0: no filter */
    int64_t highest;                    /* so many of the highest scores, and those that equal the last; 0: all */
} draw;

typedef struct {
    const char *logits;   /* (rows, vocab) */
    const draw *draws;    /* (rows); NULL: the likeliest token of every row */
    const int64_t *begins; /* (rows + 1): where the changes of a row begin and end; NULL: no score is changed */
    const int64_t *ids;    /* (changes): the token of each; none twice in a row */
    const float *added;     /* (changes) */
    const float *times;     /* (changes): how often the row has generated the token; NaN: it has not seen it at all */
    const float *penalties; /* (rows, 3): for having been seen, for each time, and for any time */
    const uint8_t *only;   /* (rows): whether tokens without a change are forbidden */
    const uint32_t *masks;  /* (masks, words): a bit for each token, which is 1 if it may come */
    const int64_t *mask_of; /* (rows): the mask of a row, -1 for none; NULL: no row has one */
    int64_t *found;        /* (2, rows): tokens, and whether the highest score is finite */
    float *best;           /* (rows): the highest score; NaN if any is */
    char *space;           /* (threads, space_bytes) */
    long rows, vocab, space_bytes, words;
    int kind;
} picking;

typedef struct {
    const char *values;
    long count;
    int kind;
} scores;

typedef struct {
    uint64_t order; /* likelier tokens first, and equal ones by their number, which is in the lower half */
    double weight;
} candidate;

_Static_assert(sizeof(candidate) == 16, "Python makes space for it"); /* CANDIDATE_BYTES */

typedef double doubles __attribute__((vector_size(4 * LANES)));
typedef int64_t longs __attribute__((vector_size(4 * LANES)));
typedef float narrow_floats __attribute__((vector_size(2 * LANES)));

/* -- the highest --------------------------------------------------------------------------------------------------------------- */

static ALWAYS_INLINE float highest_in(const char *values, long count, int kind, integers *is_nan)
{
    floats most = all(-INFINITY);
    long at = 0;
    for (; at + LANES <= count; at += LANES) {
        const floats some = load_floats(values + at * itemsize_of(kind), kind);
        most = larger(some, most);
        *is_nan |= some != some;
    }
    float found = most[0];
    for (int lane = 1; lane < LANES; lane++)
        found = most[lane] > found ? most[lane] : found;
    for (; at < count; at++) {
        const float value = load_value(values + at * itemsize_of(kind), kind);
        found = value > found ? value : found;
        (*is_nan)[0] |= -(value != value);
    }
    return found;
}

static ALWAYS_INLINE float highest_of_kind(const char *values, long count, int64_t *token, int kind)
{
    const long size = itemsize_of(kind), piece = 16 * BLOCK;
    integers is_nan = {0};
    float best = -INFINITY;
    long first = 0;
    for (long at = 0; at < count; at += piece) {
        const float found = highest_in(values + at * size, count - at < piece ? count - at : piece, kind, &is_nan);
        if (found > best)
            best = found, first = at;
    }
    for (int lane = 0; lane < LANES; lane++)
        if (is_nan[lane])
            return *token = 0, NAN;
    while (load_value(values + first * size, kind) != best)
        first++;
    *token = first;
    return best;
}

/* The highest score, and the first token that has it. */
static float highest_score(scores from, int64_t *token)
{
    switch (from.kind) {
    case BF16: return highest_of_kind(from.values, from.count, token, BF16);
    case HALF: return highest_of_kind(from.values, from.count, token, HALF);
    default: return highest_of_kind(from.values, from.count, token, FLOAT);
    }
}

/* -- weights ------------------------------------------------------------------------------------------------------------------- */

/* Relative error below 1e-15; 0 below 1e-304. */
static ALWAYS_INLINE doubles exp_of_distances(doubles from)
{
    const longs is_there = from > -700.0;
    const doubles x = (doubles)((longs)from & is_there);
    const double shift = 6755399441055744.0; /* 1.5 * 2^52: its last bits count whole powers */
    const doubles shifted = x * 1.4426950408889634 + shift, powers = shifted - shift;
    const doubles rest = (x - powers * 0x1.62e42fefap-1) - powers * 0x1.cf79abc9e3b3ap-40;
    doubles value = rest * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
    value = value * rest + 1.0 / 39916800.0;
    value = value * rest + 1.0 / 3628800.0;
    value = value * rest + 1.0 / 362880.0;
    value = value * rest + 1.0 / 40320.0;
    value = value * rest + 1.0 / 5040.0;
    value = value * rest + 1.0 / 720.0;
    value = value * rest + 1.0 / 120.0;
    value = value * rest + 1.0 / 24.0;
    value = value * rest + 1.0 / 6.0;
    value = value * rest + 0.5;
    value = value * rest + 1.0;
    value = value * rest + 1.0;
    return (doubles)(((longs)value + ((longs)shifted << 52)) & is_there);
}

/* The weights of a block of scores, 0 where they are below the least weight, and their sum. */
static ALWAYS_INLINE double weigh(const float *values, float best, const draw *d, double *out)
{
    const double colder = 1.0 / d->temperature;
    doubles sums = {0};
    for (long at = 0; at < BLOCK; at += LANES / 2) {
        const doubles some = __builtin_convertvector(LOAD(narrow_floats, values + at), doubles);
        const doubles weights = exp_of_distances((some - (double)best) * colder);
        const doubles kept = (doubles)((longs)weights & (weights >= d->least));
        memcpy(out + at, &kept, sizeof kept);
        sums += kept;
    }
    double sum = 0.0;
    for (int lane = 0; lane < LANES / 2; lane++)
        sum += sums[lane];
    return sum;
}

/* The scores of a block, filled up with those of tokens that weigh nothing. */
static ALWAYS_INLINE void block_at(scores from, long first, float *out)
{
    for (long at = 0; at < BLOCK; at += LANES) {
        const long left = from.count - first - at;
        floats some = all(-INFINITY);
        if (left >= LANES)
            some = load_floats(from.values + (first + at) * itemsize_of(from.kind), from.kind);
        else
            for (long lane = 0; lane < left; lane++)
                some[lane] = load_value(from.values + (first + at + lane) * itemsize_of(from.kind), from.kind);
        memcpy(out + at, &some, sizeof some);
    }
}

static double weigh_block(scores from, long first, float best, const draw *d, double *weights)
{
    float values[BLOCK];
    block_at(from, first, values);
    return weigh(values, best, d, weights);
}

static double weigh_all(scores from, float best, const draw *d, double *of_blocks)
{
    double weights[BLOCK], sum = 0.0;
    for (long first = 0; first < from.count; first += BLOCK)
        sum += of_blocks[first / BLOCK] = weigh_block(from, first, best, d, weights);
    return sum;
}

/* -- drawing from all tokens ---------------------------------------------------------------------------------------------------- */

static int64_t draw_from_all(scores from, float best, const draw *d, double share, double *of_blocks)
{
    const double target = share * weigh_all(from, best, d, of_blocks);
    double weights[BLOCK], passed = 0.0;
    int64_t last = 0;
    for (long first = 0; first < from.count; first += BLOCK) {
        if (passed + of_blocks[first / BLOCK] <= target && first + BLOCK < from.count) {
            passed += of_blocks[first / BLOCK];
            continue;
        }
        weigh_block(from, first, best, d, weights);
        for (int at = 0; at < BLOCK && first + at < from.count; at++) {
            passed += weights[at];
            if (weights[at] > 0.0)
                last = first + at;
            if (passed > target)
                return last;
        }
    }
    return last; /* sums of other order: the target is the sum of all, or nearly so */
}

/* -- drawing from the likeliest --------------------------------------------------------------------------------------------------- */

static ALWAYS_INLINE uint64_t order_of(float score, long token)
{
    const uint32_t bits = bits_of_float(score + 0.0f); /* zeros are equal */
    const uint32_t rank = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)~rank << 32 | (uint32_t)token;
}

static ALWAYS_INLINE float score_of(candidate one)
{
    const uint32_t rank = ~(uint32_t)(one.order >> 32);
    return float_of_bits(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank);
}

static ALWAYS_INLINE void swap(candidate *one, candidate *other)
{
    const candidate kept = *one;
    *one = *other;
    *other = kept;
}

/* Parts candidates so that those before a place come before it in order, and the others behind it -> the place. Those up to the place
   are the fewest first ones that weigh more than a target together. */
static long part_at(candidate *of, long count, double target)
{
    long low = 0, high = count;
    while (high - low > 1) {
        swap(of + (low + high) / 2, of + high - 1);
        const uint64_t pivot = of[high - 1].order;
        long parted = low;
        double sum = 0.0;
        for (long at = low; at < high - 1; at++)
            if (of[at].order < pivot) {
                sum += of[at].weight;
                swap(of + at, of + parted++);
            }
        swap(of + parted, of + high - 1);
        if (sum > target) {
            high = parted;
            continue;
        }
        if (sum + of[parted].weight > target || parted + 1 == high)
            return parted;
        target -= sum + of[parted].weight;
        low = parted + 1;
    }
    return low;
}

/* Candidates of all tokens with scores from a floor on. */
static long candidates_from(scores from, float floor, candidate *out)
{
    float values[BLOCK];
    long count = 0;
    for (long first = 0; first < from.count; first += BLOCK) {
        block_at(from, first, values);
        for (long at = 0; at < BLOCK; at += LANES) {
            const integers is_there = ~(LOAD(floats, values + at) < all(floor)); /* NaN too: there are as many as are wanted */
            integers any = is_there;
            for (int half = LANES / 2; half; half /= 2)
                any |= __builtin_shuffle(any, (integers)LANE_NUMBERS ^ half);
            for (int lane = 0; any[0] && lane < LANES; lane++)
                if (is_there[lane] && first + at + lane < from.count)
                    out[count++] = (candidate){order_of(values[at + lane], first + at + lane), 1.0};
        }
    }
    return count;
}

/* A score that at least so many tokens have or surpass: so many blocks have one that does. */
static float floor_of_highest(scores from, long wanted, candidate *space)
{
    const long blocks = (from.count + BLOCK - 1) / BLOCK;
    float values[BLOCK];
    if (2 * wanted > blocks)
        return -INFINITY;
    for (long block = 0; block < blocks; block++) {
        integers is_nan = {0};
        block_at(from, block * BLOCK, values);
        space[block] = (candidate){order_of(highest_in((const char *)values, BLOCK, FLOAT, &is_nan), block), 1.0};
    }
    return score_of(space[part_at(space, blocks, wanted - 0.5)]);
}

/* The candidates with the highest scores, and those that equal the last. */
static long highest_candidates(scores from, long wanted, candidate *out)
{
    const long count = candidates_from(from, floor_of_highest(from, wanted, out), out);
    long kept = part_at(out, count, wanted - 0.5) + 1;
    const uint64_t last = out[kept - 1].order >> 32;
    for (long at = kept; at < count; at++)
        if (out[at].order >> 32 == last)
            swap(out + at, out + kept++);
    return kept;
}

/* Weighs candidates and leaves out those that weigh nothing. */
static long weighed(candidate *of, long count, float best, const draw *d, double *sum)
{
    float values[BLOCK];
    double weights[BLOCK];
    long kept = 0;
    *sum = 0.0;
    for (long first = 0; first < count; first += BLOCK) {
        const long some = count - first < BLOCK ? count - first : BLOCK;
        for (long at = 0; at < BLOCK; at++)
            values[at] = at < some ? score_of(of[first + at]) : -INFINITY;
        *sum += weigh(values, best, d, weights);
        for (long at = 0; at < some; at++)
            if (weights[at] > 0.0)
                of[kept++] = (candidate){of[first + at].order, weights[at]};
    }
    return kept;
}

static int64_t draw_from_likeliest(scores from, float best, const draw *d, double share, candidate *space)
{
    double sum, total;
    long count;
    if (d->highest > 0 && d->highest < from.count) {
        count = highest_candidates(from, d->highest, space);
        count = weighed(space, count, best, d, &total);
    } else {
        total = d->nucleus < 1.0 ? weigh_all(from, best, d, (double *)space) : 0.0;
        /* all tokens lighter than this together weigh less than the nucleus leaves out */
        const double lightest = fmax(d->least, d->nucleus < 1.0 ? (1.0 - d->nucleus) * total / from.count : 0.0);
        const double floor = (double)best + d->temperature * (log(lightest) - 1e-6);
        count = candidates_from(from, lightest > 0.0 ? nextafterf((float)floor, -INFINITY) : -INFINITY, space);
        count = weighed(space, count, best, d, &sum);
    }
    if (d->nucleus < 1.0) /* those before which less than the nucleus was passed */
        count = part_at(space, count, nextafter(d->nucleus * total, 0.0)) + 1;
    sum = 0.0;
    for (long at = 0; at < count; at++)
        sum += space[at].weight;
    return (uint32_t)space[part_at(space, count, share * sum)].order;
}

/* -- a row ------------------------------------------------------------------------------------------------------------------------ */

/* The first word that Philox, 4 x 64 bits in ten rounds, makes of the next number after a counter. */
static uint64_t random_bits(const draw *d)
{
    uint64_t c[4] = {d->counter[0] + 1, d->counter[1] + (d->counter[0] == UINT64_MAX), 0, 0};
    uint64_t key[2] = {d->key[0], d->key[1]};
    for (int round = 0; round < 10; round++) {
        const unsigned __int128 one = (unsigned __int128)0xD2E7470EE14C6C93u * c[0];
        const unsigned __int128 other = (unsigned __int128)0xCA5A826395121157u * c[2];
        const uint64_t next[4] = {(uint64_t)(other >> 64) ^ c[1] ^ key[0], (uint64_t)other,
                                  (uint64_t)(one >> 64) ^ c[3] ^ key[1], (uint64_t)one};
        memcpy(c, next, sizeof c);
        key[0] += 0x9E3779B97F4A7C15u, key[1] += 0xBB67AE8584CAA73Bu;
    }
    return c[0];
}

static void copy_floats(scores from, float *out)
{
    float values[BLOCK];
    for (long first = 0; first < from.count; first += BLOCK) {
        block_at(from, first, values);
        memcpy(out + first, values, (from.count - first < BLOCK ? from.count - first : BLOCK) * sizeof *out);
    }
}

/* The score of a token with all its changes, each of which rounds. For having been seen, positive scores are divided by the penalty
   and others are multiplied. */
static ALWAYS_INLINE float changed(float score, float times, const float *penalties)
{
    if (times >= 0.0f)
        score = score < 0.0f ? score * penalties[0] : score / penalties[0];
    if (times > 0.0f) {
        const floats taken = rounded(all(times * penalties[1]));
        score = rounded(all(score - taken[0]))[0] - penalties[2];
    }
    return score;
}

static int has_mask(const picking *p, long row)
{
    return p->mask_of && p->mask_of[row] >= 0;
}

/* Tokens behind the last word of a mask are forbidden, too. */
static void forbid(const uint32_t *mask, long words, long count, float *out)
{
    for (long first = 0; first < count; first += 32) {
        const uint32_t allowed = first / 32 < words ? mask[first / 32] : 0;
        const long some = count - first < 32 ? count - first : 32;
        for (long at = 0; allowed != UINT32_MAX && at < some; at++)
            if (!(allowed >> at & 1))
                out[first + at] = -INFINITY;
    }
}

static scores changed_scores(const picking *p, scores from, long row, float *out)
{
    if (p->begins && p->only[row])
        for (long at = 0; at < from.count; at++)
            out[at] = -INFINITY;
    else
        copy_floats(from, out);
    const long first = p->begins ? p->begins[row] : 0, behind = p->begins ? p->begins[row + 1] : 0;
    for (long at = first; at < behind; at++) {
        const float score = load_value(from.values + p->ids[at] * itemsize_of(from.kind), from.kind);
        out[p->ids[at]] = changed(score + p->added[at], p->times[at], p->penalties + 3 * row);
    }
    if (has_mask(p, row))
        forbid(p->masks + p->mask_of[row] * p->words, p->words, from.count, out);
    return (scores){(const char *)out, from.count, FLOAT};
}

static void pick_row(const void *given, long row, int member)
{
    const picking *p = given;
    scores from = {p->logits + row * p->vocab * itemsize_of(p->kind), p->vocab, p->kind};
    char *space = p->space + member * p->space_bytes;
    if (has_mask(p, row) || (p->begins && (p->only[row] || p->begins[row] < p->begins[row + 1])))
        from = changed_scores(p, from, row, (float *)(space + p->vocab * sizeof(candidate)));
    const float best = p->best[row] = highest_score(from, p->found + row);
    p->found[p->rows + row] = isfinite(best) != 0;
    const draw *d = p->draws ? p->draws + row : NULL;
    if (!d || d->temperature == 0.0 || !isfinite(best))
        return;
    const double share = (random_bits(d) >> 11) * 0x1p-53;
    if (d->highest > 0 || d->nucleus < 1.0 || d->least > 0.0)
        p->found[row] = draw_from_likeliest(from, best, d, share, (candidate *)space);
    else
        p->found[row] = draw_from_all(from, best, d, share, (double *)space);
}

void pick_tokens(const void *given, int threads)
{
    share_out(given, ((const picking *)given)->rows, threads, pick_row);
}

/* -- the likeliest ------------------------------------------------------------------------------------------------------------ */

typedef struct {
    const float *values; /* (rows, vocab) */
    int64_t *ids;        /* (rows, count) */
    float *highest;      /* (rows, count) */
    char *space;         /* (threads, space_bytes) */
    long rows, vocab, count, space_bytes;
} ranking;

static int by_order(const void *one, const void *other)
{
    const uint64_t a = ((const candidate *)one)->order, b = ((const candidate *)other)->order;
    return (a > b) - (a < b);
}

static void rank_row(const void *given, long row, int member)
{
    const ranking *r = given;
    const scores from = {(const char *)(r->values + row * r->vocab), r->vocab, FLOAT};
    candidate *found = (candidate *)(r->space + member * r->space_bytes);
    qsort(found, highest_candidates(from, r->count, found), sizeof *found, by_order);
    for (long at = 0; at < r->count; at++) {
        r->ids[row * r->count + at] = (uint32_t)found[at].order;
        r->highest[row * r->count + at] = r->values[row * r->vocab + (uint32_t)found[at].order];
    }
}

void likeliest(const void *given, int threads)
{
    share_out(given, ((const ranking *)given)->rows, threads, rank_row);
}
