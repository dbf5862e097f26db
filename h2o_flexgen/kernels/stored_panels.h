/* Panels of a transposed matrix in a stored format: the codes of some outputs are turned by words of four, and become values behind
   that, when scales and minima of these outputs fill registers too. */

#pragma once

#include "squares.h"
#include "stored_product.h"

/* Some inputs, up to a span, of as many outputs as a register holds. */
typedef struct {
    uint8_t codes[LANES][SPAN];
    float scales[SPAN / 16][LANES], minima[SPAN / 16][LANES];
    int32_t zeros[SPAN / 16][LANES];
    uint32_t halves[SPAN / PIECE][LANES]; /* scales, and above them minima, of blocks that begin with these in float16 */
} turned_outputs;

static ALWAYS_INLINE void read_output(const stored_matrix *m, long output, long input, long inputs, int lane, int format, turned_outputs *to)
{
    const stored_row row = stored_row_of(m, output < m->outputs ? output : m->outputs - 1);
    const long within = input % STRETCH, sharing = sharing_inputs(format);
    stored_shares shares;
    if (!begins_with_halves(format))
        read_shares(&row, input - within, format, &shares);
    for (long at = 0; at < inputs; at += PIECE) {
        const int is_there = input + at < m->inputs;
        const stored_codes codes = is_there ? stored_codes_of(&row, input + at, format) : (stored_codes){0};
        memcpy(to->codes[lane] + at, &codes, sizeof codes);
        if (begins_with_halves(format)) {
            to->halves[at / PIECE][lane] = is_there ? LOAD(uint32_t, block_of_row(&row, input + at, format)) : 0;
            continue;
        }
        for (long share = at / sharing; share < (at + PIECE) / sharing; share++) { /* behind the last input there are zeros */
            to->scales[share][lane] = is_there ? shares.scales[within / sharing + share] : 0.0f;
            to->minima[share][lane] = is_there && has_minima(format) ? shares.minima[within / sharing + share] : 0.0f;
            to->zeros[share][lane] = is_there && format == INT4 ? shares.zeros[within / sharing + share] : 0;
        }
    }
}

/* Scales and minima of all outputs, where they come in float16. */
static ALWAYS_INLINE void widen_halves(long inputs, int format, turned_outputs *to)
{
    for (long piece = 0; piece < parts_of(inputs, PIECE); piece++) {
        const words both = LOAD(words, to->halves[piece]);
        const floats scales = floats_of_low_halves(both), minima = floats_of_low_halves(both >> 16);
        memcpy(to->scales[piece], &scales, sizeof scales);
        if (has_minima(format))
            memcpy(to->minima[piece], &minima, sizeof minima);
    }
}

/* One input of each output: a byte of their words. */
static ALWAYS_INLINE floats values_of_input(words from, int byte, long share, int format, const turned_outputs *with)
{
    const words codes = byte == 3 ? from >> 24 : from >> 8 * byte & 0xff;
    const floats scale = LOAD(floats, with->scales[share]);
    if (format == FP8)
        return floats_of_fp8(codes) * scale;
    const integers zero = format == INT4 ? LOAD(integers, with->zeros[share]) : (integers){0} + usual_zero(format);
    const floats values = __builtin_convertvector((integers)codes - zero, floats) * scale;
    return has_minima(format) ? values + LOAD(floats, with->minima[share]) : values;
}

/* Stores an input, and the next one, of each output in a half of a panel. */
typedef void store_inputs(floats first, floats second, long input, float *half);

static ALWAYS_INLINE void fill_from_stored(const product *p, long output, long input, long inputs, float *panel, int format,
                                           store_inputs store)
{
    const stored_matrix *m = &((const product_of_stored *)p)->matrix;
    for (int half = 0; half < 2; half++) {
        turned_outputs outputs;
        for (int lane = 0; lane < LANES; lane++)
            read_output(m, output + half * LANES + lane, input, inputs, lane, format, &outputs);
        if (begins_with_halves(format))
            widen_halves(inputs, format, &outputs);
        for (long at = 0; at < inputs; at += 4 * LANES) {
            words square[LANES];
            for (int lane = 0; lane < LANES; lane++)
                square[lane] = LOAD(words, outputs.codes[lane] + at);
            turn(square);
            for (int word = 0; word < LANES; word++) {
                const long first = at + 4 * word, share = first / sharing_inputs(format);
                floats values[4];
#pragma GCC unroll 4
                for (int byte = 0; byte < 4; byte++)
                    values[byte] = values_of_input(square[word], byte, share, format, &outputs);
                store(values[0], values[1], first, panel + half * LANES);
                store(values[2], values[3], first + 2, panel + half * LANES);
            }
        }
    }
}
