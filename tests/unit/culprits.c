/* SPDX-License-Identifier: Apache-2.0 */
/* Tests which ranks a wait names as culprits for given states of its peers: find_culprits()
 * calls a transport that answers from a table. */
#include "exchange/culprits.h"

#include <string.h>

#include "check.h"

#define RANKS 4
#define TAG 7
#define STEP 5

static epic_peer_status peers[RANKS];

static void look(epic_group *group, int peer, uint64_t tag, uint64_t place,
                 epic_peer_status *out)
{
    (void)group;
    CHECK(tag == TAG && place == STEP);
    *out = peers[peer];
}

/* Returns the status of a peer that is sending rows in the operation in which rank 0 waits. */
static epic_peer_status moving(void)
{
    return (epic_peer_status){.has_announced = true,
                              .phase = 1,
                              .operation = 4,
                              .tag = TAG,
                              .sequence = STEP,
                              .is_inside = true};
}

/* Rank 0 waits for all others. The ranks in the bit mask `right` must be named. */
static void expect_culprits(const char *what, uint64_t right)
{
    uint64_t culprits[RANK_WORDS] = {0};
    char sentence[400];
    const epic_transport transport = {.look = look};
    exchange x = {.transport = &transport,
                  .num_ranks = RANKS,
                  .tag = TAG,
                  .header_sequence = STEP,
                  .waits_for = {(1u << RANKS) - 2}};
    find_culprits(&x, culprits, sentence, sizeof sentence);
    CHECK_SAY(culprits[0] == right, "%s: ranks 0x%x are blamed, not 0x%x: %s", what,
              (unsigned)culprits[0], (unsigned)right, sentence);
}

/* A peer that has finished its part is not named if another peer does not move. */
static void test_finished_peers(void)
{
    peers[2] = peers[3] = peers[1] = moving();
    expect_culprits("all inside", 0xe);
    peers[1].is_inside = false;
    expect_culprits("rank 1 has finished", 0xc);
    peers[1] = moving();
    peers[1].sequence = STEP + 1;
    expect_culprits("rank 1 is in the next operation", 0xc);
    peers[1] = moving();
    peers[1].is_gone = peers[1].has_closed = true;
    expect_culprits("rank 1 has closed", 0xc);
    peers[1].has_closed = false;
    expect_culprits("rank 1 has died", 0xe);
}

/* A peer that itself waits is not named, but the peer for which it waits is. */
static void test_waiting_peers(void)
{
    peers[1] = peers[2] = peers[3] = moving();
    peers[1].is_waiting = peers[2].is_waiting = true;
    peers[1].waits_for[0] = 1u << 2;
    peers[2].waits_for[0] = 1u << 3;
    expect_culprits("rank 3 does not wait", 1u << 3);
    peers[3].is_waiting = true;
    peers[3].waits_for[0] = 1u << 1;
    expect_culprits("all wait in a circle", 0xe);
}

/* Only the peers that are furthest behind are named. */
static void test_last_peers(void)
{
    peers[1] = peers[2] = peers[3] = moving();
    peers[2].has_announced = false;
    expect_culprits("rank 2 has not come", 1u << 2);
    peers[2] = moving();
    peers[3].phase = 0;
    expect_culprits("rank 3 is a phase behind", 1u << 3);
}

int main(void)
{
    check_begin();
    test_finished_peers();
    test_waiting_peers();
    test_last_peers();
    return check_end();
}
