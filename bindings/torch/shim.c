/* SPDX-License-Identifier: Apache-2.0 */
/* Finds PyTorch's functions with dlsym(). Python loads libtorch with local scope, so
 * dlsym(RTLD_DEFAULT) cannot find its functions. dlsym() finds them with the handle that
 * dlopen(RTLD_NOLOAD) returns. */
#include "shim.h"

#include <dlfcn.h>
#include <string.h>

torch_functions torch;

/* Acquire and release Python's lock (GIL). NULL if this version of torch does not lock it when
 * it deletes tensors. */
static int (*lock_python)(void);
static void (*unlock_python)(int);
static const uint64_t torch_2_10 = 0x020a000000000000; /* torch.abi_version() of torch 2.10 */

/* Deletes tensors. Since version 2.10, torch acquires Python's lock for each tensor that only
 * Python still owns, such as the caller's arguments, and each time it may have to wait for
 * other threads. So this function acquires the lock once for all tensors. */
void torch_delete_tensors(torch_tensor *tensors, int count)
{
    const bool locks = lock_python != NULL && count > 1;
    const int before = locks ? lock_python() : 0;
    while (count > 0) torch.delete_tensor_object(tensors[--count]);
    if (locks) unlock_python(before);
}

/* Stores the address of a symbol in the function pointer at `out`. Returns false if the library
 * does not have it. Uses memcpy() because ISO C has no cast from void * to a function
 * pointer. */
static bool find_symbol(void *library, const char *name, void *out)
{
    void *found = dlsym(library, name);
    memcpy(out, &found, sizeof found);
    return found != NULL;
}

/* Finds the functions for Python's lock. They stay NULL for versions of torch that do not
 * acquire the lock when they delete tensors. */
static void find_python(void)
{
    if (torch.abi_version() < torch_2_10) return;
    if (!find_symbol(RTLD_DEFAULT, "PyGILState_Release", &unlock_python) ||
        !find_symbol(RTLD_DEFAULT, "PyGILState_Ensure", &lock_python))
        lock_python = NULL;
}

const char *torch_find_functions(void)
{
    void *cpu = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (cpu == NULL) return "libtorch_cpu.so (import torch first)";
#define FIND(type, name, ...) \
    if (!find_symbol(cpu, "aoti_torch_" #name, &torch.name)) return "aoti_torch_" #name;
    TORCH_FUNCTIONS(FIND)
#undef FIND
    find_python();
    void *cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (cuda != NULL) {
#define FIND(type, name, ...) \
    if (!find_symbol(cuda, "aoti_torch_" #name, &torch.name)) return "aoti_torch_" #name;
        TORCH_CUDA_FUNCTIONS(FIND)
#undef FIND
    }
    return NULL;
}
