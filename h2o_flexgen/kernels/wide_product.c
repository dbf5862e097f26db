/* The product of rows with a transposed matrix of plain values (outputs, inputs), whose values are widened to float32 and turned
   panel by panel: never more of them than fits into the nearest cache. */

#include "panels.h"

/* -- turning ----------------------------------------------------------------------------------------------------------------- */

#if LANES == 16
#define LOW(ONE, OTHER) (words)_mm512_unpacklo_epi32((__m512i)(ONE), (__m512i)(OTHER))
#define HIGH(ONE, OTHER) (words)_mm512_unpackhi_epi32((__m512i)(ONE), (__m512i)(OTHER))
#define LOW_PAIR(ONE, OTHER) (words)_mm512_unpacklo_epi64((__m512i)(ONE), (__m512i)(OTHER))
#define HIGH_PAIR(ONE, OTHER) (words)_mm512_unpackhi_epi64((__m512i)(ONE), (__m512i)(OTHER))
#elif LANES == 8
#define LOW(ONE, OTHER) (words)_mm256_unpacklo_epi32((__m256i)(ONE), (__m256i)(OTHER))
#define HIGH(ONE, OTHER) (words)_mm256_unpackhi_epi32((__m256i)(ONE), (__m256i)(OTHER))
#define LOW_PAIR(ONE, OTHER) (words)_mm256_unpacklo_epi64((__m256i)(ONE), (__m256i)(OTHER))
#define HIGH_PAIR(ONE, OTHER) (words)_mm256_unpackhi_epi64((__m256i)(ONE), (__m256i)(OTHER))
#else
#define LOW(ONE, OTHER) __builtin_shuffle(ONE, OTHER, (words){0, 4, 1, 5})
#define HIGH(ONE, OTHER) __builtin_shuffle(ONE, OTHER, (words){2, 6, 3, 7})
#define LOW_PAIR(ONE, OTHER) __builtin_shuffle(ONE, OTHER, (words){0, 1, 4, 5})
#define HIGH_PAIR(ONE, OTHER) __builtin_shuffle(ONE, OTHER, (words){2, 3, 6, 7})
#endif

/* Turns squares of four by four: lane 4 i + k of register j goes to lane 4 i + j of register k, for each four registers. */
static ALWAYS_INLINE void turn_squares(words *square)
{
    words pairs[LANES];
#pragma GCC unroll 8
    for (int at = 0; at < LANES; at += 2) {
        pairs[at] = LOW(square[at], square[at + 1]);
        pairs[at + 1] = HIGH(square[at], square[at + 1]);
    }
#pragma GCC unroll 4
    for (int at = 0; at < LANES; at += 4) {
        square[at] = LOW_PAIR(pairs[at], pairs[at + 2]);
        square[at + 1] = HIGH_PAIR(pairs[at], pairs[at + 2]);
        square[at + 2] = LOW_PAIR(pairs[at + 1], pairs[at + 3]);
        square[at + 3] = HIGH_PAIR(pairs[at + 1], pairs[at + 3]);
    }
}

/* Turns as many registers as they have lanes. */
static ALWAYS_INLINE void turn(words *square)
{
    turn_squares(square);
#if LANES == 8
#pragma GCC unroll 4
    for (int at = 0; at < 4; at++) {
        const __m256i one = (__m256i)square[at], other = (__m256i)square[4 + at];
        square[at] = (words)_mm256_permute2x128_si256(one, other, 0x20);
        square[4 + at] = (words)_mm256_permute2x128_si256(one, other, 0x31);
    }
#elif LANES == 16
#pragma GCC unroll 4
    for (int at = 0; at < 4; at++) {
        const __m512i a = (__m512i)square[at], b = (__m512i)square[4 + at];
        const __m512i c = (__m512i)square[8 + at], d = (__m512i)square[12 + at];
        const __m512i even = _mm512_shuffle_i32x4(a, b, 0x88), odd = _mm512_shuffle_i32x4(a, b, 0xdd);
        const __m512i even_behind = _mm512_shuffle_i32x4(c, d, 0x88), odd_behind = _mm512_shuffle_i32x4(c, d, 0xdd);
        square[at] = (words)_mm512_shuffle_i32x4(even, even_behind, 0x88);
        square[8 + at] = (words)_mm512_shuffle_i32x4(even, even_behind, 0xdd);
        square[4 + at] = (words)_mm512_shuffle_i32x4(odd, odd_behind, 0x88);
        square[12 + at] = (words)_mm512_shuffle_i32x4(odd, odd_behind, 0xdd);
    }
#endif
}

/* -- panels ------------------------------------------------------------------------------------------------------------------ */

/* Values of an output that a register of words holds. */
static ALWAYS_INLINE long inputs_at_once(int kind)
{
    return kind == BF16 ? 2 * LANES : LANES;
}

/* Writes a register of each of LANES outputs to a half of a panel, input by input. */
static ALWAYS_INLINE void write_turned(const char *const *from, float *to, int kind)
{
    words square[LANES];
#pragma GCC unroll 16
    for (int output = 0; output < LANES; output++)
        square[output] = kind == BF16 ? LOAD(words, from[output]) : (words)load_floats(from[output], kind);
    turn(square);
#pragma GCC unroll 16
    for (int at = 0; at < LANES; at++) {
        if (kind == BF16) {
            const words low = square[at] << 16, high = square[at] & 0xffff0000u;
            memcpy(to + 2 * at * PANEL, &low, sizeof low);
            memcpy(to + (2 * at + 1) * PANEL, &high, sizeof high);
        } else {
            memcpy(to + at * PANEL, &square[at], sizeof square[at]);
        }
    }
}

static ALWAYS_INLINE void fill(const product *p, long output, long input, long inputs, panel_values *panel, int kind)
{
    const long size = itemsize_of(kind), step = inputs_at_once(kind);
    for (int half = 0; half < 2; half++) {
        const char *rows[LANES];
        for (int next = 0; next < LANES; next++) {
            const long at = output + half * LANES + next; /* behind the last output it is repeated: that is not stored */
            rows[next] = (const char *)p->data + (at < p->outputs ? at : p->outputs - 1) * p->inputs * size;
        }
        for (long at = 0; at < inputs; at += step) {
            const char *from[LANES];
            char filled[LANES][4 * LANES]; /* the last inputs, and zeros behind them */
            const long left = p->inputs - input - at;
            for (int next = 0; next < LANES; next++)
                from[next] = rows[next] + (input + at) * size;
            if (left < step)
                for (int next = 0; next < LANES; next++) {
                    memset(filled[next], 0, sizeof filled[next]);
                    if (left > 0)
                        memcpy(filled[next], from[next], left * size);
                    from[next] = filled[next];
                }
            write_turned(from, panel->values[at] + half * LANES, kind);
        }
    }
}

static void fill_bf16(const product *p, long output, long input, long inputs, panel_values *to)
{
    fill(p, output, input, inputs, to, BF16);
}

static void fill_float(const product *p, long output, long input, long inputs, panel_values *to)
{
    fill(p, output, input, inputs, to, FLOAT);
}

static void fill_half(const product *p, long output, long input, long inputs, panel_values *to)
{
    fill(p, output, input, inputs, to, HALF);
}

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

static void add(const product *p, long block, long input, long inputs, const panel_values *panel, floats (*total)[2])
{
#define OF(ROWS) add_plain_##ROWS,
    static const plain_action actions[MOST_ROWS] = {EACH_NUMBER_OF_ROWS(OF)};
#undef OF
    const long rows = first_row(block + 1, p->rows) - first_row(block, p->rows);
    actions[rows - 1](block_of_x(p, block) + input * rows, inputs, panel, total);
}

void wide_product(const product *p, int kind, int threads)
{
    if (!p->rows)
        return;
#pragma omp parallel num_threads(threads)
    if (kind == BF16)
        multiply_panels(p, threads, fill_bf16, add);
    else if (kind == HALF)
        multiply_panels(p, threads, fill_half, add);
    else
        multiply_panels(p, threads, fill_float, add);
}
