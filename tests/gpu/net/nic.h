/* SPDX-License-Identifier: Apache-2.0 */
/* A NIC that is a kernel: it takes what it is asked to copy from rings in host memory, as a NIC its
 * descriptors, and takes as long as a network of its speed.  Copy engines, which local.c has else,
 * are asked by calls of CUDA, and these wait for each other. */
#ifndef NET_NIC_H
#define NET_NIC_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { NIC_URGENT, NIC_ROWS, NIC_RINGS }; /* what is urgent goes first */

typedef struct nic nic;

/* Opens a NIC of `speed` GB/s (0: as fast as it can) on the current device: `ctas` thread blocks copy, and
 * one more deals. Its kernel runs from a put until it has been idle for 5 ms. */
cudaError_t nic_open(nic **out, int ctas, double speed);

/* Memory that the GPU sees, multiples of 8; *left becomes 1 in host memory that it sees, too.
 * False: come again. */
bool nic_put(nic *n, int ring, void *to, const void *from, uint32_t bytes, int *left);

/* Starts the kernel again if it has ended and an entry waits. Call it while a put is not done: a put that
 * came while the kernel ended is not seen otherwise. */
void nic_run(nic *n);

/* Copies what was put, then frees the NIC. NULL is allowed. */
void nic_close(nic *n);

#ifdef __cplusplus
}
#endif
#endif
