/* SPDX-License-Identifier: Apache-2.0 */
/* Writes the error texts of the failures and data errors that kernels report in p2p_status. A
 * *notice* is the struct in which a kernel reports a data error. Also implements abort. */
#include <stdio.h>
#include <string.h>

#include "backend/p2p/p2p.h"
#include "base/error.h"
#include "rules/sentences.h"

/* Returns the name of an epic_operation. The value may be invalid, because a peer may have sent
 * it. */
static const char *operation_name(uint32_t operation)
{
    static const char *const names[] = {
        "none", "open",  "plan", "dispatch", "combine", "dispatch_backward", "combine_backward",
        "sum",  "window"};
    return operation < sizeof names / sizeof *names ? names[operation] : "an unknown operation";
}

/* Returns the phrase that ends the error text "rank 1 waited 9 ms for rank 2 ...". The phrase
 * describes the phase of the operation in which a kernel waited. */
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
                     "%s: CUDA reports \"%s\"", what, cudaGetErrorString(error));
}

#define RANK_NAMES_BYTES 160 /* size of a text that lists all ranks */

/* Writes a list of the culprits in `ranks` (p2p_status.culprits), for example "rank 1, 3".
 * Returns the length of the list. */
static int name_ranks(char *to, size_t size, uint32_t ranks)
{
    int n = 0;
    for (int q = 0; q < DEVICE_MAX_RANKS; q++)
        if (p2p_is_culprit(ranks, q))
            n += snprintf(to + n, size - (size_t)n, "%s%d", n ? ", " : "rank ", q);
    if (!n) n = snprintf(to, size, "no rank in particular");
    return n;
}

/* Copies to `why` the error text that an aborting peer has stored in this rank's heap. If no
 * peer has stored a text, sets `why` to "". */
static void read_why(const epic_group *group, char *why, size_t size)
{
    why[0] = 0;
    if (cudaMemcpyAsync(why, p2p_inbox(group) + group->self.at.abort_text, size - 1,
                        cudaMemcpyDefault, group->side) == cudaSuccess)
        (void)cudaStreamSynchronize(group->side);
    why[size - 1] = 0;
}

/* Names of an operation's two arrays in error texts. `tokens` names the array with one row per
 * token, and `slots` the array with one row per slot. */
typedef struct names {
    const char *tokens, *slots;
} names;

static names row_names_of(long long operation)
{
    switch (operation) {
    case EPIC_OP_COMBINE:
        return (names){"out", "rows"};
    case EPIC_OP_DISPATCH_BACKWARD:
        return (names){"d_tokens", "d_recv"};
    case EPIC_OP_COMBINE_BACKWARD:
        return (names){"d_out", "d_rows"};
    default:
        return (names){"tokens", "recv"};
    }
}

static void write_notice(const epic_group *g, const p2p_notice *n, char *to, size_t size)
{
    const long long a = n->about[0], b = n->about[1], c = n->about[2], d = n->about[3];
    switch (n->fault) {
    case P2P_FAULT_EXPERT:
        snprintf(to, size, SENTENCE_EXPERT, n->rank, a, b, c, "num_experts", d);
        return;
    case P2P_FAULT_LOGICAL:
        snprintf(to, size, SENTENCE_EXPERT, n->rank, a, b, c, "num_logical", d);
        return;
    case P2P_FAULT_REPLICA:
        snprintf(to, size, SENTENCE_REPLICA, n->rank, a, b, c);
        return;
    case P2P_FAULT_NO_REPLICA:
        snprintf(to, size, SENTENCE_NO_REPLICA, n->rank, a);
        return;
    case P2P_FAULT_DUPLICATE:
        snprintf(to, size, SENTENCE_DUPLICATE, n->rank, a, b, c);
        return;
    case P2P_FAULT_PLACEMENT:
        if (b >= 0 && b < g->num_ranks)
            snprintf(to, size, SENTENCE_TREE_PLACEMENT, n->rank, a, b, p2p_num_members(g));
        else
            snprintf(to, size, SENTENCE_PLACEMENT, n->rank, a, b, g->num_ranks - 1);
        return;
    case P2P_FAULT_VACANT:
        snprintf(to, size, SENTENCE_VACANT, n->rank, a, b);
        return;
    case P2P_FAULT_MEMBERS:
        if (a % b)
            snprintf(to, size, SENTENCE_MEMBERS, a, (int)b);
        else
            snprintf(to, size, SENTENCE_MOST_LEAVES, (unsigned)a, P2P_MOST_LEAVES);
        return;
    case P2P_FAULT_CAPACITY:
        snprintf(to, size, SENTENCE_CAPACITY, n->rank, a, b);
        return;
    case P2P_FAULT_ROWS:
        snprintf(to, size, SENTENCE_ROWS, row_names_of(c).slots, n->rank, a, b);
        return;
    case P2P_FAULT_LOCAL:
        snprintf(to, size, SENTENCE_LOCAL, n->rank, a, b);
        return;
    case P2P_FAULT_TOO_MANY_LOCAL:
        snprintf(to, size, SENTENCE_ROOM, a, b);
        return;
    case P2P_FAULT_TOKENS:
        snprintf(to, size, SENTENCE_TOKENS, row_names_of(c).tokens, a, b);
        return;
    case P2P_FAULT_LAYER:
        snprintf(to, size, SENTENCE_LAYER);
        return;
    default:
        snprintf(to, size,
                 "plan: these are not the bytes that epic_plan wrote for this rank and group; "
                 "pass those");
    }
}

/* Writes the error text of a timeout: the rank that waited, the ranks for which it waited, and
 * the phase. */
static void write_timeout(const p2p_status *s, char *to, size_t size)
{
    char culprits[RANK_NAMES_BYTES];
    name_ranks(culprits, sizeof culprits, s->culprits);
    snprintf(to, size,
             "%s, operation %u of this group: rank %u waited %u ms for %s %s; is it "
             "alive, and does it make the same calls in the same order?",
             operation_name(s->operation), s->epoch, s->reporter, s->deadline_ms, culprits,
             phase_name(s->phase));
}

/* If a kernel has reported in the same operation that this rank's plan is invalid, appends the
 * reason to the error text `to`. The invalid plan can be the cause of the mismatch, because a
 * rank with an invalid plan announces another signature (hash of its arguments). */
static void add_cause(const epic_group *g, char *to, size_t size)
{
    const p2p_status *s = g->status;
    const size_t length = strlen(to);
    char cause[256];
    for (int i = 0; i < P2P_NOTICES; i++) {
        const p2p_notice *n = &s->notices[i];
        if (__atomic_load_n(&n->result, __ATOMIC_ACQUIRE) == EPIC_OK || n->epoch != s->epoch ||
            (n->fault != P2P_FAULT_PLAN && n->fault != P2P_FAULT_TOKENS &&
             n->fault != P2P_FAULT_LAYER))
            continue;
        write_notice(g, n, cause, sizeof cause);
        snprintf(to + length, size - length, "; here %s", cause);
        return;
    }
}

/* Writes the error text of a mismatch: two ranks made different calls, or passed different
 * arguments. The highest 4 bits of a rank's signature contain its operation. */
static void write_mismatch(const epic_group *g, char *to, size_t size)
{
    const p2p_status *s = g->status;
    char culprits[RANK_NAMES_BYTES];
    const uint32_t mine = s->own_signature >> 28, theirs = s->peer_signature >> 28;
    name_ranks(culprits, sizeof culprits, s->culprits);
    if (s->peer_signature && mine != theirs)
        snprintf(to, size,
                 "operation %u of this group: rank %u calls %s and %s calls %s; the "
                 "ranks must make the same calls in the same order",
                 s->epoch, s->reporter, operation_name(mine), culprits, operation_name(theirs));
    else if (s->phase == P2P_PHASE_OVERLAP)
        snprintf(
            to, size,
            "%s, operation %u of this group: rank %u began it while another of its operations "
            "ran; streams that share a context must wait for each other",
            operation_name(s->operation), s->epoch, s->reporter);
    else if (s->phase == P2P_PHASE_TABLE)
        snprintf(to, size,
                 "%s, operation %u of this group: rank %u and %s differ in rank_of_expert or "
                 "logical_of_expert; these must be the same on all ranks",
                 operation_name(s->operation), s->epoch, s->reporter, culprits);
    else
        snprintf(to, size,
                 "%s, operation %u of this group: rank %u and %s differ in types, sizes, "
                 "weights, tag, plan or options of the layer; they must be the same on all "
                 "ranks",
                 operation_name(s->operation), s->epoch, s->reporter, culprits);
    add_cause(g, to, size);
}

/* Writes the error text of a failure whose cause is that a peer aborted, died or closed its
 * context. */
static void write_peer_failure(const epic_group *group, const p2p_status *s, char *to,
                               size_t size)
{
    char why[256], culprits[RANK_NAMES_BYTES];
    name_ranks(culprits, sizeof culprits, s->culprits);
    read_why(group, why, sizeof why);
    bool died = false;
    for (int q = 0; q < group->num_ranks; q++)
        died |= p2p_is_culprit(s->culprits, q) && p2p_is_dead(group, q);
    if (why[0])
        snprintf(to, size, "%s aborted: %s", culprits, why);
    else
        snprintf(to, size, "%s, operation %u of this group: %s %s",
                 operation_name(s->operation), s->epoch, culprits,
                 died ? "died" : "has closed its context or died");
}

epic_result p2p_check(epic_group *group, epic_failure_info *out)
{
    const p2p_status *s = group->status;
    const uint32_t result = __atomic_load_n(&s->result, __ATOMIC_ACQUIRE);
    memset(out, 0, sizeof *out);
    if (result == EPIC_OK) return EPIC_OK;
    out->result = result;
    out->operation = s->operation;
    out->sequence = s->epoch;
    out->rank = (int32_t)s->reporter;
    for (int q = 0; q < DEVICE_MAX_RANKS; q++)
        if (p2p_is_culprit(s->culprits, q) && out->num_culprits < EPIC_MAX_CULPRITS)
            out->culprits[out->num_culprits++] = q;
    if (result == EPIC_ETIMEOUT)
        write_timeout(s, out->sentence, sizeof out->sentence);
    else if (result == EPIC_EMISMATCH)
        write_mismatch(group, out->sentence, sizeof out->sentence);
    else
        write_peer_failure(group, s, out->sentence, sizeof out->sentence);
    return (epic_result)result;
}

/* Returns the index of the oldest notice that no call has returned, or -1 if there is none.
 * Compares epochs (counters of operations) by their signed difference, because they wrap
 * around. */
static int oldest_notice(const p2p_status *s)
{
    int oldest = -1;
    for (int i = 0; i < P2P_NOTICES; i++) {
        if (__atomic_load_n(&s->notices[i].result, __ATOMIC_ACQUIRE) == EPIC_OK) continue;
        if (oldest < 0 || (int32_t)(s->notices[i].epoch - s->notices[oldest].epoch) < 0)
            oldest = i;
    }
    return oldest;
}

/* Returns the oldest data error (p2p.h). If several threads call this function, a
 * compare-and-swap ensures that only one of them returns a notice. */
epic_result p2p_next_data_error(epic_group *group)
{
    char sentence[256];
    for (int i; (i = oldest_notice(group->status)) >= 0;) {
        p2p_notice *n = &group->status->notices[i];
        const p2p_notice notice = *n;
        uint32_t result = notice.result;
        if (!result || !__atomic_compare_exchange_n(&n->result, &result, EPIC_OK, false,
                                                    __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            continue;
        write_notice(group, &notice, sentence, sizeof sentence);
        return epic_fail((epic_result)notice.result, "%s", sentence);
    }
    return EPIC_OK;
}

epic_result p2p_check_group(epic_group *group)
{
    epic_failure_info failure;
    if (__atomic_load_n(&group->status->result, __ATOMIC_ACQUIRE) == EPIC_OK) return EPIC_OK;
    p2p_check(group, &failure);
    return epic_fail((epic_result)failure.result, "%s", failure.sentence);
}

void p2p_abort(epic_group *group, uint64_t tag, const char *why)
{
    (void)tag;
    char sentence[256] = {0};
    snprintf(sentence, sizeof sentence, "%s", why ? why : "no reason given");
    const uint32_t me = (uint32_t)group->rank;
    *group->word = P2P_BROKEN(EPIC_EPEER, 0, me, 0, p2p_culprit_word(group->rank)) |
                   P2P_BROKEN_IN(group->generation);
    seat_set members = {0};
    for (int q = 0; q < group->num_ranks; q++)
        if (!p2p_is_vacant(group, q)) seat_set_add(&members, q);
    group->hooks->write(group, &members, group->self.at.abort_text, sentence, sizeof sentence);
    group->hooks->write(group, &members, group->self.at.broken, group->word,
                        sizeof *group->word);
    (void)cudaGetLastError();
}
