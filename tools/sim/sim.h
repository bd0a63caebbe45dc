/* SPDX-License-Identifier: Apache-2.0 */
/* epic-sim: estimates how bytes and time of an exchange grow with the number of ranks.
 * traffic.c counts, choice by choice, the rows that every rank sends by the rules of
 * docs/internals/hosts.md. cost.c computes times from these counts and machine constants. */
#ifndef EPIC_SIM_H
#define EPIC_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define MAX_RANKS 2048
#define MAX_TOP_K 64

/* How tokens choose experts. */
typedef struct routing {
    int64_t experts; /* at least one per rank */
    int top_k;
    double skew;       /* expert number i of a random order has the weight 1 / i^skew */
    int groups, limit; /* a token's experts are in `limit` of the `groups`; 0: no groups */
    const int32_t
        *trace; /* [num_traced, top_k] ids; tokens use the rows in turn; NULL: random ids */
    int64_t num_traced;
    uint64_t seed;
} routing;

/* Size of the group. */
typedef struct shape {
    int ranks, a_host; /* ranks in all, and on one host */
    int64_t tokens;    /* tokens of each rank */
} shape;

/* Rows in one direction: of the rank that has the most, and the mean over ranks. */
typedef struct load {
    double most, mean;
} load;

/* Rows that are sent and received. */
typedef struct traffic {
    load net_out, net_in;         /* one row for each token and host */
    load by_rank_out, by_rank_in; /* one row for each token and rank of another host */
    load inside_out, inside_in;   /* over NVLink, including rows that relays forward */
    load slots;                   /* rows that a rank's experts receive */
    load puts;                    /* puts, each of up to 16 rows of consecutive tokens */
    double
        hosts; /* sum over a rank's tokens of the hosts that each goes to, its own included; mean over ranks */
} traffic;

/* Counts the rows. Returns false if there is no memory. */
bool traffic_count(const routing *r, const shape *s, traffic *out);

/* Constants of the machine. docs/lab/hosts.md explains where the defaults come from. */
typedef struct constants {
    double nic, nvlink, memory; /* GB/s per rank */
    double launch_us, net_us, put_us;
} constants;

/* Bytes of a row, and of the id and weight that are sent with it for each choice. */
typedef struct bytes_of {
    double row, extra; /* extra: for each choice */
} bytes_of;

/* Estimated bytes and times of one operation. */
typedef struct cost {
    double net_mb;           /* MB of the rank that sends or receives most */
    double plan_us, rows_us; /* the plan, then the rows */
    double by_rank_us,
        dense_us; /* rows_us with one row per rank, and with every row sent to every host */
    const char *limit; /* what determines rows_us */
} cost;

/* Computes bytes and times from counts and constants. */
cost compute_cost(const constants *c, const traffic *t, const shape *s, const routing *r,
                  bytes_of bytes);

/* Draws times over the number of ranks as SVG. Returns false with errno if the file cannot
 * be written. */
bool draw_picture(const char *path, const shape *shapes, const cost *dispatch,
                  const cost *combine, int num);

/* Prints published measurements next to what the constants give for the same shape. */
void print_published(const constants *c);

#endif
