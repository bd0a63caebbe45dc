/* SPDX-License-Identifier: Apache-2.0 */
/* SIGINT while the main thread waits inside of XLA or of an operator, where Python cannot raise
 * KeyboardInterrupt.
 *
 * The handler tells a thread of epic.endings through a pipe, then does what was done before.  It is
 * put before Python's own once; what the program installs later replaces both. */
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <unistd.h>

#include "epic/epic.h"

static struct sigaction former;
static int told = -1;
static pid_t owner; /* a child has the pipe too, and is not meant */

static void on_interrupt(int number, siginfo_t *info, void *context)
{
    const int error = errno;
    if (getpid() == owner && write(told, "", 1) < 0) errno = error; /* full: it knows */
    errno = error;
    if (former.sa_flags & SA_SIGINFO)
        former.sa_sigaction(number, info, context);
    else
        former.sa_handler(number);
}

static bool is_handled(const struct sigaction *action)
{
    return (action->sa_flags & SA_SIGINFO) ||
           (action->sa_handler != SIG_DFL && action->sa_handler != SIG_IGN);
}

/* A byte goes to the pipe at each SIGINT.  0: so it is; 1: nobody handles SIGINT here. */
EPIC_API int epic_watch_interrupts(int fd)
{
    struct sigaction ours = {0};
    if (sigaction(SIGINT, NULL, &former) || !is_handled(&former)) return 1;
    told = fd;
    owner = getpid();
    ours.sa_sigaction = on_interrupt;
    ours.sa_mask = former.sa_mask;
    ours.sa_flags = former.sa_flags | SA_SIGINFO;
    return sigaction(SIGINT, &ours, NULL) != 0;
}

/* A pending call for Python's main thread: it runs when that thread is not stuck. */
EPIC_API int epic_main_is_alive(void *flag)
{
    *(int *)flag = 1;
    return 0;
}
