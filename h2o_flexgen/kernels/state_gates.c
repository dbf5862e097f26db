/* What stands around states of rows: sizes of steps, and norms with a gate. All is float32 up to the outcome. What becomes of a row
   depends on nothing else. */

#include "sigmoid.h"
#include "slots.h"
#include "team.h"

/* -- step sizes: softplus(x + bias), within bounds; times a rate ---------------------------------------------------------------- */

typedef struct {
    const char *x; /* (rows, heads) */
    float *out;
    of_heads bias, rates;
    long rows, heads, x_row; /* the last one in bytes */
    long of_rate;            /* neighbours that have a rate together */
    float least, most;
    int kind, are_logs;
} steps;

static void size_steps(const void *given, long row, int member)
{
    const steps *s = given;
    for (long head = 0; head < s->heads; head++) {
        const float x = load_value(s->x + row * s->x_row + head * itemsize_of(s->kind), s->kind) + number_of_head(s->bias, head, 0.0f);
        const float size = x > 20.0f ? x : log1pf(expf(x)), rate = number_of_head(s->rates, head, 1.0f);
        const float within = size < s->least ? s->least : size > s->most ? s->most : size; /* NaN stays NaN */
        s->out[row * s->heads + head] = within * (s->are_logs ? -expf(rate) : rate);
    }
}

/* log(1 + exp(x)). The logarithm of 1 + y is 2 artanh(y / (2 + y)), a series in odd powers of at most 1/3. NaN stays NaN. */
static ALWAYS_INLINE floats softplus(floats x)
{
    const integers positive = x > 0.0f;
    const floats part = exp_or_nothing(either(positive, -x, x)), root = part / (part + 2.0f), square = root * root;
    floats series = square * (1.0f / 17) + 1.0f / 15;
    series = series * square + 1.0f / 13;
    series = series * square + 1.0f / 11;
    series = series * square + 1.0f / 9;
    series = series * square + 1.0f / 7;
    series = series * square + 1.0f / 5;
    series = series * square + 1.0f / 3;
    return either(positive, x, all(0.0f)) + 2.0f * (root + root * square * series);
}

static ALWAYS_INLINE void size_neighbours(const steps *s, const char *x, float *out, long first, long count, float rate)
{
    const char *bias = s->bias.data + (s->bias.data ? first * itemsize_of(s->bias.kind) : 0);
#define SIZE(AT, COUNT)                                                                                                          \
    do {                                                                                                                         \
        floats value = load_some(x + (first + (AT)) * itemsize_of(s->kind), COUNT, s->kind);                                     \
        if (s->bias.data)                                                                                                        \
            value += load_some(bias + (AT) * itemsize_of(s->bias.kind), COUNT, s->bias.kind);                                    \
        const floats size = softplus(value), more = either(size < s->least, all(s->least), size);                                \
        store_some((char *)(out + first + (AT)), either(more > s->most, all(s->most), more) * rate, COUNT, FLOAT);               \
    } while (0)
    EACH_REGISTER(at, count, SIZE);
#undef SIZE
}

static void size_steps_of_rates(const void *given, long row, int member)
{
    const steps *s = given;
    for (long number = 0; number * s->of_rate < s->heads; number++) {
        const float rate = number_of_head(s->rates, number, 1.0f);
        size_neighbours(s, s->x + row * s->x_row, s->out + row * s->heads, number * s->of_rate, s->of_rate,
                        s->are_logs ? -expf(rate) : rate);
    }
}

void step_sizes(const void *given, int threads)
{
    const steps *s = given;
    share_out(given, s->rows, threads, s->of_rate > 1 ? size_steps_of_rates : size_steps);
}

/* -- gated norm ----------------------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *x, *gate, *weight; /* (rows, groups, width), the same, (groups, width) */
    char *out;                     /* (rows, groups, width), one behind the other */
    long rows, groups, width, x_row, gate_row; /* the last two in bytes */
    float eps;
    int kind, gate_kind, weight_kind, gate_first;
} gated_norming;

static ALWAYS_INLINE floats opened(const gated_norming *n, const char *gate, long at, long count)
{
    const floats value = load_some(gate + at * itemsize_of(n->gate_kind), count, n->gate_kind);
    return value * sigmoid(value);
}

static ALWAYS_INLINE floats let_through(const gated_norming *n, const char *x, const char *gate, long at, long count)
{
    const floats value = load_some(x + at * itemsize_of(n->kind), count, n->kind);
    return n->gate_first ? value * opened(n, gate, at, count) : value;
}

static void norm_group(const gated_norming *n, const char *x, const char *gate, const char *weight, char *out)
{
    const long size = itemsize_of(n->kind), weight_size = itemsize_of(n->weight_kind);
    floats sum = {0};
#define ADD(AT, COUNT)                                                                                                           \
    do {                                                                                                                         \
        const floats value = let_through(n, x, gate, AT, COUNT);                                                                 \
        sum += value * value;                                                                                                    \
    } while (0)
    EACH_REGISTER(at, n->width, ADD);
#undef ADD
    const floats factor = all(1.0f / sqrtf(sum_of(sum) / (float)n->width + n->eps));
#define SCALE(AT, COUNT)                                                                                                         \
    do {                                                                                                                         \
        const floats made = let_through(n, x, gate, AT, COUNT) * factor * load_some(weight + (AT)*weight_size, COUNT, n->weight_kind); \
        store_some(out + (AT)*size, n->gate_first ? made : made * opened(n, gate, AT, COUNT), COUNT, n->kind);                   \
    } while (0)
    EACH_REGISTER(at, n->width, SCALE);
#undef SCALE
}

static void norm_row(const void *given, long row, int member)
{
    const gated_norming *n = given;
    for (long group = 0; group < n->groups; group++) {
        const long first = group * n->width;
        const char *x = n->x + row * n->x_row + first * itemsize_of(n->kind);
        const char *gate = n->gate + row * n->gate_row + first * itemsize_of(n->gate_kind);
        char *out = n->out + (row * n->groups * n->width + first) * itemsize_of(n->kind);
        norm_group(n, x, gate, n->weight + first * itemsize_of(n->weight_kind), out);
    }
}

void gated_norm(const void *given, int threads)
{
    const gated_norming *n = given;
    share_out(given, n->rows, threads, norm_row);
}
