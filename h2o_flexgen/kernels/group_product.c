/* Few rows times the transposed of a matrix of a group codec, which is read once and never decoded to memory. All sums are in
   float32, over the values in their order: an outcome depends on nothing but its row of each. */

#include "group_values.h"
#include "slots.h"

#define MOST_ROWS 8
#define TOGETHER 4 /* outputs, of up to so many rows; half of them of more, or the sums would not fit the registers */

typedef struct {
    const uint8_t *data; /* (outputs, bytes of a row) */
    const float *x;      /* (rows, columns) */
    const float *bias;   /* (outputs), or NULL */
    char *out;           /* (rows, outputs) */
    long rows, outputs, columns; /* whole groups of columns: zeros in x behind the last */
    int kind;            /* of the outcome */
} product;

static ALWAYS_INLINE float sum_of(floats value)
{
    float lanes[LANES];
    memcpy(lanes, &value, sizeof lanes);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

static ALWAYS_INLINE void store(const product *p, long row, long output, float value)
{
    value += p->bias ? p->bias[output] : 0.0f;
    const long at = row * p->outputs + output;
    if (p->kind == BF16)
        ((uint16_t *)p->out)[at] = float_to_bf16(value);
    else
        ((float *)p->out)[at] = value;
}

/* Some outputs at once, or sums would wait for each other; behind the last one it is worked out again. */
static ALWAYS_INLINE void multiply(const product *p, long first, int rows, int outputs, int bits)
{
    const long row_bytes = group_row_bytes(p->columns, bits), last = p->outputs - 1;
    const uint8_t *matrix[TOGETHER];
    floats sums[MOST_ROWS][TOGETHER]; /* in registers: only those that are used are there */
#pragma GCC unroll 4
    for (int next = 0; next < outputs; next++) {
        matrix[next] = p->data + (first + next < last ? first + next : last) * row_bytes;
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
            sums[row][next] = (floats){0};
    }
    for (long group = 0; group < p->columns / GROUP; group++) {
        const float *x = p->x + group * GROUP;
#pragma GCC unroll 4
        for (int next = 0; next < outputs; next++) {
            const packed_group from = group_of_row(matrix[next], group, p->columns, bits);
            const decoder with = decoder_of(from);
#pragma GCC unroll 16
            for (int at = 0; at < GROUP / LANES * bits / 8; at++) {
                const words codes = words_of_bytes(from.codes + LANES * at);
                const floats low = bits == 8 ? decoded_8(codes, with) : decoded_4(codes, with);
#pragma GCC unroll 8
                for (int row = 0; row < rows; row++)
                    sums[row][next] += low * LOAD(floats, x + row * p->columns + LANES * at);
                if (bits == 8)
                    continue;
                const floats high = decoded_4(codes >> 4, with);
#pragma GCC unroll 8
                for (int row = 0; row < rows; row++)
                    sums[row][next] += high * LOAD(floats, x + row * p->columns + GROUP / 2 + LANES * at);
            }
        }
    }
#pragma GCC unroll 4
    for (int next = 0; next < outputs; next++)
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
            if (first + next <= last)
                store(p, row, first + next, sum_of(sums[row][next]));
}

/* Called through a pointer: a parallel region is compiled by itself, and would know nothing of what is constant outside of it. */

typedef void (*action)(const product *p, long first);

#define FOR_ROWS(ROWS, OUTPUTS)                                                                                                  \
    static void multiply_##ROWS##_by_4_bits(const product *p, long first) { multiply(p, first, ROWS, OUTPUTS, 4); }              \
    static void multiply_##ROWS##_by_8_bits(const product *p, long first) { multiply(p, first, ROWS, OUTPUTS, 8); }

FOR_ROWS(1, 4)
FOR_ROWS(2, 4)
FOR_ROWS(3, 4)
FOR_ROWS(4, 4)
FOR_ROWS(5, 2)
FOR_ROWS(6, 2)
FOR_ROWS(7, 2)
FOR_ROWS(8, 2)

#define ACTIONS(ROWS) {multiply_##ROWS##_by_4_bits, multiply_##ROWS##_by_8_bits}

void group_product(const product *p, int bits, int threads)
{
    static const action actions[MOST_ROWS][2] = {ACTIONS(1), ACTIONS(2), ACTIONS(3), ACTIONS(4),
                                                 ACTIONS(5), ACTIONS(6), ACTIONS(7), ACTIONS(8)};
    const action some = actions[p->rows - 1][bits == 8];
    const long together = p->rows <= TOGETHER ? TOGETHER : TOGETHER / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long first = 0; first < p->outputs; first += together)
        some(p, first);
}
