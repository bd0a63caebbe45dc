/* SPDX-License-Identifier: Apache-2.0 */
/* Names of the values of public enums, and texts for results. */
#include "epic/epic.h"

#define NAME(constant) [constant] = #constant

/* Defines epic_ENUM_name(), which returns a constant string, even for an invalid value. */
#define ENUM_NAMES(which, ...)                                                               \
    const char *epic_##which##_name(uint32_t value)                                          \
    {                                                                                        \
        static const char *const names[] = {__VA_ARGS__};                                    \
        return value < sizeof names / sizeof *names ? names[value] : "unknown epic_" #which; \
    }

ENUM_NAMES(type, NAME(EPIC_BYTES), NAME(EPIC_F32), NAME(EPIC_BF16), NAME(EPIC_F16),
           NAME(EPIC_F64), NAME(EPIC_E4M3), NAME(EPIC_E8M0), NAME(EPIC_I32), NAME(EPIC_I64))
ENUM_NAMES(layout, NAME(EPIC_EXPERT_MAJOR), NAME(EPIC_FLAT))
ENUM_NAMES(overflow, NAME(EPIC_OVERFLOW_ERROR), NAME(EPIC_OVERFLOW_DROP))
ENUM_NAMES(sum_order, NAME(EPIC_BY_RANK), NAME(EPIC_TREE), NAME(EPIC_BY_HOSTS))
ENUM_NAMES(priority, NAME(EPIC_BY_TOKEN), NAME(EPIC_BY_K))
ENUM_NAMES(quantize, NAME(EPIC_QUANTIZE_NONE), NAME(EPIC_QUANTIZE_1X128),
           NAME(EPIC_QUANTIZE_1X32))
ENUM_NAMES(score, NAME(EPIC_SCORE_SOFTMAX), NAME(EPIC_SCORE_SIGMOID),
           NAME(EPIC_SCORE_SQRTSOFTPLUS), NAME(EPIC_SCORE_LOGITS))
ENUM_NAMES(group_score, NAME(EPIC_GROUP_MAX), NAME(EPIC_GROUP_SUM))
ENUM_NAMES(group_others, NAME(EPIC_OTHERS_OUT), NAME(EPIC_OTHERS_ZERO))
ENUM_NAMES(weight_rule, NAME(EPIC_WEIGHT_OF_SCORE), NAME(EPIC_WEIGHT_SOFTMAX_CHOSEN),
           NAME(EPIC_WEIGHT_SIGMOID_CHOSEN), NAME(EPIC_WEIGHT_SPARSEMIXER))
ENUM_NAMES(normalize, NAME(EPIC_NORMALIZE_NONE), NAME(EPIC_NORMALIZE_SUM),
           NAME(EPIC_NORMALIZE_CLAMPED))
ENUM_NAMES(activation, NAME(EPIC_SILU), NAME(EPIC_GELU), NAME(EPIC_GELU_TANH), NAME(EPIC_RELU2),
           NAME(EPIC_CLAMPED_SWIGLU), NAME(EPIC_CLAMPED_SILU))
ENUM_NAMES(weighting, NAME(EPIC_WEIGHT_LATE), NAME(EPIC_WEIGHT_EARLY), NAME(EPIC_WEIGHT_INPUT))
ENUM_NAMES(gemm_pass, NAME(EPIC_GEMM_FORWARD), NAME(EPIC_GEMM_INPUT), NAME(EPIC_GEMM_WEIGHT))
ENUM_NAMES(operation, NAME(EPIC_OP_NONE), NAME(EPIC_OP_OPEN), NAME(EPIC_OP_PLAN),
           NAME(EPIC_OP_DISPATCH), NAME(EPIC_OP_COMBINE), NAME(EPIC_OP_DISPATCH_BACKWARD),
           NAME(EPIC_OP_COMBINE_BACKWARD), NAME(EPIC_OP_SUM), NAME(EPIC_OP_WINDOW))

const char *epic_result_string(epic_result result)
{
    switch (result) {
    case EPIC_OK:
        return "The call succeeded.";
    case EPIC_EINVAL:
        return "An argument or the data of the call is invalid.";
    case EPIC_ENOMEM:
        return "There is not enough memory to open the context.";
    case EPIC_ENOTSUP:
        return "This context does not support the call, or no backend can join the ranks.";
    case EPIC_ETIMEOUT:
        return "A rank did not take part in the operation before its deadline.";
    case EPIC_EDEVICE:
        return "CUDA, NCCL, MPI or the operating system reported an error.";
    case EPIC_EOVERFLOW:
        return "A rank needs more slots than it has.";
    case EPIC_EMISMATCH:
        return "The ranks made different calls, or passed different arguments.";
    case EPIC_EPEER:
        return "Another rank died, closed its context or aborted.";
    case EPIC_ECLOSED:
        return "The context was never opened, or belongs to the parent of this process.";
    case EPIC_EEVICTED:
        return "The other ranks have gone on without this rank.";
    }
    return "The number is not an epic_result.";
}
