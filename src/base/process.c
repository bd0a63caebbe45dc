/* SPDX-License-Identifier: Apache-2.0 */
#include "base/process.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

int process_watch(int64_t pid)
{
#ifdef SYS_pidfd_open
    return pid > 0 ? (int)syscall(SYS_pidfd_open, (pid_t)pid, 0) : -1;
#else
    (void)pid;
    return -1;
#endif
}

bool process_ended(int fd, int64_t pid)
{
    struct pollfd sign = {.fd = fd, .events = POLLIN};
    if (fd >= 0) return poll(&sign, 1, 0) > 0;
    return kill((pid_t)pid, 0) != 0 && errno == ESRCH;
}

bool process_may_create_file(int64_t bytes)
{
    struct rlimit limit;
    return getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
           (uint64_t)bytes <= limit.rlim_cur;
}

static _Atomic uint32_t generation;
static pthread_once_t register_once = PTHREAD_ONCE_INIT;
static bool is_counting;
process_list process_groups = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static void begin_child(void)
{
    process_groups = (process_list){.mutex = PTHREAD_MUTEX_INITIALIZER};
    atomic_fetch_add_explicit(&generation, 1, memory_order_relaxed);
}

static void register_fork_handler(void)
{
    is_counting = pthread_atfork(NULL, NULL, begin_child) == 0;
}

bool process_count_forks(void)
{
    pthread_once(&register_once, register_fork_handler);
    return is_counting;
}

uint32_t process_generation(void)
{
    return atomic_load_explicit(&generation, memory_order_relaxed);
}
