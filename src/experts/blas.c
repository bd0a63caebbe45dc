/* SPDX-License-Identifier: Apache-2.0 */
/* OpenBLAS, loaded at first use: libepic.so itself depends on libc alone. */
#include "experts/blas.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "epic/epic.h"

/* Of the C interface to BLAS. */
enum { ROW_MAJOR = 101, AS_IT_LIES = 111, TRANSPOSED = 112 };

typedef struct blas {
    void (*sgemm)(int order, int op_a, int op_b, int m, int n, int k, float alpha,
                  const float *a, int lda, const float *b, int ldb, float beta, float *c,
                  int ldc);
    void (*dgemm)(int order, int op_a, int op_b, int m, int n, int k, double alpha,
                  const double *a, int lda, const double *b, int ldb, double beta, double *c,
                  int ldc);
    void (*set_num_threads)(int num_threads);
    int (*get_num_threads)(void);
    char name[96];
    bool loaded;
} blas;

static blas the_blas = {.name = "plain loops"};
static pthread_once_t once = PTHREAD_ONCE_INIT;

#ifdef EPIC_HAVE_BLAS

/* ISO C has no cast from an object's address to a function's. */
static bool find(void *library, const char *name, void *function)
{
    void *address = dlsym(library, name);
    memcpy(function, &address, sizeof address);
    return address != NULL;
}

/* "OpenBLAS 0.3.21 Haswell", from "OpenBLAS 0.3.21 NO_LAPACKE ..." and "Haswell". */
static void make_name(blas *b, void *library)
{
    char *(*config)(void) = NULL;
    char *(*core)(void) = NULL;
    char version[32] = "";
    if (find(library, "openblas_get_config", &config))
        sscanf(config(), "OpenBLAS %31s", version);
    find(library, "openblas_get_corename", &core);
    snprintf(b->name, sizeof b->name, "OpenBLAS%s%s%s%.40s", version[0] ? " " : "", version,
             core ? " " : "", core ? core() : "");
}

/* Stays loaded: its threads and tables are for the life of the process. */
static void load(void)
{
    blas b = {0};
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) return;
    b.loaded = find(library, "cblas_sgemm", &b.sgemm) &&
               find(library, "cblas_dgemm", &b.dgemm) &&
               find(library, "openblas_set_num_threads", &b.set_num_threads) &&
               find(library, "openblas_get_num_threads", &b.get_num_threads);
    if (!b.loaded) {
        dlclose(library);
        return;
    }
    make_name(&b, library);
    the_blas = b;
}

#else

static void load(void)
{
}

#endif

static const blas *get_blas(void)
{
    pthread_once(&once, load);
    return &the_blas;
}

const char *epic_blas_name(void)
{
    return get_blas()->name;
}

static int op(bool transpose)
{
    return transpose ? TRANSPOSED : AS_IT_LIES;
}

void gemm_f32(const gemm *g)
{
    const blas *b = get_blas();
    if (!b->loaded)
        gemm_plain_f32(g);
    else
        b->sgemm(ROW_MAJOR, op(g->transpose_a), op(g->transpose_b), (int)g->m, (int)g->n,
                 (int)g->k, 1, g->a, (int)g->lda, g->b, (int)g->ldb, g->add ? 1 : 0, g->c,
                 (int)g->ldc);
}

void gemm_f64(const gemm *g)
{
    const blas *b = get_blas();
    if (!b->loaded)
        gemm_plain_f64(g);
    else
        b->dgemm(ROW_MAJOR, op(g->transpose_a), op(g->transpose_b), (int)g->m, (int)g->n,
                 (int)g->k, 1, g->a, (int)g->lda, g->b, (int)g->ldb, g->add ? 1 : 0, g->c,
                 (int)g->ldc);
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int64_t num_inside;
static int threads_before;

void experts_blas_enter(void)
{
    const blas *b = get_blas();
    if (!b->loaded) return;
    pthread_mutex_lock(&mutex);
    if (num_inside++ == 0) {
        threads_before = b->get_num_threads();
        b->set_num_threads(1);
    }
    pthread_mutex_unlock(&mutex);
}

void experts_blas_leave(void)
{
    const blas *b = get_blas();
    if (!b->loaded) return;
    pthread_mutex_lock(&mutex);
    if (--num_inside == 0) b->set_num_threads(threads_before);
    pthread_mutex_unlock(&mutex);
}
