/* Attention of one new token per row over the slots that the row holds: shares = softmax(q . keys), out = shares . values, and the
   attention each slot got from all query heads of its group, their sum or the highest share. Keys and values are read once;
   nothing but the shares is stored. Packed ones are multiplied in fixed point where queries have 16 bits and it is faster
   (fixed_attention.h), else as float32.

   A (row, KV head) is worked on by one thread from its first slot to its last, so a row's outcome depends on nothing but the row.
   */

#include "step_attention.h"

#define PLACES(A) NULL /* the first slots are attended */

FOR_KIND(BF16)
FOR_KIND(FLOAT)
FOR_KIND(HALF)
FOR_KIND(GROUP4)
FOR_KIND(GROUP8)

static void attend_mixed(const void *given, long number, int member) /* rotated keys beside packed values */
{
    const attention *a = given;
    attend_part(a, PLACES(a), number, a->group, a->dim, a->keys.kind, a->values.kind);
}

static part_action *chosen(const attention *a)
{
    static part_action *const actions[][6] = {ACTIONS(BF16), ACTIONS(FLOAT), ACTIONS(HALF), ACTIONS(GROUP4), ACTIONS(GROUP8)};
    if (a->keys.kind != a->values.kind)
        return attend_mixed;
    return for_sizes(actions[a->keys.kind], a);
}

void decode_attention(const void *given, int threads)
{
    const attention *a = given;
    share_out(given, a->rows * a->kv_heads, threads, chosen(a));
}
