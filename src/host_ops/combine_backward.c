/* SPDX-License-Identifier: Apache-2.0 */
/* Implements epic_combine_backward on the host.
 *
 * Each rank sends the gradient row of each token to the ranks that hold slots of the token (a
 * scatter flow, exchange.h). The row is sent in pieces, each of which fits into one ring entry.
 * For each of its slots of a token, a rank computes:
 *
 * - d_rows[slot] = slot weight * gradient row.
 * - d_slot_weights[slot] = dot(gradient row, rows[slot]). rows[slot] is the expert's output in
 *   this slot, the row that combine has sent in the forward pass. */
#include <string.h>

#include "base/error.h"
#include "exchange/ring_copy.h"
#include "exchange/windows.h"
#include "host_ops/host_ops.h"

typedef struct combine_backward_call {
    const epic_combine_backward_args *args;
    const host_kernels *kernels;
    exchange *x;
    plan_view plan;
    row_split split;
} combine_backward_call;

static const unsigned char *row_of_own_token(const combine_backward_call *s, int64_t token)
{
    return (const unsigned char *)s->args->d_out.data + token * s->args->d_out.row_bytes;
}

/* Writes w * piece to n elements of d_rows[slot], starting at element `first`. If the caller
 * requests quantized rows, quantizes the products, and also writes their scales. */
static void write_scaled_row(const combine_backward_call *s, int64_t slot, float w,
                             const void *piece, int64_t first, int64_t n)
{
    const epic_combine_backward_args *a = s->args;
    const epic_type type = (epic_type)a->type;
    unsigned char *row = (unsigned char *)a->d_rows.data + slot * a->d_rows.row_bytes;
    if (!a->quantize) {
        s->kernels->scale(row + first * (int64_t)epic_type_bytes(type), piece, w, type, n);
        return;
    }
    unsigned char *scales =
        (unsigned char *)a->d_rows_scales.data + slot * a->d_rows_scales.row_bytes;
    if (a->quantize == EPIC_QUANTIZE_1X128)
        s->kernels->quantize_1x128(row + first, scales + first / 128 * 4, piece, w, type, n);
    else
        s->kernels->quantize_1x32(row + first, scales + first / 32, piece, w, type, n);
}

/* Adds the contribution of one piece to *sum, the dot product of the gradient row and
 * rows[slot]. The piece begins at element `first` of its row. If the piece is the last one of
 * the row, writes *sum to d_slot_weights. */
static void add_dot(const combine_backward_call *s, int64_t slot, double *sum,
                    const void *piece, int64_t first, int64_t n)
{
    const epic_combine_backward_args *a = s->args;
    const epic_type type = (epic_type)a->type;
    const int64_t size = (int64_t)epic_type_bytes(type);
    const unsigned char *row =
        (const unsigned char *)a->rows.data + slot * a->rows.row_bytes + first * size;
    if (n > 0 || first == 0) s->kernels->dot(sum, first == 0, piece, row, type, n);
    if ((first + n) * size == s->split.row_bytes) a->d_slot_weights[slot] = (float)*sum;
}

/* Handles one piece of a token's gradient row: n elements, starting at element `first`. For
 * each slot of the token on this rank, writes the elements times the weight of the slot, and
 * updates the dot product. In a FLAT layer, only copies the elements to the token's row. All
 * pieces of a token of rank `from` arrive before the next token of that rank, so x->sums needs
 * only one partial dot product for each source rank and k. */
static void scatter_piece(const combine_backward_call *s, int from, int64_t token,
                          const void *piece, int64_t first, int64_t n)
{
    const epic_combine_backward_args *a = s->args;
    if (plan_is_flat(&s->plan)) {
        write_scaled_row(s, s->plan.row_of[s->plan.base_of[from] + token], 1, piece, first, n);
        return;
    }
    const int32_t *slots = plan_slots_of_token(&s->plan, from, token);
    const uint32_t top_k = s->plan.header->layer.top_k;
    for (uint32_t k = 0; k < top_k; k++) {
        const int32_t slot = slots[k];
        if (slot < 0) continue;
        write_scaled_row(s, slot, a->slot_weights ? a->slot_weights[slot] : 1, piece, first, n);
        if (a->d_slot_weights)
            add_dot(s, slot, &s->x->sums[(uint32_t)from * top_k + k], piece, first, n);
    }
}

/* Stores one piece of a gradient row directly into d_rows of peers. Does this for a peer if
 * the peer needs the piece, d_rows of the peer is in a window, and the token has only one slot
 * on the peer. If a peer multiplies the rows by weights, its op header does not contain the
 * place of its d_rows (window_place()), so the function skips this peer. Copies with the same
 * function as write_scaled_row(), so that even a NaN has the same bits as without windows.
 * Returns true if some peer must read the piece from the ring. */
static bool store_for_peers(const combine_backward_call *s, int64_t token, int32_t piece)
{
    const epic_type type = (epic_type)s->args->type;
    const int64_t at = piece_offset(&s->split, piece), size = piece_size(&s->split, piece);
    const int64_t n = size / (int64_t)epic_type_bytes(type);
    bool staged = false;
    for (int r = 0; r < s->x->num_ranks; r++) {
        if (r == s->x->rank || !plan_sends_token(&s->plan, r, token)) continue;
        const int32_t slot = plan_only_slot_on(&s->plan, r, token);
        if (slot < 0 || !window_is_direct(s->x, r, WINDOW_ROWS)) {
            staged = true;
            continue;
        }
        unsigned char *to =
            window_address(s->x, r, WINDOW_ROWS, slot * s->split.row_bytes + at, size);
        if (to) s->kernels->scale(to, row_of_own_token(s, token) + at, 1, type, n);
    }
    return staged;
}

/* Callback scatter.fill_entry (exchange.h): copies one piece of a gradient row into a ring
 * entry, unless store_for_peers() has stored it for all peers that need it. */
static void combine_backward_fill_entry(void *self, int64_t token, int32_t piece, void *entry)
{
    combine_backward_call *s = self;
    exchange *x = s->x;
    const unsigned char *from = row_of_own_token(s, token) + piece_offset(&s->split, piece);
    const size_t size = (size_t)piece_size(&s->split, piece);
    if (x->has_targets && !store_for_peers(s, token, piece)) {
        x->left_out_bytes = (int64_t)size;
        return;
    }
    const ring_path path = ring_choose_path(x, x->rank, (int64_t)size);
    ring_write_row(x, x->rank, path, entry, from, size, s->kernels->copy);
}

/* Callback scatter.read_entry: handles one piece of a gradient row from rank `from`. */
static void combine_backward_read_entry(void *self, int from, int64_t token, int32_t piece,
                                        const void *entry)
{
    combine_backward_call *s = self;
    const int64_t size = (int64_t)epic_type_bytes(s->args->type);
    if (window_is_direct(s->x, s->x->rank, WINDOW_ROWS) &&
        plan_has_only_slot(&s->plan, from, token))
        return; /* rank `from` has already stored the piece in this rank's window */
    scatter_piece(s, from, token, entry, piece_offset(&s->split, piece) / size,
                  piece_size(&s->split, piece) / size);
}

/* Callback scatter.read_own_item: handles the gradient row of a token of this rank that also
 * has slots on this rank. */
static void combine_backward_read_own(void *self, int64_t token)
{
    combine_backward_call *s = self;
    const int64_t n = s->split.row_bytes / (int64_t)epic_type_bytes(s->args->type);
    scatter_piece(s, s->x->rank, token, row_of_own_token(s, token), 0, n);
}

static bool combine_backward_is_sent(void *self, int peer, int64_t token)
{
    return plan_sends_token(&((combine_backward_call *)self)->plan, peer, token);
}

static bool combine_backward_is_received(void *self, int from, int64_t token)
{
    return plan_receives_token(&((combine_backward_call *)self)->plan, from, token);
}

static void list_output_arrays(const epic_combine_backward_args *a, slot_array out[3])
{
    out[0] = (slot_array){a->d_rows.data, a->d_rows.row_bytes, a->d_rows.num_rows};
    out[1] = (slot_array){a->d_rows_scales.data, a->d_rows_scales.row_bytes,
                          a->d_rows_scales.num_rows};
    out[2] = (slot_array){a->d_slot_weights, sizeof(float), a->d_rows.num_rows};
}

/* Zeroes the padding in the outputs, then runs the scatter flow of an open exchange. */
static epic_result combine_backward_transfer(combine_backward_call *s)
{
    slot_array arrays[3];
    TRY(plan_op_check_slots(s->x, "d_rows"));
    list_output_arrays(s->args, arrays);
    for (int i = 0; i < 3; i++) slot_array_clear_padding(&s->plan, &arrays[i], s->args->flags);
    s->split = exchange_split_rows(s->x, true, s->args->d_out.row_bytes, 0);
    const scatter how = {.self = s,
                         .items = tokens_of(s->x, &s->plan),
                         .split = s->split,
                         .is_sent = combine_backward_is_sent,
                         .is_received = combine_backward_is_received,
                         .fill_entry = combine_backward_fill_entry,
                         .flush_stores = s->kernels->fence_copies,
                         .read_entry = combine_backward_read_entry,
                         .read_own_item = combine_backward_read_own};
    const bool stores = windows_begin_stores(s->x);
    const epic_result result = scatter_run(s->x, &how);
    if (stores) windows_end_stores(s->x);
    return result;
}

static int64_t min_int64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

epic_result host_combine_backward(epic_context *ctx, const epic_combine_backward_args *args,
                                  const op_header_extra *extra)
{
    combine_backward_call spread = {.args = args, .kernels = host_kernels_get()};
    plan_op s;
    plan_op_begin(&s, ctx, EPIC_OP_COMBINE_BACKWARD, args->plan, args->plan_bytes, extra);
    TRY(plan_op_check_layer(&s, args->layer));
    TRY(plan_op_check_tokens(&s, "d_out", args->d_out.num_rows));
    s.op_header.common[COMMON_TYPE] = args->type;
    s.op_header.common[COMMON_ROW_BYTES] = args->d_out.row_bytes;
    s.op_header.common[COMMON_QUANTIZE] = args->quantize;
    s.op_header.common[COMMON_WEIGHTS] = args->slot_weights != NULL;
    s.op_header.local[LOCAL_ROWS] = args->d_slot_weights
                                        ? min_int64(args->d_rows.num_rows, args->rows.num_rows)
                                        : args->d_rows.num_rows;
    s.op_header.local[LOCAL_NEEDED_ROWS] = s.damaged ? 0 : s.plan.header->num_slots;
    if (!args->quantize && !args->slot_weights && !args->d_slot_weights)
        op_header_set_window(&s.op_header, ctx, WINDOW_ROWS, args->d_rows.data,
                             args->d_rows.num_rows * args->d_rows.row_bytes);
    const uint64_t bytes = (uint64_t)(args->d_out.num_rows * args->d_out.row_bytes);
    epic_result result = exchange_open(&spread.x, ctx, EPIC_OP_COMBINE_BACKWARD, &args->call,
                                       &s.op_header, bytes);
    if (!spread.x) return result;
    spread.plan = s.plan;
    const bool moves = result == EPIC_OK && s.plan.header->result == EPIC_OK;
    if (moves) result = combine_backward_transfer(&spread);
    if (!moves || result == EPIC_EOVERFLOW) {
        slot_array arrays[3];
        list_output_arrays(args, arrays);
        for (int i = 0; i < 3; i++) slot_array_clear(&arrays[i]);
    }
    return exchange_close(spread.x, result);
}
