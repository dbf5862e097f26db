/* Adds panels of float32 to the sums of blocks of rows. */

#pragma once

#include "panels.h"

static ALWAYS_INLINE void add_plain(const float *x, long inputs, const panel_values *panel, floats (*total)[2], int rows)
{
    row_sums sums;
    start(sums, rows);
    add_inputs(sums, panel->values[0], x, inputs, rows);
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
        total[row][0] += sums[row][0];
        total[row][1] += sums[row][1];
    }
}

typedef void (*plain_action)(const float *x, long inputs, const panel_values *panel, floats (*total)[2]);

#define PLAIN(ROWS)                                                                                                              \
    static void add_plain_##ROWS(const float *x, long inputs, const panel_values *panel, floats (*total)[2])                     \
    {                                                                                                                            \
        add_plain(x, inputs, panel, total, ROWS);                                                                                \
    }
EACH_NUMBER_OF_ROWS(PLAIN)

static void add_plain_panel(const product *p, long block, long input, long inputs, const panel_values *panel, floats (*total)[2])
{
#define OF(ROWS) add_plain_##ROWS,
    static const plain_action actions[MOST_ROWS] = {EACH_NUMBER_OF_ROWS(OF)};
#undef OF
    const long rows = first_row(block + 1, p->rows) - first_row(block, p->rows);
    actions[rows - 1](block_of_x(p, block) + input * rows, inputs, panel, total);
}
