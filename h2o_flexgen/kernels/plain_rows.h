/* Panels of a transposed plain matrix; its outputs lie row by row. */

#pragma once

#include "panels.h"
#include "squares.h"

#define LINE 64 /* bytes that come from memory together */

/* Values of an output that a register of words holds. */
static ALWAYS_INLINE long inputs_at_once(int kind)
{
    return kind == BF16 ? 2 * LANES : LANES;
}

/* Writes a register of each of LANES outputs to a half of a panel: widened input by input, or as they are pair by pair. */
static ALWAYS_INLINE void write_turned(const char *const *from, float *to, int kind, int widened)
{
    words square[LANES];
#pragma GCC unroll 16
    for (int output = 0; output < LANES; output++)
        square[output] = kind == BF16 ? LOAD(words, from[output]) : (words)load_floats(from[output], kind);
    turn(square);
#pragma GCC unroll 16
    for (int at = 0; at < LANES; at++) {
        if (kind == BF16 && widened) {
            const words low = square[at] << 16, high = square[at] & 0xffff0000u;
            memcpy(to + 2 * at * PANEL, &low, sizeof low);
            memcpy(to + (2 * at + 1) * PANEL, &high, sizeof high);
        } else {
            memcpy(to + at * PANEL, &square[at], sizeof square[at]);
        }
    }
}

/* The last inputs of each output, and zeros behind them. */
static ALWAYS_INLINE void fill_up(const char **from, char (*filled)[4 * LANES], long bytes)
{
    for (int next = 0; next < LANES; next++) {
        memset(filled[next], 0, sizeof filled[next]);
        if (bytes > 0)
            memcpy(filled[next], from[next], bytes);
        from[next] = filled[next];
    }
}

/* Behind the last output it is repeated: what comes of that is not stored. */
static ALWAYS_INLINE const char *row_of(const product *p, long output, long size)
{
    return (const char *)p->data + (output < p->outputs ? output : p->outputs - 1) * p->inputs * size;
}

/* Fills a panel from inputs that lie as bfloat16, float16 or float32. What comes next of the same outputs, or of the next panel's,
   is asked for meanwhile: there are more outputs in turn than a processor notices as streams. */
static ALWAYS_INLINE void fill_from_rows(const product *p, long output, long input, long inputs, panel_values *panel, int kind,
                                         int widened)
{
    const long size = itemsize_of(kind), step = inputs_at_once(kind), ends = p->inputs - input <= inputs;
    for (int half = 0; half < 2; half++) {
        const char *rows[LANES], *ahead[LANES];
        for (int next = 0; next < LANES; next++) {
            const long at = output + half * LANES + next;
            rows[next] = row_of(p, at, size) + input * size;
            ahead[next] = ends ? row_of(p, at + PANEL, size) : rows[next] + inputs * size;
        }
        for (long at = 0; at < inputs; at += step) {
            const char *from[LANES];
            char filled[LANES][4 * LANES];
            const long left = p->inputs - input - at;
            for (int next = 0; next < LANES; next++) {
                from[next] = rows[next] + at * size;
                if (at * size % LINE == 0)
                    __builtin_prefetch(ahead[next] + at * size, 0, 2);
            }
            if (left < step)
                fill_up(from, filled, left * size);
            write_turned(from, panel->values[widened ? at : at / 2] + half * LANES, kind, widened);
        }
    }
}
