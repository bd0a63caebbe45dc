/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing the notes of two ranks, and the errors that notes carry. */
#include "exchange/note.h"

#include <stdio.h>
#include <string.h>

#include "core/error.h"
#include "plan/plan.h"
#include "plan/sentences.h"

_Static_assert(NUM_SAME <= sizeof(((epic_note *)0)->same) / sizeof(int64_t), "note.same");
_Static_assert(NUM_OWN <= sizeof(((epic_note *)0)->own) / sizeof(int64_t), "note.own");

static const char *const same_names[NUM_SAME] = {
    [SAME_OPERATION] = "operation",
    [SAME_PLAN] = "plan id",
    [SAME_TYPE] = "type",
    [SAME_ROW_BYTES] = "row_bytes",
    [SAME_SCALE_BYTES] = "scales' row_bytes",
    [SAME_QUANTISE] = "quantise",
    [SAME_WEIGHTS] = "weights given",
    [SAME_NUM_EXPERTS] = "num_experts",
    [SAME_TOP_K] = "top_k",
    [SAME_ALIGNMENT] = "alignment",
    [SAME_LAYOUT] = "layout",
    [SAME_OVERFLOW] = "overflow",
    [SAME_EXPERT_CAPACITY] = "expert_capacity",
    [SAME_SUM_ORDER] = "sum_order",
    [SAME_LEAVES] = "leaves",
    [SAME_PARTIAL_TYPE] = "partial_type",
    [SAME_PLACEMENT] = "checksum of rank_of_expert",
    [SAME_COUNT] = "count",
};

const char *operation_name(uint32_t operation)
{
    static const char *const names[] = {
        [EPIC_OP_NONE] = "nothing",
        [EPIC_OP_OPEN] = "open",
        [EPIC_OP_PLAN] = "plan",
        [EPIC_OP_DISPATCH] = "dispatch",
        [EPIC_OP_COMBINE] = "combine",
        [EPIC_OP_DISPATCH_BACKWARD] = "dispatch_backward",
        [EPIC_OP_COMBINE_BACKWARD] = "combine_backward",
        [EPIC_OP_SUM] = "sum",
    };
    return operation < sizeof names / sizeof *names ? names[operation] : "an unknown operation";
}

bool note_matches(const epic_note *a, int rank_a, const epic_note *b, int rank_b,
                  char *sentence, size_t size)
{
    const int64_t op_a = a->same[SAME_OPERATION], op_b = b->same[SAME_OPERATION];
    if (op_a != op_b) {
        snprintf(sentence, size, "rank %d called %s, rank %d called %s", rank_a,
                 operation_name((uint32_t)op_a), rank_b, operation_name((uint32_t)op_b));
        return false;
    }
    if (a->own[OWN_ERROR] || b->own[OWN_ERROR]) return true; /* class (b) goes first */
    for (int i = 0; i < NUM_SAME; i++) {
        if (a->same[i] == b->same[i]) continue;
        const char *format = i == SAME_PLAN || i == SAME_PLACEMENT
                                 ? "rank %d brought %s %llx, rank %d brought %llx"
                                 : "rank %d brought %s %lld, rank %d brought %lld";
        snprintf(sentence, size, format, rank_a, same_names[i], (long long)a->same[i], rank_b,
                 (long long)b->same[i]);
        return false;
    }
    return true;
}

void note_fault(epic_note *note, const data_fault *fault)
{
    if (!fault || fault->error == DATA_GOOD) return;
    note->own[OWN_ERROR] = fault->error;
    memcpy(&note->own[OWN_ABOUT], fault->about, sizeof fault->about);
}

static epic_result saved_error(int rank, const int64_t *about)
{
    static const char *const parts[] = {[SAVED_TOKENS] = "total tokens",
                                        [SAVED_ROWS] = "rows of local expert",
                                        [SAVED_COUNT] = "tokens of local expert",
                                        [SAVED_CHOICE] = "choice"};
    return epic_fail(EPIC_EINVAL,
                     "saved: what rank %d brought is damaged (%s %lld: %lld); bring the bytes "
                     "that epic_moe_forward wrote on this rank",
                     rank, parts[(uint64_t)about[0] % 4], (long long)about[1],
                     (long long)about[2]);
}

epic_result note_data_error(const epic_note *const *notes, int num_ranks)
{
    for (int r = 0; r < num_ranks; r++) {
        const int64_t *about = notes[r]->own + OWN_ABOUT;
        switch (notes[r]->own[OWN_ERROR]) {
        case DATA_GOOD:
            break;
        case DATA_EXPERT:
            return epic_fail(EPIC_EINVAL, SAYS_EXPERT, r, (long long)about[0],
                             (long long)about[1], (long long)about[2], (long long)about[3]);
        case DATA_PLACEMENT:
            if (about[1] >= 0 && about[1] < num_ranks)
                return epic_fail(EPIC_EINVAL, SAYS_TREE_PLACEMENT, r, (long long)about[0],
                                 (long long)about[1], num_ranks);
            return epic_fail(EPIC_EINVAL, SAYS_PLACEMENT, r, (long long)about[0],
                             (long long)about[1], num_ranks - 1);
        case DATA_TOKEN_ID:
            return epic_fail(EPIC_EINVAL, SAYS_TOKEN_ID, r, (long long)about[0],
                             (long long)about[1], (long long)about[2]);
        case DATA_TABLE:
            return epic_fail(EPIC_EINVAL, SAYS_TABLE, r, (long long)about[0],
                             (long long)about[1], (long long)about[2], (long long)about[3]);
        case DATA_SAVED:
            return epic_fail(EPIC_EINVAL,
                             "saved: what rank %d brought is of a forward that failed, or of "
                             "none; call epic_moe_forward again",
                             r);
        case DATA_SAVED_PART:
            return saved_error(r, about);
        default:
            return epic_fail(EPIC_EINVAL,
                             "plan: the one that rank %d brought cannot be used: %s; bring the "
                             "bytes that epic_plan wrote for this rank and group",
                             r, plan_damage_name((int)about[0]));
        }
    }
    return EPIC_OK;
}
