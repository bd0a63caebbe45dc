/* SPDX-License-Identifier: Apache-2.0 */
/* A kernel that acts as a NIC. It reads copy orders from rings in host memory, as a NIC reads
 * descriptors, and copies at the speed of a given network. local.c otherwise uses copy engines,
 * which need CUDA calls that wait for each other. */
#ifndef NET_NIC_H
#define NET_NIC_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { NIC_URGENT, NIC_ROWS, NIC_RINGS }; /* urgent entries go first */

typedef struct nic nic;

/* Opens a NIC of `speed` GB/s (0: as fast as possible) on the current device. `ctas` CTAs copy,
 * and one more distributes the work. Its kernel runs from a put until it has been idle for 5
 * ms. */
cudaError_t nic_open(nic **out, int ctas, double speed);

/* Copies memory that the GPU can access, in multiples of 8 bytes. Sets *left in host memory to
 * 1 when the copy has ended. Returns false if the ring is full. */
bool nic_put(nic *n, int ring, void *to, const void *from, uint32_t bytes, int *left);

/* Starts the kernel again if it has ended and an entry waits. Call it while a put is
 * unfinished: otherwise a put that comes while the kernel ends is not noticed. */
void nic_run(nic *n);

/* Completes all puts, then frees the NIC. NULL is allowed. */
void nic_close(nic *n);

#ifdef __cplusplus
}
#endif
#endif
