/* SPDX-License-Identifier: Apache-2.0 */
/* Implements epic_combine and epic_dispatch_backward on the host, as a collect flow
 * (exchange/exchange.h): ranks send rows for a token to the token's *home rank*, the rank whose
 * caller has passed the token to dispatch.
 *
 * A rank may hold several slots of a token. The rank adds the rows of these slots to one row,
 * its *partial sum* (short: partial), and sends the partial to the token's home rank. The home
 * rank adds the partials of all ranks in the layer's sum order and rounds the result once. A
 * partial is sent in pieces, each of which fits into one ring entry.
 *
 * dispatch_backward adds gradient rows in the same way. In dispatch_backward, each rank also
 * sends a *trailer* after the partial: the gradients of the weights of the token's choices, as
 * floats. A choice is one of the top_k experts of a token. The home rank stores these gradients
 * in d_weights without adding them. */
#include <string.h>

#include "base/error.h"
#include "exchange/ring_copy.h"
#include "exchange/windows.h"
#include "host_ops/host_ops.h"

typedef struct combine_call {
    const host_kernels *kernels;
    exchange *x;
    plan_view plan;
    /* element types: `type` for rows and out, partial_type for partials */
    epic_type type, partial_type;
    const char *rows_name;
    epic_const_rows rows;
    epic_rows out;
    uint32_t top_k; /* number of floats in a row of d_weights; only in dispatch_backward */
    const float *slot_weights;
    const float *d_slot_weights;
    float *d_weights;
    row_split split;
    int64_t trailer;  /* size of the trailer in bytes; 0 in combine */
    bool has_windows; /* true: an output of this rank lies in a window */
    /* the piece of the row that is computed now: index of its first element, and its number of
     * elements */
    int64_t first, count;
} combine_call;

static void combine_set_piece(combine_call *c, int32_t piece)
{
    const int64_t size = (int64_t)epic_type_bytes(c->partial_type);
    c->first = piece_offset(&c->split, piece) / size;
    c->count = piece_size(&c->split, piece) / size;
}

static void *scratch_row(const combine_call *c, int level)
{
    return c->x->scratch_rows + (size_t)level * PIECE_MAX;
}

/* ----------------------------------------------------------------------- expert side ---- */

typedef struct gathered { /* the slots of one token on this rank, in ascending order of k */
    int n;                /* number of slots */
    const void *rows[MAX_TOP_K]; /* address of the current piece of each slot's row */
    /* weight of each slot; not set in FLAT layers, where the caller has already multiplied by
     * the weights */
    float weights[MAX_TOP_K];
    /* leaf of the sum tree (EPIC_TREE) to which the expert of each slot belongs; not set in
     * FLAT layers and with other sum orders */
    int32_t leaves[MAX_TOP_K];
} gathered;

static const void *piece_of_row(const combine_call *c, int64_t row)
{
    return (const unsigned char *)c->rows.data + row * c->rows.row_bytes +
           c->first * (int64_t)epic_type_bytes(c->type);
}

/* Returns the local expert whose slab contains a slot, by binary search. */
static int32_t local_expert(const plan_view *v, int32_t slot)
{
    int32_t low = 0, high = v->header->num_local - 1;
    /* loop invariant: the slot is in the slab (the slots of one expert) of a local expert from
     * low to high */
    while (low < high) {
        const int32_t middle = low + (high - low + 1) / 2;
        if (v->slab_begin[middle] <= slot)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Returns the index of the leaf of the sum tree to which the expert of a slot belongs. The
 * experts of the layer are divided into layer->leaves leaves of equal size. */
static int32_t leaf_of(const plan_view *v, int32_t slot)
{
    const epic_layer *layer = &v->header->layer;
    const int32_t expert = v->expert_of[local_expert(v, slot)];
    return (int32_t)((uint32_t)expert / (layer->num_experts / layer->leaves));
}

/* Sets *g to this rank's slots for one token of rank `home`. In a FLAT layer the token has a
 * single row on this rank, and *g gets only this row: the caller of combine has already added
 * the rows of the experts. */
static void gather_slots(const combine_call *c, int home, int64_t token, gathered *g)
{
    const plan_view *v = &c->plan;
    const int32_t *slots = plan_slots_of_token(v, home, token);
    g->n = 0;
    if (plan_is_flat(v)) {
        g->rows[g->n++] = piece_of_row(c, v->row_of[v->base_of[home] + token]);
        return;
    }
    const bool tree = v->header->layer.sum_order == EPIC_TREE;
    for (uint32_t k = 0; k < v->header->layer.top_k; k++) {
        if (slots[k] < 0) continue;
        g->rows[g->n] = piece_of_row(c, slots[k]);
        g->weights[g->n] = c->slot_weights ? c->slot_weights[slots[k]] : 1;
        g->leaves[g->n] = tree ? leaf_of(v, slots[k]) : 0;
        g->n++;
    }
}

/* Adds the rows of the slots in g whose leaves are in [first, first + count), and writes the
 * sum to `out`. First adds the rows of each leaf by ascending k, then the sums of the leaves in
 * a binary tree. A leaf without slots adds nothing. If no slot is in these leaves, returns
 * false and writes nothing. May overwrite the scratch rows from `level` on. */
static bool reduce_subtree(const combine_call *c, const gathered *g, int32_t first,
                           int32_t count, int level, void *out)
{
    gathered in = {.n = 0};
    for (int i = 0; i < g->n; i++) {
        if (g->leaves[i] < first || g->leaves[i] >= first + count) continue;
        in.rows[in.n] = g->rows[i];
        in.weights[in.n] = g->weights[i];
        in.leaves[in.n++] = g->leaves[i];
    }
    if (!in.n) return false;
    if (count == 1) {
        c->kernels->partial(out, c->partial_type, in.rows, c->slot_weights ? in.weights : NULL,
                            in.n, c->type, c->count);
        return true;
    }
    const int32_t half = count / 2;
    const bool low = reduce_subtree(c, &in, first, half, level, out);
    void *other = low ? scratch_row(c, level) : out;
    const bool high = reduce_subtree(c, &in, first + half, half, level + low, other);
    const void *const both[] = {out, other};
    if (low && high) c->kernels->add(out, c->partial_type, both, 2, c->partial_type, c->count);
    return true;
}

/* Writes the current piece of this rank's partial for a token to `out`, rounded to
 * partial_type. */
static void make_partial(const combine_call *c, int home, int64_t token, void *out)
{
    const epic_layer *layer = &c->plan.header->layer;
    gathered g;
    gather_slots(c, home, token, &g);
    if (layer->sum_order == EPIC_TREE && !plan_is_flat(&c->plan)) {
        const int32_t leaves = (int32_t)layer->leaves / (int32_t)c->plan.header->num_members;
        if (reduce_subtree(c, &g, c->plan.position_of[c->x->rank] * leaves, leaves, 1, out))
            return;
        /* The plan is damaged: some slots of the token are on this rank, but their experts are
         * in leaves of other ranks. Add no rows, so that the partial is 0. */
        g.n = 0;
    }
    c->kernels->partial(out, c->partial_type, g.rows, c->slot_weights ? g.weights : NULL, g.n,
                        c->type, c->count);
}

/* Writes the trailer of one token. Element k is the gradient of the weight of choice k, or 0 if
 * choice k has no slot on this rank. In a FLAT layer, a row of d_slot_weights contains only the
 * choices on this rank, contiguous and by ascending k, so the function moves each value to its
 * index k. */
static void write_trailer(const combine_call *c, int home, int64_t token, void *trailer)
{
    const plan_view *v = &c->plan;
    const uint32_t top_k = v->header->layer.top_k;
    const int32_t *here = plan_slots_of_token(v, home, token);
    int64_t index = plan_is_flat(v) ? v->row_of[v->base_of[home] + token] * (int64_t)top_k : 0;
    float values[MAX_TOP_K] = {0};
    for (uint32_t k = 0; k < top_k; k++)
        if (here[k] >= 0) values[k] = c->d_slot_weights[plan_is_flat(v) ? index++ : here[k]];
    memcpy(trailer, values, top_k * sizeof *values);
}

/* Returns true if all top_k choices of a token have slots on this rank. In this case this
 * rank's partial is the only partial for the token. */
static bool has_all_choices(const combine_call *c, int home, int64_t token)
{
    const int32_t *slots = plan_slots_of_token(&c->plan, home, token);
    for (uint32_t k = 0; k < c->plan.header->layer.top_k; k++)
        if (slots[k] < 0) return false;
    return true;
}

/* Stores the current piece of a token's only partial directly into the output row of the token
 * on its home rank. Requires that this output is in a window. Rounds the elements in the way in
 * which the home rank would round them. */
static void store_in_out(combine_call *c, int home, int64_t token)
{
    const int64_t size = (int64_t)epic_type_bytes(c->type);
    const void *partial = scratch_row(c, 0);
    unsigned char *to = window_address(
        c->x, home, WINDOW_ROWS, token * c->out.row_bytes + c->first * size, c->count * size);
    if (!to) return;
    make_partial(c, home, token, scratch_row(c, 0));
    c->kernels->add(to, c->type, &partial, 1, c->partial_type, c->count);
}

/* Stores a token's trailer into the array d_weights of the token's home rank. This array is in
 * a window. Requires that all choices of the token are on this rank. */
static void store_in_d_weights(const combine_call *c, int home, int64_t token)
{
    unsigned char *to =
        window_address(c->x, home, WINDOW_WEIGHTS, token * c->trailer, c->trailer);
    if (to) write_trailer(c, home, token, to);
}

/* Stores the current piece of a token's only partial, and its trailer, into those outputs of
 * the home rank that are in windows. Sets *partial to false if it has stored the partial, and
 * *trailer to false if it has stored the trailer. The ring entry then need not contain the
 * stored data. */
static void combine_store_directly(combine_call *c, int home, int64_t token, int32_t piece,
                                   bool *partial, bool *trailer)
{
    if (*partial && window_is_direct(c->x, home, WINDOW_ROWS)) {
        store_in_out(c, home, token);
        c->x->left_out_bytes += piece_size(&c->split, piece);
        *partial = false;
    }
    if (*trailer && window_is_direct(c->x, home, WINDOW_WEIGHTS)) {
        store_in_d_weights(c, home, token);
        c->x->left_out_bytes += c->trailer;
        *trailer = false;
    }
}

/* Callback collect.fill_entry (exchange.h): writes one piece of this rank's partial for a token
 * into a ring entry. Writes the trailer after the first piece. If the entry may be written
 * through the caches, computes the piece directly in the entry. If not, computes the piece in a
 * scratch row and copies it to the entry. */
static void combine_fill_entry(void *self, int home, int64_t token, int32_t piece, void *entry)
{
    combine_call *c = self;
    bool sends_partial = true, sends_trailer = c->trailer && piece == 0;
    combine_set_piece(c, piece);
    if (c->x->has_targets && has_all_choices(c, home, token))
        combine_store_directly(c, home, token, piece, &sends_partial, &sends_trailer);
    if (sends_trailer)
        write_trailer(c, home, token, (unsigned char *)entry + c->split.piece_bytes);
    if (!sends_partial) return;
    const int64_t bytes = piece_size(&c->split, piece);
    const ring_path path = ring_choose_path(c->x, home, bytes);
    void *out = path == RING_CACHED ? entry : scratch_row(c, 0);
    make_partial(c, home, token, out);
    if (out != entry)
        ring_write_row(c->x, home, path, entry, out, (size_t)bytes, c->kernels->copy);
}

/* ------------------------------------------------------------------------- home side ---- */

/* Copies the gradients of the weights of those choices that are on rank `from` to d_weights.
 * `trailer` is the trailer that rank `from` has sent. */
static void read_trailer(const combine_call *c, int from, int64_t token, const void *trailer)
{
    const uint32_t top_k = c->plan.header->layer.top_k;
    const int64_t first = token * top_k;
    float values[MAX_TOP_K];
    memcpy(values, trailer, top_k * sizeof *values);
    for (uint32_t k = 0; k < top_k; k++)
        if (c->plan.rank_to[first + k] == from && c->plan.fate[first + k] >= 0)
            c->d_weights[first + k] = values[k];
}

/* If the slots of all choices of a token of this rank are on one other rank, returns that rank.
 * On that rank, has_all_choices() returns true for the token. If the slots are not all on one
 * other rank, returns -1. */
static int find_only_rank(const combine_call *c, int64_t token)
{
    const uint32_t top_k = c->plan.header->layer.top_k;
    const int64_t first = token * top_k;
    const int rank = c->plan.rank_to[first];
    for (uint32_t k = 0; k < top_k; k++)
        if (c->plan.rank_to[first + k] != rank || c->plan.fate[first + k] < 0) return -1;
    return rank == c->x->rank ? -1 : rank;
}

/* Writes a token's row of d_weights from the trailers of all ranks. Writes 0 for a choice
 * without a slot. */
static void read_trailers(const combine_call *c, int64_t token, const void **rows)
{
    const uint32_t top_k = c->plan.header->layer.top_k;
    memset(c->d_weights + token * top_k, 0, top_k * sizeof *c->d_weights);
    for (int r = 0; r < c->x->num_ranks; r++) {
        if (!rows[r]) continue;
        float own[MAX_TOP_K];
        const void *trailer = (const unsigned char *)rows[r] + c->split.piece_bytes;
        if (r == c->x->rank) {
            write_trailer(c, r, token, own);
            trailer = own;
        }
        read_trailer(c, r, token, trailer);
    }
}

/* Adds the partials at[first] to at[first + count - 1] in a binary tree. A NULL element means
 * that there is no partial. Returns the address of the sum: NULL if there is no partial, the
 * partial if there is one, and scratch row `level` if there are several. May overwrite the
 * scratch rows from `level` on. */
static const void *join_subtrees(const combine_call *c, const void *const *at, int32_t first,
                                 int32_t count, int level)
{
    if (count == 1) return at[first];
    const void *both[2];
    both[0] = join_subtrees(c, at, first, count / 2, level);
    both[1] = join_subtrees(c, at, first + count / 2, count / 2, level + (both[0] != NULL));
    if (!both[0] || !both[1]) return both[0] ? both[0] : both[1];
    void *out = scratch_row(c, level);
    c->kernels->add(out, c->partial_type, both, 2, c->partial_type, c->count);
    return out;
}

/* Adds the partials rows[r] of all ranks r in a binary tree, and writes the sum to `out`.
 * rows[r] is NULL if rank r has no partial. Rank r is leaf plan.position_of[r] of the tree. */
static void add_partials_as_tree(const combine_call *c, const void **rows, void *out)
{
    const void *at[EPIC_MAX_RANKS];
    const int32_t num_members = (int32_t)c->plan.header->num_members;
    for (int p = 0; p < num_members; p++) at[p] = NULL;
    for (int r = 0; r < c->x->num_ranks; r++)
        if (rows[r]) at[c->plan.position_of[r]] = rows[r];
    const void *root = join_subtrees(c, at, 0, num_members, 1);
    c->kernels->add(out, c->type, &root, root != NULL, c->partial_type, c->count);
}

/* Adds the partials rows[r] of all ranks r by ascending rank, and writes the sum to `out`.
 * rows[r] is NULL if rank r has no partial. */
static void add_partials_by_rank(const combine_call *c, const void **rows, void *out)
{
    const void *list[EPIC_MAX_RANKS];
    int n = 0;
    for (int r = 0; r < c->x->num_ranks; r++)
        if (rows[r]) list[n++] = rows[r];
    c->kernels->add(out, c->type, list, n, c->partial_type, c->count);
}

/* Callback collect.read_rows: writes one piece of a token's output row, the sum of the partials
 * of all ranks, including this rank's own. */
static void combine_read_rows(void *self, int64_t token, int32_t piece, const void **rows)
{
    combine_call *c = self;
    const int rank = c->x->rank;
    const bool direct = c->has_windows && find_only_rank(c, token) >= 0;
    combine_set_piece(c, piece);
    rows[rank] = NULL;
    if (plan_receives_token(&c->plan, rank, token)) {
        rows[rank] = scratch_row(c, 0);
        make_partial(c, rank, token, scratch_row(c, 0));
    }
    void *out = (unsigned char *)c->out.data + token * c->out.row_bytes +
                c->first * (int64_t)epic_type_bytes(c->type);
    if (direct && window_is_direct(c->x, rank, WINDOW_ROWS))
        /* the only rank with slots of this token has already stored the row in the window */
        ;
    else if (c->plan.header->layer.sum_order == EPIC_TREE)
        add_partials_as_tree(c, rows, out);
    else
        add_partials_by_rank(c, rows, out);
    const bool has_trailers = !(direct && window_is_direct(c->x, rank, WINDOW_WEIGHTS));
    if (c->d_weights && piece == 0 && has_trailers) read_trailers(c, token, rows);
    rows[rank] = NULL;
}

static bool combine_is_sent(void *self, int home, int64_t token)
{
    return plan_receives_token(&((combine_call *)self)->plan, home, token);
}

static bool combine_is_received(void *self, int from, int64_t token)
{
    return plan_sends_token(&((combine_call *)self)->plan, from, token);
}

/* ------------------------------------------------------------ running the operation ---- */

/* Checks the size of the slot buffer of every rank, then runs the collect flow. */
static epic_result combine_transfer(combine_call *c)
{
    const epic_layer *layer = &c->plan.header->layer;
    TRY(plan_op_check_slots(c->x, c->rows_name));
    c->partial_type =
        layer->partial_type == EPIC_F32 && c->type != EPIC_F64 ? EPIC_F32 : c->type;
    const int64_t elements = c->out.row_bytes / (int64_t)epic_type_bytes(c->type);
    c->trailer = c->d_weights ? layer->top_k * (int64_t)sizeof(float) : 0;
    c->split = exchange_split_rows(
        c->x, false, elements * (int64_t)epic_type_bytes(c->partial_type), TRAILER_MAX);
    const collect how = {.self = c,
                         .items = tokens_of(c->x, &c->plan),
                         .split = c->split,
                         .trailer = c->trailer,
                         .is_sent = combine_is_sent,
                         .is_received = combine_is_received,
                         .fill_entry = combine_fill_entry,
                         .flush_stores = c->kernels->fence_copies,
                         .read_rows = combine_read_rows};
    c->has_windows = window_is_direct(c->x, c->x->rank, WINDOW_ROWS) ||
                     window_is_direct(c->x, c->x->rank, WINDOW_WEIGHTS);
    const bool stores = windows_begin_stores(c->x);
    const epic_result result = collect_run(c->x, &how);
    if (stores) windows_end_stores(c->x);
    return result;
}

/* Zeroes all outputs of this rank. Called if the data of any rank contains an error. */
static void combine_clear_outputs(const combine_call *c)
{
    const slot_array out = {c->out.data, c->out.row_bytes, c->out.num_rows};
    const slot_array weights = {c->d_weights, c->top_k * (int64_t)sizeof(float),
                                c->out.num_rows};
    slot_array_clear(&out);
    slot_array_clear(&weights);
}

static epic_result combine_run(epic_context *ctx, uint32_t operation, const epic_call *call,
                               plan_op *s, combine_call *c)
{
    s->op_header.common[COMMON_TYPE] = c->type;
    s->op_header.common[COMMON_ROW_BYTES] = c->out.row_bytes;
    s->op_header.common[COMMON_WEIGHTS] = c->slot_weights || c->d_weights;
    s->op_header.local[LOCAL_ROWS] = c->rows.num_rows;
    s->op_header.local[LOCAL_NEEDED_ROWS] = s->damaged ? 0 : s->plan.header->num_slots;
    const int64_t weights_bytes = c->top_k * (int64_t)sizeof(float);
    op_header_set_window(&s->op_header, ctx, WINDOW_ROWS, c->out.data,
                         c->out.num_rows * c->out.row_bytes);
    op_header_set_window(&s->op_header, ctx, WINDOW_WEIGHTS, c->d_weights,
                         c->out.num_rows * weights_bytes);
    const uint64_t bytes = (uint64_t)(c->out.num_rows * c->out.row_bytes);
    epic_result result = exchange_open(&c->x, ctx, operation, call, &s->op_header, bytes);
    if (!c->x) return result;
    c->plan = s->plan;
    const bool moves = result == EPIC_OK && s->plan.header->result == EPIC_OK;
    if (moves) result = combine_transfer(c);
    if (!moves || result == EPIC_EOVERFLOW) combine_clear_outputs(c);
    return exchange_close(c->x, result);
}

epic_result host_combine(epic_context *ctx, const epic_combine_args *args)
{
    combine_call c = {.kernels = host_kernels_get(),
                      .type = (epic_type)args->type,
                      .rows_name = "rows",
                      .rows = args->rows,
                      .out = args->out,
                      .slot_weights = args->slot_weights};
    plan_op s;
    plan_op_begin(&s, ctx, EPIC_OP_COMBINE, args->plan, args->plan_bytes, NULL);
    TRY(plan_op_check_layer(&s, args->layer));
    TRY(plan_op_check_tokens(&s, "out", args->out.num_rows));
    return combine_run(ctx, EPIC_OP_COMBINE, &args->call, &s, &c);
}

epic_result host_dispatch_backward(epic_context *ctx, const epic_dispatch_backward_args *args)
{
    combine_call c = {.kernels = host_kernels_get(),
                      .type = (epic_type)args->type,
                      .rows_name = "d_recv",
                      .rows = args->d_recv,
                      .out = args->d_tokens,
                      .top_k = args->layer->top_k,
                      .d_slot_weights = args->d_slot_weights,
                      .d_weights = args->d_weights};
    plan_op s;
    plan_op_begin(&s, ctx, EPIC_OP_DISPATCH_BACKWARD, args->plan, args->plan_bytes, NULL);
    TRY(plan_op_check_layer(&s, args->layer));
    TRY(plan_op_check_tokens(&s, "d_tokens", args->d_tokens.num_rows));
    return combine_run(ctx, EPIC_OP_DISPATCH_BACKWARD, &args->call, &s, &c);
}
