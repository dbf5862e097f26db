/* The product of few rows with a transposed matrix in a stored format, exact: dot products of float32 values, which are made in
   registers from the bytes as they lie. A few outputs are multiplied at once, so that what is loaded of x serves all of them.

   A row and an output have one chain of operations: sixteen sums of every sixteenth product, in the order of the inputs as their
   codes lie, which are then added up in a fixed order. So an outcome does not depend on the rows beside it, nor on the width of
   registers where there is FMA. */

#include "stored_product.h"

#define SUMS 16 /* of a row and an output */
#define PARTS (SUMS / LANES)
#if LANES == 16
#define FEW_ROWS 6 /* most rows at once */
#define OUTPUTS_OF(ROWS) 4
#elif LANES == 8
#define FEW_ROWS 4
#define OUTPUTS_OF(ROWS) ((ROWS) == 1 ? 4 : (ROWS) == 2 ? 2 : 1)
#else
#define FEW_ROWS 2
#define OUTPUTS_OF(ROWS) 1
#endif
#define LINE 64 /* bytes that come from memory together */
#define MOST_OUTPUTS 4

/* -- rows -------------------------------------------------------------------------------------------------------------------- */

/* Whether codes lie in pairs: then even inputs are multiplied before odd ones, for each 32 of them. */
static ALWAYS_INLINE int lies_in_turn(int format)
{
    return format == FP4 || format == INT4;
}

/* x (rows, inputs) as float32, with zeros behind the last input of a row; `in_pairs`: for codes that lie in pairs. Rows of no run are
   left out. */
typedef struct {
    const char *x;
    float *out;           /* (rows, columns) */
    const long (*runs)[2]; /* rows that meet a matrix of their own: the first of each and how many there are */
    long count, inputs, columns; /* of runs */
    int kind, in_pairs;
} arranging;

typedef struct {
    const arranging *of;
    const long *begins; /* of the rows of each run */
} arranging_runs;

static void arrange_row(const void *given, long number, int member)
{
    const arranging_runs *some = given;
    const arranging *a = some->of;
    const long run = work_of_part(some->begins, a->count, number), row = a->runs[run][0] + number - some->begins[run];
    const long size = itemsize_of(a->kind);
    for (long at = 0; at < a->columns; at++) {
        const long within = at % PIECE, input = a->in_pairs ? at - within + within % 16 * 2 + within / 16 : at;
        a->out[row * a->columns + at] = input < a->inputs ? load_value(a->x + (row * a->inputs + input) * size, a->kind) : 0.0f;
    }
}

void arrange_dots(const void *given, int threads)
{
    const arranging *a = given;
    long begins[a->count + 1];
    begins[0] = 0;
    for (long at = 0; at < a->count; at++)
        begins[at + 1] = begins[at] + a->runs[at][1];
    const arranging_runs some = {a, begins};
    share_out(&some, begins[a->count], threads, arrange_row);
}

/* -- 32 inputs of an output -------------------------------------------------------------------------------------------------- */

static ALWAYS_INLINE const uint8_t *bytes_of_piece(const stored_row *row, long first, int format)
{
    return is_block(format) ? block_of_row(row, first, format) : row->codes + first / (format == FP8 ? 1 : 2);
}

#if LANES == 16

static ALWAYS_INLINE words words_of_16(const uint8_t *from)
{
    return (words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
}

/* Codes of four bits are looked up in a table of their values. */
static ALWAYS_INLINE void look_up(words low, words high, floats table, floats *out)
{
    out[0] = (floats)_mm512_permutexvar_ps((__m512i)low, (__m512)table);
    out[1] = (floats)_mm512_permutexvar_ps((__m512i)high, (__m512)table);
}

static ALWAYS_INLINE void floats_for_dots(const stored_row *row, long first, int format, const stored_shares *shares, floats *out)
{
    static const float whole[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    static const float of_fp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    static const float of_iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    const uint8_t *bytes = bytes_of_piece(row, first, format);
    const unsigned long within = (unsigned long)first % STRETCH, at = within / sharing_inputs(format), piece = within / PIECE;
    if (format == Q4_0 || format == Q4_1 || is_iq4(format) || format == MXFP4 || format == FP4 || format == INT4) {
        const unsigned long begin = format == IQ4_XS ? 8 + piece * 16 : format == Q4_1 ? 4 : format == Q4_0 || format == IQ4_NL ? 2 : format == MXFP4;
        const words both = words_of_16(bytes + begin);
        const floats codes = format == MXFP4 || format == FP4 ? LOAD(floats, of_fp4)
                             : is_iq4(format)               ? LOAD(floats, of_iq4)
                             : format == INT4               ? LOAD(floats, whole) - (float)shares->zeros[at]
                                                          : LOAD(floats, whole) - (float)usual_zero(format);
        const floats table = codes * shares->scales[at];
        look_up(both, both >> 4, has_minima(format) ? table + shares->minima[at] : table, out);
    } else if (format == Q4_K) {
        const uint8_t *from = bytes + 16 + piece / 2 * 32;
        const words low = words_of_16(from) >> piece % 2 * 4, high = words_of_16(from + 16) >> piece % 2 * 4;
        look_up(low, high, LOAD(floats, whole) * shares->scales[at] + shares->minima[at], out);
    } else if (format == FP8) {
        const floats scale = all(shares->scales[at]) * 256.0f;
        halves_of_fp8(codes_of_fp8(row, first), out);
        out[0] *= scale;
        out[1] *= scale;
    } else {
        stored_floats_of(row, first, format, shares, out);
    }
}

#else

static ALWAYS_INLINE void floats_for_dots(const stored_row *row, long first, int format, const stored_shares *shares, floats *out)
{
    if (lies_in_turn(format)) {
        const stored_codes codes = nibbles_by_half(row->codes + first / 2);
        floats_of_codes(format == FP4 ? codes_of_fp4(codes) : codes, first, format, shares, out);
    } else {
        stored_floats_of(row, first, format, shares, out);
    }
}

#endif

/* -- some outputs and some rows ---------------------------------------------------------------------------------------------- */

typedef floats dot_sums[FEW_ROWS][PARTS];

static ALWAYS_INLINE void add_piece(dot_sums *sums, const stored_row *rows_of_matrix, const stored_shares *shares, long first,
                                    const float *x, long columns, int outputs, int rows, int format)
{
#pragma GCC unroll 4
    for (int output = 0; output < outputs; output++) {
        floats values[PIECE / LANES];
        floats_for_dots(rows_of_matrix + output, first, format, shares + output, values);
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
            for (int at = 0; at < PIECE / LANES; at++)
                sums[output][row][at % PARTS] += values[at] * LOAD(floats, x + row * columns + first + at * LANES);
    }
}

static ALWAYS_INLINE float added_up(const floats *parts)
{
    floats sum = parts[0];
#if PARTS == 2
    sum += parts[1];
#elif PARTS == 4
    sum = (parts[0] + parts[2]) + (parts[1] + parts[3]);
#endif
    return sum_of(sum);
}

/* Asks for the same stretch of the outputs that come next: rows are too short for a processor to notice them as streams. */
static ALWAYS_INLINE void ask_for_next(const stored_row *row, long stretch, int outputs, int format)
{
    const uint8_t *from = bytes_of_piece(row, stretch, format) + outputs * row->matrix->code_row;
    const long size = is_block(format) ? STRETCH / block_values(format) * stored_block_bytes(format) : STRETCH / (format == FP8 ? 1 : 2);
#pragma GCC unroll 8
    for (long at = 0; at < size; at += LINE)
        __builtin_prefetch(from + at);
}

/* Behind the last output it is repeated: what comes of that is not stored. */
static ALWAYS_INLINE void multiply(const product_of_stored *p, long first_output, long first_row, int outputs, int rows, int format)
{
    const stored_matrix *m = &p->matrix;
    const float *x = p->given.x + first_row * p->given.columns;
    stored_row rows_of_matrix[MOST_OUTPUTS];
    stored_shares shares[MOST_OUTPUTS];
    dot_sums sums[MOST_OUTPUTS];
    memset(sums, 0, outputs * sizeof *sums);
    for (int output = 0; output < outputs; output++)
        rows_of_matrix[output] = stored_row_of(m, first_output + output < m->outputs ? first_output + output : m->outputs - 1);
    for (long stretch = 0; stretch < m->inputs; stretch += STRETCH) {
        const long end = m->inputs - stretch < STRETCH ? m->inputs : stretch + STRETCH;
        for (int output = 0; output < outputs; output++)
            ask_for_next(rows_of_matrix + output, stretch, outputs, format);
        for (int output = 0; output < outputs; output++)
            read_shares(rows_of_matrix + output, stretch, format, shares + output);
        for (long first = stretch; first < end; first += PIECE)
            add_piece(sums, rows_of_matrix, shares, first, x, p->given.columns, outputs, rows, format);
    }
    for (int row = 0; row < rows; row++)
        for (int output = 0; output < outputs && first_output + output < m->outputs; output++) {
            const long at = first_output + output, size = itemsize_of(p->given.kind);
            const float bias = p->given.bias ? p->given.bias[at] : 0.0f;
            store_value(p->given.out + ((first_row + row) * m->outputs + at) * size, added_up(sums[output][row]) + bias, p->given.kind);
        }
}

typedef void (*dots_action)(const product_of_stored *p, long first_output, long first_row);

#if FEW_ROWS == 6
#define EACH_FEW(DO, FORM) DO(1, FORM) DO(2, FORM) DO(3, FORM) DO(4, FORM) DO(5, FORM) DO(6, FORM)
#elif FEW_ROWS == 4
#define EACH_FEW(DO, FORM) DO(1, FORM) DO(2, FORM) DO(3, FORM) DO(4, FORM)
#else
#define EACH_FEW(DO, FORM) DO(1, FORM) DO(2, FORM)
#endif
#define DEFINED(ROWS, FORM)                                                                                                      \
    static void multiply_##ROWS##_by_##FORM(const product_of_stored *p, long first_output, long first_row)                          \
    {                                                                                                                            \
        multiply(p, first_output, first_row, OUTPUTS_OF(ROWS), ROWS, FORM);                                                      \
    }
#define NAMED(ROWS, FORM) multiply_##ROWS##_by_##FORM,
#define OF_FORM(FORM) EACH_FEW(DEFINED, FORM)
EACH_FORM(OF_FORM)

static ALWAYS_INLINE long outputs_of(long rows)
{
    return OUTPUTS_OF(rows);
}

typedef struct {
    const product_of_stored *products;
    const long *begins; /* of the parts of each */
    long count;
    int format;
} some_dots;

/* A part is as many outputs as are multiplied together at most, for all rows. */
static void multiply_part(const void *given, long number, int member)
{
#define NAMES(FORM) {EACH_FEW(NAMED, FORM)},
    static const dots_action actions[][FEW_ROWS] = {EACH_FORM(NAMES)};
#undef NAMES
    const some_dots *some = given;
    const long at = work_of_part(some->begins, some->count, number), group = number - some->begins[at];
    const product_of_stored *p = some->products + at;
    const long blocks = parts_of(p->given.rows, FEW_ROWS), outputs = p->matrix.outputs;
    for (long block = 0; block < blocks; block++) {
        const long first = block * p->given.rows / blocks, count = (block + 1) * p->given.rows / blocks - first;
        for (long output = group * MOST_OUTPUTS; output < (group + 1) * MOST_OUTPUTS && output < outputs; output += outputs_of(count))
            actions[some->format][count - 1](p, output, first);
    }
}

/* Some products, with rows each, of matrices in one format. */
void stored_dots(const void *given, int threads)
{
    const asked_products *asked = given;
    long begins[asked->count + 1];
    const some_dots some = {asked->products, begins, asked->count, asked->told};
    begins[0] = 0;
    for (long at = 0; at < some.count; at++)
        begins[at + 1] = begins[at] + (some.products[at].given.rows ? parts_of(some.products[at].matrix.outputs, MOST_OUTPUTS) : 0);
    share_out(&some, begins[some.count], threads, multiply_part);
}
