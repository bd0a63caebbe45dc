/* SPDX-License-Identifier: Apache-2.0 */
/* The layer of a call, and what the host derives from it: whether kernels support it, where the
 * arrays of its plans are, and the hashes by which ranks and plans are compared. */
#ifndef EPIC_P2P_LAYERS_H
#define EPIC_P2P_LAYERS_H

#include "backend/p2p/p2p.h"

/* A hash of the arguments that must be equal on all ranks: 28 bits, below the operation's 4. */
typedef struct signature {
    uint64_t hash;
} signature;

/* Mixes a value into the hash; the order of the values matters. */
static inline void signature_mix(signature *a, uint64_t value)
{
    a->hash = (a->hash ^ value) * 0x9e3779b97f4a7c15ull;
    a->hash ^= a->hash >> 29;
}

/* Mixes every field of a complete layer into the hash. */
void p2p_sign_layer(signature *a, const epic_layer *layer);

/* Fills in the layer's defaults. Errors: EPIC_ENOTSUP if the kernels do not support the layer.
 */
epic_result p2p_read_layer(const epic_group *group, epic_layer *out, const epic_layer *layer);

/* Like p2p_read_layer(), for a layer whose plan exists. Kernels load from the plan before they
 * have checked its header, so the plan must have as many bytes as the layer needs. Errors: also
 * EPIC_EINVAL. */
epic_result p2p_read_plan_layer(const epic_group *group, epic_layer *out,
                                const epic_layer *layer, int64_t plan_bytes);

/* Offsets of the arrays of the layer's plans. */
device_plan_layout p2p_plan_layout(const epic_group *group, const epic_layer *layer);

/* Makes the kernels compare the layer of their plan with this complete layer. */
void p2p_expect_layer(p2p_self *self, const epic_layer *layer);

/* Does EPIC_BY_K make a difference for this layer? */
bool p2p_keeps_by_k(const epic_layer *layer);

/* Does combine need leaves within ranks, partials of another type, or a tree of more than 8
 * ranks? The low-latency kernels support none of these. */
bool p2p_has_rare_sums(const epic_group *group, const epic_layer *layer);

#endif
