/* SPDX-License-Identifier: Apache-2.0 */
#include "relay.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "run.h"

#define NETWORK "10.83.0."
#define MOST_BYTES 1600 /* largest packet */
#define MOST_WAIT 16384 /* packets in transit; more are dropped, as in a switch */

typedef struct packet {
    uint64_t due_ns;
    int to;
    ssize_t bytes;
    unsigned char data[MOST_BYTES];
} packet;

static int interfaces[RELAY_MOST_HOSTS], spaces[RELAY_MOST_HOSTS], num_hosts;
static pid_t process = -1;
static relay_count *counted; /* shared; written by the relay process */

/* ------------------------------------------------------------------------ making hosts ---- */

static bool write_file(const char *path, const char *text)
{
    const int fd = open(path, O_WRONLY | O_CLOEXEC);
    const ssize_t length = (ssize_t)strlen(text);
    const bool good = fd >= 0 && write(fd, text, (size_t)length) == length;
    if (fd >= 0) close(fd);
    return good;
}

bool relay_become_root(void)
{
    char map[64];
    const unsigned uid = geteuid(), gid = getegid();
    if (uid == 0) return true;
    if (unshare(CLONE_NEWUSER) != 0) return false;
    write_file("/proc/self/setgroups", "deny");
    snprintf(map, sizeof map, "0 %u 1", uid);
    if (!write_file("/proc/self/uid_map", map)) return false;
    snprintf(map, sizeof map, "0 %u 1", gid);
    return write_file("/proc/self/gid_map", map);
}

static void set_address(struct ifreq *r, const char *address)
{
    struct sockaddr_in in = {.sin_family = AF_INET};
    inet_pton(AF_INET, address, &in.sin_addr);
    memcpy(&r->ifr_addr, &in, sizeof in);
}

/* Sets up an interface of this namespace, with or without an address. */
static bool set_up(const char *name, const char *address)
{
    struct ifreq r = {0};
    const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool good = fd >= 0;
    snprintf(r.ifr_name, sizeof r.ifr_name, "%s", name);
    if (address) {
        set_address(&r, address);
        good = good && ioctl(fd, SIOCSIFADDR, &r) == 0;
        set_address(&r, "255.255.255.0");
        good = good && ioctl(fd, SIOCSIFNETMASK, &r) == 0;
    }
    good = good && ioctl(fd, SIOCGIFFLAGS, &r) == 0;
    r.ifr_flags |= IFF_UP | IFF_RUNNING;
    good = good && ioctl(fd, SIOCSIFFLAGS, &r) == 0;
    if (fd >= 0) close(fd);
    return good;
}

/* Moves this process to a new namespace that contains the interface. */
static bool make_host(int host)
{
    char address[32];
    struct ifreq r = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    snprintf(r.ifr_name, sizeof r.ifr_name, RELAY_INTERFACE);
    snprintf(address, sizeof address, NETWORK "%d", host + 1);
    if (unshare(CLONE_NEWNET) != 0) return false;
    spaces[host] = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    interfaces[host] = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    num_hosts = host + 1;
    return spaces[host] >= 0 && interfaces[host] >= 0 &&
           ioctl(interfaces[host], TUNSETIFF, &r) == 0 && set_up("lo", NULL) &&
           set_up(RELAY_INTERFACE, address);
}

/* -------------------------------------------------------------------------- handing on ---- */

typedef struct queue { /* a ring, because every packet has the same delay */
    packet *packets;
    uint64_t first, end;
} queue;

/* Returns the host that an IPv4 packet is for, or -1. */
static int target_of(const packet *p)
{
    unsigned char network[4];
    inet_pton(AF_INET, NETWORK "0", network);
    if (p->bytes < 20 || p->data[0] >> 4 != 4 || memcmp(p->data + 16, network, 3) != 0)
        return -1;
    const int host = p->data[19] - 1;
    return host >= 0 && host < num_hosts ? host : -1;
}

static void take(queue *q, int fd, int delay_us, uint32_t losses, run_random *random)
{
    packet spare;
    for (int i = 0; i < 64; i++) {
        const bool full = q->end - q->first == MOST_WAIT;
        packet *p = full ? &spare : &q->packets[q->end % MOST_WAIT];
        p->bytes = read(fd, p->data, sizeof p->data);
        if (p->bytes <= 0) return;
        p->to = target_of(p);
        if (p->to < 0) continue;
        p->due_ns = run_now_ns() + (uint64_t)delay_us * 1000;
        const bool lost = full || run_below(random, 1000000) < losses;
        counted->lost += lost;
        q->end += !lost;
    }
}

static void hand_on(queue *q)
{
    for (; q->first < q->end; q->first++) {
        const packet *p = &q->packets[q->first % MOST_WAIT];
        if (p->due_ns > run_now_ns()) return;
        counted->passed += write(interfaces[p->to], p->data, (size_t)p->bytes) == p->bytes;
    }
}

static void relay_all(int delay_us, uint32_t losses)
{
    struct pollfd polls[RELAY_MOST_HOSTS];
    run_random random = {20261123};
    queue q = {.packets = malloc(MOST_WAIT * sizeof *q.packets)};
    if (!q.packets) _exit(1);
    for (int h = 0; h < num_hosts; h++) polls[h] = (struct pollfd){interfaces[h], POLLIN, 0};
    for (;;) {
        const uint64_t now = run_now_ns();
        const uint64_t due = q.first < q.end ? q.packets[q.first % MOST_WAIT].due_ns : 0;
        const struct timespec wait = {.tv_nsec = due > now ? (long)(due - now) : 0};
        if (ppoll(polls, (nfds_t)num_hosts, due ? &wait : NULL, NULL) > 0)
            for (int h = 0; h < num_hosts; h++)
                if (polls[h].revents) take(&q, interfaces[h], delay_us, losses, &random);
        hand_on(&q);
    }
}

/* ----------------------------------------------------------------------------- the API ---- */

static bool refuse(const char *what)
{
    printf("left out: a network that delays and loses packets: %s\n", what);
    relay_close();
    return false;
}

bool relay_open(int hosts, int delay_us, uint32_t losses)
{
    if (!relay_become_root()) return refuse("namespaces may not be made here");
    counted =
        mmap(NULL, sizeof *counted, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (counted == MAP_FAILED) return refuse("there is no memory");
    for (int h = 0; h < hosts && h < RELAY_MOST_HOSTS; h++)
        if (!make_host(h)) return refuse("namespaces with a tun may not be made here");
    process = fork();
    if (process < 0) return refuse("there is no process left");
    if (process > 0) return true;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    /* Requests real-time priority, if permitted. Otherwise a busy machine would look like a
     * network that stops. */
    (void)sched_setscheduler(0, SCHED_RR, &(struct sched_param){.sched_priority = 1});
    relay_all(delay_us, losses);
    _exit(0);
}

int relay_space(int host)
{
    return spaces[host];
}

void relay_name(int host, char *to, int size)
{
    snprintf(to, (size_t)size, "/proc/%d/fd/%d", (int)getpid(), spaces[host]);
}

relay_count relay_counted(void)
{
    return *counted;
}

bool relay_did_lose(relay_count counted, uint32_t losses)
{
    /* the probability of no loss is e^-28 */
    return counted.lost > 0 || (double)counted.passed * losses < 28e6;
}

void relay_close(void)
{
    if (process > 0 && kill(process, SIGKILL) == 0) waitpid(process, NULL, 0);
    process = -1;
    for (int h = 0; h < num_hosts; h++) {
        if (spaces[h] >= 0) close(spaces[h]);
        if (interfaces[h] >= 0) close(interfaces[h]);
    }
    num_hosts = 0;
}
