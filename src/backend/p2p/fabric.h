/* SPDX-License-Identifier: Apache-2.0 */
/* NVLink domains. A domain is a set of GPUs, of one or several hosts, that NVLink switches
 * connect: GPUs with equal cluster and clique in NVML. Ranks of one domain can form a group of
 * backend p2p on several hosts, which exports heaps with fabric handles (heap_memory.h). */
#ifndef EPIC_P2P_FABRIC_H
#define EPIC_P2P_FABRIC_H

#include "backend/p2p/p2p.h"

/* Implements epic_backend.identify. Reads the domain of the current device from NVML, and tests
 * whether CUDA can create a fabric handle for memory of this device. */
void p2p_identify(epic_peer *mine);

/* Returns whether all ranks are on one host or in one NVLink domain. If not, writes the reason
 * why backend p2p cannot join them to `why`, which has 256 bytes. */
bool p2p_fabric_joins(const epic_peer *peers, int num_ranks, char *why);

#endif
