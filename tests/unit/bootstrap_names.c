/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the addresses of TCP bootstraps: which addresses rank 0 listens on with and without a
 * secret, host names that no server resolves, and names that mean another address on each host.
 * Also tests a libcrypto that cannot be loaded. */
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bootstrap/tcp.h"
#include "check.h"
#include "run.h"

/* ---------------------------------------------------- the system's answers, as we like ---- */

#define DEAD_NAME "no-answer.invalid"

/* the name of this host in this thread; NULL: the real one */
static _Thread_local const char *own_name;
static atomic_int num_dead; /* number of name lookups that block */
static atomic_bool release_dead;

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints,
                struct addrinfo **out)
{
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
    void *const found = dlsym(RTLD_NEXT, "getaddrinfo");
    memcpy(&real, &found, sizeof real);
    const bool numeric = hints->ai_flags & AI_NUMERICHOST;
    if (!numeric && strcmp(name, DEAD_NAME) == 0) {
        atomic_fetch_add(&num_dead, 1);
        while (!release_dead) run_nap_us(10000);
        atomic_fetch_sub(&num_dead, 1);
        return EAI_AGAIN;
    }
    return real(name, service, hints, out);
}

int gethostname(char *name, size_t size)
{
    snprintf(name, size, "%s", own_name != NULL ? own_name : "other");
    return 0;
}

/* ------------------------------------------------------------------------------- ranks ---- */

static uint32_t hold_port(int *holder)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    socklen_t bytes = sizeof at;
    const int one = 1;
    *holder = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(*holder, (struct sockaddr *)&at, sizeof at) == 0);
    getsockname(*holder, (struct sockaddr *)&at, &bytes);
    setsockopt(*holder, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    return ntohs(at.sin_port);
}

static bool answers(const char *address, uint32_t port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    inet_pton(AF_INET, address, &at.sin_addr);
    const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool answered = connect(s, (struct sockaddr *)&at, sizeof at) == 0;
    close(s);
    return answered;
}

typedef struct zero {
    epic_tcp tcp;
    const char *own_name;
    epic_result result;
    char sentence[512];
} zero;

static void *run_zero(void *self)
{
    zero *z = self;
    epic_bootstrap bootstrap;
    own_name = z->own_name;
    z->result = epic_bootstrap_tcp(&bootstrap, &z->tcp);
    snprintf(z->sentence, sizeof z->sentence, "%s", epic_error(NULL));
    epic_bootstrap_close(&bootstrap);
    return NULL;
}

/* Returns an address of this host that is not loopback, as a number, or "" if it has none. */
static void find_public(char address[64])
{
    struct ifaddrs *all = NULL;
    address[0] = '\0';
    if (getifaddrs(&all) != 0) return;
    for (const struct ifaddrs *at = all; at != NULL && address[0] == '\0'; at = at->ifa_next)
        if (at->ifa_addr != NULL && at->ifa_addr->sa_family == AF_INET &&
            (at->ifa_flags & IFF_LOOPBACK) == 0 && (at->ifa_flags & IFF_UP) != 0)
            getnameinfo(at->ifa_addr, sizeof(struct sockaddr_in), address, 64, NULL, 0,
                        NI_NUMERICHOST);
    freeifaddrs(all);
}

/* Which addresses accepted a connection while rank 0 waited. */
typedef struct heard {
    bool loopback, public;
} heard;

static heard knock(zero *z, const char *public)
{
    int holder;
    heard h = {false, false};
    pthread_t thread;
    z->tcp.port = hold_port(&holder);
    pthread_create(&thread, NULL, run_zero, z);
    for (int i = 0; i < 100 && !h.loopback && !h.public; i++) {
        run_nap_us(5000);
        h.loopback = answers("127.0.0.1", z->tcp.port);
        h.public = answers(public, z->tcp.port);
    }
    h.loopback |= answers("127.0.0.1", z->tcp.port);
    pthread_join(thread, NULL);
    close(holder);
    return h;
}

/* While rank 0 waits at `address`, checks whether it listens on loopback and on the public
 * address. On a busy machine the check may come after the deadline. Then it is repeated with
 * more time. */
static void check_listens(const char *address, const char *host, const char *secret,
                          const char *public, bool on_loopback, bool on_public)
{
    zero z = {.own_name = host,
              .tcp = {.address = address, .secret = secret, .num_ranks = 2, .timeout_ms = 700}};
    heard h = knock(&z, public);
    for (; z.tcp.timeout_ms < 20000 && (h.loopback != on_loopback || h.public != on_public);
         h = knock(&z, public))
        z.tcp.timeout_ms *= 4;
    CHECK_SAY(h.loopback == on_loopback && h.public == on_public,
              "%s, %s secret: loopback %d, public %d: %s", address, secret ? "a" : "no",
              h.loopback, h.public, z.sentence);
    CHECK_EQ(z.result, EPIC_ETIMEOUT);
    CHECK_SAY(secret || strstr(z.sentence, "without a secret it listens on loopback alone"),
              "%s", z.sentence);
}

static void test_listening(void)
{
    char public[64];
    find_public(public);
    if (public[0] == '\0') {
        printf("no address but loopback: listening is not tested\n");
        return;
    }
    check_listens(public, NULL, NULL, public, true, false);
    check_listens("127.0.0.1", NULL, NULL, public, true, false);
    check_listens("127.0.0.1", NULL, "hush", public, true, false);
    check_listens(public, NULL, "hush", public, false, true);
    /* the name of this host, which Debian's /etc/hosts maps to a loopback address */
    check_listens("localhost", "localhost", "hush", public, true, true);
    check_listens("localhost", "localhost", NULL, public, true, false);
    check_listens("localhost", "elsewhere", "hush", public, true, false);
}

/* ------------------------------------------------------------------------------ errors ---- */

#define LATE_MS 15000 /* allowed delay on a busy machine */

/* Checks the result, and returns how long the call took in ms. */
static int64_t expect(const epic_tcp *tcp, epic_result result, const char *words,
                      int64_t least_ms)
{
    epic_bootstrap bootstrap;
    const int64_t begin = epic_bootstrap_now_ms();
    const epic_result got = epic_bootstrap_tcp(&bootstrap, tcp);
    const int64_t ms = epic_bootstrap_now_ms() - begin;
    CHECK_SAY(got == result && strstr(epic_error(NULL), words), "%s: %s", epic_result_name(got),
              epic_error(NULL));
    CHECK_SAY(ms >= least_ms && ms < LATE_MS, "%lld ms: %s", (long long)ms, epic_error(NULL));
    epic_bootstrap_close(&bootstrap);
    return ms;
}

/* 203.0.113.0/24 is reserved for documentation, so no host has such an address. */
static void test_other_host(void)
{
    const epic_tcp tcp = {.address = "203.0.113.77",
                          .rank = 1,
                          .num_ranks = 2,
                          .port = 29999,
                          .timeout_ms = 60000};
    expect(&tcp, EPIC_EINVAL, "set the same EPIC_SECRET (tcp.secret) on all ranks", 0);
}

static void test_dead_servers(void)
{
    for (int rank = 0; rank < 2; rank++) {
        const epic_tcp tcp = {.address = DEAD_NAME,
                              .rank = rank,
                              .num_ranks = 2,
                              .port = 29999,
                              .timeout_ms = 500};
        expect(&tcp, EPIC_ETIMEOUT, "no name server answered within 500 ms", 490);
    }
    /* two threads still block in lookups; LeakSanitizer checks their memory */
    CHECK_EQ(num_dead, 2);
    release_dead = true;
    for (int i = 0; i < 500 && num_dead > 0; i++) run_nap_us(10000);
    run_nap_us(50000);
}

/* A program accepts connections and sends nothing. The deadline must end the wait. */
static void test_silence(void)
{
    int holder;
    const uint32_t port = hold_port(&holder);
    CHECK(listen(holder, 5) == 0);
    const epic_tcp tcp = {.rank = 1, .num_ranks = 2, .port = port, .timeout_ms = 800};
    expect(&tcp, EPIC_ETIMEOUT, "rank 0 did not accept", 790);
    close(holder);
}

/* Acts as a rank 0 that admits the rank and then sends nothing. */
static void *let_in(void *self)
{
    const int listener = *(const int *)self;
    epic_hello theirs, ours;
    time_limit limit = time_limit_begin(5000, NULL);
    const int s = accept(listener, NULL, NULL);
    epic_link link = {.socket = s};
    if (recv(s, &theirs, sizeof theirs, MSG_WAITALL) != (ssize_t)sizeof theirs) return NULL;
    epic_frame_make_hello(&ours, 0, theirs.num_ranks, false, &limit);
    (void)epic_frame_send_bytes(s, &ours, sizeof ours, &limit);
    const epic_frame frame = epic_link_make_frame(NULL, EPIC_OK, 0, NULL, 0, &limit);
    epic_message entry = epic_link_message(&link, &frame, NULL);
    (void)epic_link_send_all(&link, &entry, &limit);
    (void)!recv(s, &theirs, sizeof theirs, MSG_WAITALL);
    close(s);
    return NULL;
}

/* Tests that the whole bootstrap has one deadline. Once it ended a second later. */
static void test_silent_zero(void)
{
    int64_t least_ms = LATE_MS;
    for (int i = 0; i < 5 && least_ms >= 3900; i++) {
        int holder;
        pthread_t thread;
        const uint32_t port = hold_port(&holder);
        CHECK(listen(holder, 5) == 0);
        pthread_create(&thread, NULL, let_in, &holder);
        const epic_tcp tcp = {.rank = 1, .num_ranks = 2, .port = port, .timeout_ms = 3000};
        const int64_t ms = expect(&tcp, EPIC_ETIMEOUT, "did not begin the bootstrap", 2990);
        if (ms < least_ms) least_ms = ms;
        pthread_join(thread, NULL);
        close(holder);
    }
    CHECK_SAY(least_ms < 3900, "%lld ms", (long long)least_ms);
}

/* Puts a file that is no library where the loader looks first. Runs in a process of its own,
 * because the loader reads the variable when a program starts. */
static void test_libcrypto(const char *program)
{
    char folder[] = "/tmp/epic-libcrypto-XXXXXX", path[64];
    if (!CHECK(mkdtemp(folder) != NULL)) return;
    snprintf(path, sizeof path, "%s/libcrypto.so.3", folder);
    close(open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    const pid_t child = run_fork();
    if (child == 0) {
        setenv("LD_LIBRARY_PATH", folder, 1);
        execl(program, program, "libcrypto", (char *)NULL);
        _exit(3);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_SAY(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %x", (unsigned)status);
    unlink(path);
    rmdir(folder);
}

static int load_spoiled_libcrypto(void)
{
    const epic_tcp tcp = {.secret = "hush", .num_ranks = 2, .port = 29999, .timeout_ms = 500};
    expect(&tcp, EPIC_ENOTSUP, "libcrypto.so.3: file too short", 0);
    CHECK_SAY(!strstr(epic_error(NULL), "install"), "%s", epic_error(NULL));
    return check_num_failed() ? 1 : 0;
}

int main(int argc, char **argv)
{
    check_begin();
    run_alarm(110);
    if (argc > 1) return load_spoiled_libcrypto();
    test_libcrypto(argv[0]);
    test_listening();
    test_other_host();
    test_dead_servers();
    test_silence();
    test_silent_zero();
    return check_end();
}
