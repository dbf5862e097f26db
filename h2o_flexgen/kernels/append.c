/* The newest token of each row in the cache: query and key are rotated, key and value go behind what the row holds, and its position
   is noted with a score of 0 and what it is worth. */

#include "rotation.h"
#include "slots.h"
#include "team.h"

typedef struct {
    slots keys, values;        /* (rows, heads, slots, width) */
    slots q, k, v;             /* (rows, query heads, 1, dim), (rows, heads, 1, width) twice; without data: keys have the values */
    const char *cos, *sin;     /* (rows, half), of the type of q and k; NULL: nothing is rotated */
    char *out;                 /* (rows, query heads, dim): the rotated query */
    const int64_t *slot;       /* (rows): that of the newest token */
    const int64_t *position;   /* (rows) */
    slot_notes notes;          /* positions may be NULL, too */
    const float *worth;        /* (rows, heads): what the newest token is worth, where that is noted */
    long worth_row, worth_head; /* strides in numbers */
    long rows, heads, query_heads, dim, half;
    long nbytes; /* of a key, and of a value */
} appending;

static ALWAYS_INLINE void append_row(const appending *a, long row, int kind)
{
    const char *cos = a->cos + row * a->half * itemsize_of(kind), *sin = a->sin + row * a->half * itemsize_of(kind);
    const long slot = a->slot[row];
    for (long head = 0; head < a->query_heads && a->cos; head++)
        turn_head(slot_at(&a->q, row, head, 0), cos, sin, a->out + (row * a->query_heads + head) * a->dim * itemsize_of(kind), a->dim,
                  a->half, kind);
    for (long head = 0; head < a->heads; head++) {
        char *key = (char *)slot_at(&a->keys, row, head, slot);
        const long noted = row * a->notes.row + head * a->notes.head + slot;
        if (a->cos)
            turn_head(slot_at(&a->k, row, head, 0), cos, sin, key, a->dim, a->half, kind);
        else
            memcpy(key, slot_at(&a->k, row, head, 0), a->nbytes);
        if (a->v.data)
            memcpy((char *)slot_at(&a->values, row, head, slot), slot_at(&a->v, row, head, 0), a->nbytes);
        if (a->notes.positions)
            a->notes.positions[noted] = (int32_t)a->position[row];
        if (a->notes.scores)
            a->notes.scores[noted] = 0.0f;
        if (a->notes.worth)
            a->notes.worth[noted] = a->worth[row * a->worth_row + head * a->worth_head];
    }
}

static void append_bf16(const void *a, long row, int member) { append_row(a, row, BF16); }
static void append_float(const void *a, long row, int member) { append_row(a, row, FLOAT); }
static void append_half(const void *a, long row, int member) { append_row(a, row, HALF); }

void append(const void *given, int threads)
{
    const appending *a = given;
    static part_action *const actions[] = {[BF16] = append_bf16, [FLOAT] = append_float, [HALF] = append_half};
    share_out(given, a->rows, threads, actions[a->q.kind]);
}
