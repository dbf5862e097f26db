/* Adds rows, each times its weight, to rows of sums, in float32. Rows of one sum are added in their order, and a product is rounded
   before it is added: an outcome depends neither on threads nor on how many rows come at once. */

#include "vectors.h"

typedef struct {
    const char *rows;     /* (count, width) */
    const float *weights; /* (count) */
    const int64_t *to;    /* (count), the row of sums that each is added to */
    char *sums;           /* float32 */
    long count, width, sums_row; /* the last in bytes */
    int kind;                    /* type of the rows */
} additions;

#define AT_ONCE 512 /* columns that one thread takes: it passes over all rows */

static ALWAYS_INLINE void add_register(char *sum, const char *row, floats weight, long count, int kind)
{
    store_some(sum, load_some(sum, count, FLOAT) + rounded(load_some(row, count, kind) * weight), count, FLOAT);
}

static ALWAYS_INLINE void add_columns(const additions *a, long first, long count, int kind)
{
    const long size = itemsize_of(kind);
    for (long row = 0; row < a->count; row++) {
        const char *from = a->rows + (row * a->width + first) * size;
        char *sum = a->sums + a->to[row] * a->sums_row + first * 4;
        const floats weight = all(a->weights[row]);
#define ADD(AT, COUNT) add_register(sum + (AT)*4, from + (AT)*size, weight, COUNT, kind)
        EACH_REGISTER(at, count, ADD);
#undef ADD
    }
}

typedef void (*columns_action)(const additions *a, long first, long count);

static void add_bf16(const additions *a, long first, long count) { add_columns(a, first, count, BF16); }
static void add_float(const additions *a, long first, long count) { add_columns(a, first, count, FLOAT); }
static void add_half(const additions *a, long first, long count) { add_columns(a, first, count, HALF); }

void add_weighted(const additions *a, int threads)
{
    static const columns_action actions[] = {[BF16] = add_bf16, [FLOAT] = add_float, [HALF] = add_half};
    const columns_action action = actions[a->kind];
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long first = 0; first < a->width; first += AT_ONCE)
        action(a, first, a->width - first < AT_ONCE ? a->width - first : AT_ONCE);
}
