/* SPDX-License-Identifier: Apache-2.0 */
/* Sends bytes between the ranks with puts of the net ucx, from host memory to host memory. The
 * backend hosts sends rows of GPUs with the same puts (net/net.h).
 *
 * In a step each rank sends to one rank, its receiver, and receives from another one, its
 * sender. The inbox of a rank begins with two words that its receiver sets: the first one when
 * the receiver is ready, the second one when it has received everything. The bytes from the
 * sender follow. The value of all words is the number of the step, so a rank has received
 * everything when all words have this value. */
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "info.h"
#include "net/net.h"
#include "net/ucx/nics.h"
#include "report.h"

#define HEADER_WORDS 2
#define STEP_SECONDS 3.0 /* time limit of a step */
#define MOVER_NAP_NS 100000

typedef struct net_way {
    const net_engine *engine;
    net *net;
    int rank, num_ranks;
    uint64_t box_bytes;
    _Atomic uint64_t *inbox;
    uint64_t *outbox;
    uint64_t *num_puts; /* [num_ranks]: number of puts to each rank since the net was opened */
    uint64_t step;      /* number of the current step, from 1 */
    /* The mover is a thread that calls the net between the steps. Without it, bytes that the
     * net has accepted could stay in this process until the next step, while the peers wait for
     * them. */
    pthread_t mover;
    pthread_mutex_t mutex; /* guards the net */
    bool has_mover, is_over;
} net_way;

/* The data that the ranks gather while they open the net. */
typedef struct net_card {
    int64_t is_open;
    char why[NET_WHY_BYTES];
    _Alignas(8) unsigned char handle[NET_HANDLE_BYTES];
} net_card;

static const net_engine *find_engine(void)
{
    static const net_engine *engine;
    char path[INFO_PATH];
    void *handle = engine ? NULL : info_open_plugin(path, "libepic_ucx.so");
    if (handle) engine = dlsym(handle, "epic_net_ucx");
    return engine;
}

bool report_net_is_available(void)
{
    char why[NET_WHY_BYTES];
    const net_engine *engine = find_engine();
    return engine && engine->is_available(why);
}

/* --------------------------------------------------------------------------- one step ---- */

typedef struct net_step {
    int receiver, sender;
    uint64_t words, sent, received; /* numbers of words of the transfer */
    bool has_announced; /* true: the word that this rank is ready was sent to the sender */
    /* true: the word that this rank has received everything was sent to the sender */
    bool has_confirmed;
    double begin, end; /* times of the transfer to the receiver; 0: not yet */
} net_step;

/* Sets a word of the header of the sender's inbox to the number of the step. Returns false if
 * the net accepts no put now. */
static bool send_header(net_way *n, int sender, int word)
{
    const bool good = n->engine->put_word(n->net, sender, (uint64_t)word * 8, n->step);
    n->num_puts[sender] += good;
    return good;
}

/* Sends as many words as the net accepts. */
static void send_words(net_way *n, net_step *s)
{
    const uint64_t most = n->engine->preferred_bytes / 8;
    while (s->sent < s->words) {
        const uint64_t left = s->words - s->sent, count = left < most ? left : most;
        if (!n->engine->put(n->net, s->receiver, (HEADER_WORDS + s->sent) * 8,
                            n->outbox + s->sent, (uint32_t)(count * 8)))
            return;
        n->num_puts[s->receiver]++;
        s->sent += count;
    }
}

static bool is_set(const net_way *n, uint64_t word)
{
    return atomic_load_explicit(&n->inbox[word], memory_order_relaxed) == n->step;
}

/* Performs everything that is possible now. Returns true at the end of the step. */
static bool continue_step(net_way *n, net_step *s)
{
    if (n->engine->progress(n->net) == 0) sched_yield(); /* ranks may share a core */
    if (!s->has_announced) s->has_announced = send_header(n, s->sender, 0);
    if (s->begin == 0 && is_set(n, 0)) s->begin = report_now();
    if (s->begin > 0) send_words(n, s);
    while (s->received < s->words && is_set(n, HEADER_WORDS + s->received)) s->received++;
    if (s->received == s->words && !s->has_confirmed)
        s->has_confirmed = send_header(n, s->sender, 1);
    if (s->end == 0 && is_set(n, 1)) s->end = report_now();
    return s->end > 0 && s->has_confirmed &&
           n->engine->is_done(n->net, s->receiver, n->num_puts[s->receiver]) &&
           n->engine->is_done(n->net, s->sender, n->num_puts[s->sender]);
}

static double run_step(net_way *n, net_step *s)
{
    const double limit = report_now() + STEP_SECONDS;
    for (uint64_t i = 0; i < s->words; i++) n->outbox[i] = n->step;
    while (!continue_step(n, s))
        if (report_now() > limit || n->engine->is_gone(n->net, s->receiver) ||
            n->engine->is_gone(n->net, s->sender))
            return 0;
    return s->end - s->begin;
}

static double copy_own(net_way *n, size_t bytes)
{
    const double begin = report_now();
    memcpy((void *)(n->inbox + HEADER_WORDS), n->outbox, bytes);
    return report_now() - begin;
}

static double net_send(void *way, int shift, size_t bytes)
{
    net_way *n = way;
    net_step s = {.receiver = (n->rank + shift) % n->num_ranks,
                  .sender = (n->rank - shift + n->num_ranks) % n->num_ranks,
                  .words = bytes / 8};
    if (shift == 0) return copy_own(n, bytes);
    pthread_mutex_lock(&n->mutex);
    n->step++;
    const double seconds = run_step(n, &s);
    pthread_mutex_unlock(&n->mutex);
    return seconds;
}

static void *move_net(void *self)
{
    net_way *n = self;
    bool is_over = false;
    while (!is_over) {
        pthread_mutex_lock(&n->mutex);
        n->engine->progress(n->net);
        is_over = n->is_over;
        pthread_mutex_unlock(&n->mutex);
        nanosleep(&(struct timespec){0, MOVER_NAP_NS}, NULL);
    }
    return NULL;
}

/* ---------------------------------------------------------------------- open and close ---- */

static void net_close(void *way)
{
    net_way *n = way;
    if (n->has_mover) {
        pthread_mutex_lock(&n->mutex);
        n->is_over = true;
        pthread_mutex_unlock(&n->mutex);
        pthread_join(n->mover, NULL);
    }
    if (n->net) n->engine->close(n->net);
    pthread_mutex_destroy(&n->mutex);
    free(n->num_puts);
    free(n->outbox);
    free((void *)n->inbox);
    free(n);
}

static net_rdma read_rdma(void)
{
    const char *text = getenv("EPIC_NET_RDMA");
    if (text && !strcmp(text, "0")) return NET_RDMA_NEVER;
    return text && !strcmp(text, "1") ? NET_RDMA_ALWAYS : NET_RDMA_IF_WHOLE;
}

/* Allocates inbox and outbox and opens this rank's end of the net. On an error returns false
 * and stores the reason in the card. */
static bool open_end(net_way *n, net_card *card, int local_rank)
{
    static nics_host host;
    net_setup setup = {.host = n->rank,
                       .num_hosts = n->num_ranks,
                       .rdma = read_rdma(),
                       .inbox_bytes = n->box_bytes,
                       .urgent_bytes = HEADER_WORDS * 8,
                       .outbox_bytes = n->box_bytes};
    if (n->num_ranks > NET_MAX_HOSTS) {
        snprintf(card->why, sizeof card->why, "the group has %d ranks: must be at most %d",
                 n->num_ranks, NET_MAX_HOSTS);
        return false;
    }
    snprintf(card->why, sizeof card->why, "no memory");
    n->inbox = aligned_alloc(4096, n->box_bytes);
    n->outbox = aligned_alloc(4096, n->box_bytes);
    n->num_puts = calloc((size_t)n->num_ranks, sizeof *n->num_puts);
    if (!n->inbox || !n->outbox || !n->num_puts) return false;
    memset((void *)n->inbox, 0, n->box_bytes);
    memset(n->outbox, 0, n->box_bytes);
    setup.inbox = (void *)n->inbox;
    setup.outbox = n->outbox;
    nics_read(&host, "/sys");
    if (host.num_gpus > 0)
        snprintf(setup.gpu, sizeof setup.gpu, "%s",
                 host.gpus[local_rank % host.num_gpus].address);
    return n->engine->open(&n->net, &setup, card->handle, card->why) == EPIC_OK;
}

/* Gathers the cards of all ranks. Returns true if all ranks have opened the net. If not, writes
 * the first rank that has not, and its reason, to `why`. */
static bool agree_on_cards(const epic_bootstrap *bootstrap, const net_card *mine, net_card *all,
                           char *why)
{
    if (bootstrap->gather(bootstrap->self, mine, all, sizeof *mine) != EPIC_OK) {
        snprintf(why, REPORT_WHY, "%s", epic_error(NULL));
        return false;
    }
    for (int r = 0; r < bootstrap->num_ranks; r++) {
        if (all[r].is_open == 1) continue;
        snprintf(why, REPORT_WHY, "net ucx: rank %d: %.250s", r, all[r].why);
        return false;
    }
    return true;
}

/* Connects to all peers, and starts the mover. */
static bool connect_all(net_way *n, net_card *mine, const net_card *all)
{
    unsigned char *handles = calloc((size_t)n->num_ranks, NET_HANDLE_BYTES);
    for (int r = 0; handles && r < n->num_ranks; r++)
        memcpy(handles + (size_t)r * NET_HANDLE_BYTES, all[r].handle, NET_HANDLE_BYTES);
    snprintf(mine->why, sizeof mine->why, "no memory");
    const bool good = handles && n->engine->connect(n->net, handles, mine->why) == EPIC_OK;
    free(handles);
    n->has_mover = good && pthread_create(&n->mover, NULL, move_net, n) == 0;
    return n->has_mover;
}

static bool open_all(net_way *n, const epic_bootstrap *bootstrap, net_card *mine, net_card *all,
                     int local_rank, char *why)
{
    mine->is_open = open_end(n, mine, local_rank);
    if (!agree_on_cards(bootstrap, mine, all, why)) return false;
    mine->is_open = connect_all(n, mine, all);
    return agree_on_cards(bootstrap, mine, all, why);
}

static bool net_open(void **out, const epic_bootstrap *bootstrap, int local_rank, size_t bytes,
                     char *why)
{
    net_way *n = calloc(1, sizeof *n);
    net_card *all = calloc((size_t)bootstrap->num_ranks, sizeof *all);
    net_card mine = {0};
    bool good = false;
    if (n && all) {
        *n = (net_way){.engine = find_engine(),
                       .rank = bootstrap->rank,
                       .num_ranks = bootstrap->num_ranks,
                       .box_bytes = bytes + 4096,
                       .mutex = PTHREAD_MUTEX_INITIALIZER};
        good = open_all(n, bootstrap, &mine, all, local_rank, why);
    }
    free(all);
    if (n && !good) net_close(n);
    *out = n;
    return good;
}

static void net_describe(void *way, char *to)
{
    const net_way *n = way;
    n->engine->describe(n->net, to, REPORT_WHY);
}

const report_way report_way_net = {.open = net_open,
                                   .send = net_send,
                                   .describe = net_describe,
                                   .close = net_close,
                                   .is_timed_by_sender = true};
