/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPIC_P2P_HEAP_EXCHANGE_H
#define EPIC_P2P_HEAP_EXCHANGE_H

#include "backend/p2p/heap_memory.h"

/* Sends the file descriptor of this rank's heap to the near ranks (p2p_is_near()) of other
 * processes, receives theirs, and maps their heaps. Returns when this rank has sent and
 * received all descriptors, or after an error. `handles` [num_ranks] contains the handles of
 * all ranks, all of kind P2P_HEAP_DESCRIPTOR. Errors: EPIC_ENOTSUP; EPIC_EDEVICE; EPIC_EPEER if
 * the process of a rank has ended; EPIC_ETIMEOUT. */
epic_result p2p_heap_exchange(epic_group *group, const p2p_heap_handle *handles);

#endif
