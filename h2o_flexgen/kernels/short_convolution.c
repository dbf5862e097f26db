/* Short convolutions: each channel of a token is a sum of its own last inputs, each times a weight of its place, plus a bias; and silu
   of that, if it is activated. Inputs are added up in their order, the oldest first, in float32. What becomes of a channel of a row
   depends on nothing else. */

#include "sigmoid.h"
#include "sizes.h"
#include "team.h"

typedef struct {
    const char *x;          /* (rows, tokens, channels) */
    const char *weight;     /* (channels, width) */
    const char *bias;       /* (channels); NULL: there is none */
    char *state;            /* (rows, width - 1, channels), float32: the last inputs, the oldest first */
    char *out;              /* (rows, tokens, channels), one behind the other */
    const int64_t *lengths; /* (rows): of them, how many tokens are real; NULL: all */
    long rows, tokens, channels, width, x_row, x_token, state_row; /* the last three in bytes */
    int kind, weight_kind, bias_kind, is_activated, is_trial; /* whether the state stays as it was */
} convolution;

#define AT_ONCE 512     /* channels of a part */
#define ROWS_AT_ONCE 16 /* rows of a part, which share what is made of the weights */

typedef struct {
    float weights[CONVOLVED][AT_ONCE], bias[AT_ONCE];
    float last[CONVOLVED][AT_ONCE];
    float *inputs[CONVOLVED]; /* the oldest first; the next token's takes the place of the oldest */
} channels_room;

static void read_weights(const convolution *c, long first, long count, channels_room *room)
{
    const long size = itemsize_of(c->weight_kind);
    for (long channel = 0; channel < count; channel++) {
        for (long place = 0; place < c->width; place++)
            room->weights[place][channel] = load_value(c->weight + ((first + channel) * c->width + place) * size, c->weight_kind);
        const char *bias = c->bias ? c->bias + (first + channel) * itemsize_of(c->bias_kind) : NULL;
        room->bias[channel] = bias ? load_value(bias, c->bias_kind) : 0.0f;
    }
}

static ALWAYS_INLINE void convolve_register(channels_room *room, const char *x, char *out, long at, long count, long width, int kind,
                                            int is_activated)
{
    const long size = itemsize_of(kind);
    const floats own = load_some(x + at * size, count, kind);
    floats sum = LOAD(floats, &room->bias[at]);
    memcpy(&room->inputs[width - 1][at], &own, sizeof own);
    for (long place = 0; place < width - 1; place++)
        sum += LOAD(floats, &room->inputs[place][at]) * LOAD(floats, &room->weights[place][at]);
    sum += own * LOAD(floats, &room->weights[width - 1][at]);
    store_some(out + at * size, is_activated ? sum * sigmoid(sum) : sum, count, kind);
}

static ALWAYS_INLINE void convolve_row(const convolution *c, channels_room *room, long row, long first, long count, long width, int kind)
{
    const long size = itemsize_of(kind), before = width - 1, tokens = c->lengths ? c->lengths[row] : c->tokens;
    char *state = c->state + row * c->state_row + 4 * first;
    char *out = c->out + (row * c->tokens * c->channels + first) * size;
    for (long place = 0; place < width; place++)
        room->inputs[place] = room->last[place];
    for (long place = 0; place < before; place++)
        memcpy(room->inputs[place], state + 4 * place * c->channels, 4 * count);
    for (long at = 0; at < tokens; at++, out += c->channels * size) {
        const char *x = c->x + row * c->x_row + at * c->x_token + first * size;
#define CONVOLVE(AT, COUNT) convolve_register(room, x, out, AT, COUNT, width, kind, c->is_activated)
        EACH_REGISTER(part, count, CONVOLVE);
#undef CONVOLVE
        float *oldest = room->inputs[0];
        for (long place = 0; place < before; place++)
            room->inputs[place] = room->inputs[place + 1];
        room->inputs[before] = oldest;
    }
    for (long place = 0; place < before && !c->is_trial; place++)
        memcpy(state + 4 * place * c->channels, room->inputs[place], 4 * count);
    for (long at = tokens; at < c->tokens; at++, out += c->channels * size)
        memset(out, 0, count * size);
}

/* The usual widths are constants. */
static ALWAYS_INLINE void convolve(const convolution *c, long number, int kind)
{
    const long parts = (c->channels + AT_ONCE - 1) / AT_ONCE, first = number % parts * AT_ONCE, begin = number / parts * ROWS_AT_ONCE;
    const long count = c->channels - first < AT_ONCE ? c->channels - first : AT_ONCE;
    channels_room room;
    read_weights(c, first, count, &room);
    for (long row = begin; row < begin + ROWS_AT_ONCE && row < c->rows; row++)
        if (c->width == 4)
            convolve_row(c, &room, row, first, count, 4, kind);
        else if (c->width == 3)
            convolve_row(c, &room, row, first, count, 3, kind);
        else
            convolve_row(c, &room, row, first, count, c->width, kind);
}

static void convolve_bf16(const void *c, long number, int member) { convolve(c, number, BF16); }
static void convolve_float(const void *c, long number, int member) { convolve(c, number, FLOAT); }
static void convolve_half(const void *c, long number, int member) { convolve(c, number, HALF); }

void short_convolution(const void *given, int threads)
{
    const convolution *c = given;
    static part_action *const actions[] = {[BF16] = convolve_bf16, [FLOAT] = convolve_float, [HALF] = convolve_half};
    const long parts = (c->channels + AT_ONCE - 1) / AT_ONCE, groups = (c->rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    share_out(given, parts * groups, threads, actions[c->kind]);
}
