/* SPDX-License-Identifier: Apache-2.0 */
/* Implements epic_dispatch on the host.
 *
 * A rank sends each token once to each rank that holds at least one slot of the token. In this
 * file, a token's *message* is the bytes that are sent for the token: the row, its scales, and
 * one weight for each choice k (each of the top_k experts of the token). A message is split
 * into pieces, each of which fits into one ring entry. The receiver copies the row and the
 * scales to each slot of the token, and the weight of each choice to the choice's slot. */
#include <string.h>

#include "base/error.h"
#include "base/hash.h"
#include "exchange/ring_copy.h"
#include "exchange/windows.h"
#include "host_ops/host_ops.h"

/* If the used part of the receive buffer has fewer bytes than this, it is written through the
 * caches, so that it is still in the cache when the experts read it. */
#define CACHED_COPY_MAX (4 << 20)

typedef struct dispatch_call {
    const epic_dispatch_args *args;
    const host_kernels *kernels;
    copy_function *copy; /* copies rows and scales to slots, through the caches or past them */
    exchange *x;
    plan_view plan;
    row_split split;
    /* offsets of the scales and of the weights in the message, in bytes */
    int64_t scales_at, weights_at;
    /* token whose quantized row and scales are in x->row; -1: x->row is not in use */
    int64_t token_in_row;
} dispatch_call;

static const unsigned char *row_of(const epic_const_rows *rows, int64_t i)
{
    return (const unsigned char *)rows->data + i * rows->row_bytes;
}

static unsigned char *out_row_of(const epic_rows *rows, int64_t i)
{
    return (unsigned char *)rows->data + i * rows->row_bytes;
}

/* ---------------------------------------------------------------------------- sending ---- */

/* Writes a token's quantized row and its scales to x->row, unless they are already in
 * x->row. */
static void quantize_token(dispatch_call *d, int64_t token)
{
    const epic_dispatch_args *a = d->args;
    const epic_type type = (epic_type)a->type;
    const int64_t n = a->tokens.row_bytes / (int64_t)epic_type_bytes(type);
    if (d->token_in_row == token) return;
    d->token_in_row = token;
    (a->quantize == EPIC_QUANTIZE_1X128 ? d->kernels->quantize_1x128
                                        : d->kernels->quantize_1x32)(
        d->x->row, d->x->row + d->scales_at, row_of(&a->tokens, token), 1, type, n);
}

/* Return the address of one part of a token's message: its row, its scales or its weights. If
 * quantized rows are requested, first compute the row and the scales. */
static const unsigned char *row_part(dispatch_call *d, int64_t token)
{
    if (!d->args->quantize) return row_of(&d->args->tokens, token);
    quantize_token(d, token);
    return d->x->row;
}

static const unsigned char *scales_part(dispatch_call *d, int64_t token)
{
    if (!d->args->quantize) return row_of(&d->args->scales, token);
    quantize_token(d, token);
    return d->x->row + d->scales_at;
}

static const float *weights_part(const dispatch_call *d, int64_t token)
{
    return d->args->weights + token * d->plan.header->layer.top_k;
}

/* Copies the bytes that two ranges of a message have in common. `from` contains the bytes
 * [begin, end) of the message, and `to` has room for the bytes [at, at + size) of the
 * message. */
static void copy_overlap(copy_function *copy, void *to, int64_t at, int64_t size,
                         const void *from, int64_t begin, int64_t end)
{
    const int64_t low = at > begin ? at : begin;
    const int64_t high = at + size < end ? at + size : end;
    if (low < high)
        copy((unsigned char *)to + (low - at), (const unsigned char *)from + (low - begin),
             (size_t)(high - low));
}

/* Copies through the caches. Used for data that is read soon, while it is still in a cache. */
static void copy_cached(void *to, const void *from, size_t n)
{
    memcpy(to, from, n);
}

/* Each part of a message has one bit in a mask. enum window_output contains the indices of the
 * bits. */
#define ROW_BIT (1u << WINDOW_ROWS)
#define SCALES_BIT (1u << WINDOW_SCALES)
#define WEIGHTS_BIT (1u << WINDOW_WEIGHTS)
#define ALL_PARTS (ROW_BIT | SCALES_BIT | WEIGHTS_BIT)

/* Copies those parts of one piece of a token's message that are in the mask `wanted` into
 * `entry`, with the function `copy`. */
static void fill_entry_with(dispatch_call *d, int64_t token, int32_t piece, void *entry,
                            uint32_t wanted, copy_function *copy)
{
    const int64_t begin = piece_offset(&d->split, piece), size = piece_size(&d->split, piece);
    const int64_t row = d->scales_at, end = d->split.row_bytes;
    if (begin < row && wanted & ROW_BIT)
        copy_overlap(copy, entry, begin, size, row_part(d, token), 0, row);
    if (row < d->weights_at && wanted & SCALES_BIT)
        copy_overlap(copy, entry, begin, size, scales_part(d, token), row, d->weights_at);
    if (d->weights_at < end && wanted & WEIGHTS_BIT)
        copy_overlap(copy, entry, begin, size, weights_part(d, token), d->weights_at, end);
}

/* Stores bytes of one part of a message into an output of a peer. The part consists of the
 * bytes [low, high) of the message. On this rank the part is at `from`. In the peer's output it
 * begins at byte `at`. The current piece consists of the bytes [begin, end) of the message.
 * Stores only bytes that are in both the part and the piece. */
static void store_part(const dispatch_call *d, int peer, enum window_output which, int64_t at,
                       int64_t begin, int64_t end, const void *from, int64_t low, int64_t high)
{
    const int64_t first = low > begin ? low : begin, last = high < end ? high : end;
    if (first >= last) return;
    unsigned char *to = window_address(d->x, peer, which, at + (first - low), last - first);
    if (to) d->copy(to, (const unsigned char *)from + (first - low), (size_t)(last - first));
}

/* Stores one piece of a token's message into those outputs of a peer that are in windows.
 * `slot` is the token's only slot on the peer. Returns the mask of the parts that were not
 * stored, which the peer must read from the ring. */
static uint32_t store_in_windows(dispatch_call *d, int peer, int32_t slot, int64_t token,
                                 int32_t piece)
{
    const epic_dispatch_args *a = d->args;
    const int64_t begin = piece_offset(&d->split, piece);
    const int64_t end = begin + piece_size(&d->split, piece);
    uint32_t staged = 0;
    if (window_is_direct(d->x, peer, WINDOW_ROWS))
        store_part(d, peer, WINDOW_ROWS, slot * a->recv.row_bytes, begin, end,
                   row_part(d, token), 0, d->scales_at);
    else
        staged |= ROW_BIT;
    if (d->scales_at == d->weights_at)
        ;
    else if (window_is_direct(d->x, peer, WINDOW_SCALES))
        store_part(d, peer, WINDOW_SCALES, slot * a->recv_scales.row_bytes, begin, end,
                   scales_part(d, token), d->scales_at, d->weights_at);
    else
        staged |= SCALES_BIT;
    if (d->weights_at == d->split.row_bytes) return staged;
    if (!window_is_direct(d->x, peer, WINDOW_WEIGHTS)) return staged | WEIGHTS_BIT;
    const uint32_t k = plan_choice_on(&d->plan, peer, token);
    const int64_t weight = d->weights_at + (int64_t)(k * sizeof(float));
    store_part(d, peer, WINDOW_WEIGHTS, slot * (int64_t)sizeof(float), begin, end,
               weights_part(d, token) + k, weight, weight + (int64_t)sizeof(float));
    return staged;
}

/* Stores one piece of a token's message directly into outputs of peers. This is possible if an
 * output is in a window and the token has only one slot on the peer. Returns the mask of the
 * parts that some peer must read from the ring. */
static uint32_t store_for_peers(dispatch_call *d, int64_t token, int32_t piece)
{
    uint32_t staged = 0;
    for (int r = 0; r < d->x->num_ranks; r++) {
        if (r == d->x->rank || !plan_sends_token(&d->plan, r, token)) continue;
        const int32_t slot = plan_only_slot_on(&d->plan, r, token);
        staged |= slot < 0 ? ALL_PARTS : store_in_windows(d, r, slot, token, piece);
    }
    return staged;
}

/* Returns the number of bytes of a piece whose part of the message is not in the mask
 * `wanted`. */
static int64_t unwanted_bytes(const dispatch_call *d, int32_t piece, uint32_t wanted)
{
    const int64_t begin = piece_offset(&d->split, piece);
    const int64_t end = begin + piece_size(&d->split, piece);
    const int64_t bounds[] = {0, d->scales_at, d->weights_at, d->split.row_bytes};
    int64_t bytes = 0;
    for (int i = 0; i < NUM_WINDOW_OUTPUTS; i++) {
        const int64_t first = bounds[i] > begin ? bounds[i] : begin;
        const int64_t last = bounds[i + 1] < end ? bounds[i + 1] : end;
        if (!(wanted >> i & 1) && first < last) bytes += last - first;
    }
    return bytes;
}

/* Callback scatter.fill_entry (exchange.h): copies one piece of a token's message into a ring
 * entry. Leaves out a part if it is stored into windows of all peers that need the part.
 * ring_choose_path() decides whether the copy goes through the caches and whether it is timed.
 * Before a timed copy, the parts are joined in x->scratch_rows, so that a single copy is
 * timed. */
static void dispatch_fill_entry(void *self, int64_t token, int32_t piece, void *entry)
{
    dispatch_call *d = self;
    const int rank = d->x->rank;
    const int64_t size = piece_size(&d->split, piece);
    uint32_t wanted = ALL_PARTS;
    if (d->x->has_targets) {
        wanted = store_for_peers(d, token, piece);
        d->x->left_out_bytes = unwanted_bytes(d, piece, wanted);
        if (d->x->left_out_bytes == size) return;
    }
    const ring_path path = ring_choose_path(d->x, rank, size);
    void *to = path == RING_TIMED ? d->x->scratch_rows : entry;
    fill_entry_with(d, token, piece, to, wanted,
                    path == RING_STREAMED ? d->kernels->copy : copy_cached);
    if (to != entry)
        ring_write_row(d->x, rank, path, entry, to, (size_t)size, d->kernels->copy);
}

/* -------------------------------------------------------------------------- receiving ---- */

/* A range of a token's row, scales or weights: `size` bytes, starting at offset `at`. The bytes
 * of the range are at `from`. The range is empty if `size` is 0 or less. */
typedef struct part {
    const unsigned char *from;
    int64_t at, size;
} part;

/* The ranges of a token's row, scales and weights that can be written to the token's slots now.
 * For a token of another rank, these are the ranges in one piece of its message. For a token of
 * this rank, they are the whole row, scales and weights. */
typedef struct parts {
    part row, scales, weights;
} parts;

/* Returns the range of bytes that a piece and one part of a message have in common. The piece
 * consists of the bytes [begin, end) of the message, and the part of the bytes [low, high).
 * result.at is an offset in the part. If they have no bytes in common, result.size is 0 or
 * less. */
static part message_part_of(const unsigned char *piece, int64_t begin, int64_t end, int64_t low,
                            int64_t high)
{
    const int64_t first = low > begin ? low : begin, last = high < end ? high : end;
    return (part){piece + (first - begin), first - low, last - first};
}

static void write_row(const dispatch_call *d, int64_t slot, const parts *p)
{
    const epic_dispatch_args *a = d->args;
    if (p->row.size > 0)
        d->copy(out_row_of(&a->recv, slot) + p->row.at, p->row.from, (size_t)p->row.size);
    if (p->scales.size > 0)
        d->copy(out_row_of(&a->recv_scales, slot) + p->scales.at, p->scales.from,
                (size_t)p->scales.size);
}

/* Writes the weight of choice k to slot_weights[index]. Writes only the bytes of the weight
 * that are in *weights, because a piece may end inside the weight. Does not use d->copy,
 * because a weight is small. */
static void write_weight(const dispatch_call *d, int64_t index, uint32_t k, const part *weights)
{
    const int64_t at = (int64_t)(k * sizeof(float)), end = weights->at + weights->size;
    float *to = d->args->slot_weights + index;
    if (weights->at <= at && at + (int64_t)sizeof *to <= end)
        memcpy(to, weights->from + (at - weights->at), sizeof *to);
    else
        copy_overlap(copy_cached, to, at, sizeof *to, weights->from, weights->at, end);
}

/* For FLAT layers: writes the ranges in *p to the token's only row on this rank. Also writes
 * the weights of the token's choices on this rank, contiguously and by ascending k. */
static void write_flat_row(const dispatch_call *d, int from, int64_t token, const parts *p)
{
    const int64_t row = d->plan.row_of[d->plan.base_of[from] + token];
    const int32_t *experts = plan_slots_of_token(&d->plan, from, token);
    const uint32_t top_k = d->plan.header->layer.top_k;
    int64_t index = row * top_k;
    write_row(d, row, p);
    for (uint32_t k = 0; k < top_k && p->weights.size > 0; k++)
        if (experts[k] >= 0) write_weight(d, index++, k, &p->weights);
}

/* Writes the ranges in *p to all slots that a token of rank `from` has on this rank. */
static void write_token(const dispatch_call *d, int from, int64_t token, const parts *p)
{
    if (plan_is_flat(&d->plan)) {
        write_flat_row(d, from, token, p);
        return;
    }
    const int32_t *slots = plan_slots_of_token(&d->plan, from, token);
    /* lists the choices on this rank without a branch on slots[k], because the processor would
     * often mispredict such a branch */
    uint32_t here[MAX_TOP_K], count = 0;
    for (uint32_t k = 0; k < d->plan.header->layer.top_k; k++) {
        here[count] = k;
        count += slots[k] >= 0;
    }
    for (uint32_t i = 0; i < count; i++) {
        write_row(d, slots[here[i]], p);
        if (p->weights.size > 0) write_weight(d, slots[here[i]], here[i], &p->weights);
    }
}

/* Returns true if rank `from` stores the part `which` of a token's message directly into a
 * window of this rank. */
static bool is_stored_directly(const dispatch_call *d, int from, int64_t token,
                               enum window_output which)
{
    return window_is_direct(d->x, d->x->rank, which) &&
           plan_has_only_slot(&d->plan, from, token);
}

/* Callback scatter.read_entry: writes one piece of the message of a token of rank `from` to the
 * token's slots. Skips the parts that rank `from` has stored in windows of this rank. */
static void dispatch_read_entry(void *self, int from, int64_t token, int32_t piece,
                                const void *entry)
{
    dispatch_call *d = self;
    const int64_t begin = piece_offset(&d->split, piece);
    const int64_t end = begin + piece_size(&d->split, piece);
    parts p = {message_part_of(entry, begin, end, 0, d->scales_at),
               message_part_of(entry, begin, end, d->scales_at, d->weights_at),
               message_part_of(entry, begin, end, d->weights_at, d->split.row_bytes)};
    if (is_stored_directly(d, from, token, WINDOW_ROWS)) p.row.size = 0;
    if (is_stored_directly(d, from, token, WINDOW_SCALES)) p.scales.size = 0;
    if (is_stored_directly(d, from, token, WINDOW_WEIGHTS)) p.weights.size = 0;
    write_token(d, from, token, &p);
}

/* Callback scatter.read_own_item: writes a token of this rank to the token's slots on this
 * rank. */
static void dispatch_read_own(void *self, int64_t token)
{
    dispatch_call *d = self;
    const int64_t row = d->scales_at, scales = d->weights_at - row;
    const int64_t weights = d->split.row_bytes - d->weights_at;
    parts p = {0};
    if (row > 0) p.row = (part){row_part(d, token), 0, row};
    if (scales > 0) p.scales = (part){scales_part(d, token), 0, scales};
    if (weights > 0) p.weights = (part){(const void *)weights_part(d, token), 0, weights};
    write_token(d, d->x->rank, token, &p);
}

static bool dispatch_is_sent(void *self, int peer, int64_t token)
{
    return plan_sends_token(&((dispatch_call *)self)->plan, peer, token);
}

static bool dispatch_is_received(void *self, int from, int64_t token)
{
    return plan_receives_token(&((dispatch_call *)self)->plan, from, token);
}

/* ------------------------------------------------------------ running the operation ---- */

/* Describes in `out` the three outputs of dispatch that have one row per slot. A row of
 * slot_weights has `weights` floats. */
static void list_output_arrays(const epic_dispatch_args *a, uint32_t weights, slot_array out[3])
{
    out[0] = (slot_array){a->recv.data, a->recv.row_bytes, a->recv.num_rows};
    out[1] =
        (slot_array){a->recv_scales.data, a->recv_scales.row_bytes, a->recv_scales.num_rows};
    out[2] = (slot_array){a->slot_weights, 4 * (int64_t)weights, a->recv.num_rows};
}

/* For FLAT layers: writes recv_expert. Each row lists the local experts of its token by
 * ascending k, followed by -1. */
static void write_recv_expert(const dispatch_call *d)
{
    const plan_header *h = d->plan.header;
    const uint32_t top_k = h->layer.top_k;
    int32_t *out = d->args->recv_expert;
    for (int64_t t = 0; t < h->total_tokens; t++) {
        const int64_t row = d->plan.row_of[t];
        if (row < 0) continue;
        uint32_t n = 0;
        for (uint32_t k = 0; k < top_k; k++) {
            const int32_t expert = d->plan.slot_or_expert[t * top_k + k];
            if (expert >= 0) out[row * top_k + n++] = expert;
        }
        while (n < top_k) out[row * top_k + n++] = -1;
    }
    const bool tail = d->args->flags & EPIC_ZERO_TAIL;
    for (int64_t i = h->num_slots * top_k; tail && i < d->args->recv.num_rows * top_k; i++)
        out[i] = -1;
}

/* Zeroes the padding in the outputs, then runs the scatter flow of an open exchange. */
static epic_result dispatch_transfer(dispatch_call *d)
{
    const epic_dispatch_args *a = d->args;
    const bool flat = plan_is_flat(&d->plan);
    const int64_t top_k = d->plan.header->layer.top_k;
    slot_array arrays[3];
    TRY(plan_op_check_slots(d->x, "recv"));
    list_output_arrays(a, flat ? (uint32_t)top_k : 1, arrays);
    for (int i = 0; i < 3; i++) slot_array_clear_padding(&d->plan, &arrays[i], a->flags);
    if (flat && a->slot_weights)
        memset(a->slot_weights, 0, (size_t)(d->plan.header->num_slots * top_k) * sizeof(float));
    if (a->recv_expert) write_recv_expert(d);
    d->scales_at = a->recv.row_bytes;
    d->weights_at =
        /* without scales, weights_at equals scales_at */
        d->scales_at + a->recv_scales.row_bytes;
    d->token_in_row = -1;
    const int64_t message_bytes = d->weights_at + (a->weights ? 4 * top_k : 0);
    d->split = exchange_split_rows(d->x, true, message_bytes, 0);
    const scatter s = {.self = d,
                       .items = tokens_of(d->x, &d->plan),
                       .split = d->split,
                       .is_sent = dispatch_is_sent,
                       .is_received = dispatch_is_received,
                       .fill_entry = dispatch_fill_entry,
                       .flush_stores = d->kernels->fence_copies,
                       .read_entry = dispatch_read_entry,
                       .read_own_item = dispatch_read_own};
    const bool stores = windows_begin_stores(d->x);
    const epic_result result = scatter_run(d->x, &s);
    d->kernels->fence_copies();
    if (stores) windows_end_stores(d->x);
    return result;
}

void op_header_set_dispatch_windows(epic_op_header *header, epic_context *ctx,
                                    const epic_dispatch_args *a)
{
    const int64_t rows = a->recv.num_rows;
    const bool is_flat = a->layer->layout == EPIC_FLAT;
    op_header_set_window(header, ctx, WINDOW_ROWS, a->recv.data, rows * a->recv.row_bytes);
    op_header_set_window(header, ctx, WINDOW_SCALES, a->recv_scales.data,
                         a->recv_scales.num_rows * a->recv_scales.row_bytes);
    /* in a FLAT layer the receiver selects the weights of the choices on its rank, so peers
     * cannot store them directly */
    if (!is_flat)
        op_header_set_window(header, ctx, WINDOW_WEIGHTS, a->slot_weights,
                             rows * (int64_t)sizeof(float));
}

/* Zeroes all outputs, but sets the elements of recv_expert to -1. Called if the data of any
 * rank contains an error. */
static void dispatch_clear_outputs(const epic_dispatch_args *a)
{
    slot_array arrays[3];
    const int64_t top_k = a->layer->layout == EPIC_FLAT ? a->layer->top_k : 1;
    list_output_arrays(a, (uint32_t)top_k, arrays);
    for (int i = 0; i < 3; i++) slot_array_clear(&arrays[i]);
    for (int64_t i = 0; a->recv_expert && i < a->recv.num_rows * top_k; i++)
        a->recv_expert[i] = -1;
}

/* Returns EPIC_EINVAL if the layer or the number of tokens differs from the plan. */
static epic_result dispatch_check(const plan_op *s, const epic_dispatch_args *a)
{
    TRY(plan_op_check_layer(s, a->layer));
    TRY(plan_op_check_tokens(s, "tokens", a->tokens.num_rows));
    return a->scales.data ? plan_op_check_tokens(s, "scales", a->scales.num_rows) : EPIC_OK;
}

/* Sets those elements of common[], a part of the op header, that describe a dispatch. The ranks
 * compare these elements. */
static void op_header_set_rows(int64_t *common, const epic_dispatch_args *args)
{
    common[COMMON_TYPE] = args->type;
    common[COMMON_ROW_BYTES] = args->recv.row_bytes;
    common[COMMON_SCALE_BYTES] = args->recv_scales.row_bytes;
    common[COMMON_QUANTIZE] = args->quantize;
    common[COMMON_WEIGHTS] = args->weights != NULL;
}

int64_t dispatch_signature(const epic_dispatch_args *args)
{
    int64_t common[NUM_COMMON] = {0};
    op_header_set_rows(common, args);
    return (int64_t)(hash_bytes(common, sizeof common) | 1);
}

static uint64_t dispatched_bytes(const epic_dispatch_args *args)
{
    return (uint64_t)(args->tokens.num_rows * args->tokens.row_bytes);
}

/* Sends and receives the rows of a valid plan, in an open exchange. If the used part of the
 * receive buffer has fewer than CACHED_COPY_MAX bytes, writes it through the caches. If it is
 * larger, writes past the caches. */
static epic_result dispatch_transfer_all(dispatch_call *d)
{
    const bool few = d->plan.header->num_slots * d->args->recv.row_bytes < CACHED_COPY_MAX;
    d->copy = few ? copy_cached : d->kernels->copy;
    return dispatch_transfer(d);
}

static epic_result dispatch_run(epic_context *ctx, const epic_dispatch_args *args, plan_op *s)
{
    dispatch_call d = {.args = args, .kernels = host_kernels_get()};
    TRY(dispatch_check(s, args));
    op_header_set_rows(s->op_header.common, args);
    op_header_set_dispatch_windows(&s->op_header, ctx, args);
    s->op_header.local[LOCAL_ROWS] = args->recv.num_rows;
    s->op_header.local[LOCAL_NEEDED_ROWS] = s->damaged ? 0 : s->plan.header->num_slots;
    epic_result result = exchange_open(&d.x, ctx, EPIC_OP_DISPATCH, &args->call, &s->op_header,
                                       dispatched_bytes(args));
    if (!d.x) return result;
    d.plan = s->plan;
    const bool moves = result == EPIC_OK && s->plan.header->result == EPIC_OK;
    if (moves) result = dispatch_transfer_all(&d);
    if (!moves || result == EPIC_EOVERFLOW) dispatch_clear_outputs(args);
    return exchange_close(d.x, result);
}

epic_result host_dispatch(epic_context *ctx, const epic_dispatch_args *args,
                          const op_header_extra *extra)
{
    plan_op s;
    plan_op_begin(&s, ctx, EPIC_OP_DISPATCH, args->plan, args->plan_bytes, extra);
    return dispatch_run(ctx, args, &s);
}

/* Runs the dispatch of epic_plan_dispatch (host_ops.h). Does not check the size of the receive
 * buffer. Requires that the caller has checked that the buffer has at least `capacity` rows. A
 * plan never has more slots than `capacity`. */
epic_result host_dispatch_continue(exchange *x, const epic_dispatch_args *args)
{
    dispatch_call d = {
        .args = args, .kernels = host_kernels_get(), .x = x, .plan = plan_view_of(args->plan)};
    exchange_reuse(x, EPIC_OP_DISPATCH, dispatched_bytes(args));
    return exchange_close(x, dispatch_transfer_all(&d));
}

epic_result host_dispatch_unchecked(epic_context *ctx, const epic_dispatch_args *args)
{
    plan_op s;
    plan_op_begin_unchecked(&s, EPIC_OP_DISPATCH, args->plan);
    return dispatch_run(ctx, args, &s);
}
