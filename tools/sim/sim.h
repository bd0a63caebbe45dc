/* SPDX-License-Identifier: Apache-2.0 */
/* epic-sim: how bytes and time of an exchange grow with the number of ranks.  `traffic` counts,
 * choice by choice, what docs/internals/hosts.md lets every rank send; `cost` makes times of it from
 * constants. */
#ifndef EPIC_SIM_H
#define EPIC_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define MAX_RANKS 2048
#define MAX_TOP_K 64

typedef struct routing {
    int64_t experts; /* at least one a rank */
    int top_k;
    double skew;          /* weights of experts fall as 1 / place^skew, in an order by chance */
    int groups, limit;    /* a token's experts are in `limit` of the `groups`; 0: anywhere */
    const int32_t *trace; /* [num_traced][top_k] ids, dealt to tokens in turn; NULL: none */
    int64_t num_traced;
    uint64_t seed;
} routing;

typedef struct shape {
    int ranks, a_host; /* ranks in all, and on one host */
    int64_t tokens;    /* of a rank */
} shape;

/* Rows of one direction, of the rank that has most, and in the mean. */
typedef struct load {
    double most, mean;
} load;

typedef struct traffic {
    load net_out, net_in;         /* one row for each token and host */
    load by_rank_out, by_rank_in; /* one row for each token and rank of another host */
    load inside_out, inside_in;   /* by NVLink, relays' rows too */
    load slots;                   /* rows that a rank's experts get */
    load puts;                    /* runs of up to 16 rows of neighbouring tokens */
    double hosts; /* that the tokens of a rank touch, its own too; in the mean */
} traffic;

/* False: no memory. */
bool traffic_count(const routing *r, const shape *s, traffic *out);

typedef struct constants {      /* where each comes from: docs/lab/hosts.md */
    double nic, nvlink, memory; /* GB/s of one rank */
    double launch_us, net_us, put_us;
} constants;

typedef struct bytes_of {
    double row, extra; /* of a row; ids and weights that travel with it, for each choice */
} bytes_of;

typedef struct cost {
    double net_mb;               /* of the rank that sends or receives most */
    double plan_us, rows_us;     /* one after the other */
    double by_rank_us, dense_us; /* rows_us if rows travelled so */
    const char *limit;           /* what rows_us is made of */
} cost;

cost compute_cost(const constants *c, const traffic *t, const shape *s, const routing *r,
                  bytes_of bytes);

/* A picture of what grows: one point for each shape. */
bool draw_picture(const char *path, const shape *shapes, const cost *dispatch,
                  const cost *combine, int num);

/* Published runs beside what the constants give for the same shape. */
void print_published(const constants *c);

#endif
