/* SPDX-License-Identifier: Apache-2.0 */
/* Expected results of random cases on GPUs: plain loops over the routing of all ranks, as
 * epic.h defines it. Each rank keeps its own part of the case. oracle.h has dot products and
 * e4m3. */
#ifndef EPIC_TEST_ROUTING_H
#define EPIC_TEST_ROUTING_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"

#define ORACLE_RANKS 32

typedef struct routing { /* one case: the inputs of all ranks */
    int num_ranks;
    epic_layer layer; /* the layer with defaults filled in */
    int32_t tokens_of[ORACLE_RANKS];
    int64_t capacity_of[ORACLE_RANKS];
    int64_t *ids[ORACLE_RANKS];   /* [tokens, top_k] */
    int64_t *named[ORACLE_RANKS]; /* with replicas: the logical ids that EPIC gets */
    int32_t *owner;               /* [num_experts] */
    int32_t *logical;             /* [num_experts]; NULL: no replicas */
    bool table;
    /* results: */
    int32_t *slot[ORACLE_RANKS]; /* [tokens, top_k]: slot on the owner, or an EPIC_FATE */
    int32_t *rank[ORACLE_RANKS]; /* [tokens, top_k]: the owner, or -1 */
    int64_t slots_of[ORACLE_RANKS], demand_of[ORACLE_RANKS];
    int64_t rows_of[ORACLE_RANKS]; /* FLAT: slots of each rank */
    int32_t *load, *kept, *begin;  /* [num_experts] */
    int32_t result;
} routing;

/* Sets the experts of the choices, in a layer with replicas. */
void choose_experts(routing *r);

/* Computes the results. free_routing() frees everything, the inputs too. */
void solve_routing(routing *r);
void free_routing(routing *r);

/* Reads and writes element i of a row. */
float get_element(const void *row, int64_t i, uint32_t type);
void put_element(void *row, int64_t i, uint32_t type, float x);
int type_bytes(uint32_t type);
float round_to(float x, uint32_t type);

/* Element i of the combined row of a token. element(rank, slot, i) returns the experts' rows,
 * weight(rank, slot) their weights. */
typedef struct expert_rows {
    float (*element)(const void *self, int rank, int64_t slot, int64_t i);
    float (*weight)(const void *self, int rank, int64_t slot);
    const void *self;
} expert_rows;
float combined_number(const routing *r, int rank, int32_t token, int64_t i, uint32_t type,
                      const expert_rows *rows);

#endif
