/* SPDX-License-Identifier: Apache-2.0 */
/* Defines the struct DEVICE_HEADER, the header of a plan in CUDA memory for at most
 * DEVICE_HEADER_RANKS ranks. device_layout.h includes this file for each of the two header
 * types. The members before tokens_of have the same offsets in both. */
typedef struct DEVICE_HEADER {
    uint64_t magic;
    uint64_t id; /* id of the plan, equal on all ranks */
    uint64_t group_id;
    int64_t bytes; /* size of the whole plan in bytes */
    int64_t max_tokens;
    int32_t rank, num_ranks;
    uint32_t num_experts, top_k, alignment, overflow, expert_capacity, sum_order, leaves,
        partial_type;
    uint32_t result;   /* an epic_result; if it is an error, the plan has no slots */
    int32_t num_local; /* maximum number of experts that a rank owns */
    int32_t owned;     /* number of experts that this rank owns */
    int32_t tokens_of[DEVICE_HEADER_RANKS]; /* number of tokens of each rank */
    int32_t slots_of[DEVICE_HEADER_RANKS];  /* number of slots of each rank */
    /* With EPIC_TREE, the experts form as many equal blocks as the group has members. rank_at[i]
     * is the rank that owns block i. The leaves of the experts of block i are subtree i of the
     * sum tree. If ranks have left the group, the last elements are their numbers. */
    uint8_t rank_at[DEVICE_HEADER_RANKS];
    int32_t capacity; /* number of slots that this rank may use */
    /* with EPIC_TREE: id of this rank's first expert; the ids of its experts are contiguous */
    int32_t first_expert;
    uint32_t layout;
    /* number of leaves in the layer's options. In contrast, `leaves` is the number of leaves
     * that combine uses: layer_leaves, or the number of members if the plan is FLAT */
    uint32_t layer_leaves;
    uint32_t num_logical; /* 0: no replicas */
    uint32_t layer_hash;  /* hash of all fields of the layer */
    uint32_t sum;         /* checksum of the words above */
} DEVICE_HEADER;
#undef DEVICE_HEADER
#undef DEVICE_HEADER_RANKS
