/* SPDX-License-Identifier: Apache-2.0 */
/* A NIC that is a kernel: it takes what it is asked to copy from rings in host memory, as a NIC its
 * descriptors, and takes as long as a network of its speed.  Copy engines, which local.c has else,
 * are asked by calls of CUDA, and these wait for each other. */
#ifndef WIRE_NIC_H
#define WIRE_NIC_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { NIC_URGENT, NIC_ROWS, NIC_RINGS }; /* what is urgent goes first */

typedef struct nic nic;

/* On the current device: `ctas` that copy, and one that deals; GB/s, 0: as fast as they can. */
cudaError_t nic_open(nic **out, int ctas, double speed);

/* When all ranks here have their memory: calls of CUDA that allocate or free wait for a kernel that
 * runs until the NIC is closed. */
cudaError_t nic_start(nic *n);

/* Memory that the GPU sees, multiples of 8; *left becomes 1 in host memory that it sees, too.
 * False: come again. */
bool nic_put(nic *n, int ring, void *to, const void *from, uint32_t bytes, int *left);

/* NULL is allowed; what was asked for is copied. */
void nic_close(nic *n);

#ifdef __cplusplus
}
#endif
#endif
