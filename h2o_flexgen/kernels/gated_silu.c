/* silu(gate) * up, where silu(x) = x / (1 + exp(-x)) is rounded to the type of the values first. What becomes of a value depends on
   nothing but the two. */

#include "team.h"
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

#define AT_ONCE 1024 /* values of a part */

static ALWAYS_INLINE void gate_register(char *gate, const char *up, long count, int kind)
{
    const floats value = rounded_to(silu(load_some(gate, count, kind)), kind);
    store_some(gate, value * load_some(up, count, kind), count, kind);
}

static ALWAYS_INLINE void gate_some(const gating *g, long number, int kind)
{
    const long size = itemsize_of(kind), first = number * AT_ONCE, count = g->count - first < AT_ONCE ? g->count - first : AT_ONCE;
    char *gate = g->gate + first * size;
    const char *up = g->up + first * size;
#define GATE(AT, COUNT) gate_register(gate + (AT)*size, up + (AT)*size, COUNT, kind)
    EACH_REGISTER(at, count, GATE);
#undef GATE
}

static void gate_bf16(const void *g, long number, int member) { gate_some(g, number, BF16); }
static void gate_float(const void *g, long number, int member) { gate_some(g, number, FLOAT); }
static void gate_half(const void *g, long number, int member) { gate_some(g, number, HALF); }

void gated_silu(const gating *g, int threads)
{
    static part_action *const actions[] = {[BF16] = gate_bf16, [FLOAT] = gate_float, [HALF] = gate_half};
    share_out(g, (g->count + AT_ONCE - 1) / AT_ONCE, threads, actions[g->kind]);
}
