/* Where the values of heads lie: of any row, head and slot (or token) side by side, else with any strides. */

#pragma once

#include "kernel.h"

enum kind { BF16, FLOAT, GROUP4, GROUP8 }; /* how the values of a slot are kept */

typedef struct {
    const char *data;
    long row, head, slot; /* strides in bytes; the values of a slot lie side by side */
    int kind;
} slots;

static ALWAYS_INLINE const char *slot_at(const slots *from, long row, long head, long slot)
{
    return from->data + row * from->row + head * from->head + slot * from->slot;
}
