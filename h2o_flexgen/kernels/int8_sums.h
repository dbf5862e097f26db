/* What products with rows of int8 share: integer dot products of some rows with some registers of outputs, and what becomes of their
   sums. */

#pragma once

#include "int8_dots.h"

/* Rows and tiles at once: the dot products of a group fill the registers. A product that keeps more than these there has fewer rows. */
#if LANES == 16
#ifndef MOST_ROWS
#define MOST_ROWS 6
#endif
#define TILES 2
#elif WHOLE_DWORDS
#define MOST_ROWS 6
#define TILES 1
#else
#define MOST_ROWS 4
#define TILES 1
#endif
#define REGISTERS (TILES * PARTS)
#define ROWS_AT_ONCE 256 /* rows with sums that are kept between groups */
#define LINE 64          /* bytes of the cache that are fetched at once */

typedef struct {
    const int8_t *codes;  /* (rows, groups * 64) */
    const float *scales;  /* (rows, groups) */
    const float *bias;    /* (outputs), or NULL */
    char *out;            /* (rows, outputs) */
    long rows, groups, outputs;
    int kind; /* type of the outcome */
} factors;

/* Parts of a product: each is some tiles of its outputs. Of a product without rows nothing is read. */
static ALWAYS_INLINE long parts_of_product(const factors *p)
{
    return p->rows ? ((p->outputs + TILE - 1) / TILE + TILES - 1) / TILES : 0;
}

/* Dwords: their products with codes may be added up in 16 bits, with codes of 8 bits in planes of 4. */
static ALWAYS_INLINE int dwords_in_shorts(int bits)
{
    return bits == 5 ? 4 : bits == 6 ? 2 : 8;
}

/* Adds the dot products of `count` dwords from `first` on, of some rows of x with the codes of blocks. */
static ALWAYS_INLINE void add_dots(const uint8_t *const *block, const int8_t *x, long x_row, int rows, int first, int count,
                                   int bits, int prepared, integers (*dots)[REGISTERS])
{
    const int8_t *x_at[MOST_ROWS];
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) {
        x_at[row] = x + row * x_row;
        __asm__("" : "+r"(x_at[row])); /* or compilers work out every address anew */
    }
#if WHOLE_DWORDS
#pragma GCC unroll 16
    for (int dword = first; dword < first + count; dword++) {
        words codes[REGISTERS];
#pragma GCC unroll 8
        for (int at = 0; at < REGISTERS; at++)
            codes[at] = codes_at(block[at / PARTS], dword, at % PARTS, 0, bits, prepared);
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            const words with = same_word(x_at[row] + 4 * dword);
#pragma GCC unroll 8
            for (int at = 0; at < REGISTERS; at++)
                dots[row][at] = dots_added(dots[row][at], codes[at], with);
        }
    }
#else
    const int step = dwords_in_shorts(bits) < count ? dwords_in_shorts(bits) : count;
#pragma GCC unroll 2
    for (int plane = 0; plane < planes_of(bits); plane++)
#pragma GCC unroll 8
        for (int begin = first; begin < first + count; begin += step) {
            shorts pairs[MOST_ROWS][REGISTERS];
            __asm__("" ::: "memory"); /* or compilers keep what is loaded here for the next turn */
#pragma GCC unroll 8
            for (int dword = begin; dword < begin + step; dword++) {
                words codes[REGISTERS];
#pragma GCC unroll 8
                for (int at = 0; at < REGISTERS; at++)
                    codes[at] = codes_at(block[at / PARTS], dword, at % PARTS, plane, bits, prepared);
#pragma GCC unroll 8
                for (int row = 0; row < rows; row++) {
                    const words with = same_word(x_at[row] + 4 * dword);
#pragma GCC unroll 8
                    for (int at = 0; at < REGISTERS; at++) {
                        const shorts next = pair_dots(codes[at], with);
                        pairs[row][at] = dword == begin ? next : pairs[row][at] + next;
                        IN_A_REGISTER(pairs[row][at]); /* or compilers put sums off and run out of registers */
                    }
                }
            }
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
                for (int at = 0; at < REGISTERS; at++)
                    dots[row][at] += pairs_added(pairs[row][at]) << (4 * plane);
        }
#endif
}

/* Outputs of all the tiles, register by register. */
static ALWAYS_INLINE void finish_whole(const factors *p, long row, long rows, long first, floats (*sums)[REGISTERS], int kind)
{
    for (long next = 0; next < rows; next++)
#pragma GCC unroll 4
        for (int at = 0; at < REGISTERS; at++) {
            const floats own = sums[next][at];
            char *out = p->out + ((row + next) * p->outputs + first + LANES * at) * itemsize_of(kind);
            store_floats(out, p->bias ? own + LOAD(floats, p->bias + first + LANES * at) : own, kind);
        }
}

static ALWAYS_INLINE void finish_as(const factors *p, long row, long rows, long first_tile, floats (*sums)[REGISTERS], int kind)
{
    const long first = first_tile * TILE, outputs = p->outputs - first;
    if (outputs >= TILES * TILE) {
        finish_whole(p, row, rows, first, sums, kind);
        return;
    }
    for (long next = 0; next < rows; next++) {
        float values[TILES * TILE];
        char *out = p->out + ((row + next) * p->outputs + first) * itemsize_of(kind);
        memcpy(values, sums[next], sizeof values);
        for (long output = 0; p->bias && output < outputs; output++)
            values[output] += p->bias[first + output];
        for (long output = 0; output < outputs; output++)
            store_value(out + output * itemsize_of(kind), values[output], kind);
    }
}

/* Stores the sums of some rows and tiles as the outcome. */
static void finish(const factors *p, long row, long rows, long first_tile, floats (*sums)[REGISTERS])
{
    if (p->kind == BF16)
        finish_as(p, row, rows, first_tile, sums, BF16);
    else if (p->kind == FLOAT)
        finish_as(p, row, rows, first_tile, sums, FLOAT);
    else
        finish_as(p, row, rows, first_tile, sums, HALF);
}

/* Functions for each number of rows: a region of threads is compiled by itself, and knows nothing of what is constant outside. */
#define FOUR_ROWS(OF, ...) OF(1, __VA_ARGS__) OF(2, __VA_ARGS__) OF(3, __VA_ARGS__) OF(4, __VA_ARGS__)
#if MOST_ROWS == 6
#define ALL_ROWS(OF, ...) FOUR_ROWS(OF, __VA_ARGS__) OF(5, __VA_ARGS__) OF(6, __VA_ARGS__)
#else
#define ALL_ROWS FOUR_ROWS
#endif
