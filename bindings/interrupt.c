/* SPDX-License-Identifier: Apache-2.0 */
/* Reports SIGINT to a Python thread, because Python cannot raise KeyboardInterrupt while its
 * main thread waits inside XLA or an operator.
 *
 * The signal handler writes a byte to a pipe that a thread of epic.endings reads. Then it calls
 * the handler that was installed before it. If the program later installs a handler of its own,
 * neither of these two handlers runs any more. */
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <unistd.h>

#include "epic/epic.h"

static struct sigaction former; /* the handler that was installed before this one */
static int pipe_end = -1;       /* write end of the pipe */
/* process that installed the handler; a forked child must not write to its parent's pipe */
static pid_t owner;

static void on_interrupt(int number, siginfo_t *info, void *context)
{
    const int error = errno;
    /* if the pipe is full, the write fails, which is no error: the reader has bytes to read */
    if (getpid() == owner && write(pipe_end, "", 1) < 0) errno = error;
    errno = error;
    if (former.sa_flags & SA_SIGINFO)
        former.sa_sigaction(number, info, context);
    else
        former.sa_handler(number);
}

/* Returns true if the action calls a function, and false for SIG_DFL and SIG_IGN. */
static bool is_handled(const struct sigaction *action)
{
    return (action->sa_flags & SA_SIGINFO) ||
           (action->sa_handler != SIG_DFL && action->sa_handler != SIG_IGN);
}

/* Installs the handler, which writes a byte to the pipe `fd` at each SIGINT. Returns 0 on
 * success. Returns 1 if no function handled SIGINT before, or if the handler cannot be
 * installed. */
EPIC_API int epic_watch_interrupts(int fd)
{
    struct sigaction ours = {0};
    if (sigaction(SIGINT, NULL, &former) || !is_handled(&former)) return 1;
    pipe_end = fd;
    owner = getpid();
    ours.sa_sigaction = on_interrupt;
    ours.sa_mask = former.sa_mask;
    ours.sa_flags = former.sa_flags | SA_SIGINFO;
    return sigaction(SIGINT, &ours, NULL) != 0;
}

/* Sets *flag to 1. Registered as a pending call of Python (Py_AddPendingCall), which only the
 * main thread runs. So *flag shows whether the main thread still executes Python code. */
EPIC_API int epic_main_is_alive(void *flag)
{
    *(int *)flag = 1;
    return 0;
}
