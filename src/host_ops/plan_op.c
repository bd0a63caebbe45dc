/* SPDX-License-Identifier: Apache-2.0 */
/* Implements the parts that all operations with a plan have in common: checks of the plan, the
 * layer and the buffers, and zeroing of padding. */
#include <string.h>

#include "base/error.h"
#include "host_ops/host_ops.h"
#include "rules/sentences.h"

void op_header_set_layer(epic_op_header *header, const epic_layer *layer)
{
    header->common[COMMON_NUM_EXPERTS] = layer->num_experts;
    header->common[COMMON_NUM_LOGICAL] = layer->num_logical;
    header->common[COMMON_TOP_K] = layer->top_k;
    header->common[COMMON_ALIGNMENT] = layer->alignment;
    header->common[COMMON_LAYOUT] = layer->layout;
    header->common[COMMON_OVERFLOW] = layer->overflow;
    header->common[COMMON_EXPERT_CAPACITY] = layer->expert_capacity;
    header->common[COMMON_PRIORITY] = layer->priority;
    header->common[COMMON_SUM_ORDER] = layer->sum_order;
    header->common[COMMON_LEAVES] = layer->leaves;
    header->common[COMMON_PARTIAL_TYPE] = layer->partial_type;
    header->common[COMMON_LAYER_FLAGS] = layer->flags;
}

/* Copies the plan's id, its layer and its number of tokens to the op header. The ranks compare
 * the id and the layer. */
static void op_header_set_plan(plan_op *s)
{
    s->op_header.common[COMMON_PLAN] = (int64_t)s->plan.header->id;
    op_header_set_layer(&s->op_header, &s->plan.header->layer);
    s->op_header.local[LOCAL_TOKENS] = s->plan.header->num_tokens;
}

void plan_op_begin(plan_op *s, const epic_context *ctx, uint32_t operation, const void *plan,
                   int64_t plan_bytes, const op_header_extra *extra)
{
    memset(s, 0, sizeof *s);
    enum plan_damage found =
        plan_check(&s->plan, plan, plan_bytes, ctx->group_id, ctx->rank, ctx->num_ranks);
    /* reject more than max_top_k choices per token, because exchange.sums has no room for
     * more */
    if (found == PLAN_OK && s->plan.header->layer.top_k > ctx->config.max_top_k)
        found = PLAN_OUT_OF_RANGE;
    const data_fault damage = {DATA_PLAN, {found}};
    const data_fault *fault = extra ? extra->fault : NULL;
    const bool given = fault && fault->error != DATA_OK;
    if (!given && damage.about[0] != PLAN_OK) fault = &damage;
    s->op_header.common[COMMON_OPERATION] = operation;
    s->damaged = fault && fault->error != DATA_OK;
    op_header_set_fault(&s->op_header, fault);
    op_header_set_options(&s->op_header, extra ? extra->options : NULL);
    if (!s->damaged) op_header_set_plan(s);
}

void plan_op_begin_unchecked(plan_op *s, uint32_t operation, const void *plan)
{
    memset(s, 0, sizeof *s);
    s->plan = plan_view_of(plan);
    s->op_header.common[COMMON_OPERATION] = operation;
    op_header_set_fault(&s->op_header, NULL);
    op_header_set_plan(s);
}

epic_result plan_op_check_layer(const plan_op *s, const epic_layer *layer)
{
    epic_op_header given = {0};
    char sentence[160];
    if (s->damaged) return EPIC_OK;
    op_header_set_layer(&given, layer);
    if (op_header_compare_layer(&given, &s->op_header, sentence, sizeof sentence))
        return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "%s", sentence);
}

epic_result plan_op_check_tokens(const plan_op *s, const char *name, int64_t num_rows)
{
    if (s->damaged || num_rows == s->plan.header->num_tokens) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, SENTENCE_TOKENS, name, (long long)num_rows,
                     (long long)s->plan.header->num_tokens);
}

epic_result plan_op_check_slots(const exchange *x, const char *name)
{
    for (int r = 0; r < x->num_ranks; r++) {
        const int64_t rows = exchange_local_field(x, r, LOCAL_ROWS),
                      needed = exchange_local_field(x, r, LOCAL_NEEDED_ROWS);
        if (rows < needed)
            return epic_fail(EPIC_EOVERFLOW, SENTENCE_ROWS, name, r, (long long)rows,
                             (long long)needed);
    }
    return EPIC_OK;
}

const int64_t *tokens_of(exchange *x, const plan_view *v)
{
    int64_t *tokens = x->items;
    for (int r = 0; r < x->num_ranks; r++) tokens[r] = v->tokens_of[r];
    return tokens;
}

static void slot_array_clear_rows(const slot_array *a, int64_t begin, int64_t end)
{
    if (begin < end)
        memset((unsigned char *)a->data + begin * a->row_bytes, 0,
               (size_t)((end - begin) * a->row_bytes));
}

void slot_array_clear_padding(const plan_view *v, const slot_array *a, uint32_t flags)
{
    if (!a->data) return;
    const plan_header *h = v->header;
    const bool pads = !plan_is_flat(v) && !(flags & EPIC_LEAVE_PADDING);
    for (int32_t l = 0; l < h->num_local && pads; l++)
        slot_array_clear_rows(a, v->slab_begin[l] + v->slab_count[l], v->slab_begin[l + 1]);
    if (flags & EPIC_ZERO_TAIL) slot_array_clear_rows(a, h->num_slots, a->num_rows);
}

void slot_array_clear(const slot_array *a)
{
    if (a->data) slot_array_clear_rows(a, 0, a->num_rows);
}
