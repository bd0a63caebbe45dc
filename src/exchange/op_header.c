/* SPDX-License-Identifier: Apache-2.0 */
/* Compares the op headers of two ranks, and writes the texts of errors in headers. */
#include "exchange/op_header.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "plan/plan.h"
#include "rules/sentences.h"

_Static_assert(NUM_COMMON <= sizeof(((epic_op_header *)0)->common) / sizeof(int64_t),
               "op_header.common");
_Static_assert(NUM_LOCAL <= sizeof(((epic_op_header *)0)->local) / sizeof(int64_t),
               "op_header.local");

static const char *const common_names[NUM_COMMON] = {
    [COMMON_OPERATION] = "operation",
    [COMMON_PLAN] = "plan id",
    [COMMON_TYPE] = "type",
    [COMMON_ROW_BYTES] = "row_bytes",
    [COMMON_SCALE_BYTES] = "scales' row_bytes",
    [COMMON_QUANTIZE] = "quantize",
    [COMMON_WEIGHTS] = "weights",
    [COMMON_NUM_EXPERTS] = "num_experts",
    [COMMON_NUM_LOGICAL] = "num_logical",
    [COMMON_TOP_K] = "top_k",
    [COMMON_ALIGNMENT] = "alignment",
    [COMMON_LAYOUT] = "layout",
    [COMMON_OVERFLOW] = "overflow",
    [COMMON_EXPERT_CAPACITY] = "expert_capacity",
    [COMMON_PRIORITY] = "priority",
    [COMMON_SUM_ORDER] = "sum_order",
    [COMMON_LEAVES] = "leaves",
    [COMMON_PARTIAL_TYPE] = "partial_type",
    [COMMON_PLACEMENT] = "checksum of rank_of_expert",
    [COMMON_REPLICAS] = "checksum of logical_of_expert",
    [COMMON_COUNT] = "count",
    [COMMON_LAYER_FLAGS] = "layer.flags",
    [COMMON_OPTIONS] = "hash of the layer's options",
    [COMMON_LAYER_WEIGHTS] = "hash of the layer's weights",
};

const char *operation_name(uint32_t operation)
{
    static const char *const names[] = {
        [EPIC_OP_NONE] = "nothing",
        [EPIC_OP_OPEN] = "open",
        [EPIC_OP_PLAN] = "plan",
        [EPIC_OP_DISPATCH] = "dispatch",
        [EPIC_OP_COMBINE] = "combine",
        [EPIC_OP_DISPATCH_BACKWARD] = "dispatch_backward",
        [EPIC_OP_COMBINE_BACKWARD] = "combine_backward",
        [EPIC_OP_SUM] = "sum",
        [EPIC_OP_WINDOW] = "window",
    };
    return operation < sizeof names / sizeof *names ? names[operation] : "an unknown operation";
}

/* Returns the name of value `value` of element `field` of `common`, or NULL if the value has no
 * name. */
static const char *value_name(int field, int64_t value)
{
    switch (field) {
    case COMMON_TYPE:
        return epic_type_name((uint32_t)value);
    case COMMON_PARTIAL_TYPE:
        return value ? epic_type_name((uint32_t)value) : "0 (the rows' type)";
    case COMMON_QUANTIZE:
        return epic_quantize_name((uint32_t)value);
    case COMMON_LAYOUT:
        return epic_layout_name((uint32_t)value);
    case COMMON_OVERFLOW:
        return epic_overflow_name((uint32_t)value);
    case COMMON_PRIORITY:
        return epic_priority_name((uint32_t)value);
    case COMMON_SUM_ORDER:
        return epic_sum_order_name((uint32_t)value);
    case COMMON_WEIGHTS:
        return value ? "some" : "none";
    case COMMON_PLACEMENT:
    case COMMON_REPLICAS:
        return value ? NULL : "none";
    default:
        return NULL;
    }
}

static const char *value_text(int field, int64_t value, char text[32])
{
    const char *name = value_name(field, value);
    const bool number =
        field != COMMON_PLAN && field != COMMON_PLACEMENT && field != COMMON_REPLICAS;
    if (name && strncmp(name, "unknown ", 8) != 0) return name;
    snprintf(text, 32, number ? "%lld" : "%llx", (long long)value);
    return text;
}

static const char *mismatch_remedy(int field)
{
    return field == COMMON_PLAN ? "use the plan of the same epic_plan call"
                                : "pass the same on every rank";
}

bool op_header_compare(const epic_op_header *a, int rank_a, const epic_op_header *b, int rank_b,
                       char *sentence, size_t size)
{
    const int64_t op_a = a->common[COMMON_OPERATION], op_b = b->common[COMMON_OPERATION];
    if (op_a != op_b) {
        snprintf(sentence, size,
                 "rank %d called %s, rank %d called %s; make the calls of a tag in the same "
                 "order on every rank",
                 rank_a, operation_name((uint32_t)op_a), rank_b,
                 operation_name((uint32_t)op_b));
        return false;
    }
    if (a->local[LOCAL_ERROR] || b->local[LOCAL_ERROR])
        /* a rank with an error in its data leaves other fields empty; op_header_data_error()
         * reports the error later */
        return true;
    for (int i = 0; i < NUM_COMMON; i++) {
        char text_a[32], text_b[32];
        if (a->common[i] == b->common[i]) continue;
        if (i == COMMON_OPTIONS || i == COMMON_LAYER_WEIGHTS) {
            /* a hash of 0 means that the options of the rank are unknown */
            if (!a->common[i] || !b->common[i]) continue;
            layer_options_describe_difference(a, rank_a, b, rank_b, sentence, size);
            return false;
        }
        snprintf(sentence, size, "rank %d passed %s %s, rank %d passed %s; %s", rank_a,
                 common_names[i], value_text(i, a->common[i], text_a), rank_b,
                 value_text(i, b->common[i], text_b), mismatch_remedy(i));
        return false;
    }
    return true;
}

void op_header_set_options(epic_op_header *header, const layer_options *options)
{
    if (!options) return;
    header->common[COMMON_OPTIONS] = (int64_t)options->hash;
    header->common[COMMON_LAYER_WEIGHTS] = (int64_t)options->weights_hash;
    memcpy(header->options, options->words, sizeof header->options);
}

bool op_header_compare_layer(const epic_op_header *given, const epic_op_header *plan,
                             char *sentence, size_t size)
{
    /* The order in which fields are compared. If the callers pass different values for one
     * field, the defaults of later fields may differ as a consequence. In this order the error
     * text names the field that the callers passed, and not a default. */
    static const int fields[] = {
        COMMON_NUM_EXPERTS, COMMON_NUM_LOGICAL, COMMON_TOP_K,           COMMON_LAYOUT,
        COMMON_ALIGNMENT,   COMMON_OVERFLOW,    COMMON_EXPERT_CAPACITY, COMMON_PRIORITY,
        COMMON_SUM_ORDER,   COMMON_LEAVES,      COMMON_PARTIAL_TYPE,    COMMON_LAYER_FLAGS};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        const int field = fields[i];
        char text[32], other[32];
        if (given->common[field] == plan->common[field]) continue;
        snprintf(sentence, size,
                 "%s%s is %s: must be %s, as in the layer that was passed to epic_plan",
                 field == COMMON_LAYER_FLAGS ? "" : "layer.", common_names[field],
                 value_text(field, given->common[field], text),
                 value_text(field, plan->common[field], other));
        return false;
    }
    return true;
}

void op_header_set_fault(epic_op_header *header, const data_fault *fault)
{
    if (!fault || fault->error == DATA_OK) return;
    header->local[LOCAL_ERROR] = fault->error;
    memcpy(&header->local[LOCAL_ERROR_DETAILS], fault->about, sizeof fault->about);
}

/* Returns the error of an invalid placement. */
static epic_result placement_fail(int rank, const int64_t *about, int num_ranks)
{
    const long long expert = about[0], owner = about[1];
    switch (about[2]) {
    case PLACEMENT_TREE:
        return epic_fail(EPIC_EINVAL, SENTENCE_TREE_PLACEMENT, rank, expert, owner,
                         (int)about[3]);
    case PLACEMENT_VACANT:
        return epic_fail(EPIC_EINVAL, SENTENCE_VACANT, rank, expert, owner);
    default:
        return epic_fail(EPIC_EINVAL, SENTENCE_PLACEMENT, rank, expert, owner, num_ranks - 1);
    }
}

static epic_result saved_error(int rank, const int64_t *about)
{
    static const char *const parts[] = {[SAVED_TOKENS] = "total tokens",
                                        [SAVED_ROWS] = "rows of local expert",
                                        [SAVED_COUNT] = "tokens of local expert",
                                        [SAVED_CHOICE] = "choice"};
    return epic_fail(EPIC_EINVAL,
                     "saved of rank %d is damaged (%s %lld: %lld): must be the bytes that "
                     "epic_moe_forward wrote on this rank; pass those",
                     rank, parts[(uint64_t)about[0] % 4], (long long)about[1],
                     (long long)about[2]);
}

/* Returns the error that a rank reports about its window: EPIC_ENOMEM or EPIC_ENOTSUP. Such an
 * error does not break the group. The error text is from that rank, and may be cut off at its
 * end. epic_fail() replaces bytes that are not valid text. */
static epic_result window_error(int rank, const epic_op_header *header)
{
    const bool no_memory = header->local[LOCAL_ERROR_DETAILS] == EPIC_ENOMEM;
    return epic_fail(no_memory ? EPIC_ENOMEM : EPIC_ENOTSUP, "window of rank %d: %.*s", rank,
                     (int)sizeof header->bytes - 1, (const char *)header->bytes);
}

epic_result op_header_data_error(const epic_op_header *const *headers, int num_ranks)
{
    for (int r = 0; r < num_ranks; r++) {
        const int64_t *about = headers[r]->local + LOCAL_ERROR_DETAILS;
        switch (headers[r]->local[LOCAL_ERROR]) {
        case DATA_OK:
            break;
        case DATA_EXPERT:
            return epic_fail(EPIC_EINVAL, SENTENCE_EXPERT, r, (long long)about[0],
                             (long long)about[1], (long long)about[2],
                             headers[r]->common[COMMON_NUM_LOGICAL] ? "num_logical"
                                                                    : "num_experts",
                             (long long)about[3]);
        case DATA_DUPLICATE:
            return epic_fail(EPIC_EINVAL, SENTENCE_DUPLICATE, r, (long long)about[0],
                             (long long)about[1], (long long)about[2]);
        case DATA_PLACEMENT:
            return placement_fail(r, about, num_ranks);
        case DATA_REPLICAS:
            if (about[0] < 0)
                return epic_fail(EPIC_EINVAL, SENTENCE_NO_REPLICA, r, (long long)about[1]);
            return epic_fail(EPIC_EINVAL, SENTENCE_REPLICA, r, (long long)about[0],
                             (long long)about[1], (long long)about[2]);
        case DATA_TOKEN_ID:
            return epic_fail(EPIC_EINVAL, SENTENCE_TOKEN_ID, r, (long long)about[0],
                             (long long)about[1], (long long)about[2]);
        case DATA_TABLE:
            return epic_fail(EPIC_EINVAL, SENTENCE_TABLE, r, (long long)about[0],
                             (long long)about[1], (long long)about[2], (long long)about[3]);
        case DATA_FORCED:
            return epic_fail(EPIC_EINVAL, SENTENCE_FORCED, r, (long long)about[0],
                             (long long)about[1], (long long)about[2], (long long)about[3]);
        case DATA_SAVED:
            return epic_fail(EPIC_EINVAL,
                             "saved of rank %d is from a forward that failed or never ran: "
                             "must be from one that succeeded; call epic_moe_forward again",
                             r);
        case DATA_SAVED_PART:
            return saved_error(r, about);
        case DATA_WINDOW:
            return window_error(r, headers[r]);
        default:
            return epic_fail(
                EPIC_EINVAL,
                "plan of rank %d cannot be used: %s; pass the bytes that epic_plan "
                "wrote for this rank and group",
                r, plan_damage_name((int)about[0]));
        }
    }
    return EPIC_OK;
}
