/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the option structs of the core from the attributes of a call. */
#ifndef EPIC_JAX_OPTIONS_H
#define EPIC_JAX_OPTIONS_H

#include "ffi.h"

/* Return the options of a layer, and of its router. If an attribute is missing or invalid, the
 * functions of this header store an error in the reader. */
epic_layer options_read_layer(ffi_reader *reader);
epic_router options_read_router(ffi_reader *reader);

/* Returns the options of the experts or of the shared expert. The names of their attributes
 * begin with `prefix`, which is "experts_" or "shared_". */
epic_experts options_read_experts(ffi_reader *reader, const char *prefix);

/* Options of a whole layer. The field `moe` points to the other fields, so the struct must not
 * be copied. */
typedef struct moe_options {
    epic_layer layer;
    epic_router router;
    epic_experts experts, shared;
    epic_moe moe;
} moe_options;

/* Reads the options of a whole layer to *out. */
void options_read_moe(ffi_reader *reader, moe_options *out);

#endif
