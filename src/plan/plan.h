/* SPDX-License-Identifier: Apache-2.0 */
/* A plan on the host: where each choice goes, and where each slot came from.
 *
 * The bytes are a header and arrays at offsets; they hold no address.  "Here" is the expert side
 * of this rank, "fate" the home side:
 *
 *   tokens_of  [num_ranks]              tokens of each rank
 *   base_of    [num_ranks + 1]          where each rank's tokens begin in `here`
 *   expert_of  [num_local]              global id of a local expert, -1: missing
 *   logical_of [num_experts]            with num_logical: whose replica each expert is
 *   slab_begin [num_local + 1]          first slot of each slab (FLAT: all 0)
 *   slab_count [num_local]              true counts kept
 *   place_of   [num_ranks]              TREE: the place of each rank's subtree among the ranks'
 *   fate       [num_tokens, top_k]      slot on the owner's rank, or an EPIC_FATE
 *   rank_to    [num_tokens, top_k]      the owner's rank, -1: none
 *   here       [all tokens, top_k]      expert-major: slot, FLAT: local expert; -1: not here
 *   row_here   [all tokens]             FLAT: row, -1: none
 *
 * Behind them lies memory that epic_plan works in and nobody reads later. */
#ifndef EPIC_PLAN_H
#define EPIC_PLAN_H

#include <stdbool.h>

#include "epic/epic.h"

#define MAX_TOP_K 64
#define MAX_EXPERTS 65536

typedef struct plan_header {
    uint64_t magic;
    uint64_t header_sum; /* of the header with this field 0 */
    uint64_t body_sum;   /* of the arrays */
    uint64_t id;
    uint64_t group_id;
    int64_t bytes; /* header and arrays */
    int64_t num_tokens, total_tokens;
    int64_t num_slots, capacity, demand;
    int64_t num_kept, num_none, num_expert_full, num_rank_full;
    int64_t tokens_of, base_of, expert_of, logical_of, slab_begin, slab_count; /* offsets */
    int64_t place_of;
    int64_t fate, rank_to, here, row_here;
    int32_t rank, num_ranks, num_local;
    uint32_t result;
    epic_layer layer; /* defaults filled in */
} plan_header;

typedef struct plan_view { /* a plan in memory; host code's way to it */
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

/* Checks a plan's bytes and points into them; *out is set only if they are good.  group_id 0: of
 * any group and rank. */
enum plan_damage plan_check(plan_view *out, const void *plan, int64_t plan_bytes,
                            uint64_t group_id, int32_t rank, int32_t num_ranks);

/* Fills in the layer's defaults and checks it. */
epic_result layer_read(epic_layer *out, const epic_layer *layer, size_t size,
                       int32_t num_ranks);

/* EPIC_BY_HOSTS becomes the order that it stands for; relayed: sums may be begun on other hosts. */
void layer_choose_order(epic_layer *layer, int32_t num_ranks, bool relayed);

/* Lays the arrays out from the header's counts: fills in its offsets and bytes. */
void plan_layout(plan_header *header);

/* Points into a plan whose header is good. */
plan_view plan_view_of(const void *plan);

/* Bytes that hold a plan of a host context, with the memory that planning needs, or of a CUDA
 * context; 0: too large for int32 slots. */
int64_t plan_bytes_bound(const epic_layer *layer, int32_t num_ranks, int64_t max_tokens);

/* What ids are below. */
static inline uint32_t layer_num_ids(const epic_layer *layer)
{
    return layer->num_logical ? layer->num_logical : layer->num_experts;
}

/* Most layers have the alignment 1, and divisions, one for each expert, add up. */
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
    /* working memory */
    int32_t *count;    /* [num_experts] choices over the group */
    int32_t *owner;    /* [num_experts] rank */
    int32_t *local;    /* [num_experts] local number on its rank */
    int32_t *begin;    /* [num_experts] first slot on its rank */
    int32_t *quota;    /* [num_experts] the expert's part of expert_capacity */
    int32_t *limit;    /* [num_experts] choices kept */
    int32_t *next;     /* [num_experts] place of the next choice */
    int32_t *rows;     /* [num_ranks] FLAT: rows so far; then slots of each rank */
    int32_t *most;     /* [num_ranks] choices that each of its experts may keep */
    int32_t *low;      /* [num_ranks] binary search: the largest limit known to fit */
    int32_t *high;     /* [num_ranks] and the smallest known not to */
    int64_t *needed;   /* [num_ranks] slots, FLAT: rows */
    int64_t *capacity; /* [num_ranks]; 0: no bound */
} planner;

/* The first expert that `rank_of_expert` (NULL: contiguous blocks) places wrongly, or -1: ranks
 * are below num_ranks; TREE: the experts of a rank are one of num_ranks equal blocks. */
int64_t layer_find_misplaced(const epic_layer *layer, int32_t num_ranks,
                             const int32_t *rank_of_expert);

/* What is wrong with a table of replicas.  There may be none (NULL). */
typedef struct replicas_error {
    int64_t expert;  /* its entry is out of range; -1: none is */
    int64_t logical; /* that entry; or a logical expert that has no replica, -1: none */
} replicas_error;

replicas_error replicas_check(const epic_layer *layer, const int32_t *logical_of_expert);

/* The tables of a plan's args. */
typedef struct plan_tables {
    const int32_t *rank_of_expert;    /* NULL: contiguous blocks */
    const int32_t *logical_of_expert; /* NULL: none, or not to be used */
} plan_tables;

/* Lays out a plan for ranks of tokens_of[] tokens in `plan`, which is large enough. */
void planner_begin(planner *p, void *plan, const epic_layer *layer, int32_t rank,
                   int32_t num_ranks, const int64_t *tokens_of, const plan_tables *tables);

/* Replaces logical experts in `here` by those of their replicas that take the choices. */
void planner_choose_replicas(planner *p);

/* Fills in quota. */
void planner_deal_capacity(planner *p);

/* `here` holds the ids of all ranks' choices (negative: none), owner the ranks of the experts,
 * logical_of whose replicas they are, capacity the slots of the ranks: decides everything else.
 * EPIC_EOVERFLOW names the lowest rank; the plan is complete but moves nothing then. */
epic_result planner_finish(planner *p);

/* Writes id and checksums: the plan is valid from here on. */
void planner_seal(planner *p, uint64_t id, uint64_t group_id, epic_result result);

#endif
