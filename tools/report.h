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

/* Prints the variables of EPIC, UCX and NCCL, and those of launchers that EPIC reads. Prints no
 * values of variables that may contain a secret. Prints no other variables. */
void report_variables(FILE *to);

/* Overwrites each secret of the environment that occurs in `text` with asterisks. */
void report_hide_secrets(char *text);

/* Returns the rank of this process according to the variables of its launcher; 0: no launcher. */
int report_rank_of_launcher(void);

/* --------------------------------------------------------------- report_machine.c ---- */

/* Prints versions of EPIC and of the libraries that it uses, this machine, and the limits of
 * this process. */
void report_machine(FILE *to);

#define REPORT_TEXT 64 /* size of a short text */

/* The facts that each rank reports about itself. Ranks send them to rank 0. */
typedef struct report_rank {
    char host[REPORT_TEXT], kernel[REPORT_TEXT], ucx[REPORT_TEXT];
    unsigned version;                /* of EPIC */
    int cores;                       /* cores that the process may use */
    unsigned long long memlock, shm; /* limit of locked memory, and free bytes of /dev/shm */
} report_rank;

void report_fill_rank(report_rank *out);

/* ---------------------------------------------------------------- report_matrix.c ---- */

/* Measures the bandwidth between all ranks of the bootstrap, and prints it if `to` is not NULL.
 * All ranks call it. Ends after about 10 seconds, measured or not. */
void report_matrix(FILE *to, const epic_bootstrap *bootstrap);

/* A way to send bytes between the ranks. All ranks call its functions in the same order. */
typedef struct report_way {
    /* Opens the way for up to `bytes` bytes per rank and step. `local_rank` is the number of
     * this rank on its host. On an error writes the reason to `why`, which has REPORT_WHY
     * bytes. */
    bool (*open)(void **out, const epic_bootstrap *bootstrap, int local_rank, size_t bytes,
                 char *why);
    /* Sends `bytes` bytes from each rank r to rank r + shift, counted modulo the number of
     * ranks. Returns the seconds that it took; 0: not in time, or an error. */
    double (*send)(void *way, int shift, size_t bytes);
    /* Writes the name of the way to `to`, of REPORT_WHY bytes. */
    void (*describe)(void *way, char *to);
    void (*close)(void *way);
    bool is_timed_by_sender; /* false: send() returns the time of what this rank receives */
} report_way;

#define REPORT_WHY 600
#define REPORT_SECONDS 6 /* time for all steps of the matrix */

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
