/* Adds rows, each times its weight, to rows of sums, in float32. Rows of one sum are added in their order, and a product is rounded
   before it is added: an outcome depends neither on threads nor on how many rows come at once. */

#include "team.h"
#include "vectors.h"

typedef struct {
    const char *rows;     /* (count, width) */
    const float *weights; /* (count) */
    const int64_t *to;    /* (count), the row of sums that each is added to */
    char *sums;           /* float32 */
    long count, width, sums_row; /* the last in bytes */
    int kind;                    /* type of the rows */
} additions;

#define AT_ONCE 512 /* columns of a part, which passes over all rows */

static ALWAYS_INLINE void add_register(char *sum, const char *row, floats weight, long count, int kind)
{
    store_some(sum, load_some(sum, count, FLOAT) + rounded(load_some(row, count, kind) * weight), count, FLOAT);
}

static ALWAYS_INLINE void add_columns(const additions *a, long number, int kind)
{
    const long size = itemsize_of(kind), first = number * AT_ONCE, count = a->width - first < AT_ONCE ? a->width - first : AT_ONCE;
    for (long row = 0; row < a->count; row++) {
        const char *from = a->rows + (row * a->width + first) * size;
        char *sum = a->sums + a->to[row] * a->sums_row + first * 4;
        const floats weight = all(a->weights[row]);
#define ADD(AT, COUNT) add_register(sum + (AT)*4, from + (AT)*size, weight, COUNT, kind)
        EACH_REGISTER(at, count, ADD);
#undef ADD
    }
}

static void add_bf16(const void *a, long number, int member) { add_columns(a, number, BF16); }
static void add_float(const void *a, long number, int member) { add_columns(a, number, FLOAT); }
static void add_half(const void *a, long number, int member) { add_columns(a, number, HALF); }

void add_weighted(const void *given, int threads)
{
    const additions *a = given;
    static part_action *const actions[] = {[BF16] = add_bf16, [FLOAT] = add_float, [HALF] = add_half};
    share_out(given, (a->width + AT_ONCE - 1) / AT_ONCE, threads, actions[a->kind]);
}
