/* SPDX-License-Identifier: Apache-2.0 */
/* Strands of the engine chaos: whatever a net promises holds of several, too. */
#ifndef NET_CHAOS_STRIPED_H
#define NET_CHAOS_STRIPED_H

#include "net/striped/striped.h"

extern EPIC_API const net_engine epic_net_striped;

#endif
