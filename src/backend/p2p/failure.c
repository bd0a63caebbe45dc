/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels report, in words; and abort. */
#include <stdio.h>
#include <string.h>

#include "backend/p2p/p2p.h"
#include "core/error.h"

static const char *operation_name(uint32_t operation)
{
    static const char *const names[] = {
        "none", "open", "plan", "dispatch", "combine", "dispatch_backward", "combine_backward",
        "sum"};
    return operation < sizeof names / sizeof *names ? names[operation] : "an unknown operation";
}

static const char *phase_name(uint32_t phase)
{
    static const char *const names[] = {"",
                                        "to begin it",
                                        "for its counts of choices",
                                        "for where its tokens go",
                                        "for its rows",
                                        "for its weights",
                                        "for its own thread blocks"};
    return phase < sizeof names / sizeof *names ? names[phase] : "";
}

epic_result p2p_cuda(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return EPIC_OK;
    (void)cudaGetLastError();
    return epic_fail(error == cudaErrorMemoryAllocation ? EPIC_ENOMEM : EPIC_EDEVICE,
                     "%s: CUDA says \"%s\"", what, cudaGetErrorString(error));
}

static int name_ranks(char *to, size_t size, uint32_t ranks)
{
    int n = 0;
    for (int q = 0; q < DEVICE_MAX_RANKS; q++)
        if (ranks >> q & 1)
            n += snprintf(to + n, size - (size_t)n, "%s%d", n ? ", " : "rank ", q);
    if (!n) n = snprintf(to, size, "nobody in particular");
    return n;
}

/* The sentence of the peer that aborted lies in this rank's heap. */
static void read_why(const epic_group *group, char *why, size_t size)
{
    why[0] = 0;
    if (cudaMemcpyAsync(why, group->seat.heap[group->rank] + group->seat.at.why, size - 1,
                        cudaMemcpyDeviceToHost, group->side) == cudaSuccess)
        (void)cudaStreamSynchronize(group->side);
    why[size - 1] = 0;
}

static void timeout_sentence(const epic_group *group, const p2p_status *s, char *to,
                             size_t size)
{
    char culprits[128];
    name_ranks(culprits, sizeof culprits, s->culprits);
    snprintf(to, size,
             "%s, operation %u of this group: rank %u waited %u ms for %s %s; is it "
             "alive, and does it make the same calls in the same order?",
             operation_name(s->operation), s->epoch, s->reporter, group->config.timeout_ms,
             culprits, phase_name(s->phase));
}

static void mismatch_sentence(const p2p_status *s, char *to, size_t size)
{
    char culprits[128];
    const uint32_t mine = s->own_signature >> 28, theirs = s->peer_signature >> 28;
    name_ranks(culprits, sizeof culprits, s->culprits);
    if (s->peer_signature && mine != theirs)
        snprintf(to, size,
                 "operation %u of this group: rank %u calls %s and %s calls %s; the "
                 "ranks must make the same calls in the same order",
                 s->epoch, s->reporter, operation_name(mine), culprits, operation_name(theirs));
    else
        snprintf(to, size,
                 "%s, operation %u of this group: rank %u and %s differ in types, sizes, "
                 "weights, tag or plan; they must be the same on all ranks",
                 operation_name(s->operation), s->epoch, s->reporter, culprits);
}

static void peer_sentence(const epic_group *group, const p2p_status *s, char *to, size_t size)
{
    char why[256], culprits[128];
    name_ranks(culprits, sizeof culprits, s->culprits);
    read_why(group, why, sizeof why);
    if (why[0])
        snprintf(to, size, "%s aborted: %s", culprits, why);
    else
        snprintf(to, size, "%s, operation %u of this group: %s has closed its context or died",
                 operation_name(s->operation), s->epoch, culprits);
}

epic_result p2p_check(epic_group *group, epic_failure_info *out)
{
    const p2p_status *s = group->status;
    const uint32_t result = __atomic_load_n(&s->result, __ATOMIC_ACQUIRE);
    memset(out, 0, sizeof *out);
    if (result == EPIC_OK) return EPIC_OK;
    out->result = result;
    out->operation = s->operation;
    out->step = s->epoch;
    out->rank = (int32_t)s->reporter;
    for (int q = 0; q < DEVICE_MAX_RANKS; q++)
        if (s->culprits >> q & 1) out->culprits[out->num_culprits++] = q;
    if (result == EPIC_ETIMEOUT)
        timeout_sentence(group, s, out->sentence, sizeof out->sentence);
    else if (result == EPIC_EMISMATCH)
        mismatch_sentence(s, out->sentence, sizeof out->sentence);
    else
        peer_sentence(group, s, out->sentence, sizeof out->sentence);
    return (epic_result)result;
}

epic_result p2p_whole(epic_group *group)
{
    epic_failure_info failure;
    if (__atomic_load_n(&group->status->result, __ATOMIC_ACQUIRE) == EPIC_OK) return EPIC_OK;
    p2p_check(group, &failure);
    return epic_fail((epic_result)failure.result, "%s", failure.sentence);
}

/* The words go by copy engine, beside whatever kernels run. */
void p2p_abort(epic_group *group, uint64_t tag, const char *why)
{
    (void)tag;
    char sentence[256] = {0};
    snprintf(sentence, sizeof sentence, "%s", why ? why : "no reason given");
    const uint32_t me = (uint32_t)group->rank;
    *group->word = P2P_BROKEN(EPIC_EPEER, 0, me, 0, 1u << me, 0);
    for (int q = 0; q < group->num_ranks; q++) {
        uint8_t *heap = group->seat.heap[q];
        (void)cudaMemcpyAsync(heap + group->seat.at.why, sentence, sizeof sentence,
                              cudaMemcpyDefault, group->side);
        (void)cudaStreamSynchronize(group->side);
        (void)cudaMemcpyAsync(heap + group->seat.at.broken, group->word, sizeof *group->word,
                              cudaMemcpyDefault, group->side);
    }
    (void)cudaStreamSynchronize(group->side);
    (void)cudaGetLastError();
}
