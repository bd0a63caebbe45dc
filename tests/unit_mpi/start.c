/* SPDX-License-Identifier: Apache-2.0 */
/* The backend mpi in a program that does not call MPI but was started by mpirun. Joining starts
 * MPI, and the end of the program ends it; mpirun complains if a rank does not. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/transport.h"
#include "base/error.h"

extern const epic_backend epic_backend_mpi;

#define NEED(what)                                                               \
    do {                                                                         \
        if (what) break;                                                         \
        fprintf(stderr, "%s:%d: not true: %s (%s)\n", __FILE__, __LINE__, #what, \
                epic_error(NULL));                                               \
        exit(1);                                                                 \
    } while (0)

/* Chooses a port that all ranks of this job compute equally and that other jobs on this host
 * are unlikely to use. */
static void choose_port(void)
{
    const char *job = getenv("PMIX_NAMESPACE");
    unsigned long hash = 0;
    for (; job && *job; job++) hash = hash * 131 + (unsigned char)*job;
    char port[16];
    snprintf(port, sizeof port, "%lu", 20000 + hash % 12000);
    setenv("MASTER_PORT", port, 0);
    setenv("MASTER_ADDR", "127.0.0.1", 0);
}

static epic_group *open_group(const epic_bootstrap *bootstrap, uint64_t number)
{
    epic_config config = {
        .num_ranks = (uint32_t)bootstrap->num_ranks, .max_in_flight = 4, .timeout_ms = 5000};
    epic_peer *peers = calloc((size_t)bootstrap->num_ranks, sizeof *peers);
    for (int r = 0; r < bootstrap->num_ranks; r++) peers[r].process[0] = (uint64_t)r;
    char why[256];
    NEED(epic_backend_mpi.can_join(peers, bootstrap->num_ranks, &config, why));
    config.native = peers;
    if (number == 0)
        NEED(!epic_backend_mpi.can_join(peers, bootstrap->num_ranks, &config, why));
    config.native = NULL;
    const epic_join join = {
        .bootstrap = bootstrap, .config = &config, .peers = peers, .group_id = number};
    epic_group *group;
    NEED(epic_backend_mpi.join(&group, &join) == EPIC_OK);
    free(peers);
    return group;
}

static void exchange_notes(epic_group *group, const epic_bootstrap *bootstrap)
{
    const epic_transport *t = epic_backend_mpi.transport;
    const uint64_t no_rank[EPIC_MAX_RANKS / 64] = {0};
    const int op_slot = t->claim(group);
    NEED(op_slot >= 0);
    const epic_op_header mine = {.local = {bootstrap->rank}};
    t->announce(group, op_slot, 7, 0, &mine);
    for (int r = 0, turns = 0; r < bootstrap->num_ranks; r++) {
        if (r == bootstrap->rank) continue;
        const epic_op_header *header;
        while (!(header = t->op_header(group, op_slot, r)) && turns++ < 1000)
            t->wait(group, op_slot, 0, no_rank, 100);
        NEED(header && header->local[0] == r);
    }
    t->finish(group, op_slot);
}

int main(void)
{
    choose_port();
    epic_bootstrap bootstrap;
    NEED(epic_bootstrap_env(&bootstrap) == EPIC_OK);
    for (uint64_t number = 0; number < 3; number++) {
        epic_group *group = open_group(&bootstrap, number);
        exchange_notes(group, &bootstrap);
        epic_backend_mpi.leave(group);
    }
    epic_bootstrap_close(&bootstrap);
    int initialized = 0;
    MPI_Initialized(&initialized);
    NEED(initialized);
    return 0;
}
