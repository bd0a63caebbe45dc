/* SPDX-License-Identifier: Apache-2.0 */
/* A NIC that is a kernel: it takes copy orders from rings in host memory, as a NIC takes
 * descriptors, and is as fast as a network of its speed. Copy engines, which local.c uses
 * otherwise, need CUDA calls, which wait for each other. */
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
 * and one more passes them work. Its kernel runs from a put until it has been idle for 5 ms. */
cudaError_t nic_open(nic **out, int ctas, double speed);

/* Copies memory that the GPU can access, in multiples of 8 bytes; sets *left to 1 in host
 * memory when it has ended. Returns false if the ring is full. */
bool nic_put(nic *n, int ring, void *to, const void *from, uint32_t bytes, int *left);

/* Starts the kernel again if it has ended and an entry waits. Must be called while a put is not
 * done, because a put that comes while the kernel ends is not seen otherwise. */
void nic_run(nic *n);

/* Completes all puts, then frees the NIC. NULL is allowed. */
void nic_close(nic *n);

#ifdef __cplusplus
}
#endif
#endif
