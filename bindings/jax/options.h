/* SPDX-License-Identifier: Apache-2.0 */
/* The core's option structs from attributes, and arrays as the core wants them. */
#ifndef EPIC_JAX_OPTIONS_H
#define EPIC_JAX_OPTIONS_H

#include "ffi.h"

epic_layer options_read_layer(ffi_reader *reader);
epic_router options_read_router(ffi_reader *reader);

/* Attributes begin with `prefix`: "experts_" or "shared_". */
epic_experts options_read_experts(ffi_reader *reader, const char *prefix);

/* A whole layer, whose parts point to each other: it must not move. */
typedef struct moe_options {
    epic_layer layer;
    epic_router router;
    epic_experts experts, shared;
    epic_moe moe;
} moe_options;
void options_read_moe(ffi_reader *reader, moe_options *out);

#endif
