/* Products of rows with a transposed matrix, panel by panel: what exact products on tiles and on plain matrices share.

   A panel is a number of inputs of as many outputs as two registers hold, as float32, input by input: it lies in the nearest cache
   while one block of rows after the other is multiplied with it, each block with all its sums in registers. Some panels of outputs
   share a part of x in the cache behind. x is arranged block by block (panels.c), input by input too.

   A row and an output have one chain of operations: products are summed up over a span of inputs in their order, and the sums of
   the spans in theirs. Sums of pairs go on from span to span, however long these are. So an outcome does not depend on the rows
   beside it, nor on the width of registers where there is FMA. */

#pragma once

#include "asked_products.h"
#include "team.h"
#include "vectors.h"

#define PANEL (2 * LANES) /* outputs */
#ifdef MOST_ROWS
#elif LANES == 16
#define MOST_ROWS 12 /* of a block: as many as registers hold sums of */
#elif LANES == 8
#define MOST_ROWS 6
#else
#define MOST_ROWS 4
#endif
#define SPAN 128 /* inputs, or pairs of them, that lie side by side: those of a panel, too, unless PANEL_SPAN is given */
#ifndef PANEL_SPAN
#define PANEL_SPAN SPAN
#endif
#ifndef GROUP_PANELS
#define GROUP_PANELS 8  /* most panels of outputs that meet a part of x one after the other */
#define GROUP_BLOCKS 16 /* blocks of rows that meet a panel */
#endif

#ifdef SUMS_IN_TILES /* they begin with zeros by themselves, and there are no functions by the number of rows */
#define BEGINS_WITH_ZEROS 1
#elif MOST_ROWS == 12
#define EACH_NUMBER_OF_ROWS(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)
#elif MOST_ROWS == 6
#define EACH_NUMBER_OF_ROWS(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)
#else
#define EACH_NUMBER_OF_ROWS(DO) DO(1) DO(2) DO(3) DO(4)
#endif
#ifndef BEGINS_WITH_ZEROS
#define BEGINS_WITH_ZEROS 0
#endif

typedef struct {
    const uint8_t *data; /* the matrix */
    const float *x;      /* arranged */
    const float *bias;   /* (outputs), or NULL */
    char *out;           /* (rows, outputs) */
    long rows, outputs, inputs;
    long columns; /* inputs, filled up */
    int kind;     /* type of the outcome */
} product;

typedef floats row_sums[MOST_ROWS][2];

static ALWAYS_INLINE long parts_of(long count, long size)
{
    return (count + size - 1) / size;
}

/* Blocks of rows are as equal as can be. */
static ALWAYS_INLINE long first_row(long block, long rows)
{
    return block * rows / parts_of(rows, MOST_ROWS);
}

static ALWAYS_INLINE int is_one_block(const product *p)
{
    return p->rows <= MOST_ROWS;
}

static ALWAYS_INLINE const float *block_of_x(const product *p, long block)
{
    return p->x + first_row(block, p->rows) * p->columns;
}

/* Where the spans of all blocks lie side by side: a cache would find the blocks of long rows in one place. */
static ALWAYS_INLINE const float *span_of_x(const product *p, long block, long input, long inputs)
{
    return p->x + input * p->rows + first_row(block, p->rows) * inputs;
}

/* Behind the values of all rows lie their sums over each group of inputs. */
static ALWAYS_INLINE const float *block_of_group_sums(const product *p, long block)
{
    return p->x + p->rows * p->columns + first_row(block, p->rows) * (p->columns / GROUP);
}

/* The factor that makes up for the place of a code in its word: where it is not shifted down it is too large by a power of two
   (tiles.h), which is exact. */
static ALWAYS_INLINE float place_factor(long input, int bits)
{
    const long place = bits == 4 ? input % 4 * 8 + input / 4 % 2 * 4 : bits == 8 ? input % 4 * 8 : 0;
    return place + bits == 32 ? 1.0f : 1.0f / (float)(1u << place);
}

static ALWAYS_INLINE void start(row_sums sums, int rows)
{
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
        sums[row][0] = sums[row][1] = (floats){0};
}

/* One input of two registers of outputs, for all rows of a block. */
static ALWAYS_INLINE void add_input(row_sums sums, floats one, floats other, const float *x, int rows)
{
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
        const floats with = all(x[row]);
        sums[row][0] += with * one;
        sums[row][1] += with * other;
    }
}

static ALWAYS_INLINE void add_inputs(row_sums sums, const float *panel, const float *x, long inputs, int rows)
{
    for (long input = 0; input < inputs; input++)
        add_input(sums, LOAD(floats, panel + input * PANEL), LOAD(floats, panel + input * PANEL + LANES), x + input * rows, rows);
}

/* Adds the bias to the sums of a row, and stores them as the outcome from `output` on: as many as there are. */
static ALWAYS_INLINE void finish(const product *p, long row, long output, const floats *sums)
{
    const long size = itemsize_of(p->kind), left = p->outputs - output;
    char *out = p->out + (row * p->outputs + output) * size, last[PANEL * 4];
    float bias[PANEL] = {0};
    if (left >= PANEL) { /* of sizes that a compiler knows: copies of others are calls */
        for (int half = 0; half < 2; half++)
            store_floats(out + half * LANES * size, sums[half] + LOAD(floats, p->bias ? p->bias + output + half * LANES : bias), p->kind);
        return;
    }
    if (p->bias)
        memcpy(bias, p->bias + output, left * sizeof *bias);
    for (int half = 0; half < 2; half++)
        store_floats(last + half * LANES * size, sums[half] + LOAD(floats, bias + half * LANES), p->kind);
    memcpy(out, last, left * size);
}

/* -- the order of the work -------------------------------------------------------------------------------------------------- */

typedef struct {
    float values[PANEL_SPAN][PANEL];
    float scales[PANEL_SPAN / GROUP][PANEL], minima[PANEL_SPAN / GROUP][PANEL]; /* of each group and output; unused where there are none */
} panel_values;

/* Fills a panel with the outputs from `output` on and a number of inputs (whole groups) from `input` on. */
typedef void fill_panel(const product *p, long output, long input, long inputs, panel_values *panel);

/* Adds the sums over a panel's inputs, from `input` on, to the sums of a block of rows. Tiles begin with zeros by themselves. */
typedef void add_panel(const product *p, long block, long input, long inputs, const panel_values *panel, floats (*sums)[2]);

/* Some panels of outputs and some blocks of rows, which are multiplied together. */
typedef struct {
    long panel, panels, block, blocks;
} work;

static ALWAYS_INLINE long panels_together(const product *p, long threads, long at_most)
{
    const long blocks = parts_of(p->rows, MOST_ROWS), shared = parts_of(p->outputs, PANEL * threads);
    const long most = blocks < at_most ? blocks : at_most; /* few rows read one panel of outputs to its end */
    return shared < most ? shared : most;
}

static ALWAYS_INLINE void multiply_work(const product *p, work part, fill_panel fill, add_panel add)
{
    _Alignas(64) floats sums[GROUP_PANELS][GROUP_BLOCKS * MOST_ROWS][2];
    _Alignas(64) panel_values values;
    const long first = first_row(part.block, p->rows), rows = first_row(part.block + part.blocks, p->rows) - first;
    for (long panel = 0; panel < part.panels && !BEGINS_WITH_ZEROS; panel++)
        memset(sums[panel], 0, rows * sizeof sums[panel][0]);
    for (long input = 0; input < p->columns; input += PANEL_SPAN) {
        const long inputs = p->columns - input < PANEL_SPAN ? p->columns - input : PANEL_SPAN;
        for (long panel = 0; panel < part.panels; panel++) {
            fill(p, (part.panel + panel) * PANEL, input, inputs, &values);
            for (long block = part.block; block < part.block + part.blocks; block++)
                add(p, block, input, inputs, &values, sums[panel] + first_row(block, p->rows) - first);
        }
    }
    for (long row = 0; row < rows; row++)
        for (long panel = 0; panel < part.panels; panel++)
            finish(p, first + row, (part.panel + panel) * PANEL, sums[panel][row]);
}

/* All outputs of some rows come before the next rows, which take more room in a cache than the codes of a few panels. */
static ALWAYS_INLINE work work_number(const product *p, long number, long panels, long groups_of_blocks)
{
    const long all_panels = parts_of(p->outputs, PANEL), all_blocks = parts_of(p->rows, MOST_ROWS);
    const long works = parts_of(all_panels, panels), panel = number % works * panels, group = number / works;
    const long block = group * all_blocks / groups_of_blocks, behind = (group + 1) * all_blocks / groups_of_blocks;
    return (work){panel, all_panels - panel < panels ? all_panels - panel : panels, block, behind - block};
}

/* Some products; threads take parts of them. */
typedef struct {
    const char *products; /* each begins with a `product` */
    long size;            /* bytes from one to the next */
    long count, at_most;
    const long *begins;   /* of the parts of each */
    int threads, told;    /* `told`: as of `asked_products` */
} some_products;

static ALWAYS_INLINE some_products products_of(const void *given, long size, long at_most, int threads)
{
    const asked_products *asked = given;
    return (some_products){asked->products, size, asked->count, at_most, NULL, threads, asked->told};
}

static ALWAYS_INLINE const product *product_number(const some_products *some, long number)
{
    return (const product *)(some->products + number * some->size);
}

/* Of a product without rows nothing is read, and its matrix may be missing. */
static ALWAYS_INLINE int has_rows(const some_products *some, long number)
{
    return product_number(some, number)->rows > 0;
}

static ALWAYS_INLINE long groups_of_blocks(const product *p)
{
    return parts_of(parts_of(p->rows, MOST_ROWS), GROUP_BLOCKS);
}

/* How many parts a product has. */
typedef long count_parts(const product *p, long threads, long at_most);

static inline long works_of(const product *p, long threads, long at_most)
{
    return parts_of(parts_of(p->outputs, PANEL), panels_together(p, threads, at_most)) * groups_of_blocks(p);
}

/* The caller is a function for one kind of panels, which the compiler then knows. */
static ALWAYS_INLINE void multiply_panels(const some_products *some, long number, fill_panel fill, add_panel add)
{
    const long at = work_of_part(some->begins, some->count, number);
    const product *p = product_number(some, at);
    const long panels = panels_together(p, some->threads, some->at_most);
    multiply_work(p, work_number(p, number - some->begins[at], panels, groups_of_blocks(p)), fill, add);
}

static ALWAYS_INLINE void share_products(some_products some, count_parts count_own, part_action action)
{
    long begins[some.count + 1];
    begins[0] = 0;
    for (long at = 0; at < some.count; at++)
        begins[at + 1] = begins[at] + (has_rows(&some, at) ? count_own(product_number(&some, at), some.threads, some.at_most) : 0);
    some.begins = begins;
    share_out(&some, begins[some.count], some.threads, action);
}
