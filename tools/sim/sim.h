/* SPDX-License-Identifier: Apache-2.0 */
/* epic-sim: estimates how the bytes and times of plan, dispatch and combine grow with the
 * number of ranks. traffic.c counts the rows that every rank sends: it follows each choice (a
 * token and one of its top_k experts) by the rules of docs/internals/hosts.md. cost.c computes
 * times from these numbers and constants of the machine. */
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
    int64_t experts; /* number of experts, at least one for each rank */
    int top_k;
    /* the experts have a random order, in which expert i has the weight 1 / i^skew */
    double skew;
    /* the experts form `groups` groups, and a token chooses from `limit` of them; 0: no
     * groups */
    int groups, limit;
    const int32_t
        /* [num_traced, top_k] expert ids; token t uses row t % num_traced; NULL: random ids */
        *trace;
    int64_t num_traced;
    uint64_t seed;
} routing;

/* Size of the group. */
typedef struct shape {
    int ranks, ranks_per_host; /* number of ranks in the group, and on each host */
    int64_t tokens;            /* number of tokens of each rank */
} shape;

/* largest number of ranks per host with which the backend `hosts` uses relays (P2P_MAX_RELAYS in
 * kernels/cuda/common/heap.h) */
#define MAX_RELAYS 31

/* Returns true if a row crosses the network once for each host, and a relay (a rank of that host)
 * forwards it. Returns false if a row is sent once to each rank. */
static inline bool has_relays(const shape *s)
{
    return s->ranks_per_host <= MAX_RELAYS && s->ranks % s->ranks_per_host == 0;
}

/* Numbers of rows in one direction: of the rank with the most rows, and the mean over the
 * ranks. */
typedef struct load {
    double most, mean;
} load;

/* Numbers of rows that are sent (out) and received (in) by a rank. */
typedef struct traffic {
    /* number of rows between hosts: one for each pair of a token and another host */
    load net_out, net_in;
    /* For comparison: number of rows between hosts if each row were sent to each rank, not to
     * each host. There is one for each pair of a token and a rank on another host. */
    load by_rank_out, by_rank_in;
    /* number of rows over NVLink, including those that relays forward */
    load inside_out, inside_in;
    load slots; /* number of rows that a rank's experts receive */
    load puts;  /* number of puts, each with up to 16 rows of consecutive tokens */
    double
        /* sum over the tokens of a rank: number of hosts to which the token is sent, including
         * its own; mean over the ranks */
        hosts;
} traffic;

/* Counts the rows. Returns false if out of memory. */
bool traffic_count(const routing *r, const shape *s, traffic *out);

/* Constants of the machine. docs/lab/hosts.md explains where the defaults come from. */
typedef struct constants {
    double nic, nvlink, memory; /* bandwidths in GB/s per rank */
    double launch_us, net_us, put_us;
} constants;

/* Size of a row in bytes, and size of the id and weight that are sent with it for each
 * choice. */
typedef struct bytes_of {
    double row, extra; /* `extra` bytes for each choice */
} bytes_of;

/* Estimated bytes and times of one operation. */
typedef struct cost {
    double net_mb;           /* megabytes of the rank that sends or receives most */
    double plan_us, rows_us; /* times of the plan and of the rows */
    /* number of puts of the proxy thread of the busiest rank, for the plan and for the rows */
    double plan_puts, rows_puts;
    double by_rank_us,
        /* for comparison: rows_us if a row is sent to each rank instead of each host, and if
         * every row is sent to every host */
        dense_us;
    const char *limit; /* name of the part of the machine that determines rows_us */
} cost;

/* Computes bytes and times from counts and constants. */
cost compute_cost(const constants *c, const traffic *t, const shape *s, const routing *r,
                  bytes_of bytes);

/* Draws the times over the number of ranks, as SVG. If the file cannot be written, returns
 * false and sets errno. */
bool draw_picture(const char *path, const shape *shapes, const cost *dispatch,
                  const cost *combine, int num);

void print_published(const constants *c);

#endif
