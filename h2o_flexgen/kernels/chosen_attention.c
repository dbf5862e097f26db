/* Attention of one new token per row over chosen slots, where they lie. It has the bits of decode_attention over copies of them. */

#include "step_attention.h"

#define PLACES(A) (A)->places

FOR_KIND(BF16)
FOR_KIND(FLOAT)
FOR_KIND(HALF)
FOR_KIND(GROUP4)
FOR_KIND(GROUP8)

void chosen_attention(const void *given, int threads)
{
    static part_action *const actions[][6] = {ACTIONS(BF16), ACTIONS(FLOAT), ACTIONS(HALF), ACTIONS(GROUP4), ACTIONS(GROUP8)};
    const attention *a = given;
    share_out(given, a->rows * a->kv_heads, threads, for_sizes(actions[a->keys.kind], a));
}
