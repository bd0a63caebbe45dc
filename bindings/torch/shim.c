/* SPDX-License-Identifier: Apache-2.0 */
/* PyTorch's functions, and C++'s for its exceptions, by dlsym.  Python loads libtorch with local
 * scope: dlsym(RTLD_DEFAULT) would not see it, dlopen(RTLD_NOLOAD) finds it. */
#include "shim.h"

#include <dlfcn.h>
#include <string.h>

torch_functions torch;

/* The Itanium C++ ABI, as gcc and clang have it. */
static void (*cell_delete)(void *); /* operator delete */
static void *(*exception_allocate)(size_t);
static void (*exception_throw)(void *, void *type, void (*destroy)(void *))
    __attribute__((noreturn));
static void (*error_init)(void *, const char *), (*error_destroy)(void *);
static void *error_type; /* of std::runtime_error */

enum { ERROR_BYTES = 64 }; /* more than a std::runtime_error has */

/* Python's lock; NULL: torch does not take it for tensors. */
static int (*lock_python)(void);
static void (*unlock_python)(int);
static const uint64_t torch_2_10 = 0x020a000000000000;

_Noreturn void torch_throw(const char *text)
{
    void *error = exception_allocate(ERROR_BYTES);
    error_init(error, text); /* copies text */
    exception_throw(error, error_type, error_destroy);
}

/* From 2.10 on torch takes Python's lock for each tensor that only Python goes on to hold, as the
 * caller's arguments: within a lock of ours that is no wait and no word to other threads. */
void torch_delete(torch_tensor *tensors, int count)
{
    const bool locks = lock_python != NULL && count > 1;
    const int before = locks ? lock_python() : 0;
    while (count > 0) torch.delete_tensor_object(tensors[--count]);
    if (locks) unlock_python(before);
}

void torch_cell_delete(void *cell)
{
    cell_delete(cell);
}

/* ISO C has no cast from an object pointer to a function pointer. */
static bool find(void *library, const char *name, void *out)
{
    void *found = dlsym(library, name);
    memcpy(out, &found, sizeof found);
    return found != NULL;
}

/* What is loaded before all else, as an allocator or a sanitizer is, replaces C++'s functions, also
 * for torch. */
static bool find_as_torch(void *library, const char *name, void *out)
{
    return find(RTLD_DEFAULT, name, out) || find(library, name, out);
}

static const char *find_cxx(void)
{
    void *cxx = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
    if (cxx == NULL) return "libstdc++.so.6";
    const struct {
        const char *name;
        void *out;
    } wanted[] = {{"_ZdlPv", &cell_delete},
                  {"__cxa_allocate_exception", &exception_allocate},
                  {"__cxa_throw", &exception_throw},
                  {"_ZNSt13runtime_errorC1EPKc", &error_init},
                  {"_ZNSt13runtime_errorD1Ev", &error_destroy},
                  {"_ZTISt13runtime_error", &error_type}};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if (!find_as_torch(cxx, wanted[i].name, wanted[i].out)) return wanted[i].name;
    return NULL;
}

static void find_python(void)
{
    if (torch.abi_version() < torch_2_10) return;
    if (!find(RTLD_DEFAULT, "PyGILState_Release", &unlock_python) ||
        !find(RTLD_DEFAULT, "PyGILState_Ensure", &lock_python))
        lock_python = NULL;
}

const char *torch_find(void)
{
    void *cpu = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (cpu == NULL) return "libtorch_cpu.so (import torch first)";
#define FIND(type, name, ...) \
    if (!find(cpu, "aoti_torch_" #name, &torch.name)) return "aoti_torch_" #name;
    TORCH_FUNCTIONS(FIND)
#undef FIND
    find_python();
    void *cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (cuda != NULL) {
#define FIND(type, name, ...) \
    if (!find(cuda, "aoti_torch_" #name, &torch.name)) return "aoti_torch_" #name;
        TORCH_CUDA_FUNCTIONS(FIND)
#undef FIND
    }
    return find_cxx();
}
