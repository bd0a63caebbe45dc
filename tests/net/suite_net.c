/* SPDX-License-Identifier: Apache-2.0 */
/* Network namespaces, made with the command ip. A process holds each of them open. */
#include "net/suite_net.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "relay.h"

#define MOST_HOSTS RELAY_MOST_HOSTS

static pid_t holders[MOST_HOSTS];
static int spaces[MOST_HOSTS], bridge = -1; /* descriptors of namespaces */
static int num_held;

/* Runs a shell command without output. */
static bool shell(const char *format, ...)
{
    char line[512], quiet[600];
    va_list list;
    va_start(list, format);
    vsnprintf(line, sizeof line, format, list);
    va_end(list);
    snprintf(quiet, sizeof quiet, "PATH=$PATH:/usr/sbin:/sbin; { %s; } >/dev/null 2>&1", line);
    return system(quiet) == 0;
}

static bool leave_network(void)
{
    return relay_become_root() && unshare(CLONE_NEWNET) == 0;
}

/* UCX looks for interfaces in /sys, which shows those of the namespace in which it was mounted.
 */
static bool see_interfaces(void)
{
    return unshare(CLONE_NEWNS) == 0 &&
           mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
           mount("sysfs", "/sys", "sysfs", 0, NULL) == 0;
}

/* The system marks a link as up some time after that command, and UCX uses only links marked
 * so. */
static bool await_link(void)
{
    for (int i = 0; i < 2000; i++) {
        char state[16] = "";
        FILE *file = fopen("/sys/class/net/net/operstate", "r");
        const bool up = file && fgets(state, sizeof state, file) && !strncmp(state, "up", 2);
        if (file) fclose(file);
        if (up) return true;
        run_nap_us(10000);
    }
    return false;
}

/* Makes the namespace, waits for its link, sets it up, and stays. */
static void hold(int host, const int from[2], const int to[2])
{
    char byte = 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(from[1]);
    close(to[0]);
    if (unshare(CLONE_NEWNET) != 0 || write(to[1], "n", 1) != 1) _exit(1);
    if (read(from[0], &byte, 1) != 1) _exit(1);
    if (!shell("ip addr add 10.83.0.%d/24 dev net && ip link set net up && ip link set lo up",
               host + 1) ||
        !see_interfaces() || !await_link() || write(to[1], "u", 1) != 1)
        _exit(1);
    for (;;) pause();
}

static bool await(int fd, char wanted)
{
    char byte = 0;
    return read(fd, &byte, 1) == 1 && byte == wanted;
}

static bool add_host(int host)
{
    int to[2], from[2];
    char path[64];
    if (pipe(to) != 0 || pipe(from) != 0) return false;
    const pid_t pid = fork();
    if (pid < 0) return false;
    if (pid == 0) hold(host, to, from);
    holders[host] = pid;
    num_held = host + 1;
    close(to[0]);
    close(from[1]);
    snprintf(path, sizeof path, "/proc/%d/ns/net", (int)pid);
    bool good = await(from[0], 'n');
    spaces[host] = good ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    good = good && spaces[host] >= 0 &&
           shell("ip link add to%d type veth peer name net netns %d && "
                 "ip link set to%d master hosts && ip link set to%d up",
                 host, (int)pid, host, host) &&
           write(to[1], "l", 1) == 1 && await(from[0], 'u');
    close(to[1]);
    close(from[0]);
    return good;
}

static bool refuse(const char *what)
{
    printf("left out: hosts in network namespaces, loopback instead: %s\n", what);
    net_close();
    return false;
}

bool net_open(int num_hosts)
{
    if (!shell("command -v ip")) return refuse("there is no ip (Debian: iproute2)");
    if (!leave_network()) return refuse("they may not be made here");
    bridge = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (bridge < 0 || !shell("ip link set lo up")) return refuse("they have no loopback");
    if (!shell("ip link add hosts type bridge && ip link set hosts up"))
        return refuse("the system makes no bridges");
    for (int h = 0; h < num_hosts; h++)
        if (!add_host(h)) return refuse("the system makes no pairs of interfaces");
    return true;
}

/* Returns whether processes see their own interfaces in /sys. In a chroot they do not. */
static bool sees_interfaces(void)
{
    int status = 1;
    const pid_t pid = fork();
    if (pid == 0) _exit(setns(spaces[0], CLONE_NEWNET) == 0 && see_interfaces() ? 0 : 1);
    return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

bool net_open_lossy(int num_hosts, int delay_us, uint32_t losses)
{
    /* the last namespace belongs to this process */
    if (!relay_open(num_hosts + 1, delay_us, losses)) return false;
    for (int h = 0; h < num_hosts; h++) spaces[h] = dup(relay_space(h));
    num_held = num_hosts;
    if (sees_interfaces()) return true;
    net_close();
    return false;
}

void net_close(void)
{
    for (int h = 0; h < num_held; h++) {
        if (holders[h] > 0 && kill(holders[h], SIGKILL) == 0) waitpid(holders[h], NULL, 0);
        if (spaces[h] >= 0) close(spaces[h]);
    }
    num_held = 0;
    if (bridge >= 0) close(bridge);
    bridge = -1;
    relay_close();
}

static void be_host(run_rendezvous *rendezvous, int host, run_body *body, void *self,
                    unsigned seconds)
{
    const epic_bootstrap bootstrap = run_rendezvous_seat(rendezvous, host);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    run_alarm(seconds);
    const bool spaces_made = num_held > 0;
    if (!spaces_made || CHECK(setns(spaces[host], CLONE_NEWNET) == 0 && see_interfaces()))
        body(&bootstrap, self);
    fflush(stdout);
    exit(0);
}

void net_run(int num_hosts, run_body *body, void *self, unsigned victims, unsigned seconds)
{
    pid_t pids[MOST_HOSTS];
    run_rendezvous *rendezvous = run_rendezvous_new(num_hosts);
    for (int h = 0; h < num_hosts; h++) {
        pids[h] = fork();
        if (pids[h] == 0) be_host(rendezvous, h, body, self, seconds);
    }
    for (int h = 0; h < num_hosts; h++) {
        int status = -1;
        const bool ended = pids[h] > 0 && waitpid(pids[h], &status, 0) == pids[h];
        const bool killed = ended && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        CHECK_SAY((ended && status == 0) || (killed && victims >> h & 1),
                  "host %d ended with status %x%s", h, (unsigned)status,
                  WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM ? ": it hung" : "");
    }
    run_rendezvous_free(rendezvous);
}

/* Runs the command on the side of the bridge, in a process of its own. */
static bool on_bridge(const char *command)
{
    int status = 1;
    const pid_t pid = fork();
    if (pid == 0) _exit(setns(bridge, CLONE_NEWNET) == 0 && shell("%s", command) ? 0 : 1);
    return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

static bool set_link(int host, const char *state)
{
    char command[64];
    snprintf(command, sizeof command, "ip link set to%d %s", host, state);
    return CHECK(on_bridge(command));
}

bool net_cut(int host)
{
    return set_link(host, "down");
}

bool net_mend(int host)
{
    return set_link(host, "up");
}
