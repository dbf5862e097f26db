/* Heads of tokens, rotated to their positions. */

#include "rotation.h"
#include "slots.h"

typedef struct {
    slots x;               /* (rows, heads, tokens, dim) */
    const char *cos, *sin; /* (rows, tokens, half), of the type of x */
    char *out;             /* (rows, tokens, heads, dim) */
    long rows, heads, tokens, dim, half;
} rotation;

static ALWAYS_INLINE void rotate_token(const rotation *r, long row, long token, int kind)
{
    const long size = itemsize_of(kind), at = row * r->tokens + token, turn = at * r->half * size;
    for (long head = 0; head < r->heads; head++)
        turn_head(slot_at(&r->x, row, head, token), r->cos + turn, r->sin + turn, r->out + (at * r->heads + head) * r->dim * size,
                  r->dim, r->half, kind);
}

typedef void (*token_action)(const rotation *r, long row, long token);

static void rotate_bf16(const rotation *r, long row, long token) { rotate_token(r, row, token, BF16); }
static void rotate_float(const rotation *r, long row, long token) { rotate_token(r, row, token, FLOAT); }
static void rotate_half(const rotation *r, long row, long token) { rotate_token(r, row, token, HALF); }

void rotate(const rotation *r, int threads)
{
    static const token_action actions[] = {[BF16] = rotate_bf16, [FLOAT] = rotate_float, [HALF] = rotate_half};
    const token_action action = actions[r->x.kind];
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (long row = 0; row < r->rows; row++)
        for (long token = 0; token < r->tokens; token++)
            action(r, row, token);
}
