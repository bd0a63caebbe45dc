/* SPDX-License-Identifier: Apache-2.0 */
/* Implements epic_allreduce_sum on the host. Also sums float64 arrays for src/moe
 * (host_sum_of_type).
 *
 * A long array is split into blocks. Member b % num_members owns block b. The all-reduce is a
 * reduce-scatter and an all-gather. First every rank sends its own values of each block to the
 * block's owner, which adds them (a collect flow, exchange.h). Then each owner sends its sums
 * to all ranks (a scatter flow). So all ranks get the same bits.
 *
 * A short array is sent inside the op headers, and every rank adds the arrays of all ranks.
 * This takes one message delay instead of three. The additions have the same order as for long
 * arrays, so the sums have the same bits. */
#include <string.h>

#include "base/error.h"
#include "host_ops/host_ops.h"

#define BLOCK_BYTES 8192

typedef struct sum_call {
    const epic_allreduce_sum_args *args; /* data is an array of `type` */
    uint32_t type;                       /* EPIC_F32 or EPIC_F64 */
    int64_t bytes;                       /* size of data in bytes */
    const host_kernels *kernels;
    exchange *x;
} sum_call;

/* Rank `owner` owns several blocks. Returns the index in the whole array of the block that has
 * index `item` among these blocks. */
static int64_t block_of(const sum_call *s, int owner, int64_t item)
{
    const epic_context *ctx = s->x->ctx;
    return item * ctx->num_members + context_member_number(ctx, owner);
}

static void *block_at(const sum_call *s, int64_t block)
{
    return (char *)s->args->data + block * BLOCK_BYTES;
}

/* Returns the size in bytes of a block. The last block may be shorter than the others. */
static size_t block_size(const sum_call *s, int64_t block)
{
    const int64_t left = s->bytes - block * BLOCK_BYTES;
    return (size_t)(left < BLOCK_BYTES ? left : BLOCK_BYTES);
}

static void sum_copy_block(sum_call *s, int owner, int64_t item, void *entry)
{
    const int64_t block = block_of(s, owner, item);
    memcpy(entry, block_at(s, block), block_size(s, block));
}

/* Callback collect.fill_entry (exchange.h): copies a block of this rank's array to `entry`,
 * which is sent to rank `home`, the owner of the block. A block fits into one entry, so `piece`
 * is always 0. */
static void sum_fill_part(void *self, int home, int64_t item, int32_t piece, void *entry)
{
    (void)piece;
    sum_copy_block(self, home, item, entry);
}

/* Adds the rows [first, first + count) of n elements each in a binary tree. count is a power of
 * two. If count is 1, returns the address of the only row. If count is larger, writes the sum
 * to row `level` of x->scratch_rows and returns the address of this row. May overwrite the
 * scratch rows from `level` on. */
static const void *sum_join_ranks(const sum_call *s, const void *const *rows, int first,
                                  int count, int level, int64_t n)
{
    if (count == 1) return rows[first];
    const void *const both[] = {
        sum_join_ranks(s, rows, first, count / 2, level, n),
        sum_join_ranks(s, rows, first + count / 2, count / 2, level + 1, n)};
    void *out = s->x->scratch_rows + (size_t)level * PIECE_MAX;
    s->kernels->add(out, s->type, both, 2, s->type, n);
    return out;
}

/* Adds the rows rows[r] of all members r in the order args->order, and writes the sum to `out`,
 * which may be one of the rows. A row has `bytes` bytes. rows[r] is NULL for a vacant seat r (a
 * rank that has left the group). */
static void sum_add_rows(const sum_call *s, void *out, const void *const *rows, size_t bytes)
{
    const void *list[EPIC_MAX_RANKS];
    const int64_t n = (int64_t)(bytes / epic_type_bytes(s->type));
    int count = 0;
    for (int r = 0; r < s->x->num_ranks; r++)
        if (rows[r]) list[count++] = rows[r];
    if (s->args->order == EPIC_TREE)
        memmove(out, sum_join_ranks(s, list, 0, count, 0, n), bytes);
    else
        s->kernels->add(out, s->type, list, count, s->type, n);
}

/* Callback collect.read_rows: sums one of this rank's blocks over all ranks. */
static void sum_add_block(void *self, int64_t item, int32_t piece, const void **rows)
{
    sum_call *s = self;
    (void)piece;
    const int64_t block = block_of(s, s->x->rank, item);
    void *out = block_at(s, block);
    rows[s->x->rank] = out;
    sum_add_rows(s, out, rows, block_size(s, block));
    rows[s->x->rank] = NULL;
}

/* Callbacks is_sent and is_received of the collect flow and of the scatter flow: every member
 * sends every item to every member, so `item` is ignored. */
static bool is_sent_by_members(void *self, int rank, int64_t item)
{
    (void)item;
    return context_has_member(((sum_call *)self)->x->ctx, rank);
}

/* Callback scatter.fill_entry: copies the sum of one of this rank's blocks to `entry`, which is
 * sent to all ranks. */
static void sum_fill_result(void *self, int64_t item, int32_t piece, void *entry)
{
    sum_call *s = self;
    (void)piece;
    sum_copy_block(s, s->x->rank, item, entry);
}

/* Callback scatter.read_entry: stores the sum of a block of rank `from` into the array. */
static void sum_read_result(void *self, int from, int64_t item, int32_t piece,
                            const void *entry)
{
    sum_call *s = self;
    (void)piece;
    const int64_t block = block_of(s, from, item);
    memcpy(block_at(s, block), entry, block_size(s, block));
}

/* Callback scatter.read_own_item: does nothing, because the sums of this rank's blocks are
 * already in the array. */
static void skip_own_block(void *self, int64_t item)
{
    (void)self, (void)item;
}

static epic_result sum_in_blocks(sum_call *s)
{
    exchange *x = s->x;
    const int64_t blocks = (s->bytes + BLOCK_BYTES - 1) / BLOCK_BYTES;
    const int num_members = x->ctx->num_members;
    for (int r = 0, m = 0; r < x->num_ranks; r++)
        x->items[r] =
            context_has_member(x->ctx, r) ? (blocks - m++ + num_members - 1) / num_members : 0;
    const row_split whole = {
        .row_bytes = BLOCK_BYTES, .piece_bytes = BLOCK_BYTES, .num_pieces = 1};
    const collect add = {.self = s,
                         .items = x->items,
                         .split = whole,
                         .is_sent = is_sent_by_members,
                         .is_received = is_sent_by_members,
                         .fill_entry = sum_fill_part,
                         .read_rows = sum_add_block};
    TRY(collect_run(x, &add));
    const scatter give = {.self = s,
                          .items = x->items,
                          .split = whole,
                          .is_sent = is_sent_by_members,
                          .is_received = is_sent_by_members,
                          .fill_entry = sum_fill_result,
                          .read_entry = sum_read_result,
                          .read_own_item = skip_own_block};
    return scatter_run(x, &give);
}

static bool is_short(const sum_call *s)
{
    return s->bytes <= OP_PAYLOAD_BYTES;
}

/* Sums a short array from the op headers of all ranks. */
static void sum_from_headers(sum_call *s)
{
    exchange *x = s->x;
    for (int r = 0; r < x->num_ranks; r++)
        x->rows[r] = context_has_member(x->ctx, r) ? x->headers[r]->bytes : NULL;
    sum_add_rows(s, s->args->data, x->rows, (size_t)s->bytes);
}

static epic_result sum_numbers(epic_context *ctx, const epic_allreduce_sum_args *args,
                               uint32_t type, const epic_op_header *about)
{
    const size_t bytes = (size_t)args->count * epic_type_bytes(type);
    sum_call s = {
        .args = args, .type = type, .bytes = (int64_t)bytes, .kernels = host_kernels_get()};
    epic_op_header header = *about;
    header.common[COMMON_OPERATION] = EPIC_OP_SUM;
    header.common[COMMON_COUNT] = args->count;
    header.common[COMMON_SUM_ORDER] = args->order;
    if (args->count && is_short(&s)) memcpy(header.bytes, args->data, bytes);
    epic_result result = exchange_open(&s.x, ctx, EPIC_OP_SUM, &args->call, &header, bytes);
    if (!s.x) return result;
    if (result == EPIC_OK && !is_short(&s))
        result = sum_in_blocks(&s);
    else if (result == EPIC_OK && args->count)
        sum_from_headers(&s);
    return exchange_close(s.x, result);
}

epic_result host_sum_with_header(epic_context *ctx, const epic_allreduce_sum_args *args,
                                 const epic_op_header *about)
{
    return sum_numbers(ctx, args, EPIC_F32, about);
}

epic_result host_sum_of_type(epic_context *ctx, const epic_allreduce_sum_args *args,
                             uint32_t type)
{
    return sum_numbers(ctx, args, type, &(epic_op_header){0});
}

epic_result host_allreduce_sum(epic_context *ctx, const epic_allreduce_sum_args *args)
{
    return host_sum_with_header(ctx, args, &(epic_op_header){0});
}
