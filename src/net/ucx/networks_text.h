/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the text that UCX prints about an endpoint (networks.h). The text has one line for each
 * network of the endpoint, which UCX calls a lane, for example:
 *
 * # lane[0]: 4:tcp/eth0.0 md[1] -> md[1]/tcp am am_bw#0
 *
 * Here the network is tcp/eth0. md[n] is memory domain n. The first md is the domain of this
 * rank, the second md that of the peer. */
#ifndef EPIC_NET_UCX_NETWORKS_TEXT_H
#define EPIC_NET_UCX_NETWORKS_TEXT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Writes to `to` the next network in `text`, such as "tcp/eth0". Returns the text after this
 * network, or NULL if there are no more networks. The last dot ends the network, because names
 * of interfaces may contain dots, such as "eth0.100" of a VLAN. */
static inline const char *networks_next(const char *text, char *to, size_t size)
{
    text = text ? strstr(text, " lane[") : NULL;
    text = text ? strstr(text, "]:") : NULL;
    if (!text) return NULL;
    text += strcspn(text + 2, ":\n") + 3;
    int length = (int)strcspn(text, " \n");
    for (int i = length; i > 0 && text[length] != '.'; i--)
        if (text[i] == '.') length = i;
    snprintf(to, size, "%.*s", length, text);
    return text + length;
}

/* Returns true if UCX can use the port `port` of a NIC, such as "mlx5_0:1". `text` is what UCX
 * prints about a context. It has one line per network, such as "# resource 3 : md 1 dev 2 flags
 * -- rc_mlx5/mlx5_0:1". */
static inline bool networks_have_port(const char *text, const char *port)
{
    const size_t length = strlen(port);
    for (const char *at = text; length && at && (at = strchr(at, '/'));) {
        at++;
        if (!strncmp(at, port, length) && strchr(" \n", at[length])) return true;
    }
    return false;
}

/* Writes to `to` the devices that UCX may use if `port` should be the only port of an RDMA NIC:
 * the port and all devices for TCP, separated by commas. `text` is what UCX prints about a
 * context. Returns false if the devices do not fit into `size` bytes. */
static inline bool networks_list_devices(const char *text, const char *port, char *to,
                                         size_t size)
{
    size_t used = (size_t)snprintf(to, size, "%s", port);
    for (const char *at = text; used < size && at && (at = strstr(at, " tcp/"));) {
        at += strlen(" tcp/");
        used += (size_t)snprintf(to + used, size - used, ",%.*s", (int)strcspn(at, " \n"), at);
    }
    return used < size;
}

/* Returns true if `text`, the settings that UCX prints, has the line `line`. */
static inline bool networks_have_setting(const char *text, const char *line)
{
    const size_t length = strlen(line);
    for (const char *at = text; at && *at; at += strcspn(at, "\n"), at += *at == '\n')
        if (strcspn(at, "\n") == length && !strncmp(at, line, length)) return true;
    return false;
}

static inline bool networks_begins(const char *network, const char *with)
{
    return strncmp(network, with, strlen(with)) == 0;
}

/* `at` points into the line of a network. Returns true if UCX uses this network for remote
 * access to memory. */
static inline bool networks_is_for_memory(const char *at)
{
    const char *found = strstr(at, " rma_bw#");
    return found && found < at + strcspn(at, "\n");
}

/* Returns true if remote writes over these networks keep words of 8 bytes whole (write them
 * atomically). Every network must be RDMA, and at least one of them must be for remote access
 * to memory.
 *
 * If no network is for remote access, UCX sends remote writes as messages, which the receiver
 * stores with memcpy. memcpy may write a word twice or in parts. For EFA (network srd), UCX
 * prints that it is for remote access even if its devices can only read. So with EFA this
 * function returns true only if no_emulation is set, because then the context refuses to send
 * remote writes as messages. */
static inline bool networks_keep_words(const char *text, bool no_emulation)
{
    char network[64];
    int count = 0, writing = 0;
    for (const char *at = text; (at = networks_next(at, network, sizeof network)); count++) {
        const bool efa = networks_begins(network, "srd");
        if (!networks_begins(network, "rc_") && !networks_begins(network, "dc_") &&
            !(efa && no_emulation))
            return false;
        writing += networks_is_for_memory(at);
    }
    return count > 0 && writing > 0;
}

/* Returns true if a network for remote access reaches the registered memory of both ranks. Bit
 * n of `own` (`theirs`) is set if the key of this rank (the peer) is valid in the memory domain
 * md[n], that is, if its device can access the memory. */
static inline bool networks_reach(const char *text, uint64_t own, uint64_t theirs)
{
    char network[64];
    unsigned here, there;
    for (const char *at = text; (at = networks_next(at, network, sizeof network));)
        if (networks_is_for_memory(at) &&
            sscanf(at, ".%*u md[%u] -> md[%u]", &here, &there) == 2 && here < 64 &&
            there < 64 && (own >> here & theirs >> there & 1))
            return true;
    return false;
}

#endif
