/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the operators known to torch, once in a process. */
#include "ops.h"

static const char *register_all(void *library, void *cpu, void *cuda, torch_ops all)
{
    for (int i = 0; i < all.count; i++) {
        const torch_op *op = &all.ops[i];
        if (torch.library_def(library, op->schema) ||
            torch.library_impl(cpu, op->name, op->kernel) ||
            torch.library_impl(cuda, op->name, op->kernel))
            return op->schema;
    }
    return NULL;
}

/* For Python: NULL, or what was in the way.  Called once: the libraries are never deleted, as that
 * would take the operators away. */
TORCH_EXPORT const char *epic_torch_register(void)
{
    static void *library, *cpu, *cuda;
    const char *missing = torch_find();
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
