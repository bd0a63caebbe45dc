/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses the kernel of a grouped GEMM (a matrix product over slabs):
 *
 *     experts/grouped_hopper.cu   Hopper's tensor cores
 *     experts/grouped_plain.cu    plain loops, for every GPU, type and shape
 *     experts/grouped_few.cu      few rows with sums in slices; grouped_plain.cu launches it */
#include "cuda/experts/grouped.h"

extern "C" cudaError_t p2p_launch_gemm(const p2p_gemm *g, cudaStream_t stream)
{
    return p2p_gemm_is_slow(g) ? p2p_launch_plain_gemm(g, stream)
                               : p2p_launch_hopper_gemm(g, stream);
}
