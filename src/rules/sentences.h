/* SPDX-License-Identifier: Apache-2.0 */
/* Formats of error texts about invalid data, for host and CUDA contexts. A comment lists the
 * arguments of epic_fail() for each format. Names are strings. Ranks and num_ranks are int. All
 * other values are long long. */
#ifndef EPIC_SENTENCES_H
#define EPIC_SENTENCES_H

#define SENTENCE_EXPERT /* arguments: rank, token, k, id, name of the bound, bound */ \
    "topk_idx: rank %d, token %lld, k %lld has expert %lld: must be below %s "        \
    "%lld, or negative for no expert"

#define SENTENCE_DUPLICATE /* arguments: rank, token, k, id */                                 \
    "topk_idx: rank %d, token %lld, k %lld has expert %lld a second time: the ids of a token " \
    "must differ with EPIC_DISTINCT; pass other ids, or a layer without it"

#define SENTENCE_PLACEMENT /* arguments: rank, expert, its owner, num_ranks - 1 */ \
    "rank_of_expert: rank %d, expert %lld has owner %lld: must be a rank, 0 to %d"

#define SENTENCE_TREE_PLACEMENT /* arguments: rank, expert, its owner, num_ranks */           \
    "rank_of_expert: rank %d, expert %lld has owner %lld: with EPIC_TREE each rank must own " \
    "one of the %d equal blocks of experts"

#define SENTENCE_VACANT /* arguments: rank, expert, its owner */                               \
    "rank_of_expert: rank %d, expert %lld has owner %lld: must be a member of the group, but " \
    "this seat is vacant; or give the layer EPIC_DROP_ABSENT"

#define SENTENCE_MEMBERS /* arguments: leaves, number of members (int) */             \
    "layer.leaves is %lld: must be a multiple of the group's number of members, %d, " \
    "which must be a power of two with EPIC_TREE; change leaves, or use EPIC_BY_RANK"

#define SENTENCE_MOST_LEAVES /* arguments: leaves (unsigned), their maximum (int) */ \
    "layer.leaves is %u: must be at most %d per rank in CUDA contexts"

#define SENTENCE_REPLICA /* arguments: rank, expert, logical expert, num_logical */   \
    "logical_of_expert: rank %d, expert %lld has logical expert %lld: must be below " \
    "num_logical %lld and not negative, or EPIC_ABSENT"

#define SENTENCE_NO_REPLICA /* arguments: rank, logical expert */                            \
    "logical_of_expert: rank %d has no replica of logical expert %lld: each must have one; " \
    "or give the layer EPIC_DROP_ABSENT"

#define SENTENCE_TOKEN_ID /* arguments: rank, token, id, table_rows */                     \
    "token_ids: rank %d, token %lld has id %lld: must be below the table's %lld rows and " \
    "not negative"

#define SENTENCE_TABLE /* arguments: rank, row, k, expert, number of columns */      \
    "table: rank %d, row %lld, k %lld has expert %lld: must be below num_experts + " \
    "zero_experts %lld, or negative for no expert"

#define SENTENCE_FORCED /* arguments: rank, token, k, expert, number of columns */           \
    "topk_idx_in: rank %d, token %lld, k %lld has expert %lld: must be below num_experts + " \
    "zero_experts %lld, or negative for no expert"

#define SENTENCE_CAPACITY /* arguments: rank, its number of slots, number that it needs */ \
    "capacity: rank %d has %lld slots and needs %lld; pass a larger one "                  \
    "(epic_capacity_bound always suffices) or let the layer drop"

/* arguments: name of the rows, number of rows, number of tokens of the plan */
#define SENTENCE_TOKENS "%s.num_rows is %lld: the plan has %lld tokens on this rank"

/* arguments: name of the rows, rank, its number of rows, number of slots of its plan */
#define SENTENCE_ROWS \
    "%s.num_rows: rank %d has %lld rows, its plan occupies %lld slots; pass as many rows"

#define SENTENCE_LOCAL /* arguments: rank, number of rows, number of local experts */    \
    "data.num_rows: rank %d has %lld rows, the plan has %lld local experts; pass a row " \
    "for each"

#define SENTENCE_ROOM /* arguments: num_local_experts, maximum number of experts on a rank */ \
    "moe.experts.num_local_experts is %lld: must be at least %lld, because a rank owns so "   \
    "many experts in rank_of_expert"

#define SENTENCE_LAYER \
    "layer is not the plan's: must equal the layer that was passed to epic_plan"

#define SENTENCE_RECV_EXPERT                                                               \
    "recv_expert is given: must be NULL with layer.layout EPIC_EXPERT_MAJOR; only a FLAT " \
    "layer has it"

#define SENTENCE_BY_SLOT /* arguments: name of the weights */                                 \
    "%s is given: must be NULL with layer.layout EPIC_FLAT; its rows are finished partials, " \
    "apply the weights before combine"

#endif
