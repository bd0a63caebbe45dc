/* SPDX-License-Identifier: Apache-2.0 */
/* A strand of the engine ucx.  UCX picks the network.  Where every lane to a peer is a
 * remote write of RDMA, which keeps words whole, rows go by that; over anything else, TCP above
 * all, whose bytes come as they please (memcpy writes some of them twice), they go in active
 * messages, and the receiver's thread copies them into its inbox a word at a time. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <ucp/api/ucp.h>

#include "base/clock.h"
#include "net/strands/strands.h"
#include "net/ucx/lanes.h"

#define DEPTH 256     /* puts to a host that are under way; more come again later */
#define MESSAGE 1     /* the id of ours */
#define MOST_TURNS 64 /* of UCX's in one look */
#define FLUSH_MS 1000 /* how long close waits for what is under way */

/* What a message begins with; a word is all header. */
typedef struct header {
    uint64_t token; /* of the receiver */
    uint64_t to;
    uint64_t value; /* of a word */
} header;

typedef struct parcel {
    header header;
    bool left;
} parcel;

typedef struct peer {
    ucp_ep_h endpoint; /* NULL: none */
    ucp_rkey_h key;    /* of its inbox; NULL: reached by messages */
    uint64_t token, inbox;
    bool gone;
    uint64_t given, finished; /* parcels; those below `finished` have left */
    parcel parcels[DEPTH];
} peer;

struct net {
    net_setup setup;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_mem_h inbox, outbox;
    uint64_t token, domains; /* which those are registered with */
    const char *segment;     /* of TCP; "": there is none */
    peer peers[NET_MAX_HOSTS];
};

typedef struct card {
    uint64_t token, inbox, inbox_bytes;
    uint32_t address_bytes, key_bytes; /* of what lies in `bytes`, one after the other */
    char segment[16];
    unsigned char bytes[NET_CARD_BYTES - 48];
} card;
_Static_assert(sizeof(card) == NET_CARD_BYTES, "a card is what the bootstrap carries");

static epic_result refused(char *why, const char *what, ucs_status_t status)
{
    snprintf(why, NET_WHY, "net \"ucx\": %s: %s", what, ucs_status_string(status));
    if (status == UCS_ERR_UNSUPPORTED) return EPIC_ENOTSUP;
    return status == UCS_ERR_NO_MEMORY ? EPIC_ENOMEM : EPIC_EDEVICE;
}

#define UCX(call, what)                                                  \
    do {                                                                 \
        const ucs_status_t ucx_status = (call);                          \
        if (ucx_status != UCS_OK) return refused(why, what, ucx_status); \
    } while (0)

/* ------------------------------------------------------------------------- receiving ---- */

static void store_words(void *to, const void *from, size_t bytes)
{
    uint64_t word;
    for (size_t i = 0; i < bytes / 8; i++) {
        memcpy(&word, (const char *)from + 8 * i, 8);
        __atomic_store_n((uint64_t *)to + i, word, __ATOMIC_RELAXED);
    }
}

/* Whoever finds the port may send something: what lacks our token, or a place, is passed over. */
static ucs_status_t take(void *self, const void *head, size_t head_bytes, void *data,
                         size_t bytes, const ucp_am_recv_param_t *param)
{
    const net *w = self;
    header h;
    if (head_bytes != sizeof h || param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) return UCS_OK;
    memcpy(&h, head, sizeof h);
    const size_t count = bytes ? bytes : sizeof h.value;
    const uint64_t room = w->setup.inbox_bytes;
    if (h.token != w->token || (h.to | count) % 8 || count > room || h.to > room - count)
        return UCS_OK;
    store_words((char *)w->setup.inbox + h.to, bytes ? data : &h.value, count);
    return UCS_OK;
}

/* ---------------------------------------------------------------------------- opening ---- */

static epic_result map(net *w, void *memory, uint64_t bytes, ucp_mem_h *out, char *why)
{
    const ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = memory,
        .length = bytes,
        .memory_type = w->setup.on_gpu ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST};
    UCX(ucp_mem_map(w->context, &params, out), "registering memory");
    return EPIC_OK;
}

static epic_result new_worker(net *w, char *why)
{
    const ucp_worker_params_t worker = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                        .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    const ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = MESSAGE,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = take,
        .arg = w};
    UCX(ucp_worker_create(w->context, &worker, &w->worker), "ucp_worker_create");
    UCX(ucp_worker_set_am_recv_handler(w->worker, &handler), "active messages");
    return EPIC_OK;
}

/* Appends to the card what UCX has packed. */
static bool append(card *c, uint32_t *length, const void *bytes, size_t count)
{
    const size_t used = (size_t)c->address_bytes + c->key_bytes;
    if (count > sizeof c->bytes - used) return false;
    memcpy(c->bytes + used, bytes, count);
    *length = (uint32_t)count;
    return true;
}

static epic_result write_card(net *w, card *c, char *why)
{
    ucp_address_t *address;
    void *key;
    size_t address_bytes, key_bytes;
    c->token = w->token;
    c->inbox = (uint64_t)(uintptr_t)w->setup.inbox;
    c->inbox_bytes = w->setup.inbox_bytes;
    snprintf(c->segment, sizeof c->segment, "%s", w->segment);
    UCX(ucp_worker_get_address(w->worker, &address, &address_bytes), "the worker's address");
    bool fits = append(c, &c->address_bytes, address, address_bytes);
    ucp_worker_release_address(w->worker, address);
    UCX(ucp_rkey_pack(w->context, w->inbox, &key, &key_bytes), "a key of the inbox");
    fits = fits && append(c, &c->key_bytes, key, key_bytes);
    w->domains = ucx_domains(key, key_bytes);
    ucp_rkey_buffer_release(key);
    if (fits) return EPIC_OK;
    snprintf(why, NET_WHY,
             "net \"ucx\": address and key take %zu bytes, a card has %zu; use fewer devices "
             "(UCX_NET_DEVICES)",
             address_bytes + key_bytes, sizeof c->bytes);
    return EPIC_ENOTSUP;
}

static epic_result prepare(net *w, card *c, char *why)
{
    const net_setup *s = &w->setup;
    if (getrandom(&w->token, sizeof w->token, 0) != (ssize_t)sizeof w->token)
        return refused(why, "random bytes", UCS_ERR_IO_ERROR);
    UCX(ucx_new_context(&w->context, &w->segment, s->puts == NET_PUT_IF_WHOLE), "ucp_init");
    if (s->on_gpu && !ucx_may_reach_gpus(w->context))
        return refused(why, "memory of a GPU", UCS_ERR_UNSUPPORTED);
    epic_result result = map(w, s->inbox, s->inbox_bytes, &w->inbox, why);
    if (result == EPIC_OK)
        result = map(w, (void *)(uintptr_t)s->outbox, s->outbox_bytes, &w->outbox, why);
    if (result == EPIC_OK) result = new_worker(w, why);
    return result == EPIC_OK ? write_card(w, c, why) : result;
}

static void close_net(net *w);

static epic_result open_net(net **out, const net_setup *setup, void *bytes, char *why)
{
    net *w = calloc(1, sizeof *w);
    if (!w) return refused(why, "host memory", UCS_ERR_NO_MEMORY);
    w->setup = *setup;
    const epic_result result = prepare(w, bytes, why);
    if (result == EPIC_OK)
        *out = w;
    else
        close_net(w);
    return result;
}

/* ------------------------------------------------------------------------- connecting ---- */

static void give_up(void *self, ucp_ep_h endpoint, ucs_status_t status)
{
    (void)endpoint, (void)status;
    ((peer *)self)->gone = true;
}

static epic_result connect_host(net *w, int host, const card *c, char *why)
{
    peer *p = &w->peers[host];
    if (c->inbox_bytes != w->setup.inbox_bytes || c->address_bytes > sizeof c->bytes ||
        c->key_bytes > sizeof c->bytes - c->address_bytes) {
        snprintf(why, NET_WHY, "net \"ucx\": the card of host %d is damaged", host);
        return EPIC_EMISMATCH;
    }
    if (*c->segment && *w->segment && strncmp(c->segment, w->segment, sizeof c->segment - 1)) {
        snprintf(why, NET_WHY,
                 "net \"ucx\": UCX_TCP_RX_SEG_SIZE is %.15s here and %.15s on host %d; it must "
                 "be the same",
                 w->segment, c->segment, host);
        return EPIC_EMISMATCH;
    }
    const ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                                  UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                                  UCP_EP_PARAM_FIELD_ERR_HANDLER,
                                    .address = (const ucp_address_t *)(const void *)c->bytes,
                                    .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                                    .err_handler = {give_up, p}};
    const unsigned char *key = c->bytes + c->address_bytes;
    p->token = c->token;
    p->inbox = c->inbox;
    UCX(ucp_ep_create(w->worker, &params, &p->endpoint), "a way to a peer");
    if (w->setup.puts == NET_PUT_NEVER ||
        (w->setup.puts == NET_PUT_IF_WHOLE && !ucx_keeps_words(p->endpoint)) ||
        (w->setup.on_gpu &&
         !ucx_reaches(p->endpoint, w->domains, ucx_domains(key, c->key_bytes))))
        return EPIC_OK;
    UCX(ucp_ep_rkey_unpack(p->endpoint, key, &p->key), "a peer's key");
    return EPIC_OK;
}

static epic_result connect_all(net *w, const void *cards, char *why)
{
    for (int h = 0; h < w->setup.num_hosts; h++) {
        if (h == w->setup.host) continue;
        const epic_result result = connect_host(w, h, (const card *)cards + h, why);
        if (result != EPIC_OK) return result;
        if (w->peers[h].key || !w->setup.on_gpu) continue;
        snprintf(why, NET_WHY, "net \"ucx\": no RDMA reaches the GPU of host %d", h);
        return EPIC_ENOTSUP;
    }
    return EPIC_OK;
}

/* ---------------------------------------------------------------------------- sending ---- */

static void on_left(void *request, ucs_status_t status, void *self)
{
    (void)status; /* a peer that is gone: give_up hears of it */
    ((parcel *)self)->left = true;
    ucp_request_free(request);
}

/* A remote write of a word reads it from its parcel. */
static void *launch(peer *p, parcel *c, const void *from, uint32_t bytes)
{
    const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                       UCP_OP_ATTR_FIELD_USER_DATA |
                                                       UCP_OP_ATTR_FIELD_FLAGS,
                                       .flags = p->key ? 0 : UCP_AM_SEND_FLAG_EAGER,
                                       .cb = {.send = on_left},
                                       .user_data = c};
    if (!p->key)
        return ucp_am_send_nbx(p->endpoint, MESSAGE, &c->header, sizeof c->header, from, bytes,
                               &param);
    return ucp_put_nbx(p->endpoint, from ? from : &c->header.value, from ? bytes : 8,
                       p->inbox + c->header.to, p->key, &param);
}

static bool send_parcel(peer *p, uint64_t to, const void *from, uint32_t bytes, uint64_t value)
{
    if (p->gone) return true;
    if (p->given - p->finished == DEPTH) return false;
    parcel *c = &p->parcels[p->given++ % DEPTH];
    *c = (parcel){.header = {p->token, to, value}};
    void *request = launch(p, c, from, bytes);
    c->left |= !UCS_PTR_IS_PTR(request);
    p->gone |= UCS_PTR_IS_ERR(request);
    return true;
}

static bool put(net *w, int host, uint64_t to, const void *from, uint32_t bytes)
{
    return send_parcel(&w->peers[host], to, from, bytes, 0);
}

static bool word(net *w, int host, uint64_t to, uint64_t value)
{
    return send_parcel(&w->peers[host], to, NULL, 0, value);
}

static int look(net *w)
{
    unsigned moved = 0, more = 1;
    for (int i = 0; i < MOST_TURNS && more; i++) moved += more = ucp_worker_progress(w->worker);
    for (int h = 0; h < w->setup.num_hosts; h++)
        for (peer *p = &w->peers[h];
             p->finished < p->given && p->parcels[p->finished % DEPTH].left; moved++)
            p->finished++;
    return (int)moved;
}

static bool done(const net *w, int host, uint64_t count)
{
    const peer *p = &w->peers[host];
    return p->finished >= count || (p->gone && p->finished == p->given);
}

static bool gone(const net *w, int host)
{
    return w->peers[host].gone;
}

static void say(const net *w, char *to, size_t size)
{
    snprintf(to, size, "ucx %s, %s memory", ucp_get_version_string(),
             w->setup.on_gpu ? "GPU" : "host");
    for (int h = 0; h < w->setup.num_hosts; h++) {
        const peer *p = &w->peers[h];
        char way[128] = "";
        if (!p->endpoint) continue;
        ucx_say_lanes(p->endpoint, way, sizeof way, p->key ? "writes" : "messages");
        const size_t used = strlen(to);
        if (!strstr(to, way)) snprintf(to + used, size - used, "%s", way); /* each once */
    }
}

/* ---------------------------------------------------------------------------- closing ---- */

/* Until `request` is done, or for a moment; a request that is not stays UCX's. */
static void finish(net *w, void *request)
{
    const int64_t end = clock_ms() + FLUSH_MS;
    if (!UCS_PTR_IS_PTR(request)) return;
    while (ucp_request_check_status(request) == UCS_INPROGRESS && clock_ms() < end)
        ucp_worker_progress(w->worker);
    ucp_request_free(request);
}

static void disconnect(net *w, peer *p)
{
    const ucp_request_param_t force = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                       .flags = UCP_EP_CLOSE_FLAG_FORCE};
    if (p->key) ucp_rkey_destroy(p->key);
    if (p->endpoint) finish(w, ucp_ep_close_nbx(p->endpoint, &force));
}

static void close_net(net *w)
{
    if (!w) return;
    if (w->worker) finish(w, ucp_worker_flush_nbx(w->worker, &(ucp_request_param_t){0}));
    for (int h = 0; h < NET_MAX_HOSTS; h++) disconnect(w, &w->peers[h]);
    if (w->worker) ucp_worker_destroy(w->worker);
    if (w->outbox) ucp_mem_unmap(w->context, w->outbox);
    if (w->inbox) ucp_mem_unmap(w->context, w->inbox);
    if (w->context) ucp_cleanup(w->context);
    free(w);
}

static bool gains(const net *w)
{
    return !ucx_has_rdma(w->context);
}

static const net_engine strand = {.name = "ucx", NET_CALLS};
const strand_engine strands_of = {.net = &strand, .gains = gains};
