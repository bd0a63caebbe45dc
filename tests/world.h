/* SPDX-License-Identifier: Apache-2.0 */
/* A random case: a layer, the routing of all ranks, and what the oracle says about it.  Every
 * rank makes the same world from the same seed, so nobody has to be asked what it brought. */
#ifndef WORLD_H
#define WORLD_H

#include "oracle.h"
#include "run.h"

#define WORLD_MAX_TOKENS 48 /* of a rank */

typedef struct world {
    uint64_t seed;
    int num_ranks;
    epic_layer layer; /* as EPIC is given it */
    int64_t tokens_of[RUN_MAX_RANKS];
    int64_t capacity[RUN_MAX_RANKS];
    int64_t *named;      /* [all tokens, top_k]: the ids that EPIC is given; -1: none */
    int64_t *ids;        /* the same, with replicas: the experts that get the choices */
    int32_t *rank_of;    /* [num_experts] */
    int32_t *logical_of; /* [num_experts]; NULL: no replicas */
    bool table;          /* rank_of is given to EPIC */
    bool wild;           /* rows hold NaN, infinities, subnormals, -0 */
    oracle_plan *plan;
    oracle_plan *alone; /* the same tokens on one rank, or NULL: what sums must equal */
} world;

world *world_new(uint64_t seed, int num_ranks);

/* Tree order, equally many tokens on each rank, and the same tokens for every num_ranks (which
 * divides 8): the sums must be those of one rank. */
world *world_new_tree(uint64_t seed, int num_ranks);

void world_free(world *w);

/* What kind of case it is, in a line on stderr. */
void world_tell(const world *w, const char *what);

/* What ids are below. */
int64_t world_num_ids(const world *w);

/* The first choice of [first, end) whose token has its id already, or -1. */
int64_t world_twin(const world *w, int64_t first, int64_t end);

/* topk_idx of a rank, as EPIC is given it; any negative number may stand for -1. */
void *world_topk_idx(const world *w, int rank, uint32_t index_type);

enum world_stream { /* arrays of rows */
                    STREAM_TOKENS,
                    STREAM_SCALES,
                    STREAM_ROWS, /* the experts' outputs */
                    STREAM_D_OUT,
                    STREAM_D_RECV,
                    STREAM_SUM
};

/* Row `ident` of an array; EPIC_BYTES: n random bytes. */
void world_row(const world *w, enum world_stream stream, int64_t ident, uint32_t type,
               int64_t n, void *row);

/* The weight of a choice; another one for each stream. */
float world_weight(const world *w, enum world_stream stream, int64_t choice);

#endif
