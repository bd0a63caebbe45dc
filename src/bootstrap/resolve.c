/* SPDX-License-Identifier: Apache-2.0 */
/* Resolves host names within a time limit. getaddrinfo() has no time limit, and takes many
 * seconds if a name server does not answer. So a separate thread calls it. If the limit passes
 * first, the caller abandons the query, and the thread frees the query when getaddrinfo()
 * returns. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/thread.h"
#include "bootstrap/tcp.h"

#define PAUSE_MS 50

/* One call of getaddrinfo(), shared by the caller and the thread that runs the call. */
typedef struct query {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool is_done;
    bool is_abandoned; /* the caller has returned; the thread frees the query */
    int wrong;         /* result of getaddrinfo(): 0 or an EAI_ code */
    int system_wrong;  /* errno after getaddrinfo() */
    struct addrinfo *found;
    char port[16];
    char name[];
} query;

static const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};

static void free_query(query *q)
{
    if (q->found != NULL) freeaddrinfo(q->found);
    pthread_cond_destroy(&q->changed);
    pthread_mutex_destroy(&q->mutex);
    free(q);
}

/* Runs getaddrinfo() and stores the result. Frees the query if the caller has abandoned it. */
static void *run_query(void *self)
{
    query *q = self;
    struct addrinfo *found = NULL;
    const int wrong = getaddrinfo(q->name, q->port, &hints, &found);
    const int system_wrong = errno;
    pthread_mutex_lock(&q->mutex);
    q->wrong = wrong;
    q->system_wrong = system_wrong;
    q->found = wrong == 0 ? found : NULL;
    q->is_done = true;
    const bool is_abandoned = q->is_abandoned;
    pthread_cond_signal(&q->changed);
    pthread_mutex_unlock(&q->mutex);
    if (is_abandoned) free_query(q);
    return NULL;
}

/* Creates a query. Removes the brackets of an IPv6 address such as "[::1]". Returns NULL if out
 * of memory. */
static query *new_query(const char *name, const char *port)
{
    pthread_condattr_t attributes;
    size_t length = strlen(name);
    if (length > 2 && name[0] == '[' && name[length - 1] == ']' && strchr(name, ':') != NULL) {
        name++;
        length -= 2;
    }
    query *q = calloc(1, sizeof *q + length + 1);
    if (q == NULL) return NULL;
    memcpy(q->name, name, length);
    snprintf(q->port, sizeof q->port, "%s", port);
    pthread_mutex_init(&q->mutex, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&q->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    return q;
}

static bool start_query(query *q)
{
    pthread_t thread;
    return thread_start(&thread, run_query, q) == 0 && pthread_detach(thread) == 0;
}

/* Keeps this library loaded until the process exits, because the thread of an abandoned query
 * may still run the library's code. */
static void stay_loaded(void)
{
    Dl_info info;
    if (dladdr((const void *)(uintptr_t)&run_query, &info) != 0 && info.dli_fname != NULL)
        (void)dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

/* Waits until the query is done. Returns false if the time limit passes first: the query's
 * thread will then free the query, and the caller must not use it any more. */
static bool wait_for_query(query *q, time_limit *limit)
{
    pthread_mutex_lock(&q->mutex);
    for (int ms; !q->is_done && (ms = time_limit_look(limit)) > 0;) {
        const struct timespec until = clock_in_ns(ms * 1000000ll);
        pthread_cond_timedwait(&q->changed, &q->mutex, &until);
    }
    const bool is_done = q->is_done;
    if (!is_done) stay_loaded();
    q->is_abandoned = !is_done;
    pthread_mutex_unlock(&q->mutex);
    return is_done;
}

/* Returns the errno that made getaddrinfo() fail, or 0. getaddrinfo() does not report that no
 * file descriptor was free, so this function opens a file to find out whether a descriptor is
 * free. */
static int find_reason(int wrong, int system_wrong)
{
    const int probe = open("/", O_RDONLY | O_CLOEXEC);
    if (probe < 0 && (errno == EMFILE || errno == ENFILE)) return errno;
    if (probe >= 0) close(probe);
    return wrong == EAI_SYSTEM ? system_wrong : 0;
}

static epic_result fail_unresolved(const epic_tcp *tcp, int wrong, int system_wrong)
{
    const int reason = find_reason(wrong, system_wrong);
    if (reason == EMFILE || reason == ENFILE)
        return epic_fail(EPIC_EDEVICE,
                         "address \"%.200s\" (tcp.address or MASTER_ADDR): %s; raise the limit "
                         "on open files (ulimit -n)",
                         tcp->address, strerror(reason));
    return epic_fail(EPIC_EINVAL, "address \"%.200s\" (tcp.address or MASTER_ADDR): %s",
                     tcp->address, reason != 0 ? strerror(reason) : gai_strerror(wrong));
}

static epic_result fail_late(const epic_tcp *tcp)
{
    return epic_fail(EPIC_ETIMEOUT,
                     "address \"%.200s\" (tcp.address or MASTER_ADDR): no name server answered "
                     "within %u ms: use a numeric address, or check /etc/resolv.conf",
                     tcp->address, tcp->timeout_ms);
}

/* Runs one query. Sets *can_retry to true if another query may succeed. */
static epic_result resolve_once(struct addrinfo **out, const epic_tcp *tcp, const char *port,
                                time_limit *limit, bool *can_retry)
{
    query *q = new_query(tcp->address, port);
    if (q == NULL) return epic_fail(EPIC_ENOMEM, "no memory to resolve an address");
    if (!start_query(q)) run_query(q); /* no thread: resolve here, without a time limit */
    if (!wait_for_query(q, limit)) return fail_late(tcp);
    const int wrong = q->wrong, system_wrong = q->system_wrong;
    *out = q->found;
    q->found = NULL;
    free_query(q);
    *can_retry = wrong == EAI_AGAIN && time_limit_look(limit) > 0;
    return wrong == 0 ? EPIC_OK : fail_unresolved(tcp, wrong, system_wrong);
}

epic_result epic_tcp_resolve(struct addrinfo **out, const epic_tcp *tcp, time_limit *limit)
{
    struct addrinfo numeric = hints;
    char port[16];
    numeric.ai_flags |= AI_NUMERICHOST;
    snprintf(port, sizeof port, "%u", tcp->port);
    if (getaddrinfo(tcp->address, port, &numeric, out) == 0) return EPIC_OK;
    for (;;) {
        bool can_retry = false;
        const epic_result result = resolve_once(out, tcp, port, limit, &can_retry);
        if (!can_retry) return result;
        time_limit_nap(limit, PAUSE_MS);
    }
}
