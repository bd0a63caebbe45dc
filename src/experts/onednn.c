/* SPDX-License-Identifier: Apache-2.0 */
/* Loads oneDNN at first use.
 *
 * GEMMs of bfloat16 matrices use dnnl_gemm_bf16bf16f32, which accepts any number of rows.
 * oneDNN's matmul primitive is not used: it would compile a kernel for each shape, and the
 * slabs of each call have new shapes. oneDNN 2 and 3 export dnnl_gemm_bf16bf16f32, but do not
 * declare it in their headers. EPIC does not use a oneDNN without this function. */
#include "experts/onednn.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#ifndef EPIC_ONEDNN
#define EPIC_ONEDNN "" /* file name of oneDNN; empty if the build found none */
#endif

typedef int multiply_bf16(char op_a, char op_b, int64_t m, int64_t n, int64_t k, float alpha,
                          const void *a, int64_t lda, const void *b, int64_t ldb, float beta,
                          float *c, int64_t ldc);

/* The first fields of the struct that dnnl_version() returns. */
typedef struct version {
    int major, minor, patch;
    const char *hash;
    unsigned runtime; /* kind of threads: SEQUENTIAL (none), OPENMP or another value */
} version;

/* Values of version.runtime (DNNL_RUNTIME_SEQ, DNNL_RUNTIME_OMP). */
enum { SEQUENTIAL = 1, OPENMP = 2 };

typedef struct onednn {
    multiply_bf16 *multiply; /* NULL if oneDNN is not loaded */
    /* Functions of OpenMP; NULL if the library is sequential. */
    void (*set_num_threads)(int num_threads);
    int (*get_num_threads)(void);
    char name[32];
} onednn;

static onednn the_onednn;
static pthread_once_t once = PTHREAD_ONCE_INIT;
/* State of onednn_enter() for this thread. depth: number of calls of onednn_enter() without a
 * matching onednn_leave(). threads_before: number of threads that OpenMP used before the first
 * of these calls. */
static _Thread_local int depth, threads_before;

/* Stores the address of the function `name` in the function pointer at `function`. Returns
 * false if the library does not have it. Uses memcpy() because ISO C has no cast from void * to
 * a function pointer. */
static bool find_symbol(void *library, const char *name, void *function)
{
    void *address = dlsym(library, name);
    memcpy(function, &address, sizeof address);
    return address != NULL;
}

/* Reads the functions of a library. Returns false if a function is missing, or if the library
 * uses threads of another kind than OpenMP. With such threads EPIC could not limit a GEMM to
 * one thread, so the bits of a GEMM would depend on the number of threads. */
static bool read_functions(onednn *o, void *library)
{
    const version *(*get_version)(void) = NULL;
    if (!find_symbol(library, "dnnl_version", &get_version)) return false;
    const version *v = get_version();
    if (v->runtime == OPENMP &&
        (!find_symbol(library, "omp_set_num_threads", &o->set_num_threads) ||
         !find_symbol(library, "omp_get_max_threads", &o->get_num_threads)))
        return false;
    snprintf(o->name, sizeof o->name, "oneDNN %d.%d.%d", v->major, v->minor, v->patch);
    return (v->runtime == OPENMP || v->runtime == SEQUENTIAL) &&
           find_symbol(library, "dnnl_gemm_bf16bf16f32", &o->multiply);
}

/* Loads a library and reads its functions. A usable library is never unloaded, because its
 * threads and tables live until the process exits. */
bool onednn_load_file(const char *file)
{
    onednn o = {0};
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) return false;
    if (read_functions(&o, library)) {
        the_onednn = o;
        return true;
    }
    dlclose(library);
    return false;
}

/* Loads the oneDNN that the build found, if the processor has bfloat16 instructions
 * (AVX512-BF16). Does nothing if a test has already loaded a oneDNN with onednn_load_file(). */
static void load_default(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    if (the_onednn.multiply != NULL || !EPIC_ONEDNN[0]) return;
    if (__builtin_cpu_supports("avx512bf16")) onednn_load_file(EPIC_ONEDNN);
#endif
}

bool onednn_is_ready(void)
{
    pthread_once(&once, load_default);
    return the_onednn.multiply != NULL;
}

const char *onednn_name(void)
{
    return onednn_is_ready() ? the_onednn.name : "";
}

bool onednn_multiply(const gemm *g)
{
    return the_onednn.multiply(g->transpose_a ? 'T' : 'N', g->transpose_b ? 'T' : 'N', g->m,
                               g->n, g->k, 1, g->a, g->lda, g->b, g->ldb, g->add ? 1 : 0, g->c,
                               g->ldc) == 0;
}

void onednn_enter(void)
{
    if (!onednn_is_ready() || the_onednn.set_num_threads == NULL || depth++ > 0) return;
    threads_before = the_onednn.get_num_threads();
    the_onednn.set_num_threads(1);
}

void onednn_leave(void)
{
    if (!onednn_is_ready() || the_onednn.set_num_threads == NULL || --depth > 0) return;
    the_onednn.set_num_threads(threads_before);
}
