/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of the report that `epic-info --report` writes. */
#ifndef EPIC_REPORT_H
#define EPIC_REPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <time.h>

#include "epic/epic.h"

/* ------------------------------------------------------------- report_variables.c ---- */

/* Prints the variables of EPIC, UCX and NCCL, and the launcher variables that EPIC reads, but
 * no values of variables that may contain a secret. */
void report_variables(FILE *to);

/* Replaces each secret of the environment that occurs in `text` by asterisks. */
void report_hide_secrets(char *text);

/* Returns the rank of this process according to the variables of its launcher, or 0 if there is
 * no launcher. */
int report_rank_of_launcher(void);

/* --------------------------------------------------------------- report_machine.c ---- */

/* Prints versions of EPIC and of the libraries that it uses, this machine, and the limits of
 * this process. */
void report_machine(FILE *to);

#define REPORT_TEXT 64 /* size of a short text */

/* The facts that each rank reports about itself. Ranks send them to rank 0. */
typedef struct report_rank {
    char host[REPORT_TEXT], kernel[REPORT_TEXT], ucx[REPORT_TEXT];
    unsigned version; /* version of EPIC */
    int cores;        /* number of cores that the process may use */
    /* limit of locked memory, and free space of /dev/shm, in bytes */
    unsigned long long memlock, shm;
} report_rank;

void report_fill_rank(report_rank *out);

/* ---------------------------------------------------------------- report_matrix.c ---- */

/* Measures the bandwidth between all ranks of the bootstrap, and prints it if `to` is not NULL.
 * Collective. Stops after about 10 seconds, even if it is not finished. */
void report_matrix(FILE *to, const epic_bootstrap *bootstrap);

/* A way to send bytes between the ranks. All ranks call its functions in the same order. */
typedef struct report_way {
    /* Opens the way for up to `bytes` bytes per rank and step. `local_rank` is the index of
     * this rank on its host. On an error writes the reason to `why`, which has REPORT_WHY
     * bytes. */
    bool (*open)(void **out, const epic_bootstrap *bootstrap, int local_rank, size_t bytes,
                 char *why);
    /* Sends `bytes` bytes from each rank r to rank r + shift, modulo the number of ranks.
     * Returns the time in seconds, or 0 on a timeout or error. */
    double (*send)(void *way, int shift, size_t bytes);
    /* Writes the name of the way to `to`, which has REPORT_WHY bytes. */
    void (*describe)(void *way, char *to);
    void (*close)(void *way);
    bool is_timed_by_sender; /* false: send() returns the time of what this rank receives */
} report_way;

#define REPORT_WHY 600
#define REPORT_SECONDS 6 /* time limit in seconds for all steps of the matrix */

extern const report_way report_way_group; /* a group of a host backend */
extern const report_way report_way_net;   /* the net that the backend hosts uses */

/* Returns true if the net ucx can be used in this process. */
bool report_net_is_available(void);

/* Returns the time in seconds of a clock that never goes back. */
static inline double report_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

#endif
