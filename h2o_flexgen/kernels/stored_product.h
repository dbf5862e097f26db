/* What the products of rows with matrices in stored formats are told. */

#pragma once

#include "panels.h"
#include "stored_values.h"

typedef struct {
    product given; /* without `data` */
    stored_matrix matrix;
} product_of_stored;
