/* SPDX-License-Identifier: Apache-2.0 */
/* Strands of the engine chaos: whatever a wire promises holds of several, too. */
#ifndef WIRE_CHAOS_STRANDS_H
#define WIRE_CHAOS_STRANDS_H

#include "wire/strands/strands.h"

extern EPIC_API const wire_engine epic_wire_strands;

#endif
