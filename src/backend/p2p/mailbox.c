/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/p2p/mailbox.h"

#include <stddef.h>
#include <string.h>
#include <time.h>

#include "backend/regroup.h"
#include "base/deadline.h"
#include "base/error.h"

#define SLOTS 8 /* number of messages in a ring (mailbox.h) */
#define POLL_NAP_NS 20000

/* One message in the ring of its sender. */
typedef struct mailbox_message {
    uint64_t number; /* The first message from the sender to this rank has number 1. */
    unsigned char bytes[REGROUP_MESSAGE_BYTES];
} mailbox_message;

/* Offsets in a rank's memory for messages. The memory begins with the words of all senders
 * (p2p_mailbox_words). The rings follow: messages [num_ranks][SLOTS]. */
static int64_t words_at(const epic_group *g, int writer)
{
    return device_round_up(g->self.at.bytes, 128) + writer * (int64_t)sizeof(p2p_mailbox_words);
}

static int64_t message_at(const epic_group *g, int writer, uint64_t number)
{
    return words_at(g, DEVICE_MAX_RANKS) +
           (writer * SLOTS + (int64_t)(number % SLOTS)) * (int64_t)sizeof(mailbox_message);
}

int64_t p2p_mailbox_bytes(int64_t num_ranks)
{
    if (!WITH_VACANT_SEATS) return 0;
    return 128 + DEVICE_MAX_RANKS * (int64_t)sizeof(p2p_mailbox_words) +
           num_ranks * SLOTS * (int64_t)sizeof(mailbox_message);
}

epic_result p2p_mailbox_clear(epic_group *g)
{
    const int64_t bytes = p2p_mailbox_bytes(g->num_ranks) - 128;
    if (!WITH_VACANT_SEATS) return EPIC_OK;
    return p2p_cuda(
        cudaMemsetAsync(g->self.heap[g->rank] + words_at(g, 0), 0, (size_t)bytes, g->side),
        "clearing the memory for messages");
}

void p2p_mailbox_send(epic_group *g, int to, const void *message, size_t bytes)
{
    mailbox_message m = {.number = g->mailbox.sent[to] + 1};
    const seat_set ranks = seat_set_of(to);
    if (p2p_is_vacant(g, to) || p2p_is_dead(g, to) || p2p_has_released(g, to)) return;
    memcpy(m.bytes, message, bytes);
    g->mailbox.sent[to]++;
    g->hooks->write(g, &ranks, message_at(g, g->rank, m.number), &m, sizeof m);
    g->hooks->write(g, &ranks,
                    words_at(g, g->rank) + (int64_t)offsetof(p2p_mailbox_words, sent),
                    &m.number, sizeof m.number);
}

/* Enqueues a copy of `bytes` bytes at offset `at` of this rank's heap to `to`. Returns false if
 * CUDA reports an error. */
static bool copy_here(epic_group *g, void *to, int64_t at, size_t bytes)
{
    return cudaMemcpyAsync(to, g->self.heap[g->rank] + at, bytes, cudaMemcpyDefault, g->side) ==
           cudaSuccess;
}

/* Copies the words of all senders and the words `gone` (which ranks have closed) from this
 * rank's heap. */
static bool poll_words(epic_group *g)
{
    return copy_here(g, g->mailbox.words, words_at(g, 0),
                     DEVICE_MAX_RANKS * sizeof *g->mailbox.words) &&
           copy_here(g, g->mailbox.gone, g->self.at.gone,
                     DEVICE_MAX_RANKS * sizeof *g->mailbox.gone) &&
           cudaStreamSynchronize(g->side) == cudaSuccess;
}

/* Reads a message from rank `from`: the oldest one that is unread and that no later message has
 * overwritten. Returns false if there is none. */
static bool read_message(epic_group *g, int from, void *message, size_t bytes)
{
    const uint64_t sent = g->mailbox.words[from].sent;
    uint64_t *read = &g->mailbox.read[from];
    mailbox_message m;
    if (sent - *read > SLOTS) *read = sent - SLOTS;
    while (*read != sent) {
        const uint64_t number = ++*read;
        if (!copy_here(g, &m, message_at(g, from, number), sizeof m) ||
            cudaStreamSynchronize(g->side) != cudaSuccess)
            return false;
        if (m.number != number) continue; /* the sender has overwritten the message meanwhile */
        memcpy(message, m.bytes, bytes);
        return true;
    }
    return false;
}

/* Reads a message from any rank. Checks all ranks one after another, beginning after the sender
 * of the last message, so that no rank's messages are left unread. */
static bool read_any(epic_group *g, int *from, void *message, size_t bytes)
{
    for (int i = 1; i <= g->num_ranks; i++) {
        const int q = (g->mailbox.last + i) % g->num_ranks;
        if (!read_message(g, q, message, bytes)) continue;
        *from = g->mailbox.last = q;
        return true;
    }
    return false;
}

bool p2p_mailbox_receive(epic_group *g, int *from, void *message, size_t bytes, uint32_t ms)
{
    const int64_t end = clock_ns() + (int64_t)ms * 1000000;
    for (;;) {
        if (!poll_words(g)) break;
        if (read_any(g, from, message, bytes)) return true;
        if (clock_ns() >= end) return false;
        for (int q = 0; q < g->num_ranks; q++)
            if (p2p_mailbox_is_gone(g, q) && !g->mailbox.has_reported[q]) {
                g->mailbox.has_reported[q] = true;
                return false;
            }
        nanosleep(&(struct timespec){.tv_nsec = POLL_NAP_NS}, NULL);
    }
    (void)cudaGetLastError();
    return false;
}

bool p2p_mailbox_is_gone(const epic_group *g, int seat)
{
    const uint64_t gone = g->mailbox.gone[seat];
    return (gone && gone != P2P_RELEASED) || p2p_is_dead(g, seat) || p2p_has_released(g, seat);
}

/* Returns the lowest member that has not entered this rank's generation yet, or -1 if all have.
 * Sets *is_gone to true if a member has closed its context or died. */
static int find_missing(const epic_group *g, bool *is_gone)
{
    int missing = -1;
    *is_gone = false;
    for (int q = g->num_ranks - 1; q >= 0; q--) {
        if (q == g->rank || p2p_is_vacant(g, q)) continue;
        *is_gone |= p2p_mailbox_is_gone(g, q);
        if (g->mailbox.words[q].entered < g->generation) missing = q;
    }
    return missing;
}

epic_result p2p_mailbox_wait_members(epic_group *g)
{
    const uint64_t entered = g->generation;
    deadline end = deadline_begin_ms(g->config.timeout_ms);
    const seat_set ranks = p2p_ranks_with_heaps(g);
    bool is_gone;
    g->hooks->write(g, &ranks,
                    words_at(g, g->rank) + (int64_t)offsetof(p2p_mailbox_words, entered),
                    &entered, sizeof entered);
    for (;;) {
        if (!poll_words(g)) return p2p_cuda(cudaGetLastError(), "waiting for the members");
        const int missing = find_missing(g, &is_gone);
        if (missing < 0 || is_gone) return EPIC_OK;
        if (deadline_before_nap(&end, POLL_NAP_NS))
            return epic_fail(EPIC_ETIMEOUT,
                             "rank %d did not enter the new generation of the group within %u "
                             "ms: call epic_regroup again",
                             missing, g->config.timeout_ms);
        nanosleep(&(struct timespec){.tv_nsec = POLL_NAP_NS}, NULL);
    }
}
