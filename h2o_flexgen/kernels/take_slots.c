/* Copies slots that each head chooses: the kept part of a prompt goes to its place in the cache. */

#include "slots.h"

typedef struct {
    slots from, to;       /* (rows, heads, slots, width), (rows, heads, count, width) */
    const int64_t *index; /* (rows, heads, count): slots in `from`; the strides below are in values */
    long index_row, index_head;
    long rows, heads, count, width; /* width in bytes */
} taking;

void take_slots(const taking *t, int threads)
{
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (long row = 0; row < t->rows; row++)
        for (long head = 0; head < t->heads; head++) {
            const int64_t *index = t->index + row * t->index_row + head * t->index_head;
            for (long slot = 0; slot < t->count; slot++)
                memcpy((char *)slot_at(&t->to, row, head, slot), slot_at(&t->from, row, head, index[slot]), t->width);
        }
}
