/* SPDX-License-Identifier: Apache-2.0 */
/* Registers the operators with torch, once per process. */
#include <stdio.h>
#include <string.h>

#include "ops.h"

enum { SCHEMA_BYTES = 4096, NAME_BYTES = 64 };

static const char arrow[] = ") -> (Tensor ";

/* Makes the schema of NAME_out from that of NAME. "NAME(ARGUMENTS) -> (Tensor RESULT, ...)"
 * becomes "NAME_out(ARGUMENTS, Tensor(b!)? RESULT=None, ...) -> ()". The letters in parentheses
 * are torch's alias annotations. order_token has the letter a, so the letters of the results
 * begin with b. Returns false if the operator has no results or is an overload
 * (NAME.OVERLOAD). */
static bool out_schema(const torch_op *op, char out[SCHEMA_BYTES])
{
    const char *results = strstr(op->schema, arrow);
    if (results == NULL || strchr(op->name, '.') != NULL) return false;
    const char *arguments = op->schema + strlen(op->name);
    int length = snprintf(out, SCHEMA_BYTES, "%s_out%.*s", op->name, (int)(results - arguments),
                          arguments);
    char letter = 'b';
    for (const char *name = results + strlen(arrow); name != NULL; letter++) {
        length += snprintf(out + length, SCHEMA_BYTES - (size_t)length,
                           ", Tensor(%c!)? %.*s=None", letter, (int)strcspn(name, ",)"), name);
        name = strstr(name, ", Tensor ");
        if (name != NULL) name += strlen(", Tensor ");
    }
    snprintf(out + length, SCHEMA_BYTES - (size_t)length, ") -> ()");
    return true;
}

/* Registers one operator, with one kernel for CPU and CUDA tensors. Returns false on
 * failure. */
static bool register_op(void *library, void *cpu, void *cuda, const torch_op *op)
{
    return !torch.library_def(library, op->schema) &&
           !torch.library_impl(cpu, op->name, op->kernel) &&
           !torch.library_impl(cuda, op->name, op->kernel);
}

/* Registers all operators of a table, and their operators NAME_out. Returns NULL, or the schema
 * that torch refused. */
static const char *register_all(void *library, void *cpu, void *cuda, torch_ops all)
{
    for (int i = 0; i < all.count; i++) {
        const torch_op *op = &all.ops[i];
        char schema[SCHEMA_BYTES], name[NAME_BYTES];
        snprintf(name, sizeof name, "%s_out", op->name);
        const torch_op out = {name, schema, op->kernel};
        if (!register_op(library, cpu, cuda, op) ||
            (out_schema(op, schema) && !register_op(library, cpu, cuda, &out)))
            return op->schema;
    }
    return NULL;
}

/* For Python: registers all operators. Must be called once. Returns NULL on success. On failure
 * returns the name of a function that torch does not have, or a schema that torch refused.
 * Never deletes the library objects, because deleting them would remove the operators. */
TORCH_EXPORT const char *epic_torch_register(void)
{
    static void *library, *cpu, *cuda;
    const char *missing = torch_find_functions();
    if (missing != NULL) return missing;
    if (torch.library_init_fragment("epic", __FILE__, __LINE__, &library) ||
        torch.library_init_impl("epic", "CPU", __FILE__, __LINE__, &cpu) ||
        torch.library_init_impl("epic", "CUDA", __FILE__, __LINE__, &cuda))
        return "torch.library.Library";
    const torch_ops all[] = {steps_ops(), router_ops(), experts_ops(), moe_ops()};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        missing = register_all(library, cpu, cuda, all[i]);
        if (missing != NULL) return missing;
    }
    return NULL;
}
