/* Rows of x arranged for products with panels: blocks of rows, input by input, as float32. */

#include "panels.h"
#include "squares.h"

static ALWAYS_INLINE float sum_of_group(const float *values)
{
    float sums[16] = {0};
    for (long at = 0; at < GROUP; at += 16)
        for (int lane = 0; lane < 16; lane++)
            sums[lane] += values[at + lane];
    for (int half = 8; half; half /= 2)
        for (int lane = 0; lane < half; lane++)
            sums[lane] += sums[lane + half];
    return sums[0];
}

static ALWAYS_INLINE void load_group(const char *x, long count, int kind, float *values)
{
    for (long at = 0; at < count; at++)
        values[at] = load_value(x + at * itemsize_of(kind), kind);
    for (long at = count; at < GROUP; at++)
        values[at] = 0.0f;
}

/* A row of a block: its values lie `rows` apart. */
static ALWAYS_INLINE void arrange(const char *x, float *out, float *sums, long rows, long inputs, int kind, int bits)
{
    float values[GROUP];
    for (long first = 0; first < inputs; first += GROUP, out += GROUP * rows, sums += rows) {
        load_group(x + first * itemsize_of(kind), inputs - first < GROUP ? inputs - first : GROUP, kind, values);
        if (bits)
            *sums = sum_of_group(values);
        for (long at = 0; at < GROUP; at++)
            out[at * rows] = values[at] * place_factor(at, bits);
    }
}

typedef void (*row_action)(const char *x, float *out, float *sums, long rows, long inputs);

#define OF(KIND, BITS)                                                                                                           \
    static void arrange_##KIND##_for_##BITS(const char *x, float *out, float *sums, long rows, long inputs)                      \
    {                                                                                                                            \
        arrange(x, out, sums, rows, inputs, KIND, BITS);                                                                         \
    }

OF(BF16, 4)
OF(BF16, 8)
OF(FLOAT, 4)
OF(FLOAT, 8)
OF(HALF, 4)
OF(HALF, 8)

/* Some words of a row, of which `left` bytes are there; zeros behind them. Words are values of a kind as float32. */
static ALWAYS_INLINE words words_of_row(const char *from, long left, int kind)
{
    char whole[4 * LANES] = {0};
    if (left <= 0)
        return (words){0};
    if (left < LANES * itemsize_of(kind))
        from = memcpy(whole, from, left);
    return (words)load_floats(from, kind);
}

/* Transposes the rows of a block register by register: the bytes of rows lie one behind the other, then words of all rows lie side
   by side. A register is stored whole, and the next one overwrites what it has behind the last row, but at the end. */
static ALWAYS_INLINE void arrange_block(const char *x, float *out, long rows, long nbytes, long columns, int kind)
{
    for (long first = 0; first < columns; first += LANES) {
        const long at = first * itemsize_of(kind);
        words square[LANES];
        for (long row = 0; row < LANES; row++)
            square[row] = row < rows ? words_of_row(x + row * nbytes + at, nbytes - at, kind) : (words){0};
        turn(square);
        if (first + LANES < columns)
#pragma GCC unroll 16
            for (long word = 0; word < LANES; word++)
                memcpy(out + (first + word) * rows, square + word, sizeof *square);
        else
            for (long word = 0; word < LANES; word++)
                memcpy(out + (first + word) * rows, square + word, rows * sizeof *out);
    }
}

typedef void (*block_action)(const char *x, float *out, long rows, long nbytes, long columns);

#define OF_KIND(KIND)                                                                                                            \
    static void arrange_block_##KIND(const char *x, float *out, long rows, long nbytes, long columns)                            \
    {                                                                                                                            \
        arrange_block(x, out, rows, nbytes, columns, KIND);                                                                      \
    }

OF_KIND(BF16)
OF_KIND(FLOAT)
OF_KIND(HALF)

/* Rows that are to be arranged. `runs` are rows that meet a matrix of their own: the first of each and how many there are. Rows of no
   run are left out. */
typedef struct {
    const char *x; /* (rows, inputs) */
    float *out;
    const long (*runs)[2];
    long count, inputs, columns; /* of runs; columns: inputs, or pairs of them, filled up */
    int kind, bits;
} rows_in_runs;

typedef struct {
    const rows_in_runs *of;
    const long *begins;         /* of the blocks of each run */
    long nbytes, floats_of_row; /* of a row of x, and of what becomes of it */
    row_action of_rows;         /* one of both */
    block_action of_blocks;
} arranging;

static void arrange_part(const void *given, long number, int member)
{
    const arranging *a = given;
    const rows_in_runs *of = a->of;
    const long at = work_of_part(a->begins, of->count, number), run = of->runs[at][0], block = number - a->begins[at];
    const product p = {.x = of->out + run * a->floats_of_row, .rows = of->runs[at][1], .inputs = of->inputs, .columns = of->columns};
    const long first = first_row(block, p.rows), rows = first_row(block + 1, p.rows) - first;
    const char *x = of->x + (run + first) * a->nbytes;
    float *values = (float *)block_of_x(&p, block), *sums = (float *)block_of_group_sums(&p, block);
    if (a->of_blocks)
        a->of_blocks(x, values, rows, a->nbytes, p.columns);
    else
        for (long row = 0; row < rows; row++)
            a->of_rows(x + row * a->nbytes, values + row, sums + row, rows, p.inputs);
}

static void arrange_runs(arranging some, int threads)
{
    const rows_in_runs *of = some.of;
    long begins[of->count + 1];
    begins[0] = 0;
    for (long at = 0; at < of->count; at++)
        begins[at + 1] = begins[at] + parts_of(of->runs[at][1], MOST_ROWS);
    some.begins = begins;
    share_out(&some, begins[of->count], threads, arrange_part);
}

/* Arranges rows for a matrix with codes of so many bits, or for a plain one (0), and sums up their groups for codes. */
void arrange_rows(const void *given, int threads)
{
    static const row_action actions[3][2] = {{arrange_BF16_for_4, arrange_BF16_for_8},
                                             {arrange_FLOAT_for_4, arrange_FLOAT_for_8},
                                             {arrange_HALF_for_4, arrange_HALF_for_8}};
    static const block_action blocks[] = {[BF16] = arrange_block_BF16, [FLOAT] = arrange_block_FLOAT, [HALF] = arrange_block_HALF};
    const rows_in_runs *of = given;
    arranging some = {of, NULL, of->inputs * itemsize_of(of->kind), of->columns};
    if (of->bits) {
        some.floats_of_row += of->columns / GROUP;
        some.of_rows = actions[of->kind][of->bits / 8];
    } else {
        some.of_blocks = blocks[of->kind];
    }
    arrange_runs(some, threads);
}

/* Arranges rows of bfloat16 in pairs of inputs: words that are moved as they are. */
void arrange_row_pairs(const void *given, int threads)
{
    const rows_in_runs *of = given;
    arrange_runs((arranging){of, NULL, of->inputs * 2, of->columns, .of_blocks = arrange_block_FLOAT}, threads);
}
