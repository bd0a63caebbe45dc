/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the report that `epic-info --report` writes: it has no secrets, only its owner can read
 * it, its table has an entry for each pair of ranks, and missing ranks are named in time. */
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "run.h"
#include "unit/tools.h"

#define REPORT "report.txt"

/* Clears the environment of a command: no variable of this process reaches it. */
#define CLEAN "env -i PATH=/usr/bin:/bin "

/* Runs epic-info as all ranks of a group. Each rank has the variables `more`. Returns the
 * status of rank 0, and stores the report in `output`. */
static int report_group(int num_ranks, const char *more)
{
    char command[8192];
    snprintf(command, sizeof command,
             "cd '%s'; for rank in $(seq %d -1 0); do " CLEAN
             "RANK=$rank WORLD_SIZE=%d MASTER_ADDR=127.0.0.1 MASTER_PORT=%u UCX_TLS=tcp "
             "UCX_NET_DEVICES=lo %s '%s/epic-info' --report " REPORT " >printed.$rank 2>&1 & "
             "done; wait $!",
             folder, num_ranks - 1, num_ranks, run_free_port(), more, programs);
    const int status = system(command);
    output[bytes_of(REPORT, (unsigned char *)output, sizeof output - 1)] = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int report_alone(const char *more, const char *path)
{
    char command[8192], text[256];
    snprintf(command, sizeof command, "cd '%s' && " CLEAN "%s '%s/epic-info' --report %s 2>&1",
             folder, more, programs, path);
    FILE *pipe = popen(command, "r");
    if (!CHECK(pipe != NULL)) return -1;
    *output = 0;
    while (fgets(text, sizeof text, pipe))
        if (strlen(output) + sizeof text < sizeof output) strcat(output, text);
    const int status = pclose(pipe);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void read_report(const char *name)
{
    output[bytes_of(name, (unsigned char *)output, sizeof output - 1)] = 0;
}

/* Returns the mode of a file of the test. */
static unsigned mode_of(const char *name)
{
    char path[128];
    struct stat about = {0};
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return stat(path, &about) == 0 ? about.st_mode & 07777 : 0;
}

/* ----------------------------------------------------------------------------- secrets ---- */

/* Every variable that may hold a secret is planted with the same word, and the word is not in
 * the report. Variables of other programs are not in it either. */
static void test_secrets(void)
{
    static const char planted[] =
        "EPIC_SECRET=plantedword EPIC_API_KEY=plantedword EPIC_net_token=plantedword "
        "UCX_PASSWORD=plantedword UCX_AUTH=plantedword NCCL_ANY=plantedword "
        "NCCL_SECRET_KEY=plantedword SLURM_JWT=plantedword HF_TOKEN=plantedword "
        "AWS_SECRET_ACCESS_KEY=plantedword WANDB_API_KEY=plantedword PGPASSWORD=plantedword "
        "EPIC_HOST=with-plantedword-inside EPIC_NET=plantedword "
        "UCX_NET_DEVICES=plantedword UCX_PROXY=http://user:otherword@host "
        "EPIC_TRACE='http://host/?a=1&Token=otherword' "
        "PMIX_SECURITY_MODE=otherword HOME=/otherword MY_PROGRAM=otherword ";
    CHECK_EQ(report_alone(planted, REPORT), 0);
    read_report(REPORT);
    CHECK(strstr(output, "plantedword") == NULL && strstr(output, "otherword") == NULL);
    CHECK(says("EPIC_SECRET: set, not shown\n") && says("EPIC_API_KEY: set, not shown\n"));
    CHECK(says("UCX_PASSWORD: set, not shown\n") && says("NCCL_ANY: set, not shown\n"));
    CHECK(says("EPIC_HOST: set, not shown\n") && says("UCX_PROXY: set, not shown\n"));
    CHECK(says("EPIC_TRACE: set, not shown\n"));
    CHECK(!strstr(output, "HF_TOKEN") && !strstr(output, "MY_PROGRAM"));
    /* the error of the group contains two secrets that overlap */
    CHECK_EQ(report_alone("A_TOKEN=plantedlonger B_TOKEN=longerstill "
                          "RANK=0 WORLD_SIZE=2 MASTER_PORT=plantedlongerstill",
                          REPORT),
             0);
    read_report(REPORT);
    CHECK(says("MASTER_PORT: set, not shown\n") && says("******************"));
    CHECK(!strstr(output, "planted") && !strstr(output, "longer") && !strstr(output, "still"));
}

static void test_contents(void)
{
    CHECK_EQ(report_alone("EPIC_NET_WINDOW=77 UCX_TLS='a\tb' RANK=0 WORLD_SIZE=1", REPORT), 0);
    CHECK(says("the report is in " REPORT));
    read_report(REPORT);
    CHECK(says("EPIC_NET_WINDOW=77\n") && says("UCX_TLS=a\\x09b\n") && says("WORLD_SIZE=1\n"));
    CHECK(says("epic          0.") && says("build         ") && says("libc          glibc "));
    CHECK(says("kernel        Linux ") && says("NUMA node 0") && says("locked memory"));
    CHECK(says("/dev/shm") && says("== GPUs\n") && says("interface lo") && says("one rank"));
}

/* -------------------------------------------------------------------------------- file ---- */

static void test_file(void)
{
    CHECK_EQ(report_alone("", ""), 0); /* the default name */
    CHECK_EQ(mode_of("epic-report.txt"), 0600);
    FILE *older = create("older.txt");
    for (int i = 0; i < 10000 && older; i++) fputs("older words\n", older);
    if (older) fclose(older);
    CHECK_EQ(report_alone("", "older.txt"), 0);
    CHECK_EQ(mode_of("older.txt"), 0600);
    read_report("older.txt");
    CHECK(!strstr(output, "older words"));

    CHECK_EQ(report_alone("", "none/report.txt"), 1);
    CHECK(
        says("the report cannot be written to \"none/report.txt\": No such file or directory"));
    CHECK(says("pass the path of a file in a folder that you may write"));
    CHECK_EQ(report_alone("", "."), 1);
    CHECK(says("Is a directory"));
    char path[128];
    snprintf(path, sizeof path, "%s/link", folder);
    CHECK_EQ(symlink("older.txt", path), 0);
    CHECK_EQ(report_alone("", "link"), 1);
    CHECK(says("Too many levels of symbolic links"));
    CHECK_EQ(report_alone("", "/dev/null"), 1);
    CHECK(says("\"/dev/null\": Invalid argument"));
    CHECK_EQ(report_alone("", "-"), 0);
    CHECK(says("Report of epic-info") && says("\n== Variables") && !says("the report is in"));
    CHECK_EQ(mode_of("-"), 0);
    CHECK_EQ(report_alone("", "a --json"), 2);
    CHECK(says("--report: must be without other options"));
}

/* epic-info refuses a file that belongs to another user, even if everyone may write to it, and
 * leaves its contents. */
static void test_file_of_another(void)
{
    char path[4200];
    snprintf(path, sizeof path, "%s/epic-info", programs);
    const int program = open(path, O_RDONLY);
    int status = -1;
    if (geteuid() != 0) {
        printf(
            "left out: a file of another user, because only root can start as another one\n");
        return;
    }
    FILE *file = create("another.txt");
    CHECK(file && program >= 0 && fputs("precious\n", file) >= 0);
    CHECK(file && fchmod(fileno(file), 0666) == 0);
    if (file) fclose(file);
    CHECK_EQ(chmod(folder, 0777), 0);
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        char *arguments[] = {"epic-info", "--report", "another.txt", NULL};
        char *variables[] = {NULL};
        if (chdir(folder) == 0 && setgid(65534) == 0 && setuid(65534) == 0)
            fexecve(program, arguments, variables);
        _exit(127);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    read_report("another.txt");
    CHECK(!strcmp(output, "precious\n"));
    close(program);
}

/* ----------------------------------------------------------------------------- several ---- */

/* Returns the number of entries of the table that are numbers above 0. */
static int count_rates(int num_ranks)
{
    int num = 0;
    const char *line = strstr(output, "-: not measured\n");
    for (int row = -1; line && row < num_ranks; row++) {
        line = strchr(line, '\n') + 1;
        char *at;
        if (row < 0) continue;
        CHECK_EQ(strtol(line, &at, 10), row);
        for (int column = 0; column < num_ranks; column++) num += strtod(at, &at) > 0;
        CHECK(*at == '\n');
    }
    return num;
}

static void test_matrix(int num_ranks)
{
    char last[32];
    snprintf(last, sizeof last, "\nrank %-4d host ", num_ranks - 1);
    CHECK_EQ(report_group(num_ranks, "EPIC_SECRET=plantedword"), 0);
    CHECK(says("by epic_dispatch of backend shm") && says("\nrank 0    host ") && says(last));
    CHECK_EQ(count_rates(num_ranks), num_ranks * num_ranks);
    CHECK(says("\nmedian: ") && says("lowest: ") && !strstr(output, "plantedword"));
    CHECK_EQ(mode_of(REPORT), 0600);
    CHECK_EQ(report_group(num_ranks, "EPIC_HOST=%r EPIC_BACKEND=gpu"), 0);
    if (strstr(output, "UCX none")) {
        printf("left out: the bandwidth over UCX, because there is no UCX\n");
        return;
    }
    CHECK(says("by ucx ") && says("tcp/lo"));
    CHECK_EQ(count_rates(num_ranks), num_ranks * num_ranks);
}

/* If a rank does not come, rank 0 writes which one, and the rest of the report. */
static void test_missing(void)
{
    char more[256];
    const uint64_t begin = run_now_ns();
    snprintf(more, sizeof more,
             "EPIC_TIMEOUT_MS=1500 RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=%u",
             run_free_port());
    CHECK_EQ(report_alone(more, REPORT), 0);
    CHECK((run_now_ns() - begin) / 1000000 < 20000);
    read_report(REPORT);
    CHECK(says("no group: ") && says("rank 1") && says("kernel        Linux "));
    snprintf(more, sizeof more,
             "EPIC_TIMEOUT_MS=1500 RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=%u",
             run_free_port());
    CHECK_EQ(report_alone(more, "other.txt"), 1);
    CHECK(says("no report, because this is not rank 0") && mode_of("other.txt") == 0);
}

int main(void)
{
    check_begin();
    tools_begin();
    test_secrets();
    test_contents();
    test_file();
    test_file_of_another();
    test_matrix(2);
    test_matrix(3);
    test_missing();
    tools_end();
    return check_end();
}
