/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that epic-info shows, from another process, the operations in which the ranks of a
 * group are stuck. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/recorder.h"
#include "run.h"
#include "sysfs.h"

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

static char program[4096]; /* path of build/bin/epic-info, found from build/tests/unit/info */
static char group[64];
static char output[65536];
static bool damages; /* true: the next rank damages its recording */

static void damage_recording(void);

static void find_program(void)
{
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 64);
    CHECK(length > 0);
    program[length] = 0;
    for (int up = 0; up < 3; up++) *strrchr(program, '/') = 0;
    strcat(program, "/bin/epic-info");
}

/* Runs epic-info, stores its output in `output`, and returns its exit status. */
static int info(const char *arguments)
{
    char command[8192];
    snprintf(command, sizeof command, "'%s' %s 2>&1", program, arguments);
    FILE *pipe = popen(command, "r");
    CHECK(pipe);
    const size_t length = fread(output, 1, sizeof output - 1, pipe);
    output[length] = 0;
    const int status = pclose(pipe);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int info_of_group(const char *more)
{
    char arguments[128];
    snprintf(arguments, sizeof arguments, "--group '%s' %s", group, more);
    return info(arguments);
}

static bool says(const char *words)
{
    if (strstr(output, words)) return true;
    fprintf(stderr, "\"%s\" is not in:\n%s", words, output);
    return false;
}

/* Starts one of four ranks, which finishes one operation, fails in one, and is stuck in the
 * next. */
static pid_t start_rank(uint64_t group_id, int rank)
{
    char byte;
    int opened[2];
    CHECK(pipe(opened) == 0);
    const pid_t pid = run_fork();
    CHECK(pid >= 0);
    if (pid > 0) {
        close(opened[1]);
        CHECK(read(opened[0], &byte, 1) == 1);
        close(opened[0]);
        return pid;
    }
    epic_recorder *r;
    CHECK(recorder_open(&r, group, group_id, rank, 4, "shm", rank ? "" : "ucx \"by hand\"") ==
          EPIC_OK);
    recorder_end(r, recorder_begin(r, EPIC_OP_PLAN, 7, 0, 64), EPIC_OK, NULL);
    recorder_end(r, recorder_begin(r, EPIC_OP_SUM, 9, 0, 8), EPIC_EOVERFLOW, "say \"when\"");
    recorder_phase(r, recorder_begin(r, EPIC_OP_DISPATCH, 7, 1, 4096), RECORDER_MOVING, 3);
    const uint64_t three = 1 << 3, both = 1 << 1 | 1 << 3;
    recorder_add_wait(r, EPIC_OP_DISPATCH, &three, 1500000);
    recorder_add_wait(r, EPIC_OP_PLAN, &three, 500000);
    recorder_add_wait(r, EPIC_OP_PLAN, &both, 250);
    if (damages) damage_recording();
    CHECK(write(opened[1], "", 1) == 1);
    for (;;) pause();
}

static void stop(pid_t pid)
{
    CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid);
}

static void a_stuck_group(void)
{
    const pid_t first = start_rank(7, 0), second = start_rank(7, 2);
    CHECK(info_of_group("") == 0);
    CHECK(says("rank 0 of 4") && says("rank 2 of 4") && says("rank 1, 3"));
    CHECK(says("in flight") && says("tag 7 sequence 1") && says("4096 bytes"));
    CHECK(says("moving rows, waits for rank 3") && says("finished"));
    CHECK(says("EPIC_EOVERFLOW") && says("say \"when\""));
    CHECK(says("\n  to other hosts by ucx \"by hand\"\n"));
    CHECK(says("\n  waited 2.0 ms for rank 3\n"));
    CHECK(says("\nall ranks together waited 4.0 ms for rank 3\n"));

    CHECK(info_of_group("--json") == 0);
    CHECK(says("\"rank\": 2, \"num_ranks\": 4") && says("\"waits_for\": 3"));
    CHECK(says("\"operation\": \"dispatch\", \"tag\": 7, \"sequence\": 1, \"bytes\": 4096"));
    CHECK(says("\"sentence\": \"say \\\"when\\\"\""));
    CHECK(
        says("{\"operation\": \"plan\", \"peer\": 1, \"num_operations\": 1, \"wait_ns\": 250, "
             "\"alone_ns\": 0}"));
    CHECK(
        says("\"peer\": 3, \"num_operations\": 1, \"wait_ns\": 500250, \"alone_ns\": 500000}"));
    CHECK(says("\"net\": \"ucx \\\"by hand\\\"\"") && says("\"net\": \"\""));

    CHECK(info_of_group("--chrome") == 0);
    CHECK(says("{\"displayTimeUnit\": \"ns\", \"traceEvents\": [\n{\"ph\": \"M\""));
    CHECK(says("\"name\": \"plan\", \"cat\": \"epic\", \"pid\": 0, \"tid\": 7, \"ts\": "));
    CHECK(says("\"name\": \"dispatch, in flight\", \"cat\": \"epic\", \"pid\": 2, "));
    CHECK(says("\"sequence\": 1, \"bytes\": 4096, \"waits_for\": 3}}\n]}\n"));

    stop(first);
    CHECK(info_of_group("") == 0 && says("rank 0, 1, 3") && says("rank 2 of 4"));
    stop(second);
    CHECK(info_of_group("") == 1 && says("no rank of group"));
}

/* The choice of a NIC for each GPU is printed, and whether the user's choice replaces it. */
static void nics_of_a_machine(void)
{
    char root[256], arguments[300];
    sysfs_begin(root, sizeof root);
    snprintf(arguments, sizeof arguments, "--sysfs %s", root);
    unsetenv("UCX_NET_DEVICES");
    CHECK(info(arguments) == 0 && says("NICs          no GPU of NVIDIA\n"));
    sysfs_add_gpu(root, "pci0000:10/0000:10:01.0/0000:18:00.0", 0);
    CHECK(info(arguments) == 0 && says("GPU 0000:18:00.0: no active RDMA NIC\n"));
    sysfs_add_port(root, "pci0000:10/0000:10:01.0/0000:19:00.0", 0, "mlx5_3", 1, "4: ACTIVE",
                   "InfiniBand", "400 Gb/sec (4X NDR)");
    CHECK(info(arguments) == 0 && says("chosen for each GPU, by topology:\n"));
    CHECK(says("GPU 0000:18:00.0: mlx5_3:1, 400 Gb/s, InfiniBand, same PCIe switch\n"));
    setenv("UCX_NET_DEVICES", "mlx5_9:1", 1);
    CHECK(info(arguments) == 0 && says("UCX_NET_DEVICES=mlx5_9:1 replaces EPIC's choice:\n"));
    unsetenv("UCX_NET_DEVICES");
    CHECK(info("--sysfs") == 2 && says("--sysfs needs a folder"));
    snprintf(arguments, sizeof arguments, "--sysfs %s --group a", root);
    CHECK(info(arguments) == 2 && says("must be without --group"));
    snprintf(arguments, sizeof arguments, "--sysfs %s/none", root);
    CHECK(info(arguments) == 2 && says("there is no folder ") && says("/none"));
    sysfs_end(root);
}

/* If two jobs have groups with one name, each is shown separately, with its own missing ranks.
 */
static void two_of_a_name(void)
{
    const pid_t ranks[] = {start_rank(7, 0), start_rank(0xabcd, 0), start_rank(0xabcd, 3),
                           start_rank(7, 1)};
    CHECK(info_of_group("") == 0);
    CHECK(says("id 0000000000000007\nrank 0 of 4") && says("id 000000000000abcd\nrank 0 of 4"));
    CHECK(says("rank 2, 3\n") && says("rank 1, 2\n"));
    CHECK(info_of_group("--json") == 0);
    CHECK(says("\"group_id\": \"0000000000000007\", \"rank\": 1"));
    CHECK(says("\"group_id\": \"000000000000abcd\", \"rank\": 3"));
    for (int i = 0; i < 4; i++) stop(ranks[i]);
}

/* A group name with terminal control codes is cleaned, and letters of other languages stay. */
static void a_hostile_name(void)
{
    snprintf(group, sizeof group, "a\033[2Jb\nc\177\302\233d\377\303\244-%d", (int)getpid());
    const pid_t rank = start_rank(7, 0);
    CHECK(info_of_group("") == 0);
    CHECK(says("group \"a\\x1b[2Jb\\x0ac\\x7f\\xc2\\x9bd\\xff\303\244-"));
    CHECK(info_of_group("--json") == 0);
    CHECK(says("\"a\\u001b[2Jb\\u000ac\\u007f\\u00c2\\u009bd\\u00ff\303\244-"));
    CHECK(info("--group missing") == 1 && says("group found: \"a\\x1b[2Jb\\x0ac"));
    stop(rank);
}

/* Opens this process's recording as another process can, and writes times that are as far apart
 * as possible. */
static void damage_recording(void)
{
    char path[64], link[256];
    for (int fd = 0; fd < 64; fd++) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        const ssize_t length = readlink(path, link, sizeof link - 1);
        if (length <= 0 || strncmp(link, "/memfd:epic:", 12)) continue;
        recorder_page *page =
            mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        CHECK(page != MAP_FAILED);
        page->opened_ns = INT64_MIN;
        for (int i = 0; i < 3; i++) {
            recorder_entry entry = {.start_ns = INT64_MIN,
                                    .end_ns = i == 2 ? 0 : INT64_MAX - i};
            if (i == 1) entry.start_ns = INT64_MAX;
            uint64_t words[RECORDER_WORDS];
            memcpy(words, &entry, sizeof entry);
            for (size_t w = 0; w < RECORDER_WORDS; w++) page->records[i].words[w] = words[w];
        }
        return;
    }
    CHECK(!"the recording was found");
}

static void a_damaged_recording(void)
{
    damages = true;
    const pid_t rank = start_rank(7, 0);
    damages = false;
    CHECK(info_of_group("") == 0 && says("opened 0.0 us ago"));
    CHECK(info_of_group("--json") == 0 && says("\"elapsed_ns\": 0"));
    CHECK(info_of_group("--chrome") == 0 && says("\"dur\": 0.000"));
    stop(rank);
}

static void usage(void)
{
    CHECK(info("--help") == 0 && says("usage:"));
    CHECK(info("--group") == 2 && says("usage:"));
    CHECK(info("--chrome") == 2 && info("--json") == 2 && info("--nonsense") == 2 &&
          says("--nonsense"));
    CHECK(setenv("EPIC_NET", "a\nwire", 1) == 0 && unsetenv("EPIC_HOST") == 0);
    CHECK(info("") == 0 && says("epic ") && says("(chosen)") && says("cores"));
    CHECK(says("backend hosts") && says("net ucx ") && says("EPIC_NET a\\x0awire ("));
    CHECK(says("EPIC_HOST is not set (") && says("EPIC_NET_RDMA") && says("EPIC_NET_RELAY") &&
          says("EPIC_NET_MEMORY"));
}

int main(void)
{
    find_program();
    snprintf(group, sizeof group, "info-test-%d", (int)getpid());
    a_stuck_group();
    nics_of_a_machine();
    two_of_a_name();
    a_damaged_recording();
    usage();
    a_hostile_name();
    return 0;
}
