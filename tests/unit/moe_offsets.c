/* SPDX-License-Identifier: Apache-2.0 */
/* The buffer in which a layer adds the gradients of the gate and the shared expert: the weight
 * gradients of the shared expert are aligned in each row, whatever the number of columns of the
 * gate. If they are not, a GPU computes them with other kernels, whose sums have other bits. */
#include <stdio.h>

#include "moe/moe.h"

static int num_wrong;

static void expect(bool good, int64_t columns, const char *what)
{
    if (good) return;
    fprintf(stderr, "%lld columns: %s\n", (long long)columns, what);
    num_wrong++;
}

int main(void)
{
    for (int64_t columns = 1; columns <= 9; columns++)
        for (int shared = 0; shared < 2; shared++) {
            const moe_job j = {.hidden = 16,
                               .columns = columns,
                               .has_shared = shared != 0,
                               .shared = {.hidden = 16, .inner = 8}};
            const dense_grad_offsets p = moe_dense_grad_offsets(&j);
            expect(p.gate_up % DENSE_GRAD_ALIGNMENT == 0 &&
                       p.down % DENSE_GRAD_ALIGNMENT == 0 && p.end % DENSE_GRAD_ALIGNMENT == 0,
                   columns, "the weight gradients of the shared expert are not aligned");
            expect(p.gate_padding - p.scale == columns && p.gate_up - p.gate_padding < 4,
                   columns, "the padding of the gate's gradients is too long");
            expect(shared ? p.shared_padding - p.w_shared_gate == 16 : p.end == p.gate_up,
                   columns, "the shared expert's part has a wrong size");
        }
    return num_wrong ? 1 : 0;
}
