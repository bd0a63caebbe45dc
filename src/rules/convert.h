/* SPDX-License-Identifier: Apache-2.0 */
/* Converts arrays of F32, BF16 or F16 elements to float32 and back. F64 is not supported,
 * because float64 rows are computed in float64. */
#ifndef EPIC_CONVERT_H
#define EPIC_CONVERT_H

#include <stdint.h>

/* Converts n elements of type EPIC_F32, EPIC_BF16 or EPIC_F16 to float32. */
void convert_to_float(float *out, const void *in, uint32_t type, int64_t n);

/* Converts n float32 values to EPIC_F32, EPIC_BF16 or EPIC_F16. Rounds to nearest even. */
void convert_from_float(void *out, uint32_t type, const float *in, int64_t n);

/* Returns the size in bytes of an element of type F32, BF16, F16 or F64; others: 0. */
int64_t convert_bytes(uint32_t type);

/* Returns the name of a type for error texts, such as "F32". */
const char *convert_name(uint32_t type);

#endif
