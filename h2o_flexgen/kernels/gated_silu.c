/* silu(gate) * up, where silu(x) = x / (1 + exp(-x)) is rounded to the type of the values first. What becomes of a value depends on
   nothing but the two. */

#include "vectors.h"

typedef struct {
    char *gate; /* becomes the outcome */
    const char *up;
    long count;
    int kind;
} gating;

/* The exponential is taken of what is not above 0, and counts as 0 from -86 on: then silu(-infinity) is NaN, as it is in torch. */
static ALWAYS_INLINE floats silu(floats x)
{
    const integers positive = x > 0.0f;
    const floats down = (floats)(((integers)-x & positive) | ((integers)x & ~positive)), counts = exp_below_zero(down);
    const floats part = (floats)((integers)counts & ~(integers)(down < -86.0f)), whole = part + 1.0f;
    const floats over = (floats)(((integers)all(1.0f) & positive) | ((integers)part & ~positive));
    return x * (over / whole);
}

#define AT_ONCE 1024 /* values that one thread takes in turn */

static ALWAYS_INLINE void gate_register(char *gate, const char *up, long count, int kind)
{
    const floats value = rounded_to(silu(load_some(gate, count, kind)), kind);
    store_some(gate, value * load_some(up, count, kind), count, kind);
}

static ALWAYS_INLINE void gate_some(const gating *g, long first, long count, int kind)
{
    const long size = itemsize_of(kind);
    char *gate = g->gate + first * size;
    const char *up = g->up + first * size;
#define GATE(AT, COUNT) gate_register(gate + (AT)*size, up + (AT)*size, COUNT, kind)
    EACH_REGISTER(at, count, GATE);
#undef GATE
}

typedef void (*part_action)(const gating *g, long first, long count);

static void gate_bf16(const gating *g, long first, long count) { gate_some(g, first, count, BF16); }
static void gate_float(const gating *g, long first, long count) { gate_some(g, first, count, FLOAT); }
static void gate_half(const gating *g, long first, long count) { gate_some(g, first, count, HALF); }

void gated_silu(const gating *g, int threads)
{
    static const part_action actions[] = {[BF16] = gate_bf16, [FLOAT] = gate_float, [HALF] = gate_half};
    const part_action action = actions[g->kind];
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long first = 0; first < g->count; first += AT_ONCE)
        action(g, first, g->count - first < AT_ONCE ? g->count - first : AT_ONCE);
}
