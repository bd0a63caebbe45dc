/* SPDX-License-Identifier: Apache-2.0 */
/* A GPU of threads, on which the CUDA kernels run without CUDA: their sources are compiled as C++
 * on the headers in include/, and the host's sources call this runtime in place of CUDA's.
 *
 * An SM is a thread of the system; it runs one CTA at a time, whose threads are fibers: one runs
 * until it waits, for its warp (any function that ends in _sync), its CTA, or by a nap.  Streams
 * are threads too, so kernels of several streams run side by side and wait for each other as on a
 * GPU, and a kernel with more CTAs than free SMs waits for some.  Memory is shared with other
 * processes by file descriptor.
 *
 * It is stricter than a GPU where a GPU forgives: lanes that do not all meet, or meet for
 * different things, copies that nobody waited for, and shared memory out of bounds end the
 * program with a sentence.  Warps take turns in a random order, copies into shared memory are
 * done as early or as late as they may be, approximate functions differ in the last bits.  What
 * it cannot show is what caches and weak memory do, and time.
 *
 * EMULATED_GPUS (1), EMULATED_SMS (132) of each, EMULATED_SEED of the random choices;
 * CUDA_LAUNCH_BLOCKING as CUDA has it. */
#ifndef EPIC_EMULATOR_H
#define EPIC_EMULATOR_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EMULATOR_WARP 32
#define EMULATOR_MAX_THREADS 1024 /* of a CTA */

typedef struct emulator_thread { /* of a kernel: who it is */
    unsigned thread, cta, threads, ctas;
    uint8_t *shared; /* the CTA's dynamic shared memory */
    uint32_t shared_bytes;
} emulator_thread;

/* The running one. */
extern __thread emulator_thread *emulator_here;

typedef enum emulator_warp_call { /* what a warp meets for */
                                  EMULATOR_SYNC,
                                  EMULATOR_SHUFFLE,
                                  EMULATOR_VOTE,
                                  EMULATOR_MATCH,
                                  EMULATOR_REDUCE
} emulator_warp_call;

/* Waits for all lanes of the warp; each one's value, until the next one. */
const uint64_t *emulator_warp_sync(emulator_warp_call what, uint64_t value);

/* Waits for all threads of the CTA; 1 if `good` was 1 for all. */
int emulator_sync(int good);

/* Lets the others run. */
void emulator_nap(void);

/* cp.async and its groups; `to` is an offset in the CTA's dynamic shared memory. */
void emulator_copy(uint32_t to, const void *from, uint32_t bytes);
void emulator_end_copies(void);
void emulator_wait_copies(int pending);

/* Bulk stores from an offset in the CTA's dynamic shared memory, and their groups; `watch` is told of
 * each vector.  A lane hides what it writes there until it shows it to them by a fence. */
void emulator_bulk(void *to, uint32_t from, uint32_t bytes, void (*watch)(const void *));
void emulator_end_bulk(void);
void emulator_wait_bulk(int pending);
void emulator_hide_bulk(void);
void emulator_show_bulk(void);

/* Where `bytes` at an offset in the dynamic shared memory are. */
void *emulator_shared(uint32_t at, uint32_t bytes);

/* A store of a rank to its own memory, which peers see after fences; one of a peer; a fence of the
 * CTA, for all of the system or for its device alone. */
void emulator_note_store(const void *p);
void emulator_check_store(const void *p);
void emulator_fence(int system);

uint32_t emulator_random(void);
uint64_t emulator_now(void); /* ns */

/* Ends the program: the code under test is wrong. */
#if defined(__GNUC__)
__attribute__((noreturn, format(printf, 1, 2)))
#endif
void emulator_die(const char *format, ...);

/* Bytes of all blocks of device memory, or of pinned host memory, in whole pages. */
uint64_t emulator_bytes(bool host);

/* From now on device memory is refused that would make more than so many bytes of the device's; 0: as
 * much is given as is asked for. */
void emulator_limit(int device, uint64_t bytes);

/* From now on no more than the first `ctas` CTAs of any kernel on the device begin; 0: all do. */
void emulator_hold(int device, int ctas);

/* Different kernels that this process has launched. */
int emulator_kernels(void);

/* One launch of a kernel. */
typedef struct emulator_launch {
    const void *kernel;
    int ctas, threads, shared_bytes;
} emulator_launch;

/* Copies the launches that this thread has made since the last call, the first `most` of them, and
 * returns their number. */
int emulator_launches(emulator_launch *out, int most);

/* Enqueues body(arguments) for every thread; the arguments are copied. */
cudaError_t emulator_enqueue(const void *kernel, void (*body)(const void *arguments),
                             const void *arguments, size_t bytes, int ctas, int threads,
                             int shared_bytes, cudaStream_t stream);

/* The ranges of NVTX that this thread has begun, each with a blank behind it; how many are open. */
const char *emulator_ranges(int *open);

#ifdef __cplusplus
}
#endif

#endif
