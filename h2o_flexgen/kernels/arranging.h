/* Rows of x become blocks of rows for products with panels. */

#pragma once

#include "panels.h"
#include "squares.h"

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

/* Transposes some rows, no more than lanes, register by register: the bytes of rows lie one behind the other, then words of all rows
   lie side by side. A register is stored whole, and the next one overwrites what it has behind the last row, but at the end. */
static ALWAYS_INLINE void arrange_some(const char *x, long rows, long columns, long nbytes, int kind, float *out)
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

static ALWAYS_INLINE void arrange_block(const char *x, const product *p, long block, long nbytes, int kind)
{
    const long rows = first_row(block + 1, p->rows) - first_row(block, p->rows);
    arrange_some(x, rows, p->columns, nbytes, kind, (float *)block_of_x(p, block));
}

typedef void (*row_action)(const char *x, float *out, float *sums, long rows, long inputs);

typedef void (*block_action)(const char *x, const product *p, long block, long nbytes);

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
    if (a->of_blocks) {
        a->of_blocks(x, &p, block, a->nbytes);
        return;
    }
    float *values = (float *)block_of_x(&p, block), *sums = (float *)block_of_group_sums(&p, block);
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
