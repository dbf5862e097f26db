/* Decodes rows of stored formats to values of a type. */

#include "stored_values.h"
#include "team.h"

static ALWAYS_INLINE void store_piece(const floats *values, char *out, int kind)
{
#pragma GCC unroll 8
    for (int at = 0; at < PIECE / LANES; at++)
        store_floats(out + at * LANES * itemsize_of(kind), values[at], kind);
}

/* Columns of an ordered matrix go to their inputs; what names no input goes nowhere. */
static ALWAYS_INLINE void store_ordered(const floats *values, const int32_t *order, long inputs, char *row, int kind)
{
    float own[PIECE];
    memcpy(own, values, sizeof own);
    for (int at = 0; at < PIECE; at++)
        if (order[at] >= 0 && order[at] < inputs)
            store_value(row + order[at] * itemsize_of(kind), own[at], kind);
}

static ALWAYS_INLINE void decode_row(const stored_matrix *m, long output, const int32_t *order, char *out, int format, int kind)
{
    const stored_row row = stored_row_of(m, output);
    stored_shares shares;
    for (long first = 0; first < m->inputs; first += PIECE) {
        floats values[PIECE / LANES];
        char last[PIECE * 4], *to = out + first * itemsize_of(kind);
        if (first % STRETCH == 0)
            read_shares(&row, first, format, &shares);
        stored_floats_of(&row, first, format, &shares, values);
        if (format == INT4 && order) {
            store_ordered(values, order + first, m->inputs, out, kind);
        } else if (m->inputs - first >= PIECE) {
            store_piece(values, to, kind);
        } else {
            store_piece(values, last, kind);
            memcpy(to, last, (m->inputs - first) * itemsize_of(kind));
        }
    }
}

typedef struct {
    stored_matrix matrix;
    const int32_t *order; /* where its columns go, or NULL */
    char *out;            /* (outputs, inputs) */
    int format, kind;
} decoding;

static ALWAYS_INLINE void decode_number(const decoding *d, long output, int format, int kind)
{
    decode_row(&d->matrix, output, d->order, d->out + output * d->matrix.inputs * itemsize_of(kind), format, kind);
}

#define OF_KIND(FORM, KIND)                                                                                                      \
    static void decode_##FORM##_##KIND(const void *d, long output, int member) { decode_number(d, output, FORM, KIND); }
#define OF_FORM(FORM) OF_KIND(FORM, BF16) OF_KIND(FORM, FLOAT) OF_KIND(FORM, HALF)
EACH_FORM(OF_FORM)

void stored_decode(const void *given, int threads)
{
#define ACTIONS(FORM) {decode_##FORM##_BF16, decode_##FORM##_FLOAT, decode_##FORM##_HALF},
    static part_action *const actions[][3] = {EACH_FORM(ACTIONS)};
    const decoding *d = given;
    share_out(given, d->matrix.outputs, threads, actions[d->format][d->kind]);
}
