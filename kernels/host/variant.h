/* SPDX-License-Identifier: Apache-2.0 */
/* Names of one variant of the host kernels. CMake compiles rows.c and product.c once per kind
 * of processor; VARIANT is the name of the kind. */
#ifndef EPIC_HOST_VARIANT_H
#define EPIC_HOST_VARIANT_H

#ifndef VARIANT
#define VARIANT generic
#endif

#define STRINGIFY(x) #x
#define NAME_OF(variant) STRINGIFY(variant)
#define JOIN(a, b) a##b
#define TABLE_OF(variant) JOIN(host_kernels_, variant)
#define PRODUCT_OF(variant) JOIN(host_product_, variant)

#endif
