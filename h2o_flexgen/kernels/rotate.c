/* Heads of tokens, rotated to their positions. */

#include "rotation.h"
#include "slots.h"
#include "team.h"

typedef struct {
    slots x;               /* (rows, heads, tokens, dim) */
    const char *cos, *sin; /* (rows, tokens, half), of the type of x */
    char *out;             /* (rows, tokens, heads, dim) */
    long rows, heads, tokens, dim, half;
} rotation;

static ALWAYS_INLINE void rotate_token(const rotation *r, long at, int kind) /* a token of a row */
{
    const long row = at / r->tokens, token = at % r->tokens, size = itemsize_of(kind), turn = at * r->half * size;
    for (long head = 0; head < r->heads; head++)
        turn_head(slot_at(&r->x, row, head, token), r->cos + turn, r->sin + turn, r->out + (at * r->heads + head) * r->dim * size,
                  r->dim, r->half, kind);
}

static void rotate_bf16(const void *r, long at, int member) { rotate_token(r, at, BF16); }
static void rotate_float(const void *r, long at, int member) { rotate_token(r, at, FLOAT); }
static void rotate_half(const void *r, long at, int member) { rotate_token(r, at, HALF); }

void rotate(const void *given, int threads)
{
    const rotation *r = given;
    static part_action *const actions[] = {[BF16] = rotate_bf16, [FLOAT] = rotate_float, [HALF] = rotate_half};
    share_out(given, r->rows * r->tokens, threads, actions[r->x.kind]);
}
