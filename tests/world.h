/* SPDX-License-Identifier: Apache-2.0 */
/* A random case: a layer, the routing of all ranks, and the oracle's results for it. Every
 * rank makes the same case from the same seed, so ranks need not exchange their inputs. */
#ifndef WORLD_H
#define WORLD_H

#include "oracles/oracle.h"
#include "run.h"

#define WORLD_MAX_TOKENS 48 /* largest number of tokens per rank */

/* Largest number of choices per rank. For many ranks on devices, the suite lowers it. */
extern int64_t world_most_choices;

/* The seats of a group and its members, in ascending order of their seats. */
typedef struct world_seats {
    int num_seats, num_members;
    int of[RUN_MAX_RANKS]; /* [num_members] */
} world_seats;

/* A rank of a world is a member: its number in a group without vacant seats. */
typedef struct world {
    uint64_t seed;
    int num_ranks;
    world_seats seats;
    epic_layer layer; /* the layer that EPIC gets */
    int64_t tokens_of[RUN_MAX_RANKS];
    int64_t capacity[RUN_MAX_RANKS];
    int64_t *named;      /* [all tokens, top_k]: ids that EPIC gets; -1: no expert */
    int64_t *ids;        /* like `named`, after replicas are resolved to experts */
    int32_t *rank_of;    /* [num_experts]; -1: on a vacant seat */
    int32_t *owner_of;   /* [num_experts]: seats, as EPIC gets them */
    int32_t *logical_of; /* [num_experts]; NULL: no replicas */
    bool table;          /* EPIC gets owner_of */
    bool wild;           /* rows contain NaN, infinities, subnormals and -0 */
    oracle_plan *plan;
    oracle_plan *alone; /* plan of all tokens on one rank, whose sums must be equal; or NULL */
} world;

world *world_new(uint64_t seed, int num_ranks);

/* Makes a case for a group with vacant seats. Some experts may be absent. */
world *world_new_vacant(uint64_t seed, const world_seats *seats);

/* Makes a case with tree order and equally many tokens per rank. The tokens are equal for
 * every num_ranks that divides 8, and the sums must equal those of one rank. world_has_tree()
 * returns whether there are such cases: num_ranks must be a power of two. */
bool world_has_tree(int num_ranks);
world *world_new_tree(uint64_t seed, int num_ranks);

/* Places the members of a case on seats. EPIC then gets the owners of experts as seats. */
void world_take_seats(world *w, const world_seats *seats);

void world_free(world *w);

/* Prints the kind of the case as a line on stderr. */
void world_report(const world *w, const char *what);

/* Returns the number of valid ids. */
int64_t world_num_ids(const world *w);

/* Returns the first choice in [first, end) whose token already has its id, or -1. */
int64_t world_twin(const world *w, int64_t first, int64_t end);

/* Returns topk_idx of a rank as EPIC gets it. Random negative numbers replace -1. */
void *world_topk_idx(const world *w, int rank, uint32_t index_type);

enum world_stream { /* arrays of rows */
                    STREAM_TOKENS,
                    STREAM_SCALES,
                    STREAM_ROWS, /* outputs of the experts */
                    STREAM_D_OUT,
                    STREAM_D_RECV,
                    STREAM_SUM
};

/* Writes row `ident` of an array; EPIC_BYTES: n random bytes. */
void world_row(const world *w, enum world_stream stream, int64_t ident, uint32_t type,
               int64_t n, void *row);

/* Returns the weight of a choice, which differs between arrays. */
float world_weight(const world *w, enum world_stream stream, int64_t choice);

#endif
