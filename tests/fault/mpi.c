/* SPDX-License-Identifier: Apache-2.0 */
/* Tests faults on backend mpi. Each fault has an mpiexec of its own, whose ranks are this
 * program. If the launcher ends all ranks when one is killed, no rank is killed. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "faults.h"
#include "mpiexec.h"

#define FAULTS 24
#define BOOTSTRAP_MS 20000

static epic_bootstrap bootstrap_over(const MPI_Comm *comm)
{
    epic_bootstrap bootstrap = {0};
    if (*comm == MPI_COMM_NULL || epic_bootstrap_mpi(&bootstrap, comm, BOOTSTRAP_MS) == EPIC_OK)
        return bootstrap;
    fprintf(stderr, "%s\n", epic_error(NULL));
    exit(1);
}

/* At its end MPI would wait for the dead rank, so the rank ends without MPI_Finalize. */
static void be_rank(const faults_way *way, char **arguments)
{
    int level, rank;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    const faults_rank *self = faults_rank_of(way, arguments);
    MPI_Comm all = MPI_COMM_WORLD, left;
    MPI_Comm_split(MPI_COMM_WORLD, faults_rank_dies(self, rank) ? MPI_UNDEFINED : 0, rank,
                   &left);
    const epic_bootstrap first = bootstrap_over(&all), again = bootstrap_over(&left);
    faults_be_rank(self, &first, &again);
    _exit(0);
}

int main(int argc, char **argv)
{
    const char *mpiexec = mpiexec_name();
    const char *const plain[] = {mpiexec, NULL};
    const char *const recovering[] = {mpiexec, "--enable-recovery", NULL};
    const char *known = getenv("EPIC_FAULT_RECOVERY"); /* set by the test for its ranks */
    const bool deaths = known ? *known == '1' : mpiexec_recovers();
    const faults_way way = {.backend = "mpi",
                            .processes = true,
                            .deaths = deaths,
                            .launcher = deaths ? recovering : plain};
    if (argc > 1) be_rank(&way, argv);
    mpiexec_permit();
    setenv("EPIC_FAULT_RECOVERY", deaths ? "1" : "0", 1);
    if (!deaths) printf("no rank is killed: %s would end the others too\n", mpiexec);
    return faults_main(&way, FAULTS, 1);
}
