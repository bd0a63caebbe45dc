/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the text that UCX prints about an endpoint. It has one line per lane, such as "#
 * lane[0]:  4:tcp/eth0.0 md[1] -> md[1]/tcp am am_bw#0". */
#ifndef EPIC_NET_UCX_LANES_TEXT_H
#define EPIC_NET_UCX_LANES_TEXT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Writes the network of the next lane, such as "tcp/eth0", to `to`. Returns the text after it,
 * or NULL if there are no more lanes. */
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

/* Returns true if the name of a lane begins with `with`. */
static inline bool lanes_begins(const char *lane, const char *with)
{
    return strncmp(lane, with, strlen(with)) == 0;
}

/* Returns true if a lane is used for remote access to memory. `at` points into its line. */
static inline bool lanes_is_for_memory(const char *at)
{
    const char *found = strstr(at, " rma_bw#");
    return found && found < at + strcspn(at, "\n");
}

/* Returns true if remote writes over these lanes keep words of 8 bytes whole. For that, every
 * lane must be RDMA, and at least one of them must be used for remote access to memory.
 *
 * Without such a lane UCX sends remote writes as its own messages. The receiver stores them
 * with memcpy, so words may arrive twice or in parts. EFA (srd) prints such a lane even if its
 * devices can only read. So the lane counts only in a context without emulation. */
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

/* Returns true if a lane for remote access reaches the registered memory on both sides. `own`
 * and `theirs` are bit masks: bit n is set if the key of that side is valid in the memory
 * domain md[n]. A device that does not reach GPU memory has no key for it. */
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
