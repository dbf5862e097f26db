/* Copies slots that each head chooses: the kept part of a prompt goes to its place in the cache. */

#include "slots.h"
#include "team.h"

typedef struct {
    slots from, to;       /* (rows, heads, slots, width), (rows, heads, count, width) */
    const int64_t *index; /* (rows, heads, count): slots in `from`; the strides below are in values */
    long index_row, index_head;
    long rows, heads, count, width; /* width in bytes */
} taking;

static void take_slots_of_head(const void *given, long number, int member)
{
    const taking *t = given;
    const long row = number / t->heads, head = number % t->heads;
    const int64_t *index = t->index + row * t->index_row + head * t->index_head;
    for (long slot = 0; slot < t->count; slot++)
        memcpy((char *)slot_at(&t->to, row, head, slot), slot_at(&t->from, row, head, index[slot]), t->width);
}

void take_slots(const void *given, int threads)
{
    const taking *t = given;
    share_out(given, t->rows * t->heads, threads, take_slots_of_head);
}
