/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that all ranks of an MPI job are stopped together. Each group has an mpiexec of its
 * own, whose ranks are this program. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#include "mpiexec.h"
#include "stops.h"

int main(int argc, char **argv)
{
    const stops_way way = {
        .backend = "mpi", .launcher = mpiexec_name(), .groups = 8, .width = 2};
    if (argc == 1) {
        mpiexec_permit();
        return stops_main(&way);
    }
    int level;
    epic_bootstrap bootstrap;
    MPI_Comm comm = MPI_COMM_WORLD;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    if (epic_bootstrap_mpi(&bootstrap, &comm, 20000) != EPIC_OK) {
        fprintf(stderr, "%s\n", epic_error(NULL));
        exit(1);
    }
    stops_be_launched_rank(&way, argv, &bootstrap);
    epic_bootstrap_close(&bootstrap);
    return MPI_Finalize();
}
