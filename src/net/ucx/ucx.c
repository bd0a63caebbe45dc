/* SPDX-License-Identifier: Apache-2.0 */
/* One stripe (striped.h) of the engine ucx: a net over the library UCX, which chooses the
 * networks for each peer.
 *
 * If all networks to a peer are RDMA, puts are remote writes, because RDMA keeps words of 8
 * bytes whole (writes them atomically). If not, for example over TCP, puts are active messages
 * of UCX. A thread of the receiver stores them into the inbox word by word, because memcpy may
 * write a word in parts or twice. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <ucp/api/ucp.h>

#include "base/clock.h"
#include "net/striped/striped.h"
#include "net/ucx/networks.h"
#include "net/ucx/nics.h"

/* maximum number of unfinished calls of put() and put_word() for one host */
#define MAX_IN_FLIGHT 256
#define MESSAGE_ID 1
/* maximum number of calls of ucp_worker_progress() in one ucx_progress() */
#define MAX_PROGRESS_CALLS 64
#define FLUSH_MS 1000 /* maximum time in ms that closing waits for puts in flight */

/* The header of an active message. A message of put_word() has only the header. A message of
 * put() has the bytes after it. */
typedef struct header {
    uint64_t token; /* the receiver's random token, from its handle */
    uint64_t to;    /* offset in the receiver's inbox */
    uint64_t value; /* the word that put_word() sends; 0 in a message of put() */
} header;

/* A call of put() or put_word() that is in flight. */
typedef struct send_op {
    header header;
    bool completed;
} send_op;

/* The state of one peer. This rank has one peer on each other host (net/net.h). */
typedef struct peer {
    ucp_ep_h endpoint; /* NULL in the unused entry for this rank's own host */
    ucp_rkey_h key;    /* key for remote writes into the peer's inbox; NULL: send messages */
    uint64_t token, inbox; /* the peer's token and the address of its inbox, from its handle */
    bool gone;
    /* posted: number of calls of put() and put_word() for this peer. finished: the first
     * `finished` of these calls are all done. */
    uint64_t posted, finished;
    send_op ops[MAX_IN_FLIGHT];
} peer;

struct net {
    net_setup setup;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_mem_h inbox, outbox;
    uint64_t token; /* 64 random bits; receive_message() ignores messages without this token */
    uint64_t domains; /* bit mask of the memory domains of the inbox's key (ucx_domains()) */
    /* size of TCP segments as a text for UCX (networks.h); empty if UCX cannot use TCP */
    const char *segment;
    peer peers[NET_MAX_HOSTS];
};

/* Contents of a handle, which a rank publishes. */
typedef struct handle {
    uint64_t token, inbox, inbox_bytes;
    /* sizes of the worker's address and of the key in `bytes` */
    uint32_t address_bytes, key_bytes;
    char segment[16];
    unsigned char bytes[NET_HANDLE_BYTES - 48];
} handle;
_Static_assert(sizeof(handle) == NET_HANDLE_BYTES, "a handle is what the bootstrap carries");

/* Writes to `why` the name `what` of the call that failed, and its status. Returns the
 * epic_result for this status. */
static epic_result fail_with_status(char *why, const char *what, ucs_status_t status)
{
    snprintf(why, NET_WHY_BYTES, "net \"ucx\": %s: %s", what, ucs_status_string(status));
    if (status == UCS_ERR_UNSUPPORTED) return EPIC_ENOTSUP;
    return status == UCS_ERR_NO_MEMORY ? EPIC_ENOMEM : EPIC_EDEVICE;
}

/* Evaluates `call`, a call of UCX. If it fails, the enclosing function returns the error. */
#define TRY_UCX(call, what)                                                       \
    do {                                                                          \
        const ucs_status_t ucx_status = (call);                                   \
        if (ucx_status != UCS_OK) return fail_with_status(why, what, ucx_status); \
    } while (0)

/* ------------------------------------------------------------------------- receiving ---- */

/* Copies bytes in words of 8 bytes, so that a thread or CUDA kernel that polls the memory never
 * reads a half-written word. */
static void store_words(void *to, const void *from, size_t bytes)
{
    uint64_t word;
    for (size_t i = 0; i < bytes / 8; i++) {
        memcpy(&word, (const char *)from + 8 * i, 8);
        __atomic_store_n((uint64_t *)to + i, word, __ATOMIC_RELAXED);
    }
}

/* UCX calls this function for each received message. Stores the message into the inbox. Ignores
 * messages without the token of this net, because any program may send a message, and messages
 * with a target outside of the inbox. */
static ucs_status_t receive_message(void *self, const void *head, size_t head_bytes, void *data,
                                    size_t bytes, const ucp_am_recv_param_t *param)
{
    const net *n = self;
    header h;
    if (head_bytes != sizeof h || param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) return UCS_OK;
    memcpy(&h, head, sizeof h);
    const size_t count = bytes ? bytes : sizeof h.value;
    const uint64_t room = n->setup.inbox_bytes;
    if (h.token != n->token || (h.to | count) % 8 || count > room || h.to > room - count)
        return UCS_OK;
    store_words((char *)n->setup.inbox + h.to, bytes ? data : &h.value, count);
    return UCS_OK;
}

/* ---------------------------------------------------------------------------- opening ---- */

/* Registers memory, so that network devices can access it. */
static epic_result map_memory(net *n, void *memory, uint64_t bytes, ucp_mem_h *out, char *why)
{
    const ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = memory,
        .length = bytes,
        .memory_type = n->setup.on_gpu ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST};
    TRY_UCX(ucp_mem_map(n->context, &params, out), "registering memory");
    return EPIC_OK;
}

/* Creates the worker, which receives the messages of all peers. */
static epic_result create_worker(net *n, char *why)
{
    const ucp_worker_params_t worker = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                        .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    const ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = MESSAGE_ID,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = receive_message,
        .arg = n};
    TRY_UCX(ucp_worker_create(n->context, &worker, &n->worker), "ucp_worker_create");
    TRY_UCX(ucp_worker_set_am_recv_handler(n->worker, &handler), "active messages");
    return EPIC_OK;
}

/* Appends `bytes`, an address or a packed key of UCX with `count` bytes, to the handle. Stores
 * `count` in *length. Returns false if the bytes do not fit. */
static bool append_to_handle(handle *c, uint32_t *length, const void *bytes, size_t count)
{
    const size_t used = (size_t)c->address_bytes + c->key_bytes;
    if (count > sizeof c->bytes - used) return false;
    memcpy(c->bytes + used, bytes, count);
    *length = (uint32_t)count;
    return true;
}

/* Writes the token, the worker's address and the key of the inbox to the handle. Returns
 * EPIC_ENOTSUP if the address and the key do not fit. */
static epic_result write_handle(net *n, handle *c, char *why)
{
    ucp_address_t *address;
    void *key;
    size_t address_bytes, key_bytes;
    c->token = n->token;
    c->inbox = (uint64_t)(uintptr_t)n->setup.inbox;
    c->inbox_bytes = n->setup.inbox_bytes;
    snprintf(c->segment, sizeof c->segment, "%s", n->segment);
    TRY_UCX(ucp_worker_get_address(n->worker, &address, &address_bytes),
            "the worker's address");
    bool fits = append_to_handle(c, &c->address_bytes, address, address_bytes);
    ucp_worker_release_address(n->worker, address);
    TRY_UCX(ucp_rkey_pack(n->context, n->inbox, &key, &key_bytes), "a key of the inbox");
    fits = fits && append_to_handle(c, &c->key_bytes, key, key_bytes);
    n->domains = ucx_domains(key, key_bytes);
    ucp_rkey_buffer_release(key);
    if (fits) return EPIC_OK;
    snprintf(why, NET_WHY_BYTES,
             "net \"ucx\": address and key take %zu bytes, a handle has %zu; use fewer devices "
             "(UCX_NET_DEVICES)",
             address_bytes + key_bytes, sizeof c->bytes);
    return EPIC_ENOTSUP;
}

/* Writes to `port` the port of the NIC (nics.h) that the GPU with the PCI address `gpu` should
 * use. Writes "" if no port is usable or if out of memory, so that UCX chooses the devices. */
static void find_port(char port[NICS_NAME_BYTES], const char *gpu)
{
    *port = 0;
    nics_host *host = *gpu ? malloc(sizeof *host) : NULL;
    if (!host) return;
    nics_read(host, "/sys");
    const int found = nics_find_gpu(host, gpu);
    const int chosen = found < 0 ? -1 : nics_choose(host, found);
    if (chosen >= 0) snprintf(port, NICS_NAME_BYTES, "%s", host->ports[chosen].name);
    free(host);
}

/* Opens the UCX context, registers inbox and outbox, creates the worker and writes the handle.
 * On an error, the caller releases what was created. */
static epic_result prepare_net(net *n, handle *c, char *why)
{
    const net_setup *s = &n->setup;
    if (getrandom(&n->token, sizeof n->token, 0) != (ssize_t)sizeof n->token)
        return fail_with_status(why, "random bytes", UCS_ERR_IO_ERROR);
    char port[NICS_NAME_BYTES];
    find_port(port, s->gpu);
    TRY_UCX(ucx_create_context(&n->context, &n->segment, s->rdma == NET_RDMA_IF_WHOLE, port),
            "ucp_init");
    if (s->on_gpu && !ucx_can_reach_gpus(n->context))
        return fail_with_status(why, "memory of a GPU", UCS_ERR_UNSUPPORTED);
    epic_result result = map_memory(n, s->inbox, s->inbox_bytes, &n->inbox, why);
    if (result == EPIC_OK)
        result = map_memory(n, (void *)(uintptr_t)s->outbox, s->outbox_bytes, &n->outbox, why);
    if (result == EPIC_OK) result = create_worker(n, why);
    return result == EPIC_OK ? write_handle(n, c, why) : result;
}

static void ucx_close(net *n);

static epic_result ucx_open(net **out, const net_setup *setup, void *bytes, char *why)
{
    net *n = calloc(1, sizeof *n);
    if (!n) return fail_with_status(why, "host memory", UCS_ERR_NO_MEMORY);
    n->setup = *setup;
    const epic_result result = prepare_net(n, bytes, why);
    if (result == EPIC_OK)
        *out = n;
    else
        ucx_close(n);
    return result;
}

/* ------------------------------------------------------------------------- connecting ---- */

/* Called by UCX when the connection to a peer has failed. Marks the peer as gone. */
static void on_peer_error(void *self, ucp_ep_h endpoint, ucs_status_t status)
{
    (void)endpoint, (void)status;
    ((peer *)self)->gone = true;
}

/* Opens the endpoint to a peer. Decides whether its puts are remote writes or messages. */
static epic_result connect_to_host(net *n, int host, const handle *c, char *why)
{
    peer *p = &n->peers[host];
    if (c->inbox_bytes != n->setup.inbox_bytes || c->address_bytes > sizeof c->bytes ||
        c->key_bytes > sizeof c->bytes - c->address_bytes) {
        snprintf(why, NET_WHY_BYTES, "net \"ucx\": the handle of host %d is damaged", host);
        return EPIC_EMISMATCH;
    }
    if (*c->segment && *n->segment && strncmp(c->segment, n->segment, sizeof c->segment - 1)) {
        snprintf(why, NET_WHY_BYTES,
                 "net \"ucx\": UCX_TCP_RX_SEG_SIZE is %.15s here and %.15s on host %d; it must "
                 "be the same",
                 n->segment, c->segment, host);
        return EPIC_EMISMATCH;
    }
    const ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                                  UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                                  UCP_EP_PARAM_FIELD_ERR_HANDLER,
                                    .address = (const ucp_address_t *)(const void *)c->bytes,
                                    .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                                    .err_handler = {on_peer_error, p}};
    const unsigned char *key = c->bytes + c->address_bytes;
    p->token = c->token;
    p->inbox = c->inbox;
    TRY_UCX(ucp_ep_create(n->worker, &params, &p->endpoint), "an endpoint for a peer");
    if (n->setup.rdma == NET_RDMA_NEVER ||
        (n->setup.rdma == NET_RDMA_IF_WHOLE && !ucx_keeps_words(p->endpoint)) ||
        (n->setup.on_gpu &&
         !ucx_can_reach(p->endpoint, n->domains, ucx_domains(key, c->key_bytes))))
        return EPIC_OK;
    TRY_UCX(ucp_ep_rkey_unpack(p->endpoint, key, &p->key), "a peer's key");
    return EPIC_OK;
}

/* Implements net_engine.connect. If inbox and outbox are GPU memory, remote writes must be
 * possible to every peer. */
static epic_result ucx_connect(net *n, const void *handles, char *why)
{
    for (int h = 0; h < n->setup.num_hosts; h++) {
        if (h == n->setup.host) continue;
        const epic_result result = connect_to_host(n, h, (const handle *)handles + h, why);
        if (result != EPIC_OK) return result;
        if (n->peers[h].key || !n->setup.on_gpu) continue;
        snprintf(why, NET_WHY_BYTES, "net \"ucx\": no RDMA reaches the GPU of host %d", h);
        return EPIC_ENOTSUP;
    }
    return EPIC_OK;
}

/* ---------------------------------------------------------------------------- sending ---- */

/* Called by UCX when a remote write or message has been sent. `self` is its send_op. */
static void on_completed(void *request, ucs_status_t status, void *self)
{
    (void)status; /* on_peer_error() records that the peer is gone */
    ((send_op *)self)->completed = true;
    ucp_request_free(request);
}

/* Starts a remote write or, without a key of the peer's inbox, a message. Returns the request
 * of UCX, or a status if the operation has already completed or failed. If `from` is NULL,
 * sends the word in c->header. *c must stay valid until the operation has completed. */
static void *start_send(peer *p, send_op *c, const void *from, uint32_t bytes)
{
    const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                       UCP_OP_ATTR_FIELD_USER_DATA |
                                                       UCP_OP_ATTR_FIELD_FLAGS,
                                       .flags = p->key ? 0 : UCP_AM_SEND_FLAG_EAGER,
                                       .cb = {.send = on_completed},
                                       .user_data = c};
    if (!p->key)
        return ucp_am_send_nbx(p->endpoint, MESSAGE_ID, &c->header, sizeof c->header, from,
                               bytes, &param);
    return ucp_put_nbx(p->endpoint, from ? from : &c->header.value, from ? bytes : 8,
                       p->inbox + c->header.to, p->key, &param);
}

/* Starts a put of `bytes` bytes or, if `from` is NULL, of the word `value`. Returns false if
 * MAX_IN_FLIGHT calls for this peer are in flight. If the peer is gone, sends nothing and
 * returns true. */
static bool post_send(peer *p, uint64_t to, const void *from, uint32_t bytes, uint64_t value)
{
    if (p->gone) return true;
    if (p->posted - p->finished == MAX_IN_FLIGHT) return false;
    send_op *c = &p->ops[p->posted++ % MAX_IN_FLIGHT];
    *c = (send_op){.header = {p->token, to, value}};
    void *request = start_send(p, c, from, bytes);
    c->completed |= !UCS_PTR_IS_PTR(request);
    p->gone |= UCS_PTR_IS_ERR(request);
    return true;
}

static bool ucx_put(net *n, int host, uint64_t to, const void *from, uint32_t bytes)
{
    return post_send(&n->peers[host], to, from, bytes, 0);
}

static bool ucx_put_word(net *n, int host, uint64_t to, uint64_t value)
{
    return post_send(&n->peers[host], to, NULL, 0, value);
}

/* Implements net_engine.progress: lets UCX send and receive, then updates peer.finished. */
static int ucx_progress(net *n)
{
    unsigned moved = 0, more = 1;
    for (int i = 0; i < MAX_PROGRESS_CALLS && more; i++)
        moved += more = ucp_worker_progress(n->worker);
    for (int h = 0; h < n->setup.num_hosts; h++)
        for (peer *p = &n->peers[h];
             p->finished < p->posted && p->ops[p->finished % MAX_IN_FLIGHT].completed; moved++)
            p->finished++;
    return (int)moved;
}

/* Implements net_engine.is_done. If the peer is gone, later puts are dropped, so this function
 * returns true for any `count` as soon as nothing is in flight. */
static bool ucx_is_done(const net *n, int host, uint64_t count)
{
    const peer *p = &n->peers[host];
    return p->finished >= count || (p->gone && p->finished == p->posted);
}

static bool ucx_is_gone(const net *n, int host)
{
    return n->peers[host].gone;
}

/* Implements net_engine.describe. Lists each network once, even if several peers use it. */
static void ucx_describe(const net *n, char *to, size_t size)
{
    snprintf(to, size, "ucx %s, %s memory", ucp_get_version_string(),
             n->setup.on_gpu ? "GPU" : "host");
    for (int h = 0; h < n->setup.num_hosts; h++) {
        const peer *p = &n->peers[h];
        char networks[128] = "";
        if (!p->endpoint) continue;
        ucx_describe_networks(p->endpoint, networks, sizeof networks,
                              p->key ? "writes" : "messages");
        const size_t used = strlen(to);
        if (!strstr(to, networks)) snprintf(to + used, size - used, "%s", networks);
    }
}

/* ---------------------------------------------------------------------------- closing ---- */

/* Waits until the request of UCX has completed, for at most FLUSH_MS, and releases the request.
 * If the request has not completed by then, UCX frees it when it completes. */
static void wait_for_request(net *n, void *request)
{
    const int64_t end = clock_ms() + FLUSH_MS;
    if (!UCS_PTR_IS_PTR(request)) return;
    while (ucp_request_check_status(request) == UCS_INPROGRESS && clock_ms() < end)
        ucp_worker_progress(n->worker);
    ucp_request_free(request);
}

/* Closes the endpoint to a peer without waiting for the peer. */
static void disconnect_peer(net *n, peer *p)
{
    const ucp_request_param_t force = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                       .flags = UCP_EP_CLOSE_FLAG_FORCE};
    if (p->key) ucp_rkey_destroy(p->key);
    if (p->endpoint) wait_for_request(n, ucp_ep_close_nbx(p->endpoint, &force));
}

static void ucx_close(net *n)
{
    if (!n) return;
    if (n->worker)
        wait_for_request(n, ucp_worker_flush_nbx(n->worker, &(ucp_request_param_t){0}));
    for (int h = 0; h < NET_MAX_HOSTS; h++) disconnect_peer(n, &n->peers[h]);
    if (n->worker) ucp_worker_destroy(n->worker);
    if (n->outbox) ucp_mem_unmap(n->context, n->outbox);
    if (n->inbox) ucp_mem_unmap(n->context, n->inbox);
    if (n->context) ucp_cleanup(n->context);
    free(n);
}

/* Implements stripe_engine.can_gain. With RDMA the network devices copy the bytes, so more
 * threads would not be faster. */
static bool can_gain_from_stripes(const net *n)
{
    return !ucx_has_rdma(n->context);
}

static const net_engine stripe = {.name = "ucx",
                                  .open = ucx_open,
                                  .connect = ucx_connect,
                                  .put = ucx_put,
                                  .put_word = ucx_put_word,
                                  .progress = ucx_progress,
                                  .is_done = ucx_is_done,
                                  .is_gone = ucx_is_gone,
                                  .describe = ucx_describe,
                                  .close = ucx_close};
const stripe_engine striped_over = {.engine = &stripe, .can_gain = can_gain_from_stripes};
