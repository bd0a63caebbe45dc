/* SPDX-License-Identifier: Apache-2.0 */
/* A plan in host memory: where each choice goes, and which choices this rank receives.
 *
 * The bytes are a header, then arrays at offsets; they contain no address. `here` and
 * `row_here` are the expert side: slots on this rank. `fate` and `rank_to` are the home side:
 * choices of this rank's tokens.
 *
 * tokens_of [num_ranks]: tokens of each rank
 * base_of [num_ranks + 1]: first token of each rank in `here`
 * expert_of [num_local]: global id of each local expert; -1: none
 * logical_of [num_experts]: with num_logical, the logical expert of each replica
 * slab_begin [num_local + 1]: first slot of each slab; FLAT: all 0
 * slab_count [num_local]: choices that each slab holds, without padding
 * place_of [num_ranks]: EPIC_TREE, the position of each rank's subtree
 * fate [num_tokens, top_k]: slot on the owner's rank, or an EPIC_FATE value
 * rank_to [num_tokens, top_k]: rank of the owner; -1: none
 * here [all tokens, top_k]: slot on this rank, FLAT: local expert; -1: not here
 * row_here [all tokens]: FLAT, row on this rank; -1: none
 *
 * Behind them is workspace that only the planner uses. */
#ifndef EPIC_PLAN_H
#define EPIC_PLAN_H

#include <stdbool.h>

#include "epic/epic.h"

#define MAX_TOP_K 64
#define MAX_EXPERTS 65536

typedef struct plan_header {
    uint64_t magic;
    uint64_t header_sum; /* of the header, with 0 in this field */
    uint64_t body_sum;   /* of the arrays */
    uint64_t id;
    uint64_t group_id;
    int64_t bytes; /* of the header and the arrays */
    int64_t num_tokens, total_tokens;
    int64_t num_slots, capacity, demand;
    int64_t num_kept, num_none, num_expert_full, num_rank_full;
    int64_t tokens_of, base_of, expert_of, logical_of, slab_begin,
        slab_count; /* offsets from the header */
    int64_t place_of;
    int64_t fate, rank_to, here, row_here;
    int32_t rank, num_ranks, num_local;
    uint32_t result;
    epic_layer layer; /* defaults filled in */
} plan_header;

typedef struct plan_view { /* pointers into the bytes of a valid plan */
    const plan_header *header;
    const int32_t *tokens_of, *base_of, *expert_of, *logical_of, *slab_begin, *slab_count;
    const int32_t *place_of;
    const int32_t *fate, *rank_to, *here, *row_here;
} plan_view;

enum plan_damage {
    PLAN_OK,
    PLAN_TOO_SHORT,
    PLAN_BAD_MAGIC,
    PLAN_BAD_HEADER,
    PLAN_BAD_BODY,
    PLAN_OUT_OF_RANGE,
    PLAN_WRONG_RANK
};

const char *plan_damage_name(int damage);

/* Checks the bytes of a plan. Sets *out only if they are valid. With group_id 0 it accepts a
 * plan of any group and rank. Every later use may rely on the ranges that it checks. */
enum plan_damage plan_check(plan_view *out, const void *plan, int64_t plan_bytes,
                            uint64_t group_id, int32_t rank, int32_t num_ranks);

/* Reads a caller's layer, fills in its defaults and checks it. Returns EPIC_EINVAL with the
 * field, its value and the rule. */
epic_result layer_read(epic_layer *out, const epic_layer *layer, size_t size,
                       int32_t num_ranks);

/* Replaces EPIC_BY_HOSTS by the order that it stands for. relayed: ranks of other hosts may
 * begin the sums. */
void layer_choose_order(epic_layer *layer, int32_t num_ranks, bool relayed);

/* Computes the offsets and bytes of a header from its counts. */
void plan_layout(plan_header *header);

/* Returns pointers into a plan whose header is valid. */
plan_view plan_view_of(const void *plan);

/* Returns the bytes of the largest plan, of a host context with its workspace or of a CUDA
 * context. Returns 0 if the slots do not fit into int32. */
int64_t plan_bytes_bound(const epic_layer *layer, int32_t num_ranks, int64_t max_tokens);

/* Returns the upper bound of the ids of this layer. */
static inline uint32_t layer_num_ids(const epic_layer *layer)
{
    return layer->num_logical ? layer->num_logical : layer->num_experts;
}

/* Rounds n up to a multiple of `to`. The test for 1 saves a division for each expert of most
 * layers. */
static inline int64_t round_up(int64_t n, int64_t to)
{
    if (to == 1) return n;
    return (n + to - 1) / to * to;
}

/* ------------------------------------------------------------------- while planning ---- */

typedef struct planner { /* a plan that is being made */
    unsigned char *bytes;
    plan_header *header;
    int32_t *tokens_of, *base_of, *expert_of, *logical_of, *slab_begin, *slab_count, *place_of;
    int32_t *fate, *rank_to, *here, *row_here;
    /* the workspace */
    int32_t *count;    /* [num_experts] choices of the group */
    int32_t *owner;    /* [num_experts] rank of each expert */
    int32_t *local;    /* [num_experts] local number on that rank */
    int32_t *begin;    /* [num_experts] first slot on that rank */
    int32_t *quota;    /* [num_experts] share of expert_capacity */
    int32_t *limit;    /* [num_experts] choices that are kept */
    int32_t *next;     /* [num_experts] number of the next choice */
    int32_t *rows;     /* [num_ranks] FLAT: rows so far; else slots */
    int32_t *most;     /* [num_ranks] limit for each expert of the rank */
    int32_t *low;      /* [num_ranks] binary search: largest limit known to fit */
    int32_t *high;     /* [num_ranks] smallest limit known not to fit */
    int64_t *needed;   /* [num_ranks] slots; FLAT: rows */
    int64_t *capacity; /* [num_ranks] 0: unlimited */
} planner;

/* Returns the first expert that rank_of_expert places on an invalid rank, or -1. NULL stands
 * for contiguous blocks, which are valid. With EPIC_TREE the experts of each rank must be
 * one of num_ranks equal blocks. */
int64_t layer_find_misplaced(const epic_layer *layer, int32_t num_ranks,
                             const int32_t *rank_of_expert);

/* An error in a table of replicas. -1 in both fields: no error. */
typedef struct replicas_error {
    int64_t expert;  /* expert with an entry out of range; -1: none */
    int64_t logical; /* that entry, or a logical expert without a replica */
} replicas_error;

replicas_error replicas_check(const epic_layer *layer, const int32_t *logical_of_expert);

/* The tables in the arguments of epic_plan. */
typedef struct plan_tables {
    const int32_t *rank_of_expert;    /* NULL: contiguous blocks */
    const int32_t *logical_of_expert; /* NULL: not used */
} plan_tables;

/* Starts a plan in the memory `plan`, which is large enough, for ranks with tokens_of[]
 * tokens. */
void planner_begin(planner *p, void *plan, const epic_layer *layer, int32_t rank,
                   int32_t num_ranks, const int64_t *tokens_of, const plan_tables *tables);

/* Replaces each logical expert in `here` by the replica that takes the choice. */
void planner_choose_replicas(planner *p);

/* Computes `quota`, the share of expert_capacity of each replica. */
void planner_deal_capacity(planner *p);

/* Decides where every choice goes. On entry `here` holds the ids of all ranks' choices
 * (negative: none), and owner, logical_of and capacity are set. On EPIC_EOVERFLOW the error
 * names the lowest rank; the plan is complete but has no slots. */
epic_result planner_finish(planner *p);

/* Writes the id and the checksums. The plan is valid afterwards. */
void planner_seal(planner *p, uint64_t id, uint64_t group_id, epic_result result);

#endif
