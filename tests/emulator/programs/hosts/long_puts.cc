/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the entries of the ring with which kernels send rows to other hosts, in groups of many
 * ranks, for rows with more words than an entry can describe. The entries of a row must describe
 * all its words in order, and name its receiver. No other test moves such long rows. */
#include <cuda_device.h>

#include <cstdio>
#include <cstdlib>

#include "cuda/common/launch.cuh"
#include "cuda/net/net.cuh"

#define OUTBOX 0x10000 /* address of the outbox, in which nothing is read or written */

enum way { BY_WARP, BY_PIECES, NUM_WAYS }; /* functions that post the puts of a row */

static __global__ void put_row(const p2p_self self, int peer, uint32_t offset, uint32_t bytes,
                               way by)
{
    OpState op;
    op.self = &self;
    op.heap = self.heap[self.rank];
    const uint8_t *row = self.heap[peer] + offset;
    if (by == BY_WARP) post_put_warp(op, peer, row, bytes);
    if (by == BY_PIECES) post_put_when_complete(self, op, peer, 0, 1, row, bytes);
}

/* Checks the `count` entries that have been posted for a row. */
static bool are_right(const uint64_t *entries, uint64_t count, int peer, uint32_t offset,
                      uint32_t bytes)
{
    uint64_t word = offset / 8;
    for (uint64_t i = 0; i < count; i++) {
        if (P2P_ENTRY_PEER(entries[i]) != peer || P2P_ENTRY_WORD(entries[i]) != word)
            return false;
        word += P2P_ENTRY_WORDS(entries[i]);
    }
    return word == (offset + bytes) / 8;
}

int main()
{
    static const uint32_t sizes[] = {16,     32768,   32784,   65520,   65536,  65552,
                                     131072, 1048576, 2097136, 2097152, 2097168};
    static const int peers[] = {1, 34, DEVICE_MAX_RANKS - 1};
    static p2p_ring_words words;
    static uint64_t entries[P2P_RING_ENTRIES];
    p2p_self self = {};
    int failed = 0;
    self.num_ranks = DEVICE_MAX_RANKS;
    self.max_tokens = 1;
    self.at.control = 0;
    self.at.net->stored_pieces = P2P_CONTROL_BYTES;
    self.at.round->tokens = 1;
    self.net->ring = {entries, &words};
    self.net->host_ranks[0] = 1; /* all other ranks are on other hosts */
    for (int q = 1; q < DEVICE_MAX_RANKS; q++) self.heap[q] = (uint8_t *)OUTBOX;
    self.heap[0] = (uint8_t *)calloc(1, P2P_CONTROL_BYTES + DEVICE_MAX_RANKS * 4);
    p2p_net_control *control = ((p2p_control *)self.heap[0])->net;
    control->ring_room = P2P_RING_ENTRIES;
    for (uint32_t bytes : sizes)
        for (int peer : peers)
            for (int by = 0; by < NUM_WAYS; by++) {
                const uint64_t first = control->posted_entries;
                launch_kernel(put_row, 1, WARP, 0, NULL, self, peer, bytes, bytes, (way)by);
                cudaDeviceSynchronize();
                const uint64_t count = control->posted_entries - first;
                if (are_right(entries + first, count, peer, bytes, bytes)) continue;
                fprintf(stderr, "%u bytes for rank %d: wrong entries\n", bytes, peer);
                failed = 1;
            }
    free(self.heap[0]);
    printf("long_puts: %s\n", failed ? "WRONG" : "good");
    return failed;
}
