/* SPDX-License-Identifier: Apache-2.0 */
/* A plan in host memory: where each choice goes, and which choices this rank receives.
 *
 * The bytes are a header, then arrays of int32 at offsets. They contain no addresses, so they
 * may be copied. Sizes and positions in the group:
 *
 *   tokens_of    [num_ranks]      number of tokens of each rank
 *   base_of      [num_ranks + 1]  tokens of all lower ranks: the number of a rank's first token
 *   expert_of    [num_local]      global id of each local expert; -1: no expert
 *   logical_of   [num_experts]    replicas only: logical expert of each expert
 *   slab_begin   [num_local + 1]  first slot of each slab; FLAT: all 0
 *   slab_count   [num_local]      choices in each slab, without padding
 *   position_of  [num_ranks]      EPIC_TREE only: position of each rank's experts in the tree
 *
 * Arrays that this rank uses as the home rank of its own tokens:
 *
 *   fate         [num_tokens, top_k]  slot on the rank of the expert, or an EPIC_FATE value
 *   rank_to      [num_tokens, top_k]  rank of the expert; -1: the choice has no expert
 *
 * Arrays that this rank uses as the owner of experts, for the tokens of all ranks:
 *
 *   slot_or_expert  [all tokens, top_k]  slot of the choice on this rank (FLAT: local expert of
 *                                        the choice); -1: the choice does not go to this rank
 *   row_of          [all tokens]         FLAT only: row of the token on this rank; -1: no row
 *
 * The workspace of the planner follows the arrays. */
#ifndef EPIC_PLAN_H
#define EPIC_PLAN_H

#include <stdbool.h>

#include "epic/epic.h"

#define MAX_TOP_K 64
#define MAX_EXPERTS 65536

/* The first bytes of a plan. */
typedef struct plan_header {
    uint64_t magic;
    uint64_t header_sum; /* checksum of the header, with 0 in this field */
    uint64_t body_sum;   /* checksum of the arrays */
    uint64_t id;
    uint64_t group_id;
    int64_t bytes;                    /* bytes of the header and the arrays */
    int64_t num_tokens, total_tokens; /* tokens of this rank, and of all ranks */
    /* num_slots: number of slots that this rank uses. capacity: number of slots that it may
     * use. demand: number of slots that it would need if no choice were dropped. */
    int64_t num_slots, capacity, demand;
    /* How many of this rank's own choices have each fate. */
    int64_t num_kept, num_none, num_expert_full, num_rank_full;
    /* The offsets of the arrays in bytes from the header. */
    int64_t tokens_of, base_of, expert_of, logical_of, slab_begin, slab_count;
    int64_t position_of;
    int64_t fate, rank_to, slot_or_expert, row_of;
    int32_t rank, num_ranks, num_local; /* num_local: largest number of experts on one rank */
    /* The epic_result of the planning. If it is an error, the plan has no slots. */
    uint32_t result;
    epic_layer layer; /* with defaults filled in */
} plan_header;

typedef struct plan_view { /* addresses of the arrays of a valid plan */
    const plan_header *header;
    const int32_t *tokens_of, *base_of, *expert_of, *logical_of, *slab_begin, *slab_count;
    const int32_t *position_of;
    const int32_t *fate, *rank_to, *slot_or_expert, *row_of;
} plan_view;

/* The kinds of damage that a check of a plan's bytes can find. */
enum plan_damage {
    PLAN_OK,
    PLAN_TOO_SHORT,
    PLAN_BAD_MAGIC,
    PLAN_BAD_HEADER,
    PLAN_BAD_BODY,
    PLAN_OUT_OF_RANGE,
    PLAN_WRONG_RANK
};

/* Returns a description of the damage, which errors use as the end of their sentence. */
const char *plan_damage_name(int damage);

/* Checks the bytes of a plan. If they are valid, returns PLAN_OK and sets *out; otherwise
 * returns the damage. If group_id is 0, accepts a plan of any group and rank. After PLAN_OK,
 * all values in the arrays are in their ranges, and code may use them without checks. */
enum plan_damage plan_check(plan_view *out, const void *plan, int64_t plan_bytes,
                            uint64_t group_id, int32_t rank, int32_t num_ranks);

/* Copies the caller's layer of `size` bytes to *out, fills in its defaults and checks it.
 * Returns EPIC_OK, or EPIC_EINVAL with the field, its value and the rule. */
epic_result layer_read(epic_layer *out, const epic_layer *layer, size_t size,
                       int32_t num_ranks);

/* Replaces the sum order EPIC_BY_HOSTS by EPIC_TREE or EPIC_BY_RANK. `relayed` is the result of
 * context_relays(): true if the ranks of one host add up their rows before they send them to
 * another host. If `relayed` is true and the numbers of experts and ranks allow it, the order
 * becomes EPIC_TREE with one leaf per rank. Otherwise it becomes EPIC_BY_RANK. */
void layer_choose_order(epic_layer *layer, int32_t num_ranks, bool relayed);

/* Computes the offsets of the arrays and the bytes of the plan from the counts in the
 * header. */
void plan_layout(plan_header *header);

/* Returns the addresses of the arrays of a plan. Its header must be valid. */
plan_view plan_view_of(const void *plan);

/* Returns a size in bytes that suffices for any plan of this layer, both on host contexts (with
 * workspace) and on CUDA contexts. Returns 0 if the numbers of slots do not fit in an
 * int32_t. */
int64_t plan_bytes_bound(const epic_layer *layer, int32_t num_ranks, int64_t max_tokens);

/* Returns the number of valid expert ids of this layer. With replicas, ids name logical
 * experts. */
static inline uint32_t layer_num_ids(const epic_layer *layer)
{
    return layer->num_logical ? layer->num_logical : layer->num_experts;
}

/* Rounds n up to a multiple of `to`. Most layers have `to` 1, which needs no division. */
static inline int64_t round_up(int64_t n, int64_t to)
{
    if (to == 1) return n;
    return (n + to - 1) / to * to;
}

/* ----------------------------------------------------------------------- making a plan ---- */

typedef struct planner { /* a plan while it is made */
    unsigned char *bytes;
    plan_header *header;
    int32_t *tokens_of, *base_of, *expert_of, *logical_of, *slab_begin, *slab_count,
        *position_of;
    int32_t *fate, *rank_to, *row_of;
    /* [all tokens, top_k] the plan's array slot_or_expert. It first contains the expert ids.
     * place_choices() replaces them by slots. */
    int32_t *ids;
    /* The workspace. A limit is the largest number of choices that an expert keeps. */
    int32_t *count; /* [num_experts] number of the group's choices of each expert */
    int32_t *owner; /* [num_experts] rank of each expert */
    int32_t *local; /* [num_experts] number of the expert among the experts of its rank */
    int32_t *begin; /* [num_experts] first slot of the expert's slab, on its rank */
    /* [num_experts] largest number of choices that expert_capacity allows */
    int32_t *quota;
    int32_t *limit;      /* [num_experts] limit of the expert */
    int32_t *next;       /* [num_experts] position that the expert's next choice will get */
    int32_t *used_slots; /* [num_ranks] slots of the rank that are used so far */
    /* [num_ranks] limit that all experts of the rank share. Expert e of rank r keeps at most
     * min(limit[e], rank_limit[r]) choices. */
    int32_t *rank_limit;
    /* [num_ranks] bounds of the binary search for rank_limit. `fits`: the largest limit that is
     * known to fit the rank's capacity. `fails`: the smallest one that is known not to fit. */
    int32_t *fits, *fails;
    int64_t *needed;   /* [num_ranks] slots that the rank needs; FLAT: rows */
    int64_t *capacity; /* [num_ranks] slots that the rank has; 0: no limit */
} planner;

/* Returns the first expert with an invalid rank in rank_of_expert, or -1 if there is none.
 * rank_of_expert NULL means contiguous blocks, which are valid. With EPIC_TREE, the experts
 * form num_ranks equal blocks, and each rank must own exactly one block. */
int64_t layer_find_misplaced(const epic_layer *layer, int32_t num_ranks,
                             const int32_t *rank_of_expert);

/* The first error in a table of replicas. Both fields are -1 if there is none. */
typedef struct replicas_error {
    int64_t expert;  /* expert whose entry is out of range; -1: no such expert */
    int64_t logical; /* the invalid entry, or a logical expert without a replica; or -1 */
} replicas_error;

/* Checks a table of replicas, which may be NULL. Returns its first error. */
replicas_error replicas_check(const epic_layer *layer, const int32_t *logical_of_expert);

/* The tables among the arguments of epic_plan. */
typedef struct plan_tables {
    const int32_t *rank_of_expert;    /* NULL: contiguous blocks */
    const int32_t *logical_of_expert; /* NULL: no replicas */
} plan_tables;

/* Starts a plan in the memory at `plan`, which has at least plan_bytes_bound() bytes. tokens_of
 * [num_ranks] is the number of tokens of each rank. Sets the header, the pointers, the numbers
 * of tokens and the tables. */
void planner_begin(planner *p, void *plan, const epic_layer *layer, int32_t rank,
                   int32_t num_ranks, const int64_t *tokens_of, const plan_tables *tables);

/* Replaces each logical expert in `ids` by the replica that gets the choice. */
void planner_choose_replicas(planner *p);

/* Sets quota[e], the number of choices within expert_capacity. The replicas of a logical expert
 * share its expert_capacity. */
void planner_deal_capacity(planner *p);

/* Decides where every choice goes. The caller has set `ids` to the expert ids of all ranks'
 * choices (negative: no expert), and owner, logical_of and capacity. If a rank has too few
 * slots, returns EPIC_EOVERFLOW with an error that names the lowest such rank. The plan is then
 * complete but has no slots. */
epic_result planner_finish(planner *p);

/* Writes the plan's id, group_id, result and checksums. The bytes are then a valid plan. */
void planner_seal(planner *p, uint64_t id, uint64_t group_id, epic_result result);

#endif
