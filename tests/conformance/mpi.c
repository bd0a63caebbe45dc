/* SPDX-License-Identifier: Apache-2.0 */
/* The suite on the backend mpi. This process is one rank; `mpirun -n N mpi` starts N. The
 * backend gets a communicator; with the argument "world" it uses MPI_COMM_WORLD. */
#include <mpi.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "run.h"
#include "suite.h"

/* MPI counts in int, which is large enough for what the bootstrap gathers. */
static epic_result gather(void *self, const void *mine, void *all, int64_t bytes)
{
    const int count = (int)bytes;
    if (MPI_Allgather(mine, count, MPI_BYTE, all, count, MPI_BYTE, *(MPI_Comm *)self))
        return EPIC_EDEVICE;
    return EPIC_OK;
}

/* Rank 0 prints the checks of all ranks. */
static int finish(int rank)
{
    long mine[2] = {check_num_passed(), check_num_failed()}, all[2] = {0, 0};
    MPI_Allreduce(mine, all, 2, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    MPI_Finalize();
    if (rank == 0) printf("%ld passed, %ld failed\n", all[0], all[1]);
    return all[1] ? 1 : 0;
}

int main(int argc, char **argv)
{
    int level, rank, num_ranks;
    check_begin();
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &num_ranks);
    if (level < MPI_THREAD_MULTIPLE) {
        MPI_Finalize();
        return check_skip("this MPI has no MPI_THREAD_MULTIPLE");
    }
    if (num_ranks > RUN_MAX_RANKS) {
        MPI_Finalize();
        return check_skip("too many ranks for this test");
    }
    run_alarm((unsigned)(110 * (run_scale() > 1 ? run_scale() : 1)));
    MPI_Comm bootstrap_comm, lent;
    MPI_Comm_dup(MPI_COMM_WORLD, &bootstrap_comm);
    MPI_Comm_dup(MPI_COMM_WORLD, &lent);
    const epic_bootstrap bootstrap = {
        .rank = rank, .num_ranks = num_ranks, .gather = gather, .self = &bootstrap_comm};
    if (rank == 0) printf("seed %llu\n", (unsigned long long)run_seed());
    suite_rank("mpi", &bootstrap, argc > 1 && strcmp(argv[1], "world") == 0 ? NULL : &lent);
    MPI_Comm_free(&lent);
    MPI_Comm_free(&bootstrap_comm);
    return finish(rank);
}
