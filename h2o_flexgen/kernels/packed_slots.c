/* Packed slots that queries of 16 bits attend in fixed point: the same body for usual numbers of queries, which the compiler then
   knows. A group of another size has its last queries with the next larger number, filled up with zeros. Whatever attends packed
   slots takes these, so that they are compiled once. */

#include "step_attention.h"

#if LANES > 4 /* narrower registers have no use for them (is_fixed) */

#define FOR_QUERIES(QUERIES, BITS)                                                                                               \
    static void score_##QUERIES##_by_##BITS(const queries_of_head *h) { score_packed(h, QUERIES, BITS); }                       \
    static void sum_##QUERIES##_by_##BITS(const queries_of_head *h) { sum_packed(h, QUERIES, BITS); }
#define FOR_BITS(BITS) FOR_QUERIES(1, BITS) FOR_QUERIES(2, BITS) FOR_QUERIES(4, BITS) FOR_QUERIES(8, BITS)
#define FIXED_ACTIONS(WHAT, BITS) {WHAT##_1_by_##BITS, WHAT##_2_by_##BITS, WHAT##_4_by_##BITS, WHAT##_8_by_##BITS}

FOR_BITS(4)
FOR_BITS(8)

#else
#define FIXED_ACTIONS(WHAT, BITS) {NULL}
#endif

const fixed_action scoring[2][4] = {FIXED_ACTIONS(score, 4), FIXED_ACTIONS(score, 8)};
const fixed_action summing[2][4] = {FIXED_ACTIONS(sum, 4), FIXED_ACTIONS(sum, 8)};
