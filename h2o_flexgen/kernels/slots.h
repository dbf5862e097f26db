/* The addresses of the values of heads: contiguous within a row, head and slot (or token), and any strides between these. */

#pragma once

#include "kernel.h"

typedef struct {
    const char *data;
    long row, head, slot; /* strides in bytes */
    int kind; /* how the values are kept: one of enum kind */
} slots;

static ALWAYS_INLINE const char *slot_at(const slots *from, long row, long head, long slot)
{
    return from->data + row * from->row + head * from->head + slot * from->slot;
}
