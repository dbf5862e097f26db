/* Routers: the experts that each row is given to, those with the highest scores, and their shares. Among equals the one with the
   lowest number comes first, and a NaN ranks above all. What becomes of a row depends on nothing but the row. */

#include "team.h"
#include "vectors.h"
#include <math.h>

enum way { SOFTMAX_OF_ALL, SOFTMAX_OF_CHOSEN, SIGMOID };

typedef struct {
    const char *scores;      /* (rows, experts) */
    const float *correction; /* (experts), added for the choice alone; or NULL */
    const float *factors;    /* (experts), of shares; or NULL */
    char *shares;            /* (rows, chosen), float32 */
    char *numbers;           /* alike, int32 */
    char *total;             /* (rows, width), float32, which become zeros; or NULL */
    long rows, experts, chosen, width;
    long shares_row, numbers_row, total_row; /* bytes from a row to the next */
    float least_sum, factor;
    int kind; /* of scores */
    int way, sums_to_one;
    long groups, chosen_groups; /* of experts, equally many side by side; those of groups that are not chosen are not chosen */
    long best_of_group;         /* a group ranks by the sum of so many of its highest */
} routing;

#define ROWS_OF_PART 8

/* Ranks as values do. */
static ALWAYS_INLINE int32_t rank_of(float value)
{
    const int32_t bits = (int32_t)bits_of_float(value + 0.0f); /* there is one zero */
    return value != value ? INT32_MAX : bits ^ (bits >> 31 & 0x7fffffff);
}

static void choose(const int32_t *ranks, long experts, long chosen, int32_t *numbers)
{
    long count = 0;
    for (long expert = 0; expert < experts; expert++) {
        if (count == chosen && ranks[expert] <= ranks[numbers[count - 1]])
            continue;
        long at = count < chosen ? count++ : count - 1;
        for (; at && ranks[numbers[at - 1]] < ranks[expert]; at--)
            numbers[at] = numbers[at - 1];
        numbers[at] = (int32_t)expert;
    }
}

static ALWAYS_INLINE float sum_in_order(const float *values, long count)
{
    float sum = 0.0f;
    for (long at = 0; at < count; at++)
        sum += values[at];
    return sum;
}

static void softmax(float *values, long count)
{
    float most = values[0];
    for (long at = 1; at < count; at++)
        most = values[at] > most ? values[at] : most;
#define EXP(AT, COUNT)                                                                                                           \
    store_some((char *)(values + (AT)), exp_below_zero(load_some((char *)(values + (AT)), COUNT, FLOAT) - most), COUNT, FLOAT)
    EACH_REGISTER(at, count, EXP);
#undef EXP
    const float sum = sum_in_order(values, count);
    for (long at = 0; at < count; at++)
        values[at] /= sum;
}

static ALWAYS_INLINE floats sigmoid_of(floats x)
{
    const integers positive = x > 0.0f;
    const floats part = exp_below_zero((floats)(((integers)x & ~positive) | ((integers)-x & positive)));
    const floats one = all(1.0f);
    return (floats)(((integers)one & positive) | ((integers)part & ~positive)) / (part + 1.0f);
}

static void sigmoid(float *values, long count)
{
#define SIGMOID_OF(AT, COUNT)                                                                                                    \
    store_some((char *)(values + (AT)), sigmoid_of(load_some((char *)(values + (AT)), COUNT, FLOAT)), COUNT, FLOAT)
    EACH_REGISTER(at, count, SIGMOID_OF);
#undef SIGMOID_OF
}

/* The sum of the highest values, the highest first. */
static float sum_of_best(const float *values, long count, long best)
{
    int32_t ranks[count], numbers[best];
    float chosen[best];
    for (long at = 0; at < count; at++)
        ranks[at] = rank_of(values[at]);
    choose(ranks, count, best, numbers);
    for (long at = 0; at < best; at++)
        chosen[at] = values[numbers[at]];
    float sum = chosen[0];
    for (long at = 1; at < best; at++)
        sum += chosen[at];
    return sum;
}

/* Experts of groups that are not chosen rank below all others. */
static void choose_groups(const routing *r, const float *ranked, int32_t *ranks)
{
    const long of_group = r->experts / r->groups;
    int32_t ranks_of_groups[r->groups], chosen[r->chosen_groups];
    char is_chosen[r->groups];
    for (long group = 0; group < r->groups; group++)
        ranks_of_groups[group] = rank_of(sum_of_best(ranked + group * of_group, of_group, r->best_of_group));
    choose(ranks_of_groups, r->groups, r->chosen_groups, chosen);
    memset(is_chosen, 0, r->groups);
    for (long at = 0; at < r->chosen_groups; at++)
        is_chosen[chosen[at]] = 1;
    for (long expert = 0; expert < r->experts; expert++)
        if (!is_chosen[expert / of_group])
            ranks[expert] = rank_of(-INFINITY);
}

static void route_row(const routing *r, long row)
{
    float values[r->experts], ranked[r->experts], *shares = (float *)(r->shares + row * r->shares_row);
    int32_t ranks[r->experts], *numbers = (int32_t *)(r->numbers + row * r->numbers_row);
    const long size = itemsize_of(r->kind);
    for (long expert = 0; expert < r->experts; expert++)
        values[expert] = load_value(r->scores + (row * r->experts + expert) * size, r->kind);
    const int is_corrected = r->correction != NULL; /* what is added is added to shares */
    if (r->way == SIGMOID)
        sigmoid(values, r->experts);
    if (r->way == SOFTMAX_OF_ALL && is_corrected)
        softmax(values, r->experts);
    for (long expert = 0; expert < r->experts; expert++) {
        ranked[expert] = is_corrected ? values[expert] + r->correction[expert] : values[expert];
        ranks[expert] = rank_of(ranked[expert]);
    }
    if (r->groups > 1)
        choose_groups(r, ranked, ranks);
    choose(ranks, r->experts, r->chosen, numbers);
    if (r->way == SOFTMAX_OF_ALL && !is_corrected)
        softmax(values, r->experts);
    for (long at = 0; at < r->chosen; at++)
        shares[at] = values[numbers[at]];
    if (r->way == SOFTMAX_OF_CHOSEN)
        softmax(shares, r->chosen);
    const float by = r->sums_to_one ? sum_in_order(shares, r->chosen) + r->least_sum : 1.0f;
    for (long at = 0; at < r->chosen; at++)
        shares[at] = shares[at] / by * r->factor * (r->factors ? r->factors[numbers[at]] : 1.0f);
    if (r->total)
        memset(r->total + row * r->total_row, 0, r->width * 4);
}

static void route_part(const void *given, long number, int member)
{
    const routing *r = given;
    for (long row = number * ROWS_OF_PART; row < (number + 1) * ROWS_OF_PART && row < r->rows; row++)
        route_row(r, row);
}

void route(const void *given, int threads)
{
    const routing *r = given;
    share_out(given, (r->rows + ROWS_OF_PART - 1) / ROWS_OF_PART, threads, route_part);
}
