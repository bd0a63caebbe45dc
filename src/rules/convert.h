/* SPDX-License-Identifier: Apache-2.0 */
/* Runs of elements of any type to float32 and back.  F64 is not among them: it is computed as
 * it lies. */
#ifndef EPIC_CONVERT_H
#define EPIC_CONVERT_H

#include <stdint.h>

/* n elements of type F32, BF16 or F16. */
void convert_to_float(float *out, const void *in, uint32_t type, int64_t n);

/* Rounded to nearest even. */
void convert_from_float(void *out, uint32_t type, const float *in, int64_t n);

/* Bytes of an element of F32, BF16, F16 or F64; 0 for every other type. */
int64_t convert_bytes(uint32_t type);

/* "F32", for messages. */
const char *convert_name(uint32_t type);

#endif
