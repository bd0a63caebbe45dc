/* SPDX-License-Identifier: Apache-2.0 */
/* The experts' work on one slab: included once with REAL float, once with double.
 * OF(name) is the name, for that type, of what other files see.
 *
 * A product over the slab is one call over all of its padded rows (narrow weights: one for each
 * tile of weights), so that a row's bits depend on its slab alone.  Padding rows are zero in x
 * and in d_y, by contract, and are made zero wherever a bias would fill them. */
#include <math.h>
#include <string.h>

#include "experts/blas.h"
#include "experts/config.h"
#include "rules/convert.h"
#include "rules/scalar.h"

/* Each uses the ones before it. */
#include "experts/activation_template.h"

#include "experts/product_template.h"

#include "experts/forward_template.h"

#include "experts/backward_template.h"
