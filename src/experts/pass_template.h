/* SPDX-License-Identifier: Apache-2.0 */
/* Forward and backward of the experts on one slab (the slots of one expert). pass_f32.c and
 * pass_f64.c include this file, with REAL defined as float or double. OF(name) appends _f32 or
 * _f64 to a name that other files use.
 *
 * Each GEMM is one call over all rows of the slab, including its padding, or one call for each
 * tile of converted weights. So the bits of a row do not depend on other slabs.
 *
 * The caller passes zeros in the rows of padding of x and d_y. If a function writes other
 * values into rows of padding, for example by adding a bias, these rows are set to zero again
 * before the next GEMM. */
#include <math.h>
#include <string.h>

#include "experts/blas.h"
#include "experts/config.h"
#include "kernels/kernels.h"
#include "rules/convert.h"
#include "rules/scalar.h"

/* the order matters, because each of these files uses functions of the files before it */
#include "experts/activation_template.h"

#include "experts/product_template.h"

#include "experts/forward_template.h"

#include "experts/backward_template.h"
