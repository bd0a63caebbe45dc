/* SPDX-License-Identifier: Apache-2.0 */
/* Forward and backward of the experts on one slab. pass_f32.c and pass_f64.c include this
 * file with REAL float and REAL double. OF(name) is the name that other files see, with the
 * type as its suffix.
 *
 * Each matrix product is one call over all rows of the slab, padding included, or one call
 * per tile of weights that need a conversion. The bits of a row therefore depend on its slab
 * alone. Padding rows of x and d_y are zero by contract; where adding a bias would make them
 * nonzero, they are zeroed again. */
#include <math.h>
#include <string.h>

#include "experts/blas.h"
#include "experts/config.h"
#include "rules/convert.h"
#include "rules/scalar.h"

/* The order matters: each of these uses the ones before it. */
#include "experts/activation_template.h"

#include "experts/product_template.h"

#include "experts/forward_template.h"

#include "experts/backward_template.h"
