/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the culprits of a timeout: the ranks for which other ranks wait, but which do not wait
 * themselves. If ranks wait for each other in a cycle, the culprits are chosen from the ranks
 * for which this rank waits. In this file, x is this rank's exchange whose deadline has
 * passed. */
#include "exchange/culprits.h"

#include <stdio.h>
#include <string.h>

static bool rank_set_has(const uint64_t *ranks, int rank)
{
    return ranks[rank / 64] >> (rank % 64) & 1;
}

static void rank_set_add(uint64_t *ranks, int rank)
{
    ranks[rank / 64] |= 1ull << (rank % 64);
}

void format_ranks(char *out, size_t size, const uint64_t *ranks)
{
    int count = 0, named = 0;
    for (int r = 0; r < EPIC_MAX_RANKS; r++) count += rank_set_has(ranks, r);
    size_t used = (size_t)snprintf(out, size, count == 1 ? "rank" : "ranks");
    for (int r = 0; r < EPIC_MAX_RANKS && used < size; r++) {
        if (!rank_set_has(ranks, r)) continue;
        if (named == 16) {
            snprintf(out + used, size - used, " and %d more", count - named);
            return;
        }
        const char *before = named == 0 ? " " : named == count - 1 ? " and " : ", ";
        used += (size_t)snprintf(out + used, size - used, "%s%d", before, r);
        named++;
    }
}

bool has_peer_finished(const exchange *x, const epic_peer_status *status)
{
    if (!status->has_announced) return false;
    /* a rank closes its context only after its calls, so it has finished the operation */
    if (status->has_closed) return true;
    if (status->tag != x->tag || status->sequence < x->header_sequence) return false;
    return status->sequence > x->header_sequence || !status->is_inside;
}

/* Starts with the ranks for which x waits, continues with the ranks for which those ranks wait,
 * and so on. Adds to `ends` each rank on the way that is gone or does not wait. */
static void follow_waits(exchange *x, uint64_t *ends)
{
    uint64_t todo[RANK_WORDS], seen[RANK_WORDS] = {0};
    memcpy(todo, x->waits_for, sizeof todo);
    rank_set_add(seen, x->rank);
    for (int r = 0; r < x->num_ranks; r++) {
        if (!rank_set_has(todo, r) || rank_set_has(seen, r)) continue;
        rank_set_add(seen, r);
        epic_peer_status status;
        x->transport->look(x->group, r, x->tag, x->header_sequence, &status);
        if (has_peer_finished(x, &status)) continue;
        if (!status.is_waiting || status.is_gone) {
            rank_set_add(ends, r);
            continue;
        }
        for (int w = 0; w < RANK_WORDS; w++) todo[w] |= status.waits_for[w];
        /* begin again with rank 0, because `todo` may now contain a rank lower than r */
        r = -1;
    }
}

/* Copies to `culprits` those ranks of `from` that are furthest behind: the ranks that have not
 * sent their op headers for this exchange or, if all have sent them, the ranks in the lowest
 * phase. */
static void keep_furthest_behind(exchange *x, const uint64_t *from, uint64_t *culprits)
{
    uint32_t least = UINT32_MAX;
    for (int pass = 0; pass < 2; pass++)
        for (int r = 0; r < x->num_ranks; r++) {
            if (!rank_set_has(from, r)) continue;
            epic_peer_status status;
            x->transport->look(x->group, r, x->tag, x->header_sequence, &status);
            const uint32_t progress = status.has_announced ? 1 + status.phase : 0;
            if (pass == 0 && progress < least) least = progress;
            if (pass == 1 && progress <= least) rank_set_add(culprits, r);
        }
}

/* Appends to `sentence` the operation in which the culprit `rank` was last seen. Returns false
 * and appends nothing if the text does not fit. */
static bool append_peer_status(char *sentence, size_t size, int rank,
                               const epic_peer_status *status)
{
    char clause[160];
    const size_t used = strlen(sentence);
    if (!status->operation)
        snprintf(clause, sizeof clause, "; rank %d was never seen in an operation", rank);
    else
        snprintf(clause, sizeof clause,
                 "; rank %d was last seen %s %s (tag %llu, sequence %llu)", rank,
                 status->is_inside ? "in" : "after", operation_name(status->operation),
                 (unsigned long long)status->tag, (unsigned long long)status->sequence);
    if (used + strlen(clause) >= size) return false;
    memcpy(sentence + used, clause, strlen(clause) + 1);
    return true;
}

/* Writes the error text to `sentence`: the list of culprits, and the status of up to four
 * culprits. */
static void describe_culprits(exchange *x, const uint64_t *culprits, char *sentence,
                              size_t size)
{
    char list[128];
    format_ranks(list, sizeof list, culprits);
    snprintf(sentence, size, "rank %d waited %llu ms for %s", x->rank,
             (unsigned long long)(x->deadline.timeout_ns / 1000000), list);
    int num_described = 0;
    for (int r = 0; r < x->num_ranks && num_described < 4; r++) {
        if (!rank_set_has(culprits, r)) continue;
        epic_peer_status status;
        x->transport->look(x->group, r, x->tag, x->header_sequence, &status);
        if (!append_peer_status(sentence, size, r, &status)) return;
        num_described++;
    }
}

void find_culprits(exchange *x, uint64_t *culprits, char *sentence, size_t size)
{
    uint64_t ends[RANK_WORDS] = {0};
    follow_waits(x, ends);
    bool any = false;
    for (int w = 0; w < RANK_WORDS; w++) any |= ends[w] != 0;
    /* if `ends` is empty, the ranks wait for each other in a cycle, so all ranks for which x
     * waits are candidates */
    keep_furthest_behind(x, any ? ends : x->waits_for, culprits);
    describe_culprits(x, culprits, sentence, size);
}
