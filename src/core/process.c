/* SPDX-License-Identifier: Apache-2.0 */
/* Watching processes by pidfd. */
#include "core/process.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
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
