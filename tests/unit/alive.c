/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the page of memory that shows other processes whether a process is alive. */
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/alive.h"
#include "base/process.h"
#include "base/thread.h"
#include "check.h"
#include "run.h"

#define GROUP 0x1234567890abcdefu
#define RANK 3
#define SECOND_US 1000000

/* The page of the child, and the orders that the parent gives to the child. */
typedef struct shared {
    _Atomic int fd; /* alive.fd of the child */
    _Atomic int is_registered;
    _Atomic int is_unregistered;
    _Atomic int order; /* one of the values below */
} shared;
enum { WAIT, UNREGISTER, EXIT };

static shared *with_child;
static alive page_of_child;

static void *owner(void *self)
{
    (void)self;
    alive_register(&page_of_child);
    with_child->is_registered = 1;
    while (with_child->order != UNREGISTER) run_nap_us(1000);
    alive_unregister(&page_of_child);
    with_child->is_unregistered = 1;
    return NULL;
}

/* The child: a thread registers, and the main thread obeys the parent. */
static void be_owner(void)
{
    pthread_t thread;
    alive_create(&page_of_child, GROUP, RANK);
    with_child->fd = page_of_child.fd;
    if (thread_start(&thread, owner, NULL) != 0) _exit(1);
    while (with_child->order != EXIT) run_nap_us(1000);
    exit(0);
}

static bool becomes(_Atomic int *word)
{
    for (int i = 0; i < 10000 && !*word; i++) run_nap_us(1000);
    return *word != 0;
}

/* Starts a child, and waits until it has registered. Returns its pid. */
static pid_t start_child(void)
{
    *with_child = (shared){.fd = -1};
    const pid_t pid = fork();
    if (pid == 0) be_owner();
    CHECK(becomes(&with_child->is_registered));
    return pid;
}

static bool dies_within(const alive_page *page, int us)
{
    for (int i = 0; i < us && !alive_is_dead(page); i += 1000) run_nap_us(1000);
    return alive_is_dead(page);
}

/* A page shows that its process is alive until the process is killed or exits. */
static void show_death(bool kills)
{
    const pid_t pid = start_child();
    const alive_page *page = alive_map(pid, with_child->fd, GROUP, RANK);
    if (CHECK(page != NULL)) {
        CHECK(!dies_within(page, 20000));
        if (kills)
            kill(pid, SIGKILL);
        else
            with_child->order = EXIT;
        CHECK(dies_within(page, 10 * SECOND_US));
        alive_unmap(page);
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

/* After alive_unregister() the process does not count as dead, not even when it is killed. */
static void leave_in_order(void)
{
    const pid_t pid = start_child();
    const alive_page *page = alive_map(pid, with_child->fd, GROUP, RANK);
    with_child->order = UNREGISTER;
    CHECK(becomes(&with_child->is_unregistered));
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    CHECK(page && !alive_is_dead(page));
    alive_unmap(page);
}

/* A page of another group or rank, a file of another kind, and a missing file are no pages. */
static void refuse_others(void)
{
    const pid_t pid = start_child();
    int pipe_fds[2];
    CHECK(alive_map(pid, with_child->fd, GROUP + 1, RANK) == NULL);
    CHECK(alive_map(pid, with_child->fd, GROUP, RANK + 1) == NULL);
    CHECK(alive_map(pid, 1000, GROUP, RANK) == NULL);
    CHECK(alive_map(pid, -1, GROUP, RANK) == NULL);
    CHECK(alive_map(0, with_child->fd, GROUP, RANK) == NULL);
    const int file = memfd_create("no-page", MFD_CLOEXEC);
    CHECK(ftruncate(file, sizeof(alive_page)) == 0);
    CHECK_SAY(alive_map(getpid(), file, 0, 0) == NULL, "a file that can shrink was mapped");
    CHECK(pipe(pipe_fds) == 0);
    CHECK(alive_map(getpid(), pipe_fds[0], GROUP, RANK) == NULL);
    close(pipe_fds[0]);
    close(pipe_fds[1]);
    close(file);
    CHECK(!alive_is_dead(NULL));
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

int main(void)
{
    check_begin();
    with_child = mmap(NULL, sizeof *with_child, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!CHECK(with_child != MAP_FAILED)) return check_end();
    show_death(true);
    show_death(false);
    leave_in_order();
    refuse_others();
    return check_end();
}
