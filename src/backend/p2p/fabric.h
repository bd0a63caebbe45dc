/* SPDX-License-Identifier: Apache-2.0 */
/* NVLink domains: GPUs, also of several hosts, that NVLink switches connect (fabric clusters).
 * Ranks of one domain join one group of backend p2p. Their heaps are exported with fabric
 * handles (heap_memory.h). */
#ifndef EPIC_P2P_FABRIC_H
#define EPIC_P2P_FABRIC_H

#include "backend/p2p/p2p.h"

/* Implements epic_backend.identify. Reads the domain of the GPU from NVML, and tries whether
 * CUDA creates a fabric handle. */
void p2p_identify(epic_peer *mine);

/* Returns whether backend p2p can join ranks on these hosts. If not, writes the reason to `why`,
 * which has 256 bytes. */
bool p2p_fabric_joins(const epic_peer *peers, int num_ranks, char *why);

#endif
