/* An activation of the gate, rounded to the type of the values, and then times up where there is one. Both may be limited first, and
   the gate scaled. An activation is x times a share: silu's is 1 / (1 + exp(-x)), that of gelu by a tanh the same of
   sqrt(8 / pi) * (x + 0.044715 * x^3), that of quick gelu the same of 1.702 * x, gelu's is the normal distribution. Relu's are 0 below 0
   and then 1, those of relu squared 0 and then x. A sigmoid and the gate itself are no such products. xIELU has numbers of its own,
   which are learned. What becomes of a value depends on nothing beside these and the two. */

#include "sigmoid.h"
#include "team.h"
#include <math.h>

typedef struct {
    char *gate;     /* becomes the outcome */
    const char *up; /* NULL: there is none */
    long count;
    int kind;
    int curve;
    float limit, alpha; /* of a clamped silu */
    const float *rising, *falling, *slope, *least; /* of xIELU: what squares above 0 and falls below it, before their softplus; how
                                                      steep both are in 0; and the least distance from it that counts below */
} gating;

enum { SILU, GELU_TANH, GELU, QUICK_GELU, RELU, RELU_SQUARED, CLAMPED_SILU, XIELU, SIGMOID, IDENTITY, CURVES };

/* By an approximation of erfc with a relative error below 1.2e-7 everywhere (Press et al., Numerical Recipes, erfcc). */
static ALWAYS_INLINE floats normal_distribution(floats x)
{
    static const float factors[] = {0.17087277f,  -0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f,
                                    -0.18628806f, 0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
    const integers positive = x > 0.0f;
    const floats z = either(positive, x, -x) * 0.707106781f, t = 1.0f / (z * 0.5f + 1.0f);
    floats power = {0};
#pragma GCC unroll 10
    for (int at = 0; at < 10; at++)
        power = power * t + factors[at];
    const floats behind = t * exp_or_nothing(power - z * z) * 0.5f;
    return either(positive, 1.0f - behind, behind);
}

static ALWAYS_INLINE floats activated(floats x, int curve)
{
    if (curve == GELU)
        return x * normal_distribution(x);
    if (curve == RELU)
        return either(x < 0.0f, all(0.0f), x);
    if (curve == RELU_SQUARED)
        return either(x < 0.0f, all(0.0f), x * x);
    if (curve == SIGMOID)
        return sigmoid(x);
    if (curve == IDENTITY)
        return x;
    if (curve == QUICK_GELU)
        return x * sigmoid(x * 1.702f);
    return x * sigmoid(curve == SILU ? x : x * 1.59576912f * (x * x * 0.044715f + 1.0f));
}

/* exp(x) - 1 of what is not above 0. */
static ALWAYS_INLINE floats expm1_below_zero(floats x)
{
    floats sum = x * (1.0f / 8.0f) + 1.0f;
#pragma GCC unroll 6
    for (int term = 7; term > 1; term--)
        sum = sum * x * (1.0f / term) + 1.0f;
    return either(x > -0.5f, sum * x, exp_or_nothing(x) - 1.0f);
}

static ALWAYS_INLINE float softplus(float x)
{
    return x > 20.0f ? x : log1pf(expf(x));
}

static ALWAYS_INLINE floats xielu(floats x, const gating *g)
{
    const float rising = softplus(*g->rising), falling = *g->slope + softplus(*g->falling);
    const floats below = either(x > *g->least, all(*g->least), x);
    return either(x > 0.0f, x * x * rising, (expm1_below_zero(below) - x) * falling) + x * *g->slope;
}

static ALWAYS_INLINE floats at_most(floats x, float limit) /* NaN stays NaN */
{
    return either(x > limit, all(limit), x);
}

/* alpha * (gate, limited from above), and (up, limited, + 1) / alpha: every operation rounds as torch does. */
static ALWAYS_INLINE floats clamped_gate(floats gate, int kind, const gating *g)
{
    return rounded_to(at_most(gate, g->limit) * g->alpha, kind);
}

static ALWAYS_INLINE floats clamped_up(floats up, int kind, const gating *g)
{
    return rounded_to(rounded_to(-at_most(-at_most(up, g->limit), g->limit) + 1.0f, kind) / g->alpha, kind);
}

#define AT_ONCE 1024 /* values of a part */

static ALWAYS_INLINE void gate_register(char *gate, const char *up, long count, int kind, int curve, const gating *g)
{
    const floats of_gate = load_some(gate, count, kind);
    if (curve == CLAMPED_SILU) {
        const floats value = rounded_to(activated(clamped_gate(of_gate, kind, g), SILU), kind);
        store_some(gate, value * clamped_up(load_some(up, count, kind), kind, g), count, kind);
        return;
    }
    const floats value = rounded_to(curve == XIELU ? xielu(of_gate, g) : activated(of_gate, curve), kind);
    store_some(gate, up ? value * load_some(up, count, kind) : value, count, kind);
}

static ALWAYS_INLINE void gate_some(const gating *g, long number, int kind, int curve)
{
    const long size = itemsize_of(kind), first = number * AT_ONCE, count = g->count - first < AT_ONCE ? g->count - first : AT_ONCE;
    char *gate = g->gate + first * size;
    const char *up = g->up ? g->up + first * size : NULL;
#define GATE(AT, COUNT) gate_register(gate + (AT)*size, up ? up + (AT)*size : NULL, COUNT, kind, curve, g)
    EACH_REGISTER(at, count, GATE);
#undef GATE
}

#define OF(KIND, CURVE)                                                                                                          \
    static void CURVE##_##KIND(const void *g, long number, int member) { gate_some(g, number, KIND, CURVE); }
#define OF_KIND(KIND)                                                                                                            \
    OF(KIND, SILU) OF(KIND, GELU_TANH) OF(KIND, GELU) OF(KIND, QUICK_GELU) OF(KIND, RELU) OF(KIND, RELU_SQUARED)     \
    OF(KIND, CLAMPED_SILU) OF(KIND, XIELU) OF(KIND, SIGMOID) OF(KIND, IDENTITY)

OF_KIND(BF16)
OF_KIND(FLOAT)
OF_KIND(HALF)

void gated(const void *given, int threads)
{
    const gating *g = given;
#define ACTIONS(KIND)                                                                                                            \
    [KIND] = {SILU_##KIND, GELU_TANH_##KIND, GELU_##KIND, QUICK_GELU_##KIND, RELU_##KIND, RELU_SQUARED_##KIND, CLAMPED_SILU_##KIND, XIELU_##KIND, SIGMOID_##KIND, IDENTITY_##KIND}
    static part_action *const actions[][CURVES] = {ACTIONS(BF16), ACTIONS(FLOAT), ACTIONS(HALF)};
#undef ACTIONS
    share_out(given, (g->count + AT_ONCE - 1) / AT_ONCE, threads, actions[g->kind][g->curve]);
}
