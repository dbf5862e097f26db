/* Rows of bytes that are chosen by their numbers: taken from there one behind the other, or put there. */

#include "kernel.h"
#include "team.h"

typedef struct {
    char *chosen, *others;       /* (tables, rows, row), which numbers choose from; (tables, count, row) */
    const void *numbers;         /* (count), of 4 or 8 bytes */
    long first;                  /* is added to each number */
    long tables, rows, count;
    long chosen_table, chosen_row, others_table, nbytes; /* strides, and the size of a row */
    int puts, are_short;         /* the others are copied to the chosen rows; numbers have 4 bytes */
} taking;

static ALWAYS_INLINE void copy_row(char *to, const char *from, long nbytes)
{
    if (nbytes == 2)
        memcpy(to, from, 2);
    else if (nbytes == 4)
        memcpy(to, from, 4);
    else
        memcpy(to, from, nbytes);
}

static ALWAYS_INLINE long number_at(const taking *t, long at)
{
    return t->are_short ? ((const int32_t *)t->numbers)[at] : ((const int64_t *)t->numbers)[at];
}

/* A number that no row has gives bytes that are NaN in every type. */
static void take_number(const void *given, long number, int member)
{
    const taking *t = given;
    const long table = number / t->count, at = number % t->count, row = number_at(t, at) + t->first;
    char *other = t->others + table * t->others_table + at * t->nbytes, *chosen = t->chosen + table * t->chosen_table + row * t->chosen_row;
    const int is_there = row >= 0 && row < t->rows;
    if (t->puts && is_there)
        copy_row(chosen, other, t->nbytes);
    else if (!t->puts && is_there)
        copy_row(other, chosen, t->nbytes);
    else if (!t->puts)
        memset(other, 0xff, t->nbytes);
}

void take_rows(const void *given, int threads)
{
    const taking *t = given;
    share_out(given, t->tables * t->count, threads, take_number);
}
