/* SPDX-License-Identifier: Apache-2.0 */
/* The oracle: expected results of EPIC, computed by plain loops over the inputs of all ranks.
 * It is written from epic.h alone and shares no code with the library.
 *
 * A choice has a number in the group: token * top_k + k, where tokens are numbered through
 * all ranks in rank order. */
#ifndef ORACLE_H
#define ORACLE_H

#include <stdbool.h>

#include "epic/epic.h"

/* The routing of all ranks. */
typedef struct oracle_input {
    int num_ranks;
    epic_layer layer;
    const int64_t *tokens_of; /* [num_ranks] */
    const int64_t *capacity;  /* [num_ranks]; 0: no limit */
    /* [all tokens, top_k]: expert of each choice, after replicas are resolved; -1: none;
     * ORACLE_ABSENT: its expert is absent */
    const int64_t *ids;
    const int32_t *rank_of;    /* [num_experts]; -1: the expert is on no rank */
    const int32_t *logical_of; /* [num_experts]; NULL: no replicas */
} oracle_input;

#define ORACLE_ABSENT (-2)

typedef struct oracle_plan {
    oracle_input in;
    int64_t alignment, leaves, total_tokens;
    epic_result result;
    int num_local;
    int64_t *first_token; /* [num_ranks + 1] */
    int32_t *local_of;    /* [num_experts] */
    int64_t *load;        /* [num_experts] */
    /* [num_experts]: largest number of choices that expert_capacity keeps */
    int64_t *most;
    int32_t *fate;          /* [all tokens, top_k]: slot or row on the rank, or an EPIC_FATE */
    int64_t *num_slots;     /* [num_ranks] */
    int64_t *demand;        /* [num_ranks] */
    int32_t *expert_rows;   /* [num_ranks, num_local] */
    int32_t *expert_tokens; /* [num_ranks, num_local] */
    int64_t *
        *filled_by; /* [num_ranks][num_slots]: choice in the slot (FLAT: token), -1: padding */
} oracle_plan;

/* Writes to ids [all choices] the expert that receives each choice, which is a replica if the
 * layer has replicas (-1: none; ORACLE_ABSENT: it is on no rank). rank_of NULL: every expert is
 * on a rank. */
void oracle_choose_replicas(const epic_layer *layer, const int32_t *rank_of,
                            const int32_t *logical_of, const int64_t *logical_ids,
                            int64_t choices, int64_t *ids);

oracle_plan *oracle_plan_new(const oracle_input *in);
void oracle_plan_free(oracle_plan *plan);

static inline bool oracle_is_flat(const oracle_plan *plan)
{
    return plan->in.layer.layout == EPIC_FLAT;
}

/* Returns the number of bytes of an element of this type. */
int64_t oracle_type_bytes(uint32_t type);
double oracle_get(const void *row, uint32_t type, int64_t i);
/* stores an element, rounded to nearest even */
void oracle_put(void *row, uint32_t type, int64_t i, double x);
double oracle_round(uint32_t type, double x);

/* Writes row `row` of the expert outputs of `rank`: that of a choice, or (FLAT) of a token. */
typedef void oracle_fetch(void *self, int rank, int64_t choice_or_token, void *row,
                          float *weight);

/* Writes the combined row of a token: its exact bits to `out`, its float64 value to `truth`,
 * and the largest possible rounding error to `bound`. */
void oracle_combine(const oracle_plan *plan, int64_t token, uint32_t type, int64_t n,
                    oracle_fetch *fetch, void *self, void *out, double *truth, double *bound);

/* Computes w * row, rounded to float32 and then to the type (EPIC_F64: rounded once). */
void oracle_scale(const void *row, float w, uint32_t type, int64_t n, void *out);

float oracle_dot(const void *a, const void *b, uint32_t type, int64_t n);

/* Computes w * row in e4m3 with scales. */
void oracle_quantize(uint32_t how, const void *row, float w, uint32_t type, int64_t n,
                     uint8_t *q, void *scales);
int64_t oracle_scale_bytes(uint32_t how, int64_t n);

/* Allocates zeroed memory for count + 1 elements, so never NULL. Exits if there is no
 * memory. */
void *oracle_zeroed(int64_t count, size_t size);

/* Returns whether the bits are equal; any two NaNs count as equal. */
bool oracle_same(const void *a, const void *b, uint32_t type, int64_t n);

#endif
