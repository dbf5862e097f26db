/* Tells later calls how many rows they have, and where: a recorded call knows where that stands in memory, and no number itself. */

#include "kernel.h"

/* An address among what a call is told: that of the first row. */
typedef struct {
    long at;    /* bytes from the beginning of a struct */
    long base;  /* where the rows of all begin */
    long bytes; /* of a row */
} address_of_rows;

typedef struct {
    const int64_t *begins; /* of the rows of each struct, and where those of the last one end */
    char *told;            /* the structs */
    const address_of_rows *addresses;
    long structs, step, nbytes; /* `step`: from one beginning to the next; bytes of a struct */
    long count;                 /* of addresses */
    long rows_at, unit;         /* where a struct says how many rows there are, and what a row counts there */
    long least, most;           /* rows that these calls are for: of more or fewer there are none */
} placing;

void place_rows(const void *given, int threads)
{
    const placing *p = given;
    for (long at = 0; at < p->structs; at++) {
        char *told = p->told + at * p->nbytes;
        const long first = p->begins[at * p->step], rows = p->begins[(at + 1) * p->step] - first;
        const long counted = rows >= p->least && rows <= p->most ? rows * p->unit : 0;
        memcpy(told + p->rows_at, &counted, sizeof counted);
        for (long each = 0; each < p->count; each++) {
            const long address = p->addresses[each].base + first * p->addresses[each].bytes;
            memcpy(told + p->addresses[each].at, &address, sizeof address);
        }
    }
    (void)threads;
}
