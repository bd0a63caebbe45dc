/* SPDX-License-Identifier: Apache-2.0 */
/* The C functions of PyTorch that this library uses. Every version since 2.9 exports them.
 * libepic_torch.so looks them up at run time in the libraries that the process has loaded. So
 * one libepic_torch.so works with all these versions, and building it needs no part of
 * PyTorch. */
#ifndef EPIC_TORCH_SHIM_H
#define EPIC_TORCH_SHIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TORCH_EXPORT __attribute__((visibility("default")))

typedef uint64_t torch_value;              /* PyTorch's type StableIValue */
typedef struct torch_handle *torch_tensor; /* PyTorch's type AtenTensorHandle */
typedef void torch_kernel(torch_value *stack, uint64_t num_arguments, uint64_t num_results);

enum { TORCH_CPU = 0, TORCH_CUDA = 1 }; /* values of torch's enum of device types */

/* The functions of torch, with the types of their results and arguments. Each returns 0 on
 * success, with two exceptions: dtype_*() return the enum value of a dtype, and abi_version()
 * returns a version. */
#define TORCH_FUNCTIONS(F)                                                                     \
    F(int32_t, library_init_fragment, const char *, const char *, uint32_t, void **)           \
    F(int32_t, library_init_impl, const char *, const char *, const char *, uint32_t, void **) \
    F(int32_t, library_def, void *, const char *)                                              \
    F(int32_t, library_impl, void *, const char *, torch_kernel *)                             \
    F(int32_t, get_data_ptr, torch_tensor, void **)                                            \
    F(int32_t, get_dim, torch_tensor, int64_t *)                                               \
    F(int32_t, get_sizes, torch_tensor, int64_t **)                                            \
    F(int32_t, get_dtype, torch_tensor, int32_t *)                                             \
    F(int32_t, get_device_type, torch_tensor, int32_t *)                                       \
    F(int32_t, get_device_index, torch_tensor, int32_t *)                                      \
    F(int32_t, is_contiguous, torch_tensor, bool *)                                            \
    F(int32_t, delete_tensor_object, torch_tensor)                                             \
    F(uint64_t, abi_version, void)                                                             \
    F(int32_t, get_current_device_index, int32_t *)                                            \
    F(int32_t, copy_, torch_tensor, torch_tensor, int32_t)                                     \
    F(int32_t, empty_strided, int64_t, const int64_t *, const int64_t *, int32_t, int32_t,     \
      int32_t, torch_tensor *)                                                                 \
    F(int32_t, dtype_float32, void)                                                            \
    F(int32_t, dtype_bfloat16, void)                                                           \
    F(int32_t, dtype_float16, void)                                                            \
    F(int32_t, dtype_float64, void)                                                            \
    F(int32_t, dtype_float8_e4m3fn, void)                                                      \
    F(int32_t, dtype_int32, void)                                                              \
    F(int32_t, dtype_int64, void)                                                              \
    F(int32_t, dtype_uint8, void)

/* Functions of libtorch_cuda.so. They are NULL if that library is not loaded. */
#define TORCH_CUDA_FUNCTIONS(F)                           \
    F(int32_t, get_current_cuda_stream, int32_t, void **) \
    F(int32_t, create_cuda_guard, int32_t, void **)       \
    F(int32_t, delete_cuda_guard, void *)

#define TORCH_DECLARE(type, name, ...) type (*name)(__VA_ARGS__);
typedef struct torch_functions {
    TORCH_FUNCTIONS(TORCH_DECLARE)
    TORCH_CUDA_FUNCTIONS(TORCH_DECLARE)
} torch_functions;
#undef TORCH_DECLARE

extern torch_functions torch;

/* Finds all functions. Returns NULL, or the name of the first function that is missing. */
const char *torch_find_functions(void);

/* Throws std::runtime_error with a copy of the text, which torch converts to Python's
 * RuntimeError. The exception passes through C functions of this library, so they are compiled
 * with -fexceptions. */
_Noreturn void torch_throw(const char *text);

/* Deletes `count` handles of tensors. */
void torch_delete_tensors(torch_tensor *tensors, int count);

/* Frees the heap memory of an optional argument, which torch allocated with operator new. */
void torch_cell_delete(void *cell);

#endif
