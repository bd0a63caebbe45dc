/* SPDX-License-Identifier: Apache-2.0 */
/* Implements the common parts of all operations (operations.h). */
#include "backend/p2p/operations.h"

#include "base/error.h"

void p2p_fill_self(p2p_self *self, const epic_group *g, const epic_call *call,
                   epic_operation operation, signature a)
{
    const uint32_t timeout_ms = call->timeout_ms ? call->timeout_ms : g->config.timeout_ms;
    g->hooks->wake(g);
    signature_mix(&a, call->tag);
    *self = g->self;
    self->operation = operation;
    self->signature = (uint32_t)operation << 28 | (uint32_t)(a.hash >> 36);
    self->timeout_ns = (uint64_t)timeout_ms * 1000000;
    p2p_beats_expect(g->beats, timeout_ms);
}

epic_result p2p_check_row(const epic_group *g, const char *name, int64_t row_bytes)
{
    if (row_bytes <= g->config.max_row_bytes) return EPIC_OK;
    return epic_fail(
        EPIC_EINVAL,
        "%s.row_bytes is %lld: must be at most config.max_row_bytes %lld; open with "
        "more",
        name, (long long)row_bytes, (long long)g->config.max_row_bytes);
}

bool p2p_fits_staging(const epic_group *g, int64_t row_bytes)
{
    const p2p_heap *at = &g->self.at;
    const int64_t tokens = g->config.max_tokens;
    return tokens * device_round_up(row_bytes, 16) <= at->source_bytes &&
           tokens <= p2p_index_tokens(at, tokens);
}

bool p2p_can_use_lowlat(const epic_group *g)
{
    if (MANY_RANKS) return false;
    return !HOSTS || (g->config.max_tokens <= g->lowlat_tokens && !g->self.net->ranks_per_host);
}

bool p2p_fits_lowlat(const epic_group *g, const epic_layer *layer, int32_t num_tokens,
                     int32_t most, int64_t row_bytes)
{
    return p2p_can_use_lowlat(g) && num_tokens <= most && layer->top_k <= 32 &&
           p2p_fits_staging(g, row_bytes);
}
