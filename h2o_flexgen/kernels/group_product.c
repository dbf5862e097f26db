/* The product of few rows and a transposed matrix of a group codec, which is never decoded to memory. Codes are taken out of whole
   words, so the values of x are arranged to meet them; the minimum of a group is multiplied with the sum of the x that meet the
   group. All sums are in float32 and in a fixed order: an outcome depends only on its row of x and its row of the matrix. */

#include "slots.h"
#include "vectors.h"

#define MOST_ROWS 8 /* rows at once; further rows find the same outputs in the cache */
#define MOST_OUTPUTS 4

typedef struct {
    const uint8_t *data; /* (outputs, bytes of a row) */
    const float *x;      /* (rows, columns) */
    const float *bias;   /* (outputs), or NULL */
    char *out;           /* (rows, outputs) */
    float *arranged;     /* (rows, arranged_values): working room */
    long rows, outputs, columns; /* columns in whole groups, x filled up with zeros */
    int kind;            /* type of the outcome */
} product;

/* The number of sums that registers hold. */
static ALWAYS_INLINE int outputs_at_once(int rows)
{
    return LANES == 16 ? (rows <= 4 ? 4 : 2) : (rows <= 2 ? 4 : rows <= 4 ? 2 : 1);
}

static ALWAYS_INLINE long registers_of(long columns, int bits) /* registers that the codes fill */
{
    return (columns * bits / 32 + LANES - 1) / LANES;
}

/* The arranged values of a row: a register of values for every code of a word, then the sums of the groups. */
static ALWAYS_INLINE long arranged_values(long columns, int bits)
{
    return registers_of(columns, bits) * (32 / bits) * LANES + columns / GROUP;
}

long group_product_room(long columns, int bits)
{
    return arranged_values(columns, bits);
}

/* The value whose code is number `code` of word `word` of a group. */
static ALWAYS_INLINE long value_of(long word, int code, int bits)
{
    return 4 * word + (bits == 8 ? code : code / 2 + GROUP / 2 * (code % 2));
}

static ALWAYS_INLINE void arrange(const float *x, long columns, int bits, float *out)
{
    const long words_of_group = GROUP * bits / 32, all_words = columns / GROUP * words_of_group;
    const int codes = 32 / bits;
    for (long first = 0; first < registers_of(columns, bits) * LANES; first += LANES)
        for (int code = 0; code < codes; code++)
            for (long word = first; word < first + LANES; word++)
                *out++ = word < all_words ? x[word / words_of_group * GROUP + value_of(word % words_of_group, code, bits)] : 0.0f;
    for (long group = 0; group < columns / GROUP; group++) {
        float sum = 0.0f;
        for (int at = 0; at < GROUP; at++)
            sum += x[group * GROUP + at];
        *out++ = sum;
    }
}

/* The lowest codes of a register's words, as float32. */
static ALWAYS_INLINE floats lowest_codes(words from, int bits)
{
#if LANES == 16
    if (bits == 4)
        return (floats)_mm512_permutexvar_ps((__m512i)from, (__m512)(floats){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
#endif
    return __builtin_convertvector((integers)(from & (bits == 8 ? 255 : 15)), floats);
}

static ALWAYS_INLINE floats scales_of_words(const uint8_t *scales, long first_word, long words_of_group)
{
#if LANES == 16
    if (words_of_group == LANES / 2) { /* two groups in a register */
        int two;
        memcpy(&two, scales + 2 * (first_word / words_of_group), sizeof two);
        const words shifts = {16, 16, 16, 16, 16, 16, 16, 16}, both = (words)_mm512_set1_epi32(two);
        return (floats)((both << shifts) & 0xffff0000u);
    }
#endif
    return all(load_bf16(scales + 2 * (first_word / words_of_group)));
}

static ALWAYS_INLINE float of_minima(const uint8_t *minima, const float *group_sums, long groups)
{
    floats sums = {0};
    long group = 0;
    for (; group + LANES <= groups; group += LANES)
        sums += (floats)(words_of_halves((const char *)minima + 2 * group) << 16) * LOAD(floats, group_sums + group);
    float sum = sum_of(sums);
    for (; group < groups; group++)
        sum += load_bf16(minima + 2 * group) * group_sums[group];
    return sum;
}

static ALWAYS_INLINE void store(const product *p, long row, long output, float value)
{
    value += p->bias ? p->bias[output] : 0.0f;
    store_value(p->out + (row * p->outputs + output) * itemsize_of(p->kind), value, p->kind);
}

/* Multiplies a register of codes of some outputs with some rows. */
static ALWAYS_INLINE void add(floats (*sums)[MOST_OUTPUTS], words *codes, const floats *scales, const float *x, long room, int rows,
                              int outputs, int bits)
{
#pragma GCC unroll 8
    for (int code = 0; code < 32 / bits; code++) {
        floats values[MOST_OUTPUTS];
#pragma GCC unroll 4
        for (int next = 0; next < outputs; next++) {
            values[next] = lowest_codes(codes[next] >> (bits * code), bits) * scales[next];
        }
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            const floats with = LOAD(floats, x + row * room + LANES * code);
#pragma GCC unroll 4
            for (int next = 0; next < outputs; next++)
                sums[row][next] += values[next] * with;
        }
    }
}

/* Computes several outputs at once, or sums would wait for each other; where there are no more, the last one is repeated. */
static ALWAYS_INLINE void multiply(const product *p, long first_row, long first, int rows, int bits)
{
    const int outputs = outputs_at_once(rows);
    const long row_bytes = group_row_bytes(p->columns, bits), last = p->outputs - 1, groups = p->columns / GROUP;
    const long words_of_group = GROUP * bits / 32, all_words = groups * words_of_group, room = arranged_values(p->columns, bits);
    const float *arranged = p->arranged + first_row * room, *x = arranged;
    const uint8_t *matrix[MOST_OUTPUTS];
    floats sums[MOST_ROWS][MOST_OUTPUTS]; /* in registers, as many as are used */
#pragma GCC unroll 4
    for (int next = 0; next < outputs; next++) {
        matrix[next] = p->data + (first + next < last ? first + next : last) * row_bytes;
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
            sums[row][next] = (floats){0};
    }
    long word = 0;
    for (; word + LANES <= all_words; word += LANES, x += 32 / bits * LANES) {
        words codes[MOST_OUTPUTS];
        floats scales[MOST_OUTPUTS];
#pragma GCC unroll 4
        for (int next = 0; next < outputs; next++) {
            codes[next] = LOAD(words, matrix[next] + 4 * word);
            __builtin_prefetch(matrix[next] + 4 * word + 2 * outputs * row_bytes); /* rows are too short to be noticed as streams */
            scales[next] = scales_of_words(matrix[next] + 4 * all_words, word, words_of_group);
        }
        add(sums, codes, scales, x, room, rows, outputs, bits);
    }
    if (word < all_words) { /* half a register: nothing behind it is touched */
        words codes[MOST_OUTPUTS];
        floats scales[MOST_OUTPUTS];
#pragma GCC unroll 4
        for (int next = 0; next < outputs; next++) {
            codes[next] = (words){0};
            memcpy(&codes[next], matrix[next] + 4 * word, 2 * LANES);
            scales[next] = all(load_bf16(matrix[next] + 4 * all_words + 2 * (groups - 1)));
        }
        add(sums, codes, scales, x, room, rows, outputs, bits);
    }
#pragma GCC unroll 4
    for (int next = 0; next < outputs; next++)
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
            if (first + next <= last) {
                const float *group_sums = arranged + (row + 1) * room - groups;
                const float rest = of_minima(matrix[next] + 4 * all_words + 2 * groups, group_sums, groups);
                store(p, first_row + row, first + next, sum_of(sums[row][next]) + rest);
            }
}

/* Parallel regions call through a pointer: a region is compiled by itself, and would know nothing of what is constant outside of
   it. */

typedef void (*action)(const product *p, long first_row, long first);

#define FOR_ROWS(ROWS)                                                                                                           \
    static void multiply_##ROWS##_by_4_bits(const product *p, long row, long first) { multiply(p, row, first, ROWS, 4); }        \
    static void multiply_##ROWS##_by_8_bits(const product *p, long row, long first) { multiply(p, row, first, ROWS, 8); }

FOR_ROWS(1)
FOR_ROWS(2)
FOR_ROWS(3)
FOR_ROWS(4)
FOR_ROWS(5)
FOR_ROWS(6)
FOR_ROWS(7)
FOR_ROWS(8)

#define ACTIONS(ROWS) {multiply_##ROWS##_by_4_bits, multiply_##ROWS##_by_8_bits}
#define TILE 8 /* outputs that are read once for all rows: a multiple of 1, 2 and 4 */

void group_product(const product *p, int bits, int threads)
{
    static const action actions[MOST_ROWS][2] = {ACTIONS(1), ACTIONS(2), ACTIONS(3), ACTIONS(4),
                                                 ACTIONS(5), ACTIONS(6), ACTIONS(7), ACTIONS(8)};
    const long room = arranged_values(p->columns, bits);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long row = 0; row < p->rows; row++)
            if (bits == 8)
                arrange(p->x + row * p->columns, p->columns, 8, p->arranged + row * room);
            else
                arrange(p->x + row * p->columns, p->columns, 4, p->arranged + row * room);
#pragma omp for schedule(static)
        for (long tile = 0; tile < p->outputs; tile += TILE)
            for (long row = 0; row < p->rows; row += MOST_ROWS) {
                const long rows = p->rows - row < MOST_ROWS ? p->rows - row : MOST_ROWS;
                const long end = tile + TILE < p->outputs ? tile + TILE : p->outputs;
                for (long first = tile; first < end; first += outputs_at_once((int)rows))
                    actions[rows - 1][bits == 8](p, row, first);
            }
    }
}
