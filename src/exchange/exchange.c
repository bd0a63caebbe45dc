/* SPDX-License-Identifier: Apache-2.0 */
/* Opens and closes operations, compares their op headers (the first message of each rank), and
 * waits with a deadline. To *break the group* means to record its failure, so that all later
 * calls of all ranks return this failure. */
#include "exchange/exchange.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "exchange/culprits.h"
#include "exchange/rounding.h"

/* The phases of an exchange. Peers read the phase of a rank with transport->look(). */
enum { PHASE_HEADERS, PHASE_ROWS, PHASE_NEXT_ROWS };

/* time between two checks whether peers are alive, while no peer is known to be gone */
#define CHECK_NS 100000000ull
#define MS 1000000ull
#define MAX_SLEEP_MS 1000u

static size_t row_scratch_bytes(const epic_config *config)
{
    return (size_t)config->max_row_bytes + 64;
}

int64_t exchange_bytes(const epic_config *config)
{
    const int64_t targets = NUM_WINDOW_OUTPUTS * (int64_t)sizeof(window_target);
    const int64_t by_rank =
        9 * 8 + 4 + (int64_t)sizeof(ring_write_time) + config->max_top_k * 8ll + targets;
    return (int64_t)sizeof(exchange) + by_rank * config->num_ranks +
           (int64_t)row_scratch_bytes(config) + (TREE_LEVELS + 1) * PIECE_MAX;
}

/* Allocates the arrays of an exchange. Returns false if out of memory. exchange_close_all()
 * frees the arrays, also after a failure. */
static bool exchange_allocate(exchange *x, const epic_context *ctx)
{
    const size_t n = (size_t)ctx->num_ranks;
    x->headers = calloc(n, sizeof *x->headers);
    x->items = calloc(n, sizeof *x->items);
    x->sends = calloc(n, sizeof *x->sends);
    x->receives = calloc(n, sizeof *x->receives);
    x->num_sent = calloc(n, sizeof *x->num_sent);
    x->num_read = calloc(n, sizeof *x->num_read);
    x->next_item_to = calloc(n, sizeof *x->next_item_to);
    x->next_piece_to = calloc(n, sizeof *x->next_piece_to);
    x->next_item_from = calloc(n, sizeof *x->next_item_from);
    x->ring_write_times = calloc(n, sizeof *x->ring_write_times);
    x->rows = calloc(n, sizeof *x->rows);
    x->targets = calloc(n, NUM_WINDOW_OUTPUTS * sizeof *x->targets);
    x->sums = calloc(n, ctx->config.max_top_k * sizeof *x->sums);
    x->row = malloc(row_scratch_bytes(&ctx->config));
    x->scratch_rows = aligned_alloc(64, (size_t)(TREE_LEVELS + 1) * PIECE_MAX);
    return x->headers && x->items && x->sends && x->receives && x->num_sent && x->num_read &&
           x->next_item_to && x->next_piece_to && x->next_item_from && x->ring_write_times &&
           x->rows && x->targets && x->sums && x->row && x->scratch_rows;
}

epic_result exchange_open_all(epic_context *ctx)
{
    const uint32_t n = ctx->config.max_in_flight;
    ctx->exchanges = calloc(n, sizeof *ctx->exchanges);
    if (!ctx->exchanges) return epic_fail(EPIC_ENOMEM, "no memory for %u operations", n);
    for (uint32_t i = 0; i < n; i++) {
        exchange *x = &ctx->exchanges[i];
        *x = (exchange){.ctx = ctx,
                        .transport = ctx->backend->transport,
                        .group = ctx->group,
                        .op_slot = (int)i,
                        .rank = ctx->rank,
                        .num_ranks = ctx->num_ranks};
        if (!exchange_allocate(x, ctx))
            return epic_fail(EPIC_ENOMEM,
                             "no memory for operation %u of max_in_flight %u: %lld bytes each",
                             i, n, (long long)exchange_bytes(&ctx->config));
    }
    return EPIC_OK;
}

void exchange_close_all(epic_context *ctx)
{
    for (uint32_t i = 0; ctx->exchanges && i < ctx->config.max_in_flight; i++) {
        exchange *x = &ctx->exchanges[i];
        void *const parts[] = {(void *)x->headers,
                               x->items,
                               x->sends,
                               x->receives,
                               x->num_sent,
                               x->num_read,
                               x->next_item_to,
                               x->next_piece_to,
                               x->next_item_from,
                               x->ring_write_times,
                               (void *)x->rows,
                               x->targets,
                               x->sums,
                               x->row,
                               x->scratch_rows};
        for (size_t p = 0; p < sizeof parts / sizeof *parts; p++) free(parts[p]);
    }
    free(ctx->exchanges);
    ctx->exchanges = NULL;
}

/* Returns the failure that a rank has reported, and stores it in the context. Returns EPIC_OK
 * if no rank has reported a failure. */
static epic_result exchange_poll_failure(exchange *x)
{
    epic_failure_info failure;
    if (!x->transport->failure(x->group, &failure)) return EPIC_OK;
    return context_break(x->ctx, &failure);
}

/* Breaks the group with `result`, an error of this rank. If another rank has broken the group
 * first, returns the error of that rank, so that all ranks return the same error. */
static epic_result exchange_break_group(exchange *x, epic_result result,
                                        const uint64_t *culprits, const char *sentence)
{
    epic_failure_info failure = {.result = (uint32_t)result,
                                 .operation = x->operation,
                                 .tag = x->tag,
                                 .sequence = x->sequence,
                                 .rank = x->rank};
    for (int r = 0; r < x->num_ranks && failure.num_culprits < EPIC_MAX_CULPRITS; r++)
        if (culprits[r / 64] >> (r % 64) & 1) failure.culprits[failure.num_culprits++] = r;
    snprintf(failure.sentence, sizeof failure.sentence, "%s (tag %llu, sequence %llu): %s",
             operation_name(x->operation), (unsigned long long)x->tag,
             (unsigned long long)x->sequence, sentence);
    x->transport->break_group(x->group, &failure);
    const epic_result first = exchange_poll_failure(x);
    return first ? first : context_break(x->ctx, &failure);
}

/* Returns true if the peers should be checked now. This is so in three cases: the last check
 * found a peer gone, the last check was at least CHECK_NS ago, or the backend has detected that
 * a peer is gone. */
static bool exchange_should_check_peers(const exchange *x, uint64_t now)
{
    if (x->is_peer_gone || now - x->last_check_ns >= CHECK_NS) return true;
    return x->transport->any_gone && x->transport->any_gone(x->group);
}

/* Breaks the group with EPIC_EPEER if a peer for which this rank waits is gone. `late` means
 * that the deadline has passed. If `late` is false, most calls return without a check
 * (exchange_should_check_peers()).
 *
 * A peer may have sent its last data just before its process exited. So the group breaks only
 * if two checks find the peer gone and this rank has sent and read no entry between them. If
 * some processes exited and other peers closed their contexts, the error text contains only the
 * processes that exited, because the other peers probably closed as a consequence. */
static epic_result exchange_check_peers(exchange *x, uint64_t now, bool late)
{
    if (!late && !exchange_should_check_peers(x, now)) return EPIC_OK;
    x->last_check_ns = now;
    uint64_t closed[RANK_WORDS] = {0}, ended[RANK_WORDS] = {0};
    bool any = false, any_ended = false;
    for (int r = 0; r < x->num_ranks; r++) {
        if (!(x->waits_for[r / 64] >> (r % 64) & 1)) continue;
        epic_peer_status status;
        x->transport->look(x->group, r, x->tag, x->header_sequence, &status);
        if (!status.is_gone || has_peer_finished(x, &status)) continue;
        (status.has_closed ? closed : ended)[r / 64] |= 1ull << (r % 64);
        any = true;
        any_ended |= !status.has_closed;
    }
    if (!any || !x->is_peer_gone) {
        x->is_peer_gone = any;
        return EPIC_OK;
    }
    char list[128], sentence[256];
    format_ranks(list, sizeof list, any_ended ? ended : closed);
    snprintf(sentence, sizeof sentence, "rank %d waited for %s, %s; %sopen a new group",
             x->rank, list, any_ended ? "whose process ended" : "which closed the context",
             x->transport->regroup ? "call epic_regroup, or " : "");
    return exchange_break_group(x, EPIC_EPEER, any_ended ? ended : closed, sentence);
}

/* Searches for the culprits, and breaks the group with EPIC_ETIMEOUT, because the deadline has
 * passed. If deadline_look() finds that this process was suspended during the search, the peers
 * probably were suspended too. So the deadline has restarted, and the function returns EPIC_OK
 * without breaking the group. */
static epic_result exchange_report_timeout(exchange *x)
{
    uint64_t culprits[RANK_WORDS] = {0};
    char sentence[400];
    find_culprits(x, culprits, sentence, sizeof sentence);
    if (!deadline_look(&x->deadline, now_ns())) return EPIC_OK;
    return exchange_break_group(x, EPIC_ETIMEOUT, culprits, sentence);
}

/* For each rank in x->waits_for, adds the time since `start` to the recorded waiting time. Does
 * not include the time in which this process was suspended. */
static void exchange_count_wait(exchange *x, uint64_t start)
{
    const uint64_t end = now_ns();
    const uint64_t ns = end - start - deadline_stopped_ns(&x->deadline, end);
    recorder_add_wait(x->ctx->recorder, x->operation, x->waits_for, ns);
}

/* Checks for a failure, for peers that are gone and for the deadline, then sleeps once in
 * transport->wait(). op_slot is the op slot of the exchange, or -1 to wait for a free op slot.
 * If one check has found a peer gone, sleeps only until all data of that peer must have
 * arrived, so that the second check comes soon. */
static epic_result exchange_wait_in(exchange *x, int op_slot)
{
    TRY(exchange_poll_failure(x));
    const uint64_t now = now_ns();
    const bool late = deadline_look(&x->deadline, now);
    TRY(exchange_check_peers(x, now, late));
    if (late && !x->is_peer_gone)
        /* if a peer seems to be gone, the next check decides, so do not report a timeout yet */
        TRY(exchange_report_timeout(x));
    const uint64_t longest_ms = x->is_peer_gone ? x->transport->settle_ms : MAX_SLEEP_MS;
    const uint64_t sleep = deadline_sleep_ns(&x->deadline, now, longest_ms * MS);
    const uint64_t ms = longest_ms ? sleep / MS + 1 : 0;
    x->transport->wait(x->group, op_slot, x->phase, x->waits_for, (uint32_t)ms);
    if (op_slot >= 0) exchange_count_wait(x, now);
    return exchange_poll_failure(x);
}

static int first_awaited_rank(const exchange *x)
{
    for (int r = 0; r < x->num_ranks; r++)
        if (x->waits_for[r / 64] >> (r % 64) & 1) return r;
    return -1;
}

epic_result exchange_wait(exchange *x)
{
    const uint32_t state = x->phase == PHASE_HEADERS ? RECORDER_ANNOUNCED : RECORDER_MOVING;
    recorder_phase(x->ctx->recorder, x->record, state, first_awaited_rank(x));
    return exchange_wait_in(x, x->op_slot);
}

void exchange_report_progress(exchange *x)
{
    x->is_peer_gone = false;
    deadline_renew(&x->deadline); /* the next wait has the full timeout again */
}

/* Waits for a free op slot and stores its index in *op_slot. Any member may delay the
 * operations that use the op slots, so waits_for contains all other members. */
static epic_result exchange_wait_for_op_slot(exchange *request, int *op_slot)
{
    exchange waiter = *request;
    for (int r = 0; r < waiter.num_ranks; r++)
        if (exchange_is_peer(&waiter, r)) exchange_mark_awaited(&waiter, r);
    while ((*op_slot = request->transport->claim(request->group)) < 0)
        TRY(exchange_wait_in(&waiter, -1));
    /* the wait for op headers, which comes next, uses the same deadline */
    request->deadline = waiter.deadline;
    return EPIC_OK;
}

/* Claims an op slot. If no op slot is free, waits until one is. Sets *out to the exchange of
 * that op slot, and copies the operation in `request` to it. */
static epic_result exchange_claim_op_slot(exchange **out, epic_context *ctx, exchange *request)
{
    int op_slot = request->transport->claim(ctx->group);
    if (op_slot < 0) TRY(exchange_wait_for_op_slot(request, &op_slot));
    exchange *x = &ctx->exchanges[op_slot];
    x->operation = request->operation;
    x->tag = request->tag;
    x->sequence = request->sequence;
    x->header_sequence = request->header_sequence;
    x->deadline = request->deadline;
    x->phase = PHASE_HEADERS;
    x->is_peer_gone = false;
    x->has_targets = false;
    x->last_check_ns = now_ns();
    x->rounding = rounding_enter();
    *out = x;
    return EPIC_OK;
}

/* Compares the op header of rank r with the headers of this rank and of rank *healthy. If two
 * headers differ, breaks the group with EPIC_EMISMATCH. *healthy is the first rank whose header
 * reports no error, or -1 if no such rank is known yet. If *healthy is -1 and rank r reports no
 * error, sets *healthy to r.
 *
 * In a header that reports an error, most other elements are empty. So if this rank's own
 * header reports an error, only the header of *healthy can show that rank r differs. */
static epic_result exchange_compare_header(exchange *x, int r, int *healthy)
{
    char sentence[256];
    const int with[] = {x->rank, *healthy};
    const int count = *healthy < 0 || *healthy == x->rank ? 1 : 2;
    for (int i = 0; i < count; i++) {
        const int a = r < with[i] ? r : with[i], b = r < with[i] ? with[i] : r;
        if (op_header_compare(x->headers[a], a, x->headers[b], b, sentence, sizeof sentence))
            continue;
        const uint64_t no_rank[RANK_WORDS] = {0};
        return exchange_break_group(x, EPIC_EMISMATCH, no_rank, sentence);
    }
    if (*healthy < 0 && !exchange_local_field(x, r, LOCAL_ERROR)) *healthy = r;
    return EPIC_OK;
}

/* Sets the op headers of this rank and of the vacant seats (ranks that have left the group),
 * and clears the pointers of all other ranks. The header of a vacant seat is all zero, which
 * means no tokens, no slots and no error. */
static void exchange_init_headers(exchange *x, const epic_op_header *mine)
{
    static const epic_op_header vacant;
    memset(x->headers, 0, (size_t)x->num_ranks * sizeof *x->headers);
    for (int r = 0; r < x->num_ranks && context_members(x->ctx); r++)
        if (!context_has_member(x->ctx, r)) x->headers[r] = &vacant;
    x->headers[x->rank] = mine;
}

/* Waits for the op headers of all members and compares them with `mine`, the header of this
 * rank. If two headers differ, breaks the group with EPIC_EMISMATCH. */
static epic_result exchange_gather_headers(exchange *x, const epic_op_header *mine)
{
    int healthy = mine->local[LOCAL_ERROR] ? -1 : x->rank;
    exchange_init_headers(x, mine);
    for (;;) {
        int missing = 0;
        memset(x->waits_for, 0, sizeof x->waits_for);
        for (int r = 0; r < x->num_ranks; r++) {
            if (x->headers[r]) continue;
            x->headers[r] = x->transport->op_header(x->group, x->op_slot, r);
            if (!x->headers[r]) {
                exchange_mark_awaited(x, r);
                missing++;
                continue;
            }
            TRY(exchange_compare_header(x, r, &healthy));
        }
        if (!missing) return EPIC_OK;
        TRY(exchange_wait(x));
    }
}

/* Claims an op slot, sends the op header to all ranks, and waits for the headers of all ranks.
 * If an op slot was claimed, sets *out to its exchange, even if an error follows. The caller
 * must close this exchange. */
static epic_result exchange_enter(exchange **out, epic_context *ctx, exchange *request,
                                  const epic_op_header *header, uint64_t bytes)
{
    exchange *x;
    TRY(exchange_claim_op_slot(&x, ctx, request));
    x->record = recorder_begin(ctx->recorder, x->operation, x->tag, x->sequence, bytes);
    x->transport->announce(x->group, x->op_slot, x->tag, x->sequence, header);
    *out = x;
    TRY(exchange_gather_headers(x, header));
    x->phase = PHASE_ROWS;
    exchange_report_progress(x);
    return EPIC_OK;
}

epic_result exchange_open(exchange **out, epic_context *ctx, uint32_t operation,
                          const epic_call *call, const epic_op_header *header, uint64_t bytes)
{
    exchange request = {.ctx = ctx,
                        .transport = ctx->backend->transport,
                        .group = ctx->group,
                        .rank = ctx->rank,
                        .num_ranks = ctx->num_ranks,
                        .operation = operation,
                        .tag = call->tag};
    const uint32_t timeout_ms = call->timeout_ms ? call->timeout_ms : ctx->config.timeout_ms;
    deadline_start(&request.deadline, timeout_ms * MS, now_ns());
    *out = NULL;
    TRY(context_check(ctx));
    TRY(tags_begin(&ctx->tags, call->tag, &request.sequence));
    request.header_sequence = request.sequence;
    exchange *x = NULL;
    const epic_result result = exchange_enter(&x, ctx, &request, header, bytes);
    if (result != EPIC_OK) {
        if (x) return exchange_close(x, result);
        tags_end(&ctx->tags, call->tag);
        return result;
    }
    *out = x;
    return op_header_data_error(x->headers, x->num_ranks);
}

void exchange_reuse(exchange *x, uint32_t operation, uint64_t bytes)
{
    epic_context *ctx = x->ctx;
    recorder_end(ctx->recorder, x->record, EPIC_OK, NULL);
    x->operation = operation;
    x->sequence = tags_continue(&ctx->tags, x->tag);
    x->record = recorder_begin(ctx->recorder, operation, x->tag, x->sequence, bytes);
    x->phase = PHASE_NEXT_ROWS;
    exchange_report_progress(x);
}

epic_result exchange_close(exchange *x, epic_result result)
{
    epic_context *ctx = x->ctx;
    const uint64_t tag = x->tag, record = x->record;
    rounding_leave(x->rounding);
    x->transport->finish(x->group,
                         /* another thread may now claim the op slot and overwrite *x, so *x
                          * must not be used any more */
                         x->op_slot);
    recorder_end(ctx->recorder, record, result, result == EPIC_OK ? NULL : epic_sentence());
    tags_end(&ctx->tags, tag);
    return result;
}

row_split exchange_split_rows(const exchange *x, bool everyone, int64_t row_bytes,
                              int64_t trailer)
{
    int64_t most = PIECE_MAX;
    if (x->num_ranks > 1) {
        const int64_t half =
            x->transport->ring_bytes(x->group, everyone && x->transport->shares) / 2 - trailer;
        most = half < PIECE_MAX ? half / PIECE_UNIT * PIECE_UNIT : PIECE_MAX;
    }
    if (row_bytes <= most)
        return (row_split){.row_bytes = row_bytes, .piece_bytes = row_bytes, .num_pieces = 1};
    return (row_split){.row_bytes = row_bytes,
                       .piece_bytes = most,
                       .num_pieces = (int32_t)((row_bytes + most - 1) / most)};
}
