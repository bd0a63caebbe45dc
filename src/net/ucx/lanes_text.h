/* SPDX-License-Identifier: Apache-2.0 */
/* What UCX prints of an endpoint, read: "#  lane[0]:  4:tcp/eth0.0 md[1] -> md[1]/tcp am am_bw#0". */
#ifndef EPIC_NET_UCX_LANES_TEXT_H
#define EPIC_NET_UCX_LANES_TEXT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Writes the network of the next lane, as in "tcp/eth0", and returns what follows; NULL: there is
 * none. */
static inline const char *lanes_next(const char *text, char *to, size_t size)
{
    text = text ? strstr(text, " lane[") : NULL;
    text = text ? strstr(text, "]:") : NULL;
    if (!text) return NULL;
    text += strcspn(text + 2, ":\n") + 3;
    const int length = (int)strcspn(text, ". \n");
    snprintf(to, size, "%.*s", length, text);
    return text + length;
}

static inline bool lanes_begins(const char *lane, const char *with)
{
    return strncmp(lane, with, strlen(with)) == 0;
}

/* Is the lane, whose line goes on at `at`, one for memory of the peer? */
static inline bool lanes_is_for_memory(const char *at)
{
    const char *found = strstr(at, " rma_bw#");
    return found && found < at + strcspn(at, "\n");
}

/* Is every lane RDMA, and one of them for memory of the peer?  Where there is none UCX sends what is
 * written there in messages of its own, which the other side copies with memcpy: words may land
 * twice, or in pieces.  EFA (srd) has such a lane where it reads alone, too, so it counts only where
 * UCX was told to send none (`honest`). */
static inline bool lanes_keep_words(const char *text, bool no_emulation)
{
    char lane[64];
    int lanes = 0, writing = 0;
    for (const char *at = text; (at = lanes_next(at, lane, sizeof lane)); lanes++) {
        const bool efa = lanes_begins(lane, "srd");
        if (!lanes_begins(lane, "rc_") && !lanes_begins(lane, "dc_") && !(efa && no_emulation))
            return false;
        writing += lanes_is_for_memory(at);
    }
    return lanes > 0 && writing > 0;
}

/* Has a lane for memory of the peer keys of it, and of memory here?  Bit n of `own` and of `theirs`: a
 * key by the domain md[n] of that side.  A device that does not reach memory of a GPU has none. */
static inline bool lanes_reach(const char *text, uint64_t own, uint64_t theirs)
{
    char lane[64];
    unsigned here, there;
    for (const char *at = text; (at = lanes_next(at, lane, sizeof lane));)
        if (lanes_is_for_memory(at) &&
            sscanf(at, ".%*u md[%u] -> md[%u]", &here, &there) == 2 && here < 64 &&
            there < 64 && (own >> here & theirs >> there & 1))
            return true;
    return false;
}

#endif
