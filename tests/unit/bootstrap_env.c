/* SPDX-License-Identifier: Apache-2.0 */
/* Tests bootstraps that the environment describes: the variables that launchers set, and
 * incomplete sets of them. */
#include <netinet/in.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "epic/epic.h"
#include "run.h"

typedef struct row {
    const char *settings; /* in the form "NAME=value NAME=value" */
    epic_result result;
    const char *words[3]; /* words that the error must contain */
} row;

/* Bootstraps of more than one rank end with EPIC_ETIMEOUT here, because no rank 0 listens. */
static const row rows[] = {
    {"", EPIC_OK, {0}},
    {"EPIC_SECRET=hush", EPIC_OK, {0}},
    {"RANK=0 WORLD_SIZE=1", EPIC_OK, {0}},
    {"RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500", EPIC_OK, {0}},
    {"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", EPIC_OK, {0}},
    {"PMI_RANK=0 PMI_SIZE=1", EPIC_OK, {0}},

    {"RANK=1", EPIC_EINVAL, {"RANK is set and WORLD_SIZE is not"}},
    {"WORLD_SIZE=2", EPIC_EINVAL, {"WORLD_SIZE is set and RANK is not"}},
    {"RANK=1 OMPI_COMM_WORLD_SIZE=2", EPIC_EINVAL, {"RANK is set and WORLD_SIZE is not"}},
    {"OMPI_COMM_WORLD_RANK=1", EPIC_EINVAL, {"OMPI_COMM_WORLD_SIZE is not"}},
    {"PMI_SIZE=1", EPIC_EINVAL, {"PMI_RANK is not"}},
    {"MASTER_PORT=29500", EPIC_EINVAL, {"MASTER_PORT is set", "RANK and WORLD_SIZE are not"}},
    {"MASTER_ADDR=127.0.0.1", EPIC_EINVAL, {"MASTER_ADDR is set"}},
    {"RANK=1 WORLD_SIZE=2", EPIC_EINVAL, {"WORLD_SIZE is 2", "MASTER_PORT is not set"}},
    {"RANK=1 WORLD_SIZE=2 MASTER_PORT=1", EPIC_EINVAL, {"MASTER_ADDR is not set"}},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1", EPIC_EINVAL, {"MASTER_PORT is not set"}},
    {"PMI_RANK=1 PMI_SIZE=2", EPIC_EINVAL, {"PMI_SIZE is 2", "MASTER_PORT is not set"}},
    {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1",
     EPIC_EINVAL,
     {"OMPI_COMM_WORLD_SIZE is 2", "MASTER_PORT is not set"}},

    {"RANK=2 WORLD_SIZE=2", EPIC_EINVAL, {"RANK is \"2\"", "from 0 to 1"}},
    {"RANK=-1 WORLD_SIZE=2", EPIC_EINVAL, {"RANK is \"-1\"", "from 0 to 1"}},
    {"RANK= WORLD_SIZE=2", EPIC_EINVAL, {"RANK is \"\""}},
    {"RANK=0x1 WORLD_SIZE=2", EPIC_EINVAL, {"RANK is \"0x1\""}},
    {"RANK=+1 WORLD_SIZE=2", EPIC_EINVAL, {"RANK is \"+1\""}},
    {"RANK=1.0 WORLD_SIZE=2", EPIC_EINVAL, {"RANK is \"1.0\""}},
    {"RANK=1, WORLD_SIZE=2", EPIC_EINVAL, {"RANK is \"1,\""}},
    {"RANK=0 WORLD_SIZE=0", EPIC_EINVAL, {"WORLD_SIZE is \"0\"", "from 1 to 65536"}},
    {"RANK=0 WORLD_SIZE=65537", EPIC_EINVAL, {"WORLD_SIZE is \"65537\""}},
    {"RANK=0 WORLD_SIZE=18446744073709551618", EPIC_EINVAL, {"WORLD_SIZE is \"184467"}},
    {"RANK=0 WORLD_SIZE=many", EPIC_EINVAL, {"WORLD_SIZE is \"many\""}},
    {"RANK=0 WORLD_SIZE=1 MASTER_PORT=65536", EPIC_EINVAL, {"MASTER_PORT is \"65536\""}},
    {"RANK=0 WORLD_SIZE=1 MASTER_PORT=0", EPIC_EINVAL, {"MASTER_PORT is \"0\"", "from 1 to"}},
    {"RANK=0 WORLD_SIZE=1 EPIC_TIMEOUT_MS=soon", EPIC_EINVAL, {"EPIC_TIMEOUT_MS is \"soon\""}},
    {"RANK=0 WORLD_SIZE=1 EPIC_TIMEOUT_MS=", EPIC_OK, {0}},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 EPIC_SECRET=",
     EPIC_EINVAL,
     {"EPIC_SECRET", "empty"}},

    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.2 MASTER_PORT=1 EPIC_TIMEOUT_MS=50",
     EPIC_ETIMEOUT,
     {"rank 0 did not accept rank 1 at 127.0.0.2, port 1 within 50 ms"}},
    {"OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 MASTER_PORT=1 EPIC_TIMEOUT_MS=50",
     EPIC_ETIMEOUT,
     {"accept rank 2 at 127.0.0.1, port 1"}},
    {"PMI_RANK=2 PMI_SIZE=3 MASTER_PORT=1 EPIC_TIMEOUT_MS=50",
     EPIC_ETIMEOUT,
     {"accept rank 2"}},
    {"RANK=1 WORLD_SIZE=2 PMI_RANK=0 PMI_SIZE=9 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 "
     "EPIC_TIMEOUT_MS=50",
     EPIC_ETIMEOUT,
     {"accept rank 1"}},
    {"MV2_COMM_WORLD_RANK=2 MV2_COMM_WORLD_SIZE=3 MASTER_PORT=1 EPIC_TIMEOUT_MS=50",
     EPIC_ETIMEOUT,
     {"accept rank 2"}},
    {"JSM_NAMESPACE_RANK=0 JSM_NAMESPACE_SIZE=2", EPIC_EINVAL, {"MASTER_PORT is not set"}},
    {"FLUX_TASK_RANK=0 FLUX_JOB_SIZE=1", EPIC_OK, {0}},

    /* torchrun, whose store may itself listen on MASTER_PORT */
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 "
     "TORCHELASTIC_USE_AGENT_STORE=True EPIC_TIMEOUT_MS=50",
     EPIC_ETIMEOUT,
     {"127.0.0.1, port 17919 within"}},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=15000 "
     "TORCHELASTIC_USE_AGENT_STORE=True EPIC_TIMEOUT_MS=50",
     EPIC_ETIMEOUT,
     {"127.0.0.1, port 15001 within"}},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 "
     "TORCHELASTIC_USE_AGENT_STORE=False EPIC_TIMEOUT_MS=50",
     EPIC_ETIMEOUT,
     {"127.0.0.1, port 1 within"}},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 TORCHELASTIC_USE_AGENT_STORE=True",
     EPIC_EINVAL,
     {"MASTER_PORT is not set"}},

    /* variables that show several ranks, but not how many */
    {"PMIX_RANK=1",
     EPIC_EINVAL,
     {"PMIX_RANK is 1", "RANK and WORLD_SIZE", "epic_bootstrap_mpi"}},
    {"PMIX_RANK=0", EPIC_EINVAL, {"PMIX_RANK is 0", "RANK=0 WORLD_SIZE=1"}},
    {"PALS_RANKID=3", EPIC_EINVAL, {"PALS_RANKID is 3"}},
    {"ALPS_APP_PE=3", EPIC_EINVAL, {"ALPS_APP_PE is 3"}},
    {"JOB_COMPLETION_INDEX=0", EPIC_EINVAL, {"JOB_COMPLETION_INDEX is 0"}},
    {"JOB_COMPLETION_INDEX=3 RANK=0 WORLD_SIZE=1", EPIC_OK, {0}},
    {"PMIX_RANK=x", EPIC_EINVAL, {"PMIX_RANK is \"x\""}},
    {"PMIX_RANK=2 OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 MASTER_PORT=1 "
     "EPIC_TIMEOUT_MS=50",
     EPIC_ETIMEOUT,
     {"accept rank 2"}},

    /* two launchers whose variables contradict each other */
    {"RANK=0 WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4",
     EPIC_EINVAL,
     {"WORLD_SIZE is 1", "OMPI_COMM_WORLD_SIZE is 4", "unset"}},
    {"RANK=0 WORLD_SIZE=1 PMIX_RANK=1", EPIC_EINVAL, {"WORLD_SIZE is 1", "PMIX_RANK is 1"}},
    {"RANK=0 WORLD_SIZE=1 SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=2",
     EPIC_EINVAL,
     {"WORLD_SIZE is 1", "SLURM_NTASKS is 2"}},
    {"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 SLURM_PROCID=1 SLURM_NTASKS=2",
     EPIC_EINVAL,
     {"OMPI_COMM_WORLD_SIZE is 1", "SLURM_PROCID is 1"}},
    {"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 PMI_RANK=0 PMI_SIZE=2 MASTER_PORT=1",
     EPIC_EINVAL,
     {"OMPI_COMM_WORLD_SIZE is 4", "PMI_SIZE is 2"}},
    {"PMI_RANK=1 PMI_SIZE=4 PMIX_RANK=2 MASTER_PORT=1",
     EPIC_EINVAL,
     {"PMI_RANK is 1", "PMIX_RANK is 2"}},
    {"SLURM_PROCID=1 SLURM_STEP_ID=0 SLURM_NTASKS=2 PMIX_RANK=5",
     EPIC_EINVAL,
     {"SLURM_PROCID is 1", "PMIX_RANK is 5"}},
    {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 SLURM_PROCID=1 SLURM_STEP_ID=0 "
     "SLURM_NTASKS=2 MASTER_PORT=1 EPIC_TIMEOUT_MS=50", /* srun started the daemons of mpirun */
     EPIC_ETIMEOUT,
     {"accept rank 3"}},
    {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 FLUX_TASK_RANK=0 FLUX_JOB_SIZE=1 "
     "MASTER_PORT=1 EPIC_TIMEOUT_MS=50", /* mpirun in a script that flux started */
     EPIC_ETIMEOUT,
     {"accept rank 3"}},

    /* srun, sbatch, salloc */
    {"SLURM_PROCID=0 SLURM_NTASKS=1", EPIC_OK, {0}},
    {"SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=4", EPIC_OK, {0}},
    {"SLURM_PROCID=0 SLURM_NTASKS=4", EPIC_EINVAL, {"SLURM_NTASKS is 4", "srun"}},
    {"SLURM_NTASKS=4", EPIC_EINVAL, {"SLURM_NTASKS is 4", "RANK=0 WORLD_SIZE=1"}},
    {"SLURM_NTASKS=4 SLURM_PROCID=0 RANK=0 WORLD_SIZE=1", EPIC_OK, {0}},
    {"SLURM_NTASKS=4 SLURM_PROCID=0 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1",
     EPIC_OK,
     {0}},
    {"SLURM_NTASKS=4 SLURM_PROCID=0 PMIX_RANK=1", EPIC_EINVAL, {"PMIX_RANK is 1"}},
    {"SLURM_PROCID=1", EPIC_EINVAL, {"SLURM_PROCID is set and SLURM_STEP_NUM_TASKS is not"}},
    {"SLURM_PROCID=2 SLURM_NTASKS=2", EPIC_EINVAL, {"SLURM_PROCID is \"2\"", "from 0 to 1"}},
    {"SLURM_PROCID=1 SLURM_NTASKS=2", EPIC_EINVAL, {"SLURM_STEP_NODELIST", "MASTER_ADDR"}},
    {"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NODELIST=n[1-2]",
     EPIC_EINVAL,
     {"SLURM_JOB_ID", "MASTER_PORT"}},
    {"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=7 SLURM_STEP_NODELIST=n[1-2",
     EPIC_EINVAL,
     {"SLURM_STEP_NODELIST is \"n[1-2\"", "MASTER_ADDR"}},
    {"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=7 SLURM_STEP_NODELIST=127.0.[0-1].[2-9,11] "
     "SLURM_STEP_RESV_PORTS=1-4 EPIC_TIMEOUT_MS=50",
     EPIC_ETIMEOUT,
     {"accept rank 1 at 127.0.0.2, port 1 within"}},
    {"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_NODELIST=127.0.0.3,n4 MASTER_PORT=1 "
     "EPIC_TIMEOUT_MS=50",
     EPIC_ETIMEOUT,
     {"127.0.0.3, port 1 within"}},
    {"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=n1 "
     "SLURM_JOB_ID=7 EPIC_TIMEOUT_MS=50",
     EPIC_ETIMEOUT,
     {"127.0.0.1, port"}},
    {"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NODELIST=n1 MASTER_ADDR=127.0.0.5 "
     "SLURM_JOB_ID=7 EPIC_TIMEOUT_MS=50",
     EPIC_ETIMEOUT,
     {"127.0.0.5, port"}},
};

static void set_environment(const char *settings)
{
    char copy[512];
    clearenv();
    snprintf(copy, sizeof copy, "%s", settings);
    for (char *at = strtok(copy, " "); at != NULL; at = strtok(NULL, " ")) {
        char *value = strchr(at, '=');
        *value++ = '\0';
        setenv(at, value, 1);
    }
}

static int check(const row *r)
{
    epic_bootstrap bootstrap;
    set_environment(r->settings);
    setenv("EPIC_TIMEOUT_MS", "1000", 0); /* default for rows that do not set it */
    const epic_result result = epic_bootstrap_env(&bootstrap);
    bool good = result == r->result;
    for (int i = 0; i < 3 && good; i++)
        good = r->words[i] == NULL || strstr(epic_error(NULL), r->words[i]) != NULL;
    if (good && result == EPIC_OK) {
        int mine = 5, all = 0;
        good = bootstrap.rank == 0 && bootstrap.num_ranks == 1 &&
               bootstrap.gather(bootstrap.self, &mine, &all, sizeof all) == EPIC_OK && all == 5;
    }
    epic_bootstrap_close(&bootstrap);
    if (!good)
        printf("\"%s\": %s: %s\n", r->settings, epic_result_name(result), epic_error(NULL));
    return !good;
}

/* Starts three processes that have only their environment. The formats take rank and port. If
 * torchrun's store is to listen on this port, the test listens there. */
static const char *const launched[] = {
    "RANK=%d WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=%d EPIC_SECRET=hush "
    "EPIC_TIMEOUT_MS=5000",
    "RANK=%d WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=%d EPIC_TIMEOUT_MS=5000 "
    "TORCHELASTIC_USE_AGENT_STORE=True",
    "PMI_RANK=%d PMI_SIZE=3 MASTER_PORT=%d EPIC_TIMEOUT_MS=5000",
    "SLURM_PROCID=%d SLURM_NTASKS=3 SLURM_STEPID=0 SLURM_STEP_NODELIST=127.0.0.[1,3] "
    "SLURM_STEP_RESV_PORTS=%d-65535 EPIC_TIMEOUT_MS=5000",
    "SLURM_PROCID=%d SLURM_JOB_ID=%d SLURM_STEP_ID=4 SLURM_STEP_NUM_TASKS=3 SLURM_NTASKS=64 "
    "SLURM_NNODES=1 EPIC_TIMEOUT_MS=5000",
};
#define NUM_LAUNCHED (sizeof launched / sizeof *launched)

static int join(const char *format, int rank, int port)
{
    epic_bootstrap bootstrap;
    char settings[256];
    int32_t all[3] = {0};
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    snprintf(settings, sizeof settings, format, rank, port);
#pragma GCC diagnostic pop
    set_environment(settings);
    epic_result result = epic_bootstrap_env(&bootstrap);
    if (result == EPIC_OK)
        result = bootstrap.gather(bootstrap.self, &bootstrap.rank, all, sizeof *all);
    const bool right = all[0] == 0 && all[1] == 1 && all[2] == 2;
    if (result != EPIC_OK) printf("rank %d, port %d: %s\n", rank, port, epic_error(NULL));
    epic_bootstrap_close(&bootstrap);
    return result == EPIC_OK && right ? 0 : 1;
}

static int check_processes(const char *format)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof at;
    const int one = 1;
    int failed = 0;

    /* No other program can use the port while this socket is open: it is bound exclusively
     * first, then shared with rank 0. */
    const int holder = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bind(holder, (struct sockaddr *)&at, sizeof at);
    getsockname(holder, (struct sockaddr *)&at, &bytes);
    setsockopt(holder, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (strstr(format, "AGENT_STORE=True") != NULL && listen(holder, 1) != 0) return 1;
    fflush(stdout);
    for (int r = 0; r < 3; r++)
        if (run_fork() == 0) exit(join(format, r, ntohs(at.sin_port)));
    for (int r = 0; r < 3; r++) {
        int status;
        wait(&status);
        failed += status != 0;
    }
    close(holder);
    return failed;
}

int main(void)
{
    int failures = 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) failures += check(&rows[i]);

    for (size_t i = 0; i < NUM_LAUNCHED; i++) failures += check_processes(launched[i]);
    return failures == 0 ? 0 : 1;
}
