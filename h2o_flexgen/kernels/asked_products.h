/* What a function is told that computes several products in one call. */

#pragma once

typedef struct {
    const void *products; /* as the function knows them */
    long count;
    int told; /* what all have in common: the bits of codes, a kind of plain values, or a stored format */
} asked_products;
