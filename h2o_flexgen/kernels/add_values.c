/* Adds values to others of their type, each sum rounded to it. */

#include "team.h"
#include "vectors.h"

#define PART 4096 /* values that a thread takes at once */

typedef struct {
    char *sums;
    const char *values;
    long count;
    int kind;
} adding;

static void add_part(const void *given, long number, int member)
{
    const adding *a = given;
    const long size = itemsize_of(a->kind), first = number * PART, left = a->count - first, count = left < PART ? left : PART;
    char *sums = a->sums + first * size;
    const char *values = a->values + first * size;
#define ADD(AT, COUNT)                                                                                                            \
    store_some(sums + (AT)*size, load_some(sums + (AT)*size, COUNT, a->kind) + load_some(values + (AT)*size, COUNT, a->kind), COUNT, a->kind)
    EACH_REGISTER(at, count, ADD);
#undef ADD
}

void add_values(const void *given, int threads)
{
    const adding *a = given;
    share_out(a, (a->count + PART - 1) / PART, threads, add_part);
}
