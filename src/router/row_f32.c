/* SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic of the router for one token in float32 (row_template.h). */
#define REAL float
#define OF(name) name##_f32
#include "router/row_template.h"
