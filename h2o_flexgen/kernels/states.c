/* What tokens make of the states of rows, and what they find there. A head's state is a matrix (key width, value width). A token
   fades it, adds something under its key, and reads what is under its query. By the delta rule it adds a share of what is not found
   under its key yet; otherwise it adds its values times the size of its step. By the delta rule each value of a key may fade by a
   number of its own: a token then finds what is left under its key by a key that is faded alike.

   A token passes the matrix once, and on the way the next token finds what stands under its key. Of a prompt, a few columns take one
   token after the other while they stay in the nearest cache: they depend on no other columns. So a prompt has the bits of its
   tokens one by one, whatever the pieces in which they come. In float32 a chunk of tokens in products of matrices would take as many
   multiplications.

   A state may be kept in bfloat16. Each token works in float32, and what it leaves is rounded: so several tokens have the bits of
   one by one there, too. Tokens on trial read a state and leave it as it was. */

#include "sigmoid.h"
#include "sizes.h"
#include "slots.h"
#include "team.h"

typedef struct {
    slots q, k, v;       /* (rows, key heads, tokens, key width), and (rows, heads, tokens, value width) */
    slots sizes, betas;  /* (rows, heads, tokens, 1): of steps, or how a token fades the state; and shares of the delta rule. Or the
                            first (rows, heads, tokens, key width), in float32 */
    of_heads rates;      /* a step of size 1 fades a state by their exponential */
    of_heads skips;      /* how much of its own values a token reads */
    char *state;         /* (rows, heads, key width, value width) */
    char *out;           /* (rows, tokens, heads, value width) */
    const int64_t *lengths; /* (rows): of them, how many tokens are real; NULL: all */
    long rows, tokens, heads, key_heads, key_width, value_width, state_row; /* the last one in bytes */
    int corrects, by_value, is_tiled, are_logs; /* whether there is a delta rule; and values of keys fade apart; see operations.py */
    int state_kind, is_trial; /* FLOAT or BF16; whether the state stays as it was */
} passing;

#define KEY_EPS 1e-6f
#if LANES == 16
#define FEW 4 /* registers of columns that all tokens pass: each has three sums and factors of its own */
#else
#define FEW 2
#endif
#define MANY 8 /* registers of columns that are looked through at once */

enum rule { BY_STEPS, DELTA, DELTA_BY_VALUE };

typedef struct {
    float q[STATE_KEYS], k[STATE_KEYS];
    float fading, share;
    float fadings[STATE_KEYS], faded_k[STATE_KEYS]; /* of DELTA_BY_VALUE alone */
} token;

static ALWAYS_INLINE float number_of_token(const slots *from, long row, long head, long at)
{
    return load_value(slot_at(from, row, head, at), from->kind);
}

/* Values times a factor; or times what also makes their length one. */
static ALWAYS_INLINE void read_key(const char *from, float *to, long width, int kind, int normed, float factor)
{
    const long size = itemsize_of(kind);
    if (normed) {
        floats sum = {0};
#define ADD(AT, COUNT)                                                                                                           \
    do {                                                                                                                         \
        const floats value = load_some(from + (AT)*size, COUNT, kind);                                                           \
        sum += value * value;                                                                                                    \
    } while (0)
        EACH_REGISTER(at, width, ADD);
#undef ADD
        factor /= sqrtf(sum_of(sum) + KEY_EPS);
    }
#define SCALE(AT, COUNT) store_some((char *)(to + (AT)), load_some(from + (AT)*size, COUNT, kind) * factor, COUNT, FLOAT)
    EACH_REGISTER(at, width, SCALE);
#undef SCALE
}

/* How each value of a key fades, and the key that is faded alike. */
static ALWAYS_INLINE void read_fadings(const char *from, token *t, long width)
{
#define FADE(AT, COUNT)                                                                                                          \
    do {                                                                                                                         \
        const floats fading = exp_or_nothing(load_some(from + (AT) * sizeof(float), COUNT, FLOAT));                              \
        store_some((char *)(t->fadings + (AT)), fading, COUNT, FLOAT);                                                           \
        store_some((char *)(t->faded_k + (AT)), load_some((char *)(t->k + (AT)), COUNT, FLOAT) * fading, COUNT, FLOAT);          \
    } while (0)
    EACH_REGISTER(at, width, FADE);
#undef FADE
}

static void read_token(const passing *p, long row, long head, long at, token *t)
{
    const long key_head = p->is_tiled ? head % p->key_heads : head / (p->heads / p->key_heads);
    const float scale = p->corrects ? 1.0f / sqrtf((float)p->key_width) : 1.0f;
    read_key(slot_at(&p->q, row, key_head, at), t->q, p->key_width, p->q.kind, p->corrects, scale);
    read_key(slot_at(&p->k, row, key_head, at), t->k, p->key_width, p->k.kind, p->corrects, 1.0f);
    if (p->by_value) {
        read_fadings(slot_at(&p->sizes, row, head, at), t, p->key_width);
        t->share = number_of_token(&p->betas, row, head, at);
        return;
    }
    const float size = number_of_token(&p->sizes, row, head, at), rate = number_of_head(p->rates, head, 1.0f);
    t->fading = expf(size * (p->are_logs ? -expf(rate) : rate));
    t->share = p->corrects ? number_of_token(&p->betas, row, head, at) : size;
}

/* Under what a token finds what there is for it. */
static ALWAYS_INLINE const float *sought(const token *t, enum rule rule) { return rule == DELTA_BY_VALUE ? t->faded_k : t->k; }

/* What some columns have under a key. */
static ALWAYS_INLINE void find(const char *state, const float *key, long keys, long stride, int registers, long count, int kind,
                               float *found)
{
    const long register_bytes = itemsize_of(kind) * LANES;
    floats sums[MANY];
#pragma GCC unroll 8
    for (int part = 0; part < registers; part++)
        sums[part] = all(0.0f);
    for (long at = 0; at < keys; at++, state += stride)
#pragma GCC unroll 8
        for (int part = 0; part < registers; part++)
            sums[part] += load_some(state + part * register_bytes, count, kind) * key[at];
#pragma GCC unroll 8
    for (int part = 0; part < registers; part++)
        memcpy(found + part * LANES, &sums[part], sizeof sums[part]);
}

/* Fades some columns, adds under a key, reads under a query, and finds what the next key has. */
static ALWAYS_INLINE void pass(char *state, const token *now, const float *next_key, long keys, long stride, int registers, long count,
                               enum rule rule, int kind, const floats *added, floats *read, floats *found)
{
    const long register_bytes = itemsize_of(kind) * LANES;
    const floats of_all = all(rule == DELTA_BY_VALUE ? 0.0f : now->fading);
    floats sums[FEW], next[FEW];
#pragma GCC unroll 4
    for (int part = 0; part < registers; part++)
        sums[part] = next[part] = all(0.0f);
    for (long at = 0; at < keys; at++, state += stride) {
        const floats key = all(now->k[at]), query = all(now->q[at]), next_one = all(next_key[at]);
        const floats fading = rule == DELTA_BY_VALUE ? all(now->fadings[at]) : of_all;
#pragma GCC unroll 4
        for (int part = 0; part < registers; part++) {
            char *place = state + part * register_bytes;
            const floats value = load_some(place, count, kind) * fading + key * added[part];
            store_some(place, value, count, kind);
            sums[part] += value * query;
            if (rule != BY_STEPS)
                next[part] += (kind == FLOAT ? value : load_some(place, count, kind)) * next_one;
        }
    }
#pragma GCC unroll 4
    for (int part = 0; part < registers; part++)
        read[part] = sums[part], found[part] = next[part];
}

static ALWAYS_INLINE void move_columns(char *to, long to_stride, const char *from, long from_stride, long keys, long nbytes)
{
    for (long at = 0; at < keys; at++)
        memcpy(to + at * to_stride, from + at * from_stride, nbytes);
}

/* All tokens of a row pass some columns of a head, of which `first_found` has what the first token finds. */
static ALWAYS_INLINE void pass_columns(const passing *p, long row, long head, long column, int registers, long count,
                                       enum rule rule, int kind, token *both, char *room, long tokens, const float *first_found)
{
    const int is_apart = tokens > 1 || p->is_trial;
    const long size = itemsize_of(p->v.kind), of_value = itemsize_of(kind), stride = of_value * p->value_width;
    const long nbytes = of_value * ((registers - 1) * LANES + count), near_stride = is_apart ? of_value * registers * LANES : stride;
    const float skip = number_of_head(p->skips, head, 0.0f);
    char *state = p->state + row * p->state_row + head * p->key_width * stride + of_value * column;
    char *near = is_apart ? room : state; /* rows of a matrix of 2^n columns would all want the same places of the cache */
    floats found[FEW], read[FEW], values[FEW], added[FEW];
#pragma GCC unroll 4
    for (int part = 0; part < registers; part++)
        found[part] = LOAD(floats, first_found + part * LANES);
    if (is_apart) {
        read_token(p, row, head, 0, &both[0]); /* other columns have had others there */
        move_columns(near, near_stride, state, stride, p->key_width, nbytes);
    }
    for (long at = 0; at < tokens; at++) {
        const token *now = &both[at & 1], *next = at + 1 < tokens ? &both[~at & 1] : now;
        if (at + 1 < tokens)
            read_token(p, row, head, at + 1, &both[~at & 1]);
        const char *from = slot_at(&p->v, row, head, at) + column * size;
#pragma GCC unroll 4
        for (int part = 0; part < registers; part++) {
            values[part] = load_some(from + part * LANES * size, count, p->v.kind);
            added[part] = rule == DELTA            ? (values[part] - found[part] * now->fading) * now->share
                          : rule == DELTA_BY_VALUE ? (values[part] - found[part]) * now->share
                                                   : values[part] * now->share;
        }
        pass(near, now, sought(next, rule), p->key_width, near_stride, registers, count, rule, kind, added, read, found);
        char *to = p->out + (((row * p->tokens + at) * p->heads + head) * p->value_width + column) * size;
#pragma GCC unroll 4
        for (int part = 0; part < registers; part++)
            store_some(to + part * LANES * size, read[part] + values[part] * skip, count, p->v.kind);
    }
    if (is_apart && !p->is_trial)
        move_columns(state, stride, near, near_stride, p->key_width, nbytes);
}

/* Looks through so many registers of columns, and has the tokens pass a few of these at a time. */
static ALWAYS_INLINE void pass_registers(const passing *p, long row, long head, long column, int registers, long count,
                                         enum rule rule, int kind, token *both, char *room, long tokens)
{
    const long keys = p->key_width, stride = itemsize_of(kind) * p->value_width;
    const char *state = p->state + row * p->state_row + head * keys * stride + itemsize_of(kind) * column;
    const int few = registers < FEW ? registers : FEW;
    float found[MANY * LANES] = {0};
    if (rule != BY_STEPS)
        find(state, sought(&both[0], rule), keys, stride, registers, count, kind, found);
    for (int part = 0; part < registers; part += few)
        pass_columns(p, row, head, column + part * LANES, few, count, rule, kind, both, room, tokens, found + part * LANES);
}

/* What stands behind a row's last token is zeros. */
static void clear_rest(const passing *p, long row, long head, long tokens)
{
    const long nbytes = p->value_width * itemsize_of(p->v.kind);
    for (long at = tokens; at < p->tokens; at++)
        memset(p->out + ((row * p->tokens + at) * p->heads + head) * nbytes, 0, nbytes);
}

static ALWAYS_INLINE void pass_head(const passing *p, long number, enum rule rule, int kind)
{
    const long row = number / p->heads, head = number % p->heads, tokens = p->lengths ? p->lengths[row] : p->tokens;
    token both[2]; /* each in turn is the next one */
    char room[4 * STATE_KEYS * FEW * LANES] __attribute__((aligned(64)));
    clear_rest(p, row, head, tokens);
    if (tokens < 1)
        return;
    for (long column = 0; column < p->value_width;) {
        const long left = p->value_width - column;
        read_token(p, row, head, 0, &both[0]);
        if (left >= MANY * LANES) {
            pass_registers(p, row, head, column, MANY, LANES, rule, kind, both, room, tokens);
            column += MANY * LANES;
        } else if (left >= FEW * LANES) {
            pass_registers(p, row, head, column, FEW, LANES, rule, kind, both, room, tokens);
            column += FEW * LANES;
        } else {
            pass_registers(p, row, head, column, 1, left < LANES ? left : LANES, rule, kind, both, room, tokens);
            column += LANES;
        }
    }
}

static void by_steps(const void *p, long number, int member) { pass_head(p, number, BY_STEPS, FLOAT); }
static void by_delta(const void *p, long number, int member) { pass_head(p, number, DELTA, FLOAT); }
static void by_delta_by_value(const void *p, long number, int member) { pass_head(p, number, DELTA_BY_VALUE, FLOAT); }
static void by_steps_in_bf16(const void *p, long number, int member) { pass_head(p, number, BY_STEPS, BF16); }
static void by_delta_in_bf16(const void *p, long number, int member) { pass_head(p, number, DELTA, BF16); }
static void by_delta_by_value_in_bf16(const void *p, long number, int member) { pass_head(p, number, DELTA_BY_VALUE, BF16); }

void pass_states(const void *given, int threads)
{
    static part_action *const actions[][2] = {
        [BY_STEPS] = {by_steps, by_steps_in_bf16},
        [DELTA] = {by_delta, by_delta_in_bf16},
        [DELTA_BY_VALUE] = {by_delta_by_value, by_delta_by_value_in_bf16},
    };
    const passing *p = given;
    const enum rule rule = !p->corrects ? BY_STEPS : p->by_value ? DELTA_BY_VALUE : DELTA;
    share_out(given, p->rows * p->heads, threads, actions[rule][p->state_kind == BF16]);
}
