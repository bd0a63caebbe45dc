/* SPDX-License-Identifier: Apache-2.0 */
/* The emulator: a GPU made of threads, on which the CUDA kernels run without CUDA. Their
 * sources are compiled as C++ with the headers in include/, and the sources of the host call
 * this runtime instead of CUDA's.
 *
 * An SM is a thread of the system. It runs one CTA at a time, whose threads are fibers. A fiber
 * runs until it waits for its warp (any function that ends in _sync), for its CTA, or naps.
 * Streams are threads, too. So kernels of several streams run side by side and wait for each
 * other as on a GPU, and a kernel with more CTAs than free SMs waits for some. Memory is shared
 * with other processes by file descriptors.
 *
 * It is stricter than a GPU. The program ends with an error if lanes do not all meet, or meet
 * at different calls; if a copy is never waited for; and at accesses beyond the shared memory.
 * Warps take turns in random order, copies into shared memory happen as early or as late as
 * possible, and approximate functions differ in the last bits. It cannot show the effects of
 * caches and weak memory (except fences.c), nor times.
 *
 * Environment variables: EMULATED_GPUS (1), EMULATED_SMS (132) per GPU, EMULATED_SHARED
 * (227 KB), the shared memory of a thread block; EMULATED_SEED of the random choices;
 * EMULATED_LATE (0), the largest number of milliseconds, below 1000, by which some stores are
 * late (fences.c); EMULATED_FABRIC and EMULATED_IMEX, described in fabric.c;
 * CUDA_LAUNCH_BLOCKING has CUDA's meaning. */
#ifndef EPIC_EMULATOR_H
#define EPIC_EMULATOR_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EMULATOR_WARP 32
#define EMULATOR_MAX_THREADS 1024 /* largest number of threads of a CTA */

#define EMULATOR_MAX_POLLS 15

/* The words that a thread has loaded since it began its last poll, with their values. If the
 * thread naps then, it need not run again until one of them changes (cta.c). */
typedef struct emulator_polls {
    uint32_t num_polls; /* since the thread last napped */
    uint32_t count;     /* may be larger than the arrays: then some words are missing */
    uint32_t num_bytes[EMULATOR_MAX_POLLS]; /* 4 or 8 */
    const void *at[EMULATOR_MAX_POLLS];
    uint64_t values[EMULATOR_MAX_POLLS];
} emulator_polls;

typedef struct emulator_thread { /* which thread of a kernel this is */
    unsigned thread, cta, threads, ctas;
    uint8_t *shared; /* dynamic shared memory of the CTA */
    uint32_t shared_bytes;
    emulator_polls *polls;
} emulator_thread;

/* The running thread of a kernel. This TLS model makes access faster. */
extern __thread emulator_thread *emulator_here __attribute__((tls_model("initial-exec")));

typedef enum emulator_warp_call { /* the calls at which a warp meets */
                                  EMULATOR_SYNC,
                                  EMULATOR_SHUFFLE,
                                  EMULATOR_VOTE,
                                  EMULATOR_MATCH,
                                  EMULATOR_REDUCE
} emulator_warp_call;

/* Waits for all lanes of the warp and returns their values, valid until the next call. */
const uint64_t *emulator_warp_sync(emulator_warp_call what, uint64_t value);

/* Waits for all threads of the CTA. Returns 1 if all threads passed good = 1. */
int emulator_sync(int good);

/* Lets the other threads run. */
void emulator_nap(void);

/* cp.async and its groups; `to` is an offset in the CTA's dynamic shared memory. */
void emulator_copy(uint32_t to, const void *from, uint32_t bytes);
void emulator_end_copies(void);
void emulator_wait_copies(int pending);

/* Bulk stores from an offset in the CTA's dynamic shared memory, and their groups. `watch` is
 * called for each vector. What a lane writes there is invisible to bulk stores until its fence.
 */
void emulator_bulk(void *to, uint32_t from, uint32_t bytes, void (*watch)(const void *));
void emulator_end_bulk(void);
void emulator_wait_bulk(int pending);
void emulator_hide_bulk(void);
void emulator_show_bulk(void);

/* The address of `bytes` at an offset in the dynamic shared memory. */
void *emulator_shared(uint32_t at, uint32_t bytes);

/* Records for fences.c: a store of a rank to its own memory, a store of a peer, and a fence of
 * the CTA, system-wide or for its device. */
void emulator_note_store(const void *p);
void emulator_check_store(const void *p);
void emulator_fence(int system);

/* Returns 1 if a relaxed store of the four words at p is late: the emulator performs it later.
 * Returns 0 if the caller must perform it now. */
int emulator_delay_store(void *p, const uint32_t *words);

uint32_t emulator_random(void);
uint64_t emulator_now(void); /* device time in ns */

/* Ends the program: the code under test is wrong. */
#if defined(__GNUC__)
__attribute__((noreturn, format(printf, 1, 2)))
#endif
void emulator_die(const char *format, ...);

/* Returns the bytes of all blocks of device memory, or of pinned host memory, in whole pages.
 */
uint64_t emulator_bytes(bool host);

/* Counts the allocations of cuMemCreate() that this process has created or imported and has not
 * released, and the ranges of addresses that it has reserved and has not freed. */
void emulator_virtual(int *num_allocations, int *num_reservations);

/* From now on allocations fail that would use more than `bytes` of the device's memory. 0: none
 * fail. */
void emulator_limit(int device, uint64_t bytes);

/* From now on only the first `ctas` CTAs of any kernel on the device begin. 0: all begin. */
void emulator_hold(int device, int ctas);

/* Returns the number of different kernels that this process has launched. */
int emulator_kernels(void);

/* one launch of a kernel */
typedef struct emulator_launch {
    const void *kernel;
    int ctas, threads, shared_bytes;
} emulator_launch;

/* Copies the first `most` launches that this thread has made since the last call, and returns
 * their number. */
int emulator_launches(emulator_launch *out, int most);

/* Enqueues a kernel that calls body(arguments) in every thread; copies the arguments. */
cudaError_t emulator_enqueue(const void *kernel, void (*body)(const void *arguments),
                             const void *arguments, size_t bytes, int ctas, int threads,
                             int shared_bytes, cudaStream_t stream);

/* Returns the names of the NVTX ranges that this thread has begun, each followed by a blank.
 * *open: number of ranges that have not ended. */
const char *emulator_ranges(int *open);

#ifdef __cplusplus
}
#endif

#endif
