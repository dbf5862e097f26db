/* The length of each head's vector: the root of the sum of its squares, in float32. They are summed up lane by lane in the order of the
   values, so a length depends on its vector alone. */

#include "slots.h"
#include "team.h"
#include "vectors.h"

typedef struct {
    slots x;    /* (rows, heads, tokens, dim) */
    float *out; /* (rows, tokens, heads) */
    long rows, tokens, heads, dim;
} vectors;

static ALWAYS_INLINE float length_of(const char *x, long dim, int kind)
{
    floats sum = {0};
#define ADD(AT, COUNT)                                                                                                           \
    do {                                                                                                                         \
        const floats value = load_some(x + (AT)*itemsize_of(kind), COUNT, kind);                                                 \
        sum += value * value;                                                                                                    \
    } while (0)
    EACH_REGISTER(at, dim, ADD);
#undef ADD
    return sqrtf(sum_of(sum));
}

static void measure(const void *given, long number, int member)
{
    const vectors *v = given;
    const long head = number % v->heads, token = number / v->heads % v->tokens, row = number / v->heads / v->tokens;
    v->out[number] = length_of(slot_at(&v->x, row, head, token), v->dim, v->x.kind);
}

void lengths(const void *given, int threads)
{
    const vectors *v = given;
    share_out(given, v->rows * v->tokens * v->heads, threads, measure);
}
