/* The product of few rows with a transposed matrix of plain values (outputs, inputs), by dot products as the matrix lies: it is read at
   the rate of memory. Values of 16 bits are widened in registers. A row and an output have one chain of operations, whatever is beside
   them. */

#include "asked_products.h"
#include "team.h"
#include "vectors.h"

typedef struct {
    const char *x;    /* (rows, inputs) */
    const char *data; /* (outputs, inputs) */
    const char *bias; /* (outputs), or NULL */
    char *out;        /* (rows, outputs) */
    long rows, inputs, outputs;
} dots;

#define TOGETHER 4 /* outputs whose values come side by side, and rows that meet them */
#define OF_PART 16 /* outputs of a part */
#define AHEAD 1024 /* bytes that are asked for before they are needed: more outputs come in turn than a processor notices as streams */

/* The inputs from one on of some rows and outputs. Behind the last output it is repeated: what comes of that is not stored. */
static ALWAYS_INLINE void add_inputs(const char *const *x, const char *const *data, long at, long count, floats (*sums)[TOGETHER],
                                     int rows, int kind)
{
    const long size = itemsize_of(kind);
    floats wide[TOGETHER];
#pragma GCC unroll 4
    for (int output = 0; output < TOGETHER; output++) {
        __builtin_prefetch(data[output] + at * size + AHEAD, 0, 2);
        wide[output] = load_some(data[output] + at * size, count, kind);
    }
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++) {
        const floats own = load_some(x[row] + at * size, count, kind);
#pragma GCC unroll 4
        for (int output = 0; output < TOGETHER; output++)
            sums[row][output] += own * wide[output];
    }
}

static ALWAYS_INLINE void dot(const dots *d, long first_row, long first, int rows, int kind)
{
    const long size = itemsize_of(kind), row_bytes = d->inputs * size;
    const char *x[TOGETHER], *data[TOGETHER];
    floats sums[TOGETHER][TOGETHER] = {0};
    for (int row = 0; row < rows; row++)
        x[row] = d->x + (first_row + row) * row_bytes;
    for (int output = 0; output < TOGETHER; output++)
        data[output] = d->data + (first + output < d->outputs ? first + output : d->outputs - 1) * row_bytes;
#define ADD(AT, COUNT) add_inputs(x, data, AT, COUNT, sums, rows, kind)
    EACH_REGISTER(at, d->inputs, ADD);
#undef ADD
    for (int row = 0; row < rows; row++)
        for (long output = first; output < first + TOGETHER && output < d->outputs; output++) {
            const float bias = d->bias ? load_value(d->bias + output * size, kind) : 0.0f;
            store_value(d->out + ((first_row + row) * d->outputs + output) * size, sum_of(sums[row][output - first]) + bias, kind);
        }
}

static ALWAYS_INLINE void dot_part(const dots *d, long number, int kind)
{
    for (long output = number * OF_PART; output < (number + 1) * OF_PART && output < d->outputs; output += TOGETHER) {
        long row = 0;
        for (; row + TOGETHER <= d->rows; row += TOGETHER)
            dot(d, row, output, TOGETHER, kind);
        if (d->rows - row == 3)
            dot(d, row, output, 3, kind);
        else if (d->rows - row == 2)
            dot(d, row, output, 2, kind);
        else if (d->rows - row == 1)
            dot(d, row, output, 1, kind);
    }
}

/* Some products; threads take parts of them. */
typedef struct {
    const dots *products;
    const long *begins; /* of the parts of each */
    long count;
} some_dots;

static ALWAYS_INLINE void dot_number(const some_dots *some, long number, int kind)
{
    const long at = work_of_part(some->begins, some->count, number);
    dot_part(some->products + at, number - some->begins[at], kind);
}

static void dot_bf16(const void *some, long number, int member) { dot_number(some, number, BF16); }
static void dot_float(const void *some, long number, int member) { dot_number(some, number, FLOAT); }
static void dot_half(const void *some, long number, int member) { dot_number(some, number, HALF); }

/* Some products, with rows each, of values of one kind. */
void plain_dots(const void *given, int threads)
{
    static part_action *const actions[] = {[BF16] = dot_bf16, [FLOAT] = dot_float, [HALF] = dot_half};
    const asked_products *asked = given;
    const dots *products = asked->products;
    long begins[asked->count + 1];
    begins[0] = 0;
    for (long at = 0; at < asked->count; at++)
        begins[at + 1] = begins[at] + (products[at].rows ? (products[at].outputs + OF_PART - 1) / OF_PART : 0);
    const some_dots some = {products, begins, asked->count};
    share_out(&some, begins[asked->count], threads, actions[asked->told]);
}
