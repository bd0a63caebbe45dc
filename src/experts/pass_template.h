/* SPDX-License-Identifier: Apache-2.0 */
/* Forward and backward of the experts on one slab. pass_f32.c and pass_f64.c include this file,
 * with REAL defined as float and double. OF(name) appends the suffix of the type to a name that
 * other files use.
 *
 * Each matrix product is one call over all rows of the slab, with its padding, or one call per
 * tile of converted weights. So the bits of a row depend only on the rows of its slab.
 *
 * The caller passes padding rows of x and d_y as zeros. Steps that would make padding rows of
 * an operand nonzero, such as adding a bias, zero them again. */
#include <math.h>
#include <string.h>

#include "experts/blas.h"
#include "experts/config.h"
#include "rules/convert.h"
#include "rules/scalar.h"

/* each of these files uses functions of the files above it, so their order matters */
#include "experts/activation_template.h"

#include "experts/product_template.h"

#include "experts/forward_template.h"

#include "experts/backward_template.h"
