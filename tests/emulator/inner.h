/* SPDX-License-Identifier: Apache-2.0 */
/* Declarations that the files of the emulator share. */
#ifndef EPIC_EMULATOR_INNER_H
#define EPIC_EMULATOR_INNER_H

#include <cuda.h>
#include <stdbool.h>

#include "emulator.h"

#define MAX_DEVICES 8
#define MAX_KERNELS 256
#define SHARED_BYTES (227 << 10) /* shared memory per CTA, if the kernel has requested it */
/* shared memory per CTA, if the kernel has not requested more */
#define SHARED_UNASKED (48 << 10)

typedef struct launch { /* a launch of a kernel */
    void (*body)(const void *arguments);
    const void *arguments;
    int ctas, threads, shared_bytes;
} launch;

/* cta.c: runs one CTA on the calling thread. */
void run_cta(const launch *work, int cta);

/* device.c: runs a kernel from beginning to end; returns random numbers and the number of SMs.
 */
void run_kernel(int device, const launch *work);
int most_shared(const void *kernel);
int num_devices(void);
int num_sms(void);
int current_device(void);

/* memory.c: returns whether the address is in memory of this runtime. */
bool is_known(const void *p);

/* memory.c: returns whether the address is in memory of cudaMallocAsync(). */
bool is_of_pool(const void *p);

/* memory.c: adds and removes memory that virtual.c has mapped. */
void add_mapping(void *memory, size_t bytes, int device);
void remove_mapping(void *memory);

/* fabric.c: returns CUDA_SUCCESS if the memory of a device can have a fabric handle. */
CUresult check_fabric(int device);

/* virtual.c: whether the device of this thread can read and write memory of cuMemCreate at this
 * address; true for other memory. */
bool can_access(const void *p);

/* virtual.c: ends the program if the device of this thread cannot access the address. */
void check_access(const void *p);

/* memory.c: sets bytes to a value. Gives pages of zeros back to the system, so that a large
 * array that stays zero takes no memory. */
void fill_memory(void *to, int value, size_t bytes);

/* fences.c: performs the late stores of the CTA on this thread. waits: first waits for a
 * random time. */
void finish_late_stores(bool waits);

/* fences.c: returns whether the CTA on this thread has late stores. */
bool has_late_stores(void);

/* fences.c: makes stores visible, or forgets them. */
void see_stores(int device); /* called at the end of a kernel */
void forget_stores(const void *begin, size_t bytes);

/* stream.c: waits for all streams of a device. */
void finish_streams(int device);

#endif
