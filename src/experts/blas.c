/* SPDX-License-Identifier: Apache-2.0 */
/* Multiplies matrices with OpenBLAS or oneDNN. Loads OpenBLAS at first use, so that libepic.so
 * itself depends only on libc. onednn.c loads oneDNN in the same way. */
#include "experts/blas.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "epic/epic.h"
#include "experts/onednn.h"
#include "kernels/kernels.h"
#include "rules/convert.h"

/* Constants of CBLAS, the C interface of BLAS: CblasRowMajor, CblasNoTrans, CblasTrans. */
enum { ROW_MAJOR = 101, NOT_TRANSPOSED = 111, TRANSPOSED = 112 };

/* Function types of cblas_sgemm and cblas_dgemm. The size arguments have 32 bits in some builds
 * of OpenBLAS (int) and 64 bits in others (wide). */
#define GEMM(name, integer, real)                                                         \
    typedef void name(int order, int op_a, int op_b, integer m, integer n, integer k,     \
                      real alpha, const real *a, integer lda, const real *b, integer ldb, \
                      real beta, real *c, integer ldc)
GEMM(sgemm_int, int, float);
GEMM(dgemm_int, int, double);
GEMM(sgemm_wide, int64_t, float);
GEMM(dgemm_wide, int64_t, double);

/* Functions of OpenBLAS. If no OpenBLAS was found, `loaded` is false. */
typedef struct blas {
    /* sgemm and dgemm are set in a build with 32-bit sizes, wide_sgemm and wide_dgemm in a
     * build with 64-bit sizes */
    sgemm_int *sgemm;
    dgemm_int *dgemm;
    sgemm_wide *wide_sgemm;
    dgemm_wide *wide_dgemm;
    void (*set_num_threads)(int num_threads);
    int (*get_num_threads)(void);
    char name[96]; /* for example "OpenBLAS 0.3.21 Haswell" */
    bool loaded;
} blas;

static blas the_blas = {.name = "plain loops"};
static pthread_once_t once = PTHREAD_ONCE_INIT;

#ifdef EPIC_HAVE_BLAS

/* The prefixes and suffixes of function names in builds of OpenBLAS: first the builds of Linux
 * distributions, then the builds of scipy and numpy. */
typedef struct naming {
    const char *before, *after;
} naming;

static const naming namings[] = {{"", ""}, {"scipy_", ""}, {"scipy_", "64_"}, {"", "64_"}};

/* Stores the address of the function `name` in the function pointer at `function`. Returns
 * false if the library does not have it. Uses memcpy() because ISO C has no cast from void * to
 * a function pointer. */
static bool find_symbol(void *library, const naming *n, const char *name, void *function)
{
    char whole[64];
    snprintf(whole, sizeof whole, "%s%s%s", n->before, name, n->after);
    void *address = dlsym(library, whole);
    memcpy(function, &address, sizeof address);
    return address != NULL;
}

/* Sets b->name to "OpenBLAS", the version in `config` and the processor core that OpenBLAS
 * detected. */
static void make_name(blas *b, void *library, const naming *n, const char *config)
{
    char *(*core)(void) = NULL;
    char version[32] = "";
    sscanf(config, "OpenBLAS %31s", version);
    find_symbol(library, n, "openblas_get_corename", &core);
    snprintf(b->name, sizeof b->name, "OpenBLAS%s%s%s%.40s", version[0] ? " " : "", version,
             core ? " " : "", core ? core() : "");
}

/* Reads the functions of struct blas from `library`. Returns false if a function is missing.
 * OpenBLAS has 64-bit sizes if its function names have a suffix, or if its configuration
 * contains USE64BITINT. */
static bool read_functions(blas *b, void *library, const naming *n)
{
    char *(*get_config)(void) = NULL;
    const char *config =
        find_symbol(library, n, "openblas_get_config", &get_config) ? get_config() : "";
    const bool wide = *n->after || strstr(config, "USE64BITINT");
    void *const sgemm = wide ? (void *)&b->wide_sgemm : (void *)&b->sgemm;
    void *const dgemm = wide ? (void *)&b->wide_dgemm : (void *)&b->dgemm;
    b->loaded = find_symbol(library, n, "cblas_sgemm", sgemm) &&
                find_symbol(library, n, "cblas_dgemm", dgemm) &&
                find_symbol(library, n, "openblas_set_num_threads", &b->set_num_threads) &&
                find_symbol(library, n, "openblas_get_num_threads", &b->get_num_threads);
    make_name(b, library, n, config);
    return b->loaded;
}

/* Loads a library. If it is an OpenBLAS, sets the_blas and returns true. If not, unloads it. An
 * OpenBLAS is never unloaded, because its threads and tables live until the process exits. */
static bool try_library(const char *path, int flags)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | flags);
    if (library == NULL) return false;
    for (size_t i = 0; i < sizeof namings / sizeof *namings; i++) {
        blas b = {0};
        if (!read_functions(&b, library, &namings[i])) continue;
        the_blas = b;
        return true;
    }
    dlclose(library);
    return false;
}

/* Callback of dl_iterate_phdr(). If the name of the library contains "openblas", copies the
 * library's path to `path` and returns 1 to end the search. */
static int match_openblas(struct dl_phdr_info *info, size_t size, void *path)
{
    (void)size;
    const char *slash = strrchr(info->dlpi_name, '/');
    if (!slash || !strstr(slash, "openblas")) return 0;
    return snprintf(path, 4096, "%s", info->dlpi_name) < 4096;
}

/* Loads the first OpenBLAS that it finds, in this order:
 * 1. The library of the system, so that all programs on a machine compute the same bits.
 * 2. A library that the process has already loaded, for example through numpy.
 * 3. The library of the scipy package, if the loader finds it.
 * 4. The library that was found when EPIC was built. */
static void find_library(void)
{
    char loaded[4096] = "";
    if (try_library("libopenblas.so.0", 0)) return;
    if (dl_iterate_phdr(match_openblas, loaded) && try_library(loaded, RTLD_NOLOAD)) return;
    if (try_library("libscipy_openblas.so", 0)) return;
    if (EPIC_OPENBLAS[0]) try_library(EPIC_OPENBLAS, 0);
}

#else

static void find_library(void)
{
}

#endif

/* Runs once. Loads OpenBLAS, then oneDNN, and joins the names of the two libraries. */
static void load_libraries(void)
{
    blas *b = &the_blas;
    find_library();
    const size_t length = strlen(b->name);
    if (onednn_is_ready())
        snprintf(b->name + length, sizeof b->name - length, ", %s for bfloat16", onednn_name());
}

/* Returns the functions of OpenBLAS. The first call loads it. */
static const blas *get_blas(void)
{
    pthread_once(&once, load_libraries);
    return &the_blas;
}

const char *epic_blas_name(void)
{
    return get_blas()->name;
}

static int transpose_code(bool transpose)
{
    return transpose ? TRANSPOSED : NOT_TRANSPOSED;
}

/* Calls `gemm` (cblas_sgemm or cblas_dgemm) with the fields of g. `integer` is the type of the
 * size arguments. */
#define MULTIPLY(gemm, integer)                                                       \
    gemm(ROW_MAJOR, transpose_code(g->transpose_a), transpose_code(g->transpose_b),   \
         (integer)g->m, (integer)g->n, (integer)g->k, 1, g->a, (integer)g->lda, g->b, \
         (integer)g->ldb, g->add ? 1 : 0, g->c, (integer)g->ldc)

void gemm_f32(const gemm *g)
{
    const blas *b = get_blas();
    if (!b->loaded)
        gemm_plain_f32(g);
    else if (b->sgemm)
        MULTIPLY(b->sgemm, int);
    else
        MULTIPLY(b->wide_sgemm, int64_t);
}

void gemm_f64(const gemm *g)
{
    const blas *b = get_blas();
    if (!b->loaded)
        gemm_plain_f64(g);
    else if (b->dgemm)
        MULTIPLY(b->dgemm, int);
    else
        MULTIPLY(b->wide_dgemm, int64_t);
}

static void multiply_own(const gemm *g, epic_type a_type, epic_type b_type, void *memory)
{
    const host_product product = {.m = g->m,
                                  .n = g->n,
                                  .k = g->k,
                                  .a = g->a,
                                  .lda = g->lda,
                                  .b = g->b,
                                  .ldb = g->ldb,
                                  .c = g->c,
                                  .ldc = g->ldc,
                                  .a_type = a_type,
                                  .b_type = b_type,
                                  .transpose_a = g->transpose_a,
                                  .transpose_b = g->transpose_b,
                                  .add = g->add,
                                  .memory = memory};
    host_kernels_get()->product(&product);
}

void gemm_invariant_f32(const gemm *g, void *memory)
{
    multiply_own(g, EPIC_F32, EPIC_F32, memory);
}

bool gemm_has_few(void)
{
    return host_kernels_get()->has_vectors;
}

void gemm_few(const gemm *g, uint32_t a_type, uint32_t b_type, void *memory)
{
    multiply_own(g, (epic_type)a_type, (epic_type)b_type, memory);
}

int64_t gemm_invariant_bytes(bool is_f64)
{
    return is_f64 ? 0 : HOST_PRODUCT_MEMORY * (int64_t)sizeof(float);
}

void gemm_invariant_f64(const gemm *g, void *memory)
{
    (void)memory;
    gemm_plain_f64(g);
}

bool gemm_has_bf16(void)
{
    return onednn_is_ready();
}

static float number_at(const void *matrix, int64_t index)
{
    float x;
    convert_to_float(&x, (const uint16_t *)matrix + index, EPIC_BF16, 1);
    return x;
}

/* Multiplies bfloat16 matrices with plain loops. Used if oneDNN reports an error. */
static void multiply_bf16_plain(const gemm *g)
{
    for (int64_t i = 0; i < g->m; i++)
        for (int64_t j = 0; j < g->n; j++) {
            float *c = (float *)g->c + i * g->ldc + j, sum = g->add ? *c : 0;
            for (int64_t l = 0; l < g->k; l++)
                sum += number_at(g->a, g->transpose_a ? l * g->lda + i : i * g->lda + l) *
                       number_at(g->b, g->transpose_b ? j * g->ldb + l : l * g->ldb + j);
            *c = sum;
        }
}

void gemm_bf16(const gemm *g)
{
    if (!onednn_multiply(g)) multiply_bf16_plain(g);
}

/* State of experts_blas_enter(), guarded by the mutex. num_inside: number of callers that are
 * between enter and leave. threads_before: number of threads that OpenBLAS used before the
 * first of these callers entered. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int64_t num_inside;
static int threads_before;

void experts_blas_enter(void)
{
    const blas *b = get_blas();
    onednn_enter();
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
    onednn_leave();
    if (!b->loaded) return;
    pthread_mutex_lock(&mutex);
    if (--num_inside == 0) b->set_num_threads(threads_before);
    pthread_mutex_unlock(&mutex);
}
