/* SPDX-License-Identifier: Apache-2.0 */
/* Checks that the kernels support the layer of a call. Also computes the offsets of the arrays
 * in a plan for this layer, and the hashes by which ranks and plans are compared. */
#ifndef EPIC_P2P_LAYERS_H
#define EPIC_P2P_LAYERS_H

#include "backend/p2p/p2p.h"

/* A signature is a hash of the arguments that must be equal on all ranks. Each rank sends a
 * word to its peers, and the kernels of the peers compare the words. The word contains the
 * operation in its highest 4 bits, then the highest 28 bits of the hash. */
typedef struct signature {
    uint64_t hash;
} signature;

/* Mixes a value into the hash. The order of the values matters. */
static inline void signature_mix(signature *a, uint64_t value)
{
    a->hash = (a->hash ^ value) * 0x9e3779b97f4a7c15ull;
    a->hash ^= a->hash >> 29;
}

/* Mixes every field of a layer into the hash. Requires that the layer's defaults are filled
 * in. */
void p2p_sign_layer(signature *a, const epic_layer *layer);

/* Copies the layer to *out and fills in its defaults. Errors: EPIC_ENOTSUP if kernels do not
 * support the layer. */
epic_result p2p_read_layer(const epic_group *group, epic_layer *out, const epic_layer *layer);

/* Like p2p_read_layer(), for a call that reads an existing plan. It has one more error:
 * EPIC_EINVAL if plan_bytes is less than the layer needs. This check is necessary because
 * kernels read parts of the plan before they check its header. */
epic_result p2p_read_plan_layer(const epic_group *group, epic_layer *out,
                                const epic_layer *layer, int64_t plan_bytes);

/* Returns the offsets of the arrays in a plan of this layer. */
device_plan_layout p2p_plan_layout(const epic_group *group, const epic_layer *layer);

/* Sets self->layer_hashes to hashes of the layer. The caller must have filled in the layer's
 * defaults. The kernels compare these hashes with the hash in a plan, to check that the plan
 * was made for this layer. */
void p2p_expect_layer(p2p_self *self, const epic_layer *layer);

/* Returns whether EPIC_BY_K can make a difference, that is, can keep other choices than the
 * default priority keeps. This requires a layer that can drop choices, and a top_k above 1. */
bool p2p_keeps_by_k(const epic_layer *layer);

/* Returns whether combine needs an option that the low-latency kernels do not support: several
 * leaves of the sum tree (blocks of experts) per rank, a partial_type other than the default,
 * or tree order with more than 8 ranks. In groups whose seats can become vacant, they support
 * no tree order: after a CUDA graph was captured, each rank may get several leaves. */
bool p2p_needs_general_combine(const epic_group *group, const epic_layer *layer);

#endif
