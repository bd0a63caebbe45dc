/* SPDX-License-Identifier: Apache-2.0 */
/* A plan in host memory records where each choice of this rank's tokens goes, and which choices
 * this rank receives. A *choice* is a token and one of its top_k experts, a *slot* is a row of
 * a receive buffer, and a *slab* is the contiguous slots of one expert.
 *
 * The bytes are a header, followed by arrays of int32. The header contains the offsets of the
 * arrays. The bytes contain no addresses, so a plan may be copied. Arrays about the whole
 * group:
 *
 * - tokens_of [num_ranks]: number of tokens of each rank
 * - base_of [num_ranks + 1]: exclusive prefix sum of tokens_of, so element r is the global
 *   index of rank r's first token
 * - expert_of [num_local]: global id of each local expert; -1: no expert
 * - logical_of [num_experts], only with replicas: logical expert of which each expert is a
 *   replica; EPIC_ABSENT: the expert is no replica, or is on a vacant seat (a rank that has
 *   left)
 * - slab_begin [num_local + 1]: first slot of each slab; all 0 in the layout FLAT
 * - slab_count [num_local]: number of choices in each slab, without padding
 * - position_of [num_ranks], only with the sum order EPIC_TREE: position of each member's
 *   experts in the tree
 *
 * Arrays that this rank uses as the home rank of its own tokens:
 *
 * - fate [num_tokens, top_k]: slot on the rank of the expert, or an EPIC_FATE value
 * - rank_to [num_tokens, top_k]: rank of the expert; -1: the choice has no expert, or its
 *   expert is absent
 *
 * Arrays that this rank uses as the owner of experts, for the tokens of all ranks:
 *
 * - slot_or_expert [total_tokens, top_k]: slot of the choice on this rank (FLAT: its local
 *   expert); -1: the choice does not go to this rank
 * - row_of [total_tokens], only FLAT: row of the token in this rank's receive buffer; -1: no
 *   choice of the token goes to this rank
 *
 * While the plan is made, the workspace of the planner follows the arrays. */
#ifndef EPIC_PLAN_H
#define EPIC_PLAN_H

#include <stdbool.h>

#include "backend/seat_set.h"
#include "epic/epic.h"

#define MAX_TOP_K 64
#define MAX_EXPERTS 65536

typedef struct plan_header {
    uint64_t magic;
    uint64_t header_sum; /* checksum of the header, with 0 in this field */
    uint64_t body_sum;   /* checksum of the arrays */
    uint64_t id;
    uint64_t group_id;
    int64_t bytes;                    /* size of the header and the arrays in bytes */
    int64_t num_tokens, total_tokens; /* number of tokens of this rank, and of all ranks */
    /* num_slots: number of slots of this rank that the plan uses. capacity: number of slots in
     * the receive buffer. demand: number of slots that would be needed to keep all choices. */
    int64_t num_slots, capacity, demand;
    /* how many of this rank's choices have each fate: kept, without an expert, or dropped
     * because the expert is full, the rank is full or the expert is absent */
    int64_t num_kept, num_none, num_expert_full, num_rank_full, num_absent;
    int64_t num_members;
    /* offsets of the arrays in bytes from the header */
    int64_t tokens_of, base_of, expert_of, logical_of, slab_begin, slab_count;
    int64_t position_of;
    int64_t fate, rank_to, slot_or_expert, row_of;
    /* num_local: maximum number of experts that one member owns */
    int32_t rank, num_ranks, num_local;
    uint32_t result;  /* an epic_result; if it is an error, the plan has no slots */
    epic_layer layer; /* with defaults filled in */
} plan_header;

typedef struct plan_view { /* addresses of the arrays of a valid plan */
    const plan_header *header;
    const int32_t *tokens_of, *base_of, *expert_of, *logical_of, *slab_begin, *slab_count;
    const int32_t *position_of;
    const int32_t *fate, *rank_to, *slot_or_expert, *row_of;
} plan_view;

/* Results of plan_check(): the first error in the bytes of a plan. */
enum plan_damage {
    PLAN_OK,
    PLAN_TOO_SHORT,
    PLAN_BAD_MAGIC,
    PLAN_BAD_HEADER,
    PLAN_BAD_BODY,
    PLAN_OUT_OF_RANGE,
    PLAN_WRONG_RANK
};

/* Returns a description of the error, for the end of an error text. */
const char *plan_damage_name(int damage);

/* Checks the bytes of a plan. If the bytes are valid, sets *out and returns PLAN_OK. If not,
 * returns the error. If group_id is 0, accepts plans of any group and rank. After PLAN_OK all
 * values in the arrays are in range, so the code that uses the arrays need not check them. */
enum plan_damage plan_check(plan_view *out, const void *plan, int64_t plan_bytes,
                            uint64_t group_id, int32_t rank, int32_t num_ranks);

/* Copies the caller's layer of `size` bytes to *out, fills in its defaults and checks it.
 * num_members is the number of ranks that are members. It is needed because with EPIC_TREE each
 * member owns the same number of leaves. Returns EPIC_OK or EPIC_EINVAL. */
epic_result layer_read(epic_layer *out, const epic_layer *layer, size_t size,
                       int32_t num_members);

/* If the sum order is EPIC_BY_HOSTS, replaces it. The new order is EPIC_TREE, with one leaf per
 * rank, if `relayed` is true and the number of ranks is a power of two that divides the number
 * of experts. In all other cases it is EPIC_BY_RANK. `relayed` is context_relays(): true if the
 * ranks of one host add up their rows before they send the sum to another host. */
void layer_choose_order(epic_layer *layer, int32_t num_ranks, bool relayed);

/* Sets the offsets of the arrays and `bytes` in the header. Requires that the numbers of
 * tokens, ranks and experts are in the header. */
void plan_layout(plan_header *header);

/* Returns the addresses of the arrays of a plan. Requires that the header of the plan is
 * valid. */
plan_view plan_view_of(const void *plan);

/* Returns a size in bytes that suffices for any plan of this layer on host and CUDA contexts.
 * The size includes the workspace that the planner needs on host contexts. Returns 0 if the
 * number of slots of a rank might exceed INT32_MAX. */
int64_t plan_bytes_bound(const epic_layer *layer, int32_t num_ranks, int64_t max_tokens);

/* Returns the number of valid expert ids. In a layer with replicas, an expert id is the id of a
 * logical expert. */
static inline uint32_t layer_num_ids(const epic_layer *layer)
{
    return layer->num_logical ? layer->num_logical : layer->num_experts;
}

/* Rounds n up to a multiple of `to`. `to` is often 1, which needs no division. */
static inline int64_t round_up(int64_t n, int64_t to)
{
    if (to == 1) return n;
    return (n + to - 1) / to * to;
}

/* ----------------------------------------------------------------------- making a plan ---- */

typedef struct planner {
    unsigned char *bytes;
    plan_header *header;
    int32_t *tokens_of, *base_of, *expert_of, *logical_of, *slab_begin, *slab_count,
        *position_of;
    int32_t *fate, *rank_to, *row_of;
    /* [total_tokens, top_k] The plan's array slot_or_expert. While the plan is made, it first
     * contains the expert ids. A negative id is the fate of the choice: EPIC_FATE_NONE or
     * EPIC_FATE_ABSENT. place_choices() replaces the ids by slots (FLAT: by local experts). */
    int32_t *ids;
    const seat_set *members; /* NULL: every rank is a member */
    bool has_absent;         /* true: logical_of may contain EPIC_ABSENT */
    /* [number of ids] If not NULL, planner_finish() adds the number of choices of each absent
     * expert (with replicas: logical expert) to it. */
    int32_t *absent_load;
    /* The arrays from here on are in the planner's workspace. */
    int32_t *count; /* [num_experts] number of choices of each expert in the whole group */
    int32_t *owner; /* [num_experts] rank of each expert */
    int32_t *local; /* [num_experts] index of the expert among the experts of its rank */
    int32_t *begin; /* [num_experts] first slot of the expert's slab, on its rank */
    /* [num_experts] maximum number of choices that the expert keeps within expert_capacity */
    int32_t *expert_quota;
    /* [num_experts] number of choices that each expert keeps; before decide_num_kept() returns,
     * an upper bound of this number */
    int32_t *num_kept;
    int32_t *next; /* [num_experts] number of choices of each expert that were visited so far */
    int32_t *used_slots; /* [num_ranks] number of slots of each rank that are assigned so far */
    /* [num_ranks] maximum number of choices that each expert of a rank may keep, so that the
     * rank has enough slots: expert e of rank r keeps at most min(num_kept[e], keep_limit[r])
     * choices */
    int32_t *keep_limit;
    /* [num_ranks] bounds of the binary search for keep_limit. limit_fits: the largest limit
     * found so far with which the rank has enough slots. limit_fails: the smallest limit found
     * so far with which the rank has too few. */
    int32_t *limit_fits, *limit_fails;
    /* [num_ranks] number of slots that each rank needs; FLAT: number of rows */
    int64_t *needed;
    int64_t *capacity; /* [num_ranks] number of slots that each rank has; 0: no limit */
} planner;

/* The tables among the arguments of epic_plan, and the members of the group. */
typedef struct plan_tables {
    const int32_t *rank_of_expert;    /* NULL: each rank owns a contiguous block of experts */
    const int32_t *logical_of_expert; /* NULL: no replicas */
    const seat_set *members;          /* NULL: every rank is a member */
    bool has_absent; /* set by replicas_check(): logical_of_expert contains EPIC_ABSENT */
} plan_tables;

/* Returns the rank that owns an expert. If rank_of_expert is invalid, the result might not be a
 * rank of the group. */
int32_t layer_owner_of(const epic_layer *layer, int32_t num_ranks, const plan_tables *tables,
                       uint32_t expert);

typedef enum placement_error {
    PLACEMENT_OK,
    PLACEMENT_NO_RANK, /* the owner is not a rank of the group */
    PLACEMENT_TREE,    /* EPIC_TREE: the owner does not own one whole block */
    PLACEMENT_VACANT   /* the owner is a vacant seat (its rank has left the group) */
} placement_error;

/* Checks the placement of the experts. Sets *expert to the first expert whose owner is invalid,
 * and returns the error. With EPIC_TREE the experts form num_members blocks of equal size, and
 * each member must own exactly one of these blocks. In a layer without replicas and without
 * EPIC_DROP_ABSENT, the owner of each expert must be a member. */
placement_error layer_check_placement(const epic_layer *layer, int32_t num_ranks,
                                      const plan_tables *tables, uint32_t *expert);

/* The first error in a table of replicas (logical_of_expert). Both fields are -1 if the table
 * has no error. */
typedef struct replicas_error {
    /* expert whose entry in the table is out of range; -1: all entries are in range */
    int64_t expert;
    /* if `expert` is not -1: the invalid entry of the table; if `expert` is -1: the logical
     * expert that has no replica, or -1 if there is no error */
    int64_t logical;
} replicas_error;

/* Checks the table of replicas (tables->logical_of_expert), which may be NULL. Sets
 * tables->has_absent. Returns the first error. Without EPIC_DROP_ABSENT each logical expert
 * must have a replica on a member. Requires that the caller has checked the placement of the
 * experts. */
replicas_error replicas_check(const epic_layer *layer, int32_t num_ranks, plan_tables *tables);

/* Begins a plan in the memory at `plan`. Requires that this memory has at least
 * plan_bytes_bound() bytes. tokens_of [num_ranks] is the number of tokens of each rank. Fills
 * in the header, the pointers of *p, and the arrays of the plan that depend only on tokens_of
 * and *tables. */
void planner_begin(planner *p, void *plan, const epic_layer *layer, int32_t rank,
                   int32_t num_ranks, const int64_t *tokens_of, const plan_tables *tables);

/* Adds the number of choices of each logical expert to its element of logical_load
 * [num_logical]. Does not count choices of absent experts. */
void planner_add_logical_load(const planner *p, int32_t *logical_load);

/* Replaces the logical expert of each choice in p->ids by one of its replicas on members.
 * Replaces absent experts by EPIC_FATE_ABSENT. An expert is absent if no member owns it. In a
 * layer with replicas, a logical expert is absent if no member owns one of its replicas. */
void planner_choose_replicas(planner *p);

/* Sets p->expert_quota[e], the number of choices that expert e may keep within expert_capacity.
 * The replicas of a logical expert share its expert_capacity. */
void planner_deal_capacity(planner *p);

/* Decides where every choice goes. Requires that p->ids contains the expert ids of the choices
 * of all ranks (EPIC_FATE_NONE: no expert), and that p->owner, p->logical_of, p->capacity and
 * p->absent_load are set. Without EPIC_OVERFLOW_DROP, returns EPIC_EOVERFLOW if a rank has too
 * few slots. The error text contains the lowest such rank. The plan is valid even after this
 * error, but it drops all choices. */
epic_result planner_finish(planner *p);

/* Writes the id, the group_id, the result and the checksums into the plan. After this call the
 * bytes are a valid plan. */
void planner_seal(planner *p, uint64_t id, uint64_t group_id, epic_result result);

#endif
