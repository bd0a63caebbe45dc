/* SPDX-License-Identifier: Apache-2.0 */
/* A striped net over the engine chaos. It must keep all promises of a net, too. */
#ifndef NET_CHAOS_STRIPED_H
#define NET_CHAOS_STRIPED_H

#include "net/striped/striped.h"

extern EPIC_API const net_engine epic_net_striped;

#endif
