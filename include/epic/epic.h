/* SPDX-License-Identifier: Apache-2.0 */
/* EPIC: Expert Parallelism In C.  Moves tokens to experts and back for Mixture-of-Experts
 * models.
 *
 * The experts of a layer are spread over the ranks of a group.  Every step each token's row
 * travels to the ranks that own its chosen experts (dispatch), is transformed there, and comes
 * home to be summed (combine); the backward pass does the same in reverse.
 *
 * This page goes from the simple to the advanced:
 *
 *     the dispatcher        one handle that owns the plan and the buffers: start here
 *     contexts              a rank of a group: open, close, errors, deadlines
 *     the step, in parts    plan, dispatch, combine and gradients over memory of your own
 *     router and losses     which experts, with which weights
 *     experts and layer     the experts' MLP; the whole layer as one call
 *     advanced              bootstraps, sizes before open, reading plans, what broke a group
 *
 * Words.  A *token* is a row that the caller owns.  A *choice* is a pair (token, k): one of the
 * top-k experts of a token.  A *slot* is a row of the receive buffer: one choice that landed
 * here.  A *slab* is the slots of one local expert, contiguous, padded to the alignment.
 * *Capacity* is the number of slots that the receive buffer has.
 *
 * Where a call runs.  Every call that computes takes the context first: a host context reads and
 * writes host memory and returns when the work is done; a CUDA context reads and writes memory
 * of its device, orders the work on call.stream and never waits on the host.  Calls that need no
 * peer ("local") also take NULL for the context: host memory.
 *
 * A CUDA context.  Make the device current (cudaSetDevice) and open with config.backend "gpu":
 * the context is bound to that device.  libepic_cuda.so, or of several hosts libepic_hosts.so, is
 * loaded then; nothing of CUDA is needed before.  All step calls may be captured in a CUDA graph
 * and replayed with new data.
 *
 * Unless a function says otherwise:
 *   - it is collective: every rank of the group makes the same call, and calls of one tag come
 *     in the same order on every rank.  On host contexts different tags are independent: any
 *     order, from different threads of the caller, up to max_in_flight at once.  A CUDA context
 *     does one operation after the other, in the same order on every rank whatever their tags:
 *     calls from one thread at a time, on one stream or on streams that wait for each other (two
 *     that run at once are EPIC_EMISMATCH);
 *   - pointers are borrowed for the call, aligned to the elements of their arrays; an array that
 *     is written shares memory with no other one of the call;
 *   - after epic_open no call allocates (the first use of a new tag may: 32 bytes);
 *   - counts and sizes in bytes are int64_t; a negative one is refused;
 *   - zero is the default of every field, NULL means "not wanted" or "none".
 *
 * Failure has three classes.
 *   (a) Arguments that the host can check (EPIC_EINVAL, EPIC_ENOTSUP): the call has done nothing
 *       and may be made again; the peers wait for it.  Who cannot make it any more calls
 *       epic_abort.
 *   (b) Data (EPIC_EINVAL for expert ids and damaged plans, EPIC_EOVERFLOW): every rank takes
 *       part, every rank gets the same result, outputs are zero, the group stays usable.  On
 *       CUDA contexts the call itself returns EPIC_OK, and epic_check the result.
 *   (c) Lost order (EPIC_ETIMEOUT, EPIC_EPEER, EPIC_EMISMATCH, EPIC_EDEVICE): the group is
 *       broken.  Every later call returns the same error at once, epic_close works, and a new
 *       group can be opened in the same process.
 * Every wait has a deadline.  epic_error says what went wrong: which argument, its value, the
 * rule, the way out.  The library never prints, exits, aborts or traps.
 *
 * Environment variables are read once, at open: docs/reference/environment.md lists them.
 *
 * Growing.  Structs are extended at their end, and the calls pass sizeof the struct to symbols
 * that are versioned (epic/epic_abi.h): a program built with an older header runs with a newer
 * library, and the other way round as long as it asks for nothing that is new.
 * docs/reference/abi.md has the rules. */
#ifndef EPIC_H
#define EPIC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EPIC_VERSION_MAJOR 0
#define EPIC_VERSION_MINOR 1
#define EPIC_VERSION_PATCH 0
#define EPIC_VERSION 100 /* major * 10000 + minor * 100 + patch */
#define EPIC_VERSION_STRING "0.1.0"

/* 1 if this header is of that version or a later one, also for #if. */
#define EPIC_VERSION_AT_LEAST(major, minor, patch) \
    (EPIC_VERSION >= (major)*10000 + (minor)*100 + (patch))

#if defined(__GNUC__)
#define EPIC_API __attribute__((visibility("default")))
#else
#define EPIC_API
#endif

/* ---------------------------------------------------------------- words of every call ---- */

typedef struct epic_context epic_context; /* one rank of one group */
typedef void *epic_stream;                /* a cudaStream_t; NULL for host contexts */

/* Numbers are ABI: append, never renumber. */
typedef enum epic_result {
    EPIC_OK = 0,
    EPIC_EINVAL = 1,    /* bad argument or bad data; the sentence says which */
    EPIC_ENOMEM = 2,    /* no memory: at open, or for the first operation of a new tag */
    EPIC_ENOTSUP = 3,   /* this context cannot do that, or no backend joins these ranks */
    EPIC_ETIMEOUT = 4,  /* a peer never came */
    EPIC_EDEVICE = 5,   /* CUDA, NCCL, MPI or the system refused */
    EPIC_EOVERFLOW = 6, /* more slots needed than there are */
    EPIC_EMISMATCH = 7, /* the ranks called different things */
    EPIC_EPEER = 8,     /* a peer died, closed or aborted */
    EPIC_ECLOSED = 9    /* this context never opened, or is a forked child's */
} epic_result;

/* Of the elements of an array.  EPIC_BYTES says nothing of them: enough for rows that are only
 * moved, refused where numbers are computed.  A field that says "0: ..." has that default. */
typedef enum epic_type {
    EPIC_BYTES = 0,
    EPIC_F32 = 1,
    EPIC_BF16 = 2,
    EPIC_F16 = 3,
    EPIC_F64 = 4, /* host contexts only, computed in float64 */
    EPIC_E4M3 = 5,
    EPIC_E8M0 = 6,
    EPIC_I32 = 7,
    EPIC_I64 = 8
} epic_type;

/* Each flag has a bit of its own, whatever call it is for; a call refuses those that it does not
 * know. */
typedef enum epic_flag {
    EPIC_ZERO_TAIL = 1,  /* write zeros past the last slab too */
    EPIC_ACCUMULATE = 2, /* gradients are added to what is there, not written */
    EPIC_SUM_DENSE = 4,  /* of a layer: gate and shared-expert gradients and the losses are
                            summed over the ranks; else they are this rank's part */
    EPIC_DISTINCT = 8,   /* of a layer's plan: the ids of a token are distinct.  Promised by the
                            caller and checked: a duplicate is a class (b) error.  A token brings
                            at most min(top_k, local experts) slots to a rank then, and capacity
                            bounds and layers need as much less memory */
    EPIC_PLANNED = 16,   /* of epic_moe_forward: epic_moe_plan has made the plan */
    /* Padding slots are not written, for experts that go by expert_tokens; of each rank alone. */
    EPIC_LEAVE_PADDING = 32,
    EPIC_RECOMPUTE = 64,       /* of a layer: `saved` has no part of the experts' and the shared
                                expert's; backward computes it again, their first product.  Of
                                epic_experts_forward: that part alone is made */
    EPIC_DISPATCH_AGAIN = 128, /* of a layer, on every rank alike: `saved` has no received rows;
                                  backward sends them again, one operation more */
    EPIC_LOSS_BY_CALLER = 256 /* of a layer, equal on all ranks: the caller computes the losses.
                                  The layer compares the coefficients between the ranks, and
                                  computes as if both were 0 */
} epic_flag;

/* A contiguous matrix, seen as rows of bytes, that a call may write.  {NULL, 0, 0} is a matrix without
 * rows; its row_bytes count as those that the call expects. */
typedef struct epic_rows {
    void *data;
    int64_t num_rows;
    int64_t row_bytes;
} epic_rows;

/* Like epic_rows, for a matrix that a call only reads. */
typedef struct epic_const_rows {
    const void *data;
    int64_t num_rows;
    int64_t row_bytes;
} epic_const_rows;

/* Returns the rows as an input: a buffer that dispatch wrote is what combine reads.  Local. */
static inline epic_const_rows epic_rows_as_const(epic_rows rows)
{
    epic_const_rows input;
    input.data = rows.data;
    input.num_rows = rows.num_rows;
    input.row_bytes = rows.row_bytes;
    return input;
}

/* What every call that computes has.  Local calls use the stream only. */
typedef struct epic_call {
    epic_stream stream;
    uint64_t tag;        /* which operations of different ranks belong together */
    uint32_t timeout_ms; /* 0: the context's */
    uint32_t max_sms;    /* CUDA: most SMs to use; 0: the context's */
} epic_call;

/* -------------------------------------------------------------------- dispatcher ----------
 *
 *     epic_dispatcher_open(&dispatcher, &config);
 *     epic_dispatcher_dispatch(dispatcher, tokens, topk_idx, weights, num_tokens, &slots);
 *     ...                             the experts, from slots.rows to slots.results
 *     epic_dispatcher_combine(dispatcher, out);
 *     epic_dispatcher_close(dispatcher);
 *
 * A handle that owns everything a step needs: context, plan, receive buffer, weights.  One step
 * at a time; examples/step.c and examples/step_cuda.c are whole programs. */

typedef struct epic_dispatcher epic_dispatcher;

/* Equal on all ranks, but for max_tokens of each, ctx and stream. */
typedef struct epic_dispatcher_config {
    int64_t max_tokens;   /* most tokens that this rank sends at once; required */
    uint32_t num_experts; /* of the layer; num_ranks divides it */
    uint32_t top_k;
    uint32_t hidden;     /* elements of a row */
    uint32_t type;       /* of an element: F32, BF16, F16 or F64 */
    uint32_t alignment;  /* slabs begin and end at multiples of it; 0: 1 */
    uint32_t gradients;  /* 1: with the buffers of the two backward calls */
    const char *backend; /* as epic_config.backend: "gpu" for GPUs */
    epic_stream stream;  /* CUDA: the stream of every call */
    uint64_t tag;        /* of every call: steps that share a context have different ones */
    epic_context *ctx;   /* a context of the caller's, which outlives the step; NULL: one is
                             opened as the environment says (epic_bootstrap_env) and goes with it */
} epic_dispatcher_config;

/* What has landed on this rank: the slots of local expert e are expert_rows[e] rows, behind those
 * of the experts before it.  The arrays are the step's. */
typedef struct epic_slots {
    void *rows;           /* [capacity, hidden]: what arrived; padding rows are zero */
    void *results;        /* [capacity, hidden]: where the experts' outputs go; the same memory
                               as rows, unless the step has gradients */
    float *weights;       /* [capacity]: the weight of each slot's choice, 0 on padding; NULL:
                               dispatch was given none */
    int32_t *expert_rows; /* [num_local_experts]: rows of each slab, padding included */
    int32_t *expert_tokens; /* [num_local_experts]: of these, the ones that carry a token */
    int64_t capacity;       /* never less than what can land here */
    int32_t first_expert;   /* the id of local expert 0 */
    int32_t num_local_experts;
} epic_slots;

/* Opens a step.  Collective.  *out is NULL when it fails; epic_error(NULL) says why.  Errors: as
 * epic_open, and EPIC_EINVAL, EPIC_ENOMEM. */
static inline epic_result epic_dispatcher_open(epic_dispatcher **out,
                                               const epic_dispatcher_config *config);

/* Sends each of num_tokens tokens [num_tokens, hidden] to the experts that topk_idx [num_tokens,
 * top_k] names (negative: none); weights [num_tokens, top_k] are kept for combine, NULL on all
 * ranks: 1.  Memory of `out` is the step's until the next dispatch.  Errors: as epic_plan. */
static inline epic_result epic_dispatcher_dispatch(epic_dispatcher *dispatcher,
                                                   const void *tokens, const int32_t *topk_idx,
                                                   const float *weights, int64_t num_tokens,
                                                   epic_slots *out);

/* out [num_tokens, hidden] = for each token the weighted sum of its slots' results.  Errors: as
 * epic_combine. */
EPIC_API epic_result epic_dispatcher_combine(epic_dispatcher *dispatcher, void *out);

/* The gradients, of a step opened with `gradients`, after combine.  The first sends d_out
 * [num_tokens, hidden] to the slots: out->rows is the gradient of `results`, out->weights that of
 * the weights.  The experts leave the gradient of `rows` in out->results, which is the same
 * memory; the second brings it home: d_tokens [num_tokens, hidden], and d_weights [num_tokens,
 * top_k] (NULL: not wanted).  Errors: as the calls of those names below. */
static inline epic_result epic_dispatcher_combine_backward(epic_dispatcher *dispatcher,
                                                           const void *d_out, epic_slots *out);
EPIC_API epic_result epic_dispatcher_dispatch_backward(epic_dispatcher *dispatcher,
                                                       void *d_tokens, float *d_weights);

/* The context of a step, for epic_rank, epic_error, epic_allreduce_sum, epic_check.  Local. */
EPIC_API epic_context *epic_dispatcher_context(const epic_dispatcher *dispatcher);

/* Gives everything back.  Local; NULL is allowed. */
EPIC_API void epic_dispatcher_close(epic_dispatcher *dispatcher);

/* --------------------------------------------------------------------------- contexts ---- */

/* How ranks find each other; epic_bootstrap_env, epic_bootstrap_tcp, ... make them (Advanced). */
typedef struct epic_bootstrap epic_bootstrap;

/* Zero is the default of every field; equal on all ranks. */
typedef struct epic_config {
    int64_t max_tokens;     /* most tokens one rank sends at once; required */
    int64_t max_row_bytes;  /* widest row, of tokens and scales each; required */
    int64_t staging_bytes;  /* most staging memory of this rank; 0: chosen for full speed */
    uint32_t num_ranks;     /* 0: the bootstrap's.  Needed by the size queries */
    uint32_t timeout_ms;    /* deadline of every wait; 0: 300000 */
    uint32_t max_in_flight; /* operations at once; 0: 64, at most 64 */
    uint32_t max_sms;       /* CUDA: most SMs of one operation; 0: chosen by measurement,
                               epic_max_sms tells.  All contexts that this process has on a
                               GPU together: at most its SMs */
    const char *backend;    /* "gpu": GPUs, those of one host by "p2p", of several by "hosts",
                               which may be named, too.  NULL: the first that can join the ranks
                               on CPUs: self, shm or threads, mpi */
    const char *name;       /* of the group, for messages and epic-info; NULL: "epic" */
    void *native;           /* an MPI_Comm *, borrowed for the call, that the ranks are of: for
                               backend mpi, and epic_open without a bootstrap; else NULL */
    uint32_t max_top_k; /* largest top_k of a layer; 0: 64.  Less takes less memory with backend
                               hosts; the others only check it */
    uint32_t reserved;  /* 0 */
} epic_config;

/* Opens this rank's context.  Collective over the bootstrap; bootstrap NULL: over config.native if there
 * is one (epic_bootstrap_mpi), else as the environment says (epic_bootstrap_env; a group of one if it says
 * nothing).  *out is set also when open fails, to a context that epic_error, epic_failure and
 * epic_close accept (NULL only on EPIC_ENOMEM).  Ranks that bring different configurations or
 * versions, or another num_ranks than the bootstrap's, get EPIC_EMISMATCH, all of them.  Errors:
 * EPIC_EINVAL, EPIC_ENOMEM, EPIC_ENOTSUP, EPIC_ETIMEOUT, EPIC_EDEVICE, EPIC_EMISMATCH,
 * EPIC_EPEER. */
static inline epic_result epic_open(epic_context **out, const epic_bootstrap *bootstrap,
                                    const epic_config *config);

/* Gives the context back.  Local; never fails; NULL is allowed.  Waits until no peer uses memory
 * that goes with it, at most the context's deadline.  No call may be running on ctx.
 * A context does not outlive fork: in the child every call with it is EPIC_ECLOSED, and
 * epic_close gives back the child's memory without touching the group. */
EPIC_API void epic_close(epic_context *ctx);

/* This thread's last failure, as a sentence; "" if none.  ctx may be NULL.  Local.  Valid until
 * this thread's next failing call. */
EPIC_API const char *epic_error(const epic_context *ctx);

/* Is the group whole?  EPIC_OK, or the class (c) failure that broke it, also one that a device
 * has reported since the last call.  On CUDA contexts, whose calls return before the data has
 * been looked at, also the oldest class (b) error that it has not returned yet: once, equal on
 * all ranks.  Operations that their stream has not finished yet have reported nothing.  Local;
 * never waits. */
EPIC_API epic_result epic_check(epic_context *ctx);

/* Tells the peers that this rank cannot make its next call of `tag`: they get EPIC_EPEER with
 * the sentence at once.  Local.  The group is broken afterwards. */
EPIC_API void epic_abort(epic_context *ctx, uint64_t tag, const char *why);

EPIC_API int32_t epic_rank(const epic_context *ctx);             /* local */
EPIC_API int32_t epic_num_ranks(const epic_context *ctx);        /* local */
EPIC_API const char *epic_backend_name(const epic_context *ctx); /* local; "shm" */
EPIC_API uint32_t epic_max_sms(const epic_context *ctx);         /* local; 0: a host context */
EPIC_API int32_t epic_num_hosts(const epic_context *ctx);        /* local; of the ranks */
/* Local.  What rows take to other hosts, "ucx 1.13.1, host memory, tcp/eth0 by messages"; "": the
 * backend says nothing. */
EPIC_API const char *epic_net_name(const epic_context *ctx);
EPIC_API uint32_t epic_version(void); /* EPIC_VERSION of the library */

/* Names for logs.  All of them are local and may be called from any thread.  A result as
 * "EPIC_ETIMEOUT", and as one sentence that says what it means for any call; epic_error says what went
 * wrong in the last one.  The others return the name of a constant of that enum, "EPIC_FLAT", or
 * "unknown epic_layout" for another number. */
EPIC_API const char *epic_result_name(epic_result result);
EPIC_API const char *epic_result_string(epic_result result);
EPIC_API const char *epic_type_name(uint32_t type);
EPIC_API const char *epic_layout_name(uint32_t layout);
EPIC_API const char *epic_overflow_name(uint32_t overflow);
EPIC_API const char *epic_sum_order_name(uint32_t order);
EPIC_API const char *epic_priority_name(uint32_t priority);
EPIC_API const char *epic_quantize_name(uint32_t quantize);
EPIC_API const char *epic_score_name(uint32_t score);
EPIC_API const char *epic_group_score_name(uint32_t score);
EPIC_API const char *epic_group_others_name(uint32_t others);
EPIC_API const char *epic_weight_rule_name(uint32_t rule);
EPIC_API const char *epic_normalize_name(uint32_t normalize);
EPIC_API const char *epic_activation_name(uint32_t activation);
EPIC_API const char *epic_weighting_name(uint32_t weighting);
EPIC_API const char *epic_gemm_pass_name(uint32_t pass);
EPIC_API const char *epic_operation_name(uint32_t operation);

/* ------------------------------------------------------------------ the step, in parts ----
 *
 *     epic_layer_sizes       how much memory the next calls need
 *     epic_plan              where every choice goes: from topk_idx to the plan's bytes
 *     epic_dispatch          rows to experts
 *     ...                    the expert MLP over the received slots, whatever it is
 *     epic_combine           rows home, summed
 *     epic_combine_backward  gradients to the experts, with the same plan
 *     epic_dispatch_backward gradients home, with the same plan
 *
 * The calls after epic_plan take the plan and its layer, so that nothing but the arguments decides
 * how they are done.  The layer must equal the one that epic_plan was given; a 0 equals the default
 * that it stands for, and EPIC_BY_HOSTS the order that it stands for.  Another layer is EPIC_EINVAL,
 * as a wrong number of tokens is: on host contexts class (a), on CUDA contexts class (b), or
 * EPIC_EMISMATCH if some ranks pass the right one. */

typedef enum epic_layout {
    EPIC_EXPERT_MAJOR = 0, /* one row per choice, slab by slab */
    EPIC_FLAT = 1          /* one row per (token, rank), by source rank, then token */
} epic_layout;

typedef enum epic_overflow {
    EPIC_OVERFLOW_ERROR = 0, /* demand above capacity fails the plan on every rank */
    EPIC_OVERFLOW_DROP = 1   /* what does not fit is dropped, by a rule that all ranks share */
} epic_overflow;

typedef enum epic_sum_order {
    EPIC_BY_RANK = 0, /* partials of ascending ranks, one after the other */
    EPIC_TREE = 1,    /* leaves of experts in a binary tree: same bits for every R */
    /* TREE with num_ranks leaves where it is much faster and possible: on the GPUs of several
     * hosts (backend hosts), a power of two of ranks that divides num_experts, without
     * rank_of_expert; else BY_RANK.  It promises no bits.  Not for epic_allreduce_sum. */
    EPIC_BY_HOSTS = 2
} epic_sum_order;

/* Which choices of an expert come first where not all are kept. */
typedef enum epic_priority {
    EPIC_BY_TOKEN = 0, /* source rank, token, k */
    EPIC_BY_K = 1      /* k, source rank, token: all first choices first (GShard, NLLB) */
} epic_priority;

/* What is fixed for a layer; equal on all ranks. */
typedef struct epic_layer {
    uint32_t num_experts;     /* 1 to 65536 */
    uint32_t num_logical;     /* replicas, as below: ids are below it; 0: no replicas, ids
                                 are below num_experts */
    uint32_t top_k;           /* 1 to 64 */
    uint32_t alignment;       /* slab lengths are multiples of it; 0: 1 */
    uint32_t layout;          /* an epic_layout */
    uint32_t overflow;        /* an epic_overflow */
    uint32_t expert_capacity; /* DROP: most choices of an expert over the group, with replicas
                                 of a logical one; 0: no limit */
    uint32_t priority;        /* DROP: an epic_priority.  Slots keep their order in any case */
    uint32_t sum_order;       /* an epic_sum_order */
    uint32_t leaves;          /* TREE: a power of two that divides num_experts and that
                                 num_ranks divides; 0: num_ranks */
    uint32_t partial_type;    /* what travels home: 0: the rows' type; or EPIC_F32 */
    uint32_t flags;           /* EPIC_DISTINCT */
} epic_layer;

/* Replicas.  An expert has weights, a slab and a rank.  Where some are copies of each other, so
 * that busy ones share their work, ids name *logical experts*, of which there are num_logical,
 * and logical_of_expert says which one each expert is a replica of; each has at least one.  The
 * choices of a logical expert, in the order source rank, token, k, go to its replicas by turns,
 * by ascending id: choice n of it to replica n modulo their number.  So the loads of its replicas
 * differ by at most one, no rank has to be asked, and the same choices meet in a slab whatever
 * the number of ranks is.  Of expert_capacity C replica i of r has (C + r - 1 - i) / r: by token,
 * what is dropped for it does not depend on the replicas. */

/* What a layer takes on a context. */
typedef struct epic_layer_info {
    int64_t plan_bytes;             /* of one plan */
    int64_t capacity;               /* the fewest slots of a rank that can never overflow, for
                                   contiguous blocks of experts; where num_ranks does not divide
                                   num_experts, as the next */
    int64_t capacity_any_placement; /* the same for any rank_of_expert */
    int64_t host_bytes;             /* of the context, as epic_memory tells them before open */
    int64_t shared_bytes;
    int64_t device_bytes;
    uint32_t num_local_experts; /* of contiguous blocks: ceil(num_experts / num_ranks) */
    uint32_t first_expert;      /* the id of this rank's first one; num_experts: it has none */
} epic_layer_info;

/* Tells it.  Local.  Errors: EPIC_EINVAL. */
static inline epic_result epic_layer_sizes(epic_context *ctx, const epic_layer *layer,
                                           epic_layer_info *out);

#define EPIC_CAPACITY_EXACT 0 /* no bound: read demand, then allocate */

typedef struct epic_plan_args {
    epic_call call;
    const epic_layer *layer;
    void *plan;                       /* [plan_bytes], at an address that 16 divides */
    int64_t plan_bytes;               /* as epic_layer_sizes says, or more */
    const void *topk_idx;             /* [num_tokens, top_k]; negative: no expert */
    int64_t num_tokens;               /* 0 to max_tokens; may differ between ranks */
    const int32_t *rank_of_expert;    /* [num_experts]; NULL: contiguous blocks of
                                         num_experts / num_ranks, which must be whole */
    const int32_t *logical_of_expert; /* [num_experts], with num_logical; else NULL */
    int64_t capacity;                 /* slots of this rank, or EPIC_CAPACITY_EXACT */
    uint32_t index_type;              /* of topk_idx: 0: EPIC_I32; or EPIC_I64 */
    uint32_t flags;                   /* 0 */
    int32_t *expert_rows;             /* out [num_local_experts]: padded counts */
    int32_t *expert_tokens;           /* out [num_local_experts]: true counts kept */
    int32_t *load;              /* out [num_experts]: choices over the group, before any is
                                      dropped */
    int32_t *logical_load;      /* out [num_logical]: the same of logical experts */
    int32_t *demand;            /* out [1]: slots that would have been needed here */
    const struct epic_moe *moe; /* the layer that the plan is made for, whose options are
                                   compared between the ranks (epic_moe); NULL: they are not */
} epic_plan_args;

/* Makes the plan.  An id >= num_experts (with replicas: num_logical) is a class (b) error that
 * names rank, token, k and value, and so is a table that cannot be used; ranks with different
 * tables get EPIC_EMISMATCH.  Slot order: local expert, source rank, token, k.  An expert that
 * drops keeps its first choices by the layer's priority; with expert_capacity alone these are
 * the same on any number of ranks.  A slab's length is its count rounded up to the alignment;
 * an expert with no token takes no slot.  num_local_experts is the largest number of experts
 * that one rank owns.  The bytes hold no address: they may be copied and moved.  Demand above
 * capacity: EPIC_EOVERFLOW on every rank, unless the layer drops.
 * Too few plan_bytes are class (a) here, where the caller's memory is too small; in the calls that
 * read the plan they are class (b), as any damage of its bytes.
 * Errors: (a) EPIC_EINVAL, EPIC_ENOTSUP; (b) EPIC_EINVAL, EPIC_EOVERFLOW; (c). */
static inline epic_result epic_plan(epic_context *ctx, const epic_plan_args *args);

typedef enum epic_quantize {
    EPIC_QUANTIZE_NONE = 0,
    EPIC_QUANTIZE_1X128 = 1, /* e4m3, a float32 scale for each 128 elements */
    EPIC_QUANTIZE_1X32 = 2   /* e4m3, an e8m0 scale for each 32 elements */
} epic_quantize;

typedef struct epic_dispatch_args {
    epic_call call;
    const epic_layer *layer; /* that epic_plan was given for this plan */
    const void *plan;
    int64_t plan_bytes;
    epic_const_rows tokens; /* [num_tokens, row_bytes] */
    epic_rows recv;         /* out [slots, row_bytes]; num_rows is what it really has */
    epic_const_rows scales; /* [num_tokens, scale_bytes]: a second row array, or none */
    epic_rows recv_scales;  /* out [slots, scale_bytes] */
    const float *weights;   /* [num_tokens, top_k], or NULL */
    float *slot_weights;    /* out [slots], 0 on padding; FLAT: [rows, top_k], ascending k,
                              0 where there is no choice */
    int32_t *recv_expert;   /* out, FLAT only: [rows, top_k] local experts, then -1 */
    uint32_t type;          /* of tokens; EPIC_BYTES unless quantized on the way */
    uint32_t quantize;      /* an epic_quantize: tokens F32, BF16 or F16; recv is e4m3,
                              recv_scales the scales; scales must be none */
    uint32_t flags;         /* EPIC_ZERO_TAIL, EPIC_LEAVE_PADDING */
    uint32_t reserved;      /* 0 */
} epic_dispatch_args;

/* Sends row t of tokens to every expert the plan chose for it: recv[slot] = tokens[token_of
 * slot], slot_weights[slot] = weights[token, k].  Padding slots inside slabs are written as zeros
 * in every out, or left as they were with EPIC_LEAVE_PADDING; the tail past the last slab is left
 * as it was, or written as zeros with EPIC_ZERO_TAIL.  weights and slot_weights come together,
 * and on all ranks or none: a rank without tokens or slots gives an address too.  Fewer recv rows
 * than the plan occupies, anywhere: EPIC_EOVERFLOW everywhere.
 *
 * Quantized, for n elements of a row: 1x128: scale = max|x| / 448 (1 if that is 0),
 * q = e4m3(x / scale); recv_scales rows are ceil(n / 128) float32.  1x32: scale =
 * 2^ceil(log2(max|x| / 448)) as e8m0 (byte 127 if max|x| is 0); rows are ceil(n / 32) bytes.
 * Round to nearest even, saturating; non-finite input gives a NaN scale. */
static inline epic_result epic_dispatch(epic_context *ctx, const epic_dispatch_args *args);

/* epic_plan, then epic_dispatch with the plan it made, as one call.  The call, the layer and the
 * plan of `dispatch` are not read.  A capacity is needed. */
static inline epic_result epic_plan_dispatch(epic_context *ctx, const epic_plan_args *plan,
                                             const epic_dispatch_args *dispatch);

typedef struct epic_combine_args {
    epic_call call;
    const epic_layer *layer; /* that epic_plan was given for this plan */
    const void *plan;
    int64_t plan_bytes;
    epic_const_rows rows;      /* [slots, row_bytes]; FLAT: one finished partial per row */
    epic_rows out;             /* out [num_tokens, row_bytes] */
    const float *slot_weights; /* [slots]; NULL: 1.  Not with FLAT */
    uint32_t type;             /* of rows and out: F32, BF16, F16 or F64 */
    uint32_t flags;            /* 0 */
} epic_combine_args;

/* out[t] = sum over k of w[slot(t,k)] * rows[slot(t,k)], in float32 (F64: in float64), in the
 * layer's order.
 *   BY_RANK: for each rank, ascending, the partial over that rank's choices in ascending k, by
 *     fused multiply-add from the first product; then the partials in ascending rank order.
 *   TREE: the same partial for each leaf; leaves are added in a binary tree; an empty node adds
 *     nothing.
 * Partials (and inner nodes) are rounded to the layer's partial_type, the result once to `type`.
 * A token with no live choice gives +0.  One row per (token, rank) travels. */
static inline epic_result epic_combine(epic_context *ctx, const epic_combine_args *args);

typedef struct epic_dispatch_backward_args {
    epic_call call;
    const epic_layer *layer; /* that epic_plan was given for this plan */
    const void *plan;
    int64_t plan_bytes;
    epic_const_rows d_recv;      /* [slots, row_bytes] */
    epic_rows d_tokens;          /* out [num_tokens, row_bytes] */
    const float *d_slot_weights; /* [slots]; FLAT: [rows, top_k], as slot_weights; or NULL */
    float *d_weights;            /* out [num_tokens, top_k]; 0 where no choice is alive */
    uint32_t type;               /* of d_recv and d_tokens */
    uint32_t flags;              /* 0 */
} epic_dispatch_backward_args;

/* The gradient of epic_dispatch: d_tokens = epic_combine(d_recv) without weights; d_weights[t,k]
 * = d_slot_weights[slot(t,k)], exactly. */
static inline epic_result epic_dispatch_backward(epic_context *ctx,
                                                 const epic_dispatch_backward_args *args);

typedef struct epic_combine_backward_args {
    epic_call call;
    const epic_layer *layer; /* that epic_plan was given for this plan */
    const void *plan;
    int64_t plan_bytes;
    epic_const_rows d_out;     /* [num_tokens, row_bytes] */
    epic_const_rows rows;      /* [slots, row_bytes]: what combine was given; none without
                                  d_slot_weights */
    epic_rows d_rows;          /* out [slots, row_bytes]; quantized: e4m3 rows */
    epic_rows d_rows_scales;   /* out, quantized only */
    const float *slot_weights; /* [slots]; NULL: 1.  Not with FLAT */
    float *d_slot_weights;     /* out [slots].  Not with FLAT */
    uint32_t type;             /* of d_out, rows and d_rows */
    uint32_t quantize;         /* an epic_quantize, of d_rows */
    uint32_t flags;            /* EPIC_ZERO_TAIL, EPIC_LEAVE_PADDING, of every out */
    uint32_t reserved;         /* 0 */
} epic_combine_backward_args;

/* The gradient of epic_combine: d_rows[slot] = w * d_out[token], d_slot_weights[slot] =
 * <d_out[token], rows[slot]>; padding slots get zeros, or are left.  The dot product is in
 * float32 (F64: in float64), in blocks of 1024 elements: accumulator i of 256 takes elements i,
 * i+256, i+512, i+768 by fused multiply-add from the first product; distances 4, 2, 1 are added
 * inside each aligned group of 8 accumulators, then 16, 8, 4, 2, 1 among the 32 groups; block
 * sums are added in ascending order. */
static inline epic_result epic_combine_backward(epic_context *ctx,
                                                const epic_combine_backward_args *args);

typedef struct epic_allreduce_sum_args {
    epic_call call;
    float *data;    /* [count], replaced by the sum */
    int64_t count;  /* equal on all ranks; 0 is allowed */
    uint32_t order; /* EPIC_BY_RANK: ascending; EPIC_TREE: binary tree, num_ranks must be
                       a power of two */
    uint32_t flags; /* 0 */
} epic_allreduce_sum_args;

/* Adds float32 arrays over the ranks, in place: the same bits on every rank. */
static inline epic_result epic_allreduce_sum(epic_context *ctx,
                                             const epic_allreduce_sum_args *args);

typedef struct epic_sum_replicas_args {
    epic_call call;
    const void *plan; /* which experts are replicas of each other */
    int64_t plan_bytes;
    epic_rows data;    /* [num_local_experts, row_bytes]: a row of float32 for each expert of
                         this rank, in place; row_bytes is equal on all ranks */
    float *workspace;  /* [row_bytes]; CUDA contexts leave it as it is */
    uint32_t flags;    /* 0 */
    uint32_t reserved; /* 0 */
} epic_sum_replicas_args;

/* Adds what the replicas of a logical expert have, such as gradients of its weights, and gives
 * each the sum; experts that are alone keep theirs.  Weights that were equal stay equal under any
 * optimizer then.  Gradients may be accumulated over many steps before.  The layer's order:
 *   BY_RANK: each rank its own replicas, ascending; then epic_allreduce_sum by rank.
 *   TREE: each leaf its own replicas, ascending, 0 if it has none; then the leaves of a rank in a
 *     binary tree, then the ranks in one, by their numbers.  The same bits for every number of
 *     ranks if rank i has block i of the experts, as without a table.
 * Several operations of call.tag, one after the other; on CUDA contexts one.  Errors: as
 * epic_combine. */
static inline epic_result epic_sum_replicas(epic_context *ctx,
                                            const epic_sum_replicas_args *args);

/* ------------------------------------------------------------------- router and losses ----
 *
 * All of these are local, allocate nothing (memory is the caller's, by size queries) and may be
 * called from any thread.  Errors are class (a), and for ids found in arrays (b) without peers:
 * nothing has been written then.
 *
 * On a CUDA context arrays, workspace, loss and d_loss lie on its device, and the results have
 * the host's bits (losses: but for a last one).  There ids found in arrays are not refused: one
 * out of range is no expert.  At most 4096 experts, no F64 logits there. */

/* Of an expert, from the logits z of one token. */
typedef enum epic_score {
    EPIC_SCORE_SOFTMAX = 0,
    EPIC_SCORE_SIGMOID = 1,
    EPIC_SCORE_SQRTSOFTPLUS = 2, /* sqrt(log(1 + e^z)) */
    EPIC_SCORE_LOGITS = 3        /* z itself */
} epic_score;

/* Of a group of experts, from its selection values. */
typedef enum epic_group_score {
    EPIC_GROUP_MAX = 0,
    EPIC_GROUP_SUM = 1 /* of its group_best largest */
} epic_group_score;

/* What becomes of the experts of groups not kept.  DeepSeek-V3's are out; the transformers
 * package had 0 before its release 5. */
typedef enum epic_group_others {
    EPIC_OTHERS_OUT = 0, /* never chosen */
    EPIC_OTHERS_ZERO = 1 /* their selection value is 0: wins over a kept one below 0 */
} epic_group_others;

/* What the weights of the chosen are made of. */
typedef enum epic_weight_rule {
    EPIC_WEIGHT_OF_SCORE = 0,       /* their scores, without the bias */
    EPIC_WEIGHT_SOFTMAX_CHOSEN = 1, /* softmax over the top_k chosen logits */
    EPIC_WEIGHT_SIGMOID_CHOSEN = 2, /* sigmoid of the chosen logits */
    EPIC_WEIGHT_SPARSEMIXER = 3 /* of choice k: softmax over the logits that are left, those of
                                     choices before k being gone, and near their largest m:
                                     (m - z) / max(|z|, m) <= 2 * jitter */
} epic_weight_rule;

typedef enum epic_normalize {
    EPIC_NORMALIZE_NONE = 0,
    EPIC_NORMALIZE_SUM = 1,    /* divide by sum + eps */
    EPIC_NORMALIZE_CLAMPED = 2 /* divide by max(sum, norm_min) */
} epic_normalize;

/* How experts are chosen and weighted, step by step.
 * The logits have num_experts + zero_experts columns, here E. */
typedef struct epic_router {
    uint32_t num_experts;  /* 1 to 65536, with zero_experts */
    uint32_t zero_experts; /* identity experts: ids num_experts and up; never sent anywhere */
    uint32_t top_k;        /* 1 to 64, at most E */
    uint32_t score;        /* an epic_score */
    uint32_t num_groups;   /* equal blocks of experts; divides E; at most 1024; 0: no groups */
    uint32_t topk_groups;  /* groups kept; their experts are top_k or more */
    uint32_t group_score;  /* an epic_group_score */
    uint32_t group_best;   /* EPIC_GROUP_SUM: 1 to 64, at most the experts of a group; 0:
                              top_k / topk_groups */
    uint32_t group_others; /* an epic_group_others */
    uint32_t weight_rule;  /* an epic_weight_rule */
    uint32_t normalize;    /* an epic_normalize */
    uint32_t flags;        /* 0 */
    double eps;            /* EPIC_NORMALIZE_SUM */
    double norm_min;       /* EPIC_NORMALIZE_CLAMPED; above 0 */
    double jitter;         /* EPIC_WEIGHT_SPARSEMIXER; 0 to below 1 */
    double scale;          /* of the weights; 0: 1 */
} epic_router;

/* Writes to *bytes how much workspace each function below needs, for any number of tokens.
 * *bytes is 0 when it fails.  Errors: EPIC_EINVAL. */
static inline epic_result epic_router_workspace(const epic_router *router, int64_t *bytes);

typedef struct epic_router_args {
    epic_call call;
    const epic_router *router;
    const void *logits; /* [num_tokens, E] */
    int64_t num_tokens;
    const float *bias;           /* [E], added to the scores for the choice only */
    const void *scale_of_expert; /* [E] of weights_type: the last factor of each chosen one's
                                      weight; NULL: 1 */
    const void *token_ids;       /* [num_tokens]: the token's row of table; NULL: no table */
    const int32_t *table; /* [table_rows, top_k]: experts by token id, instead of a choice;
                              negative: no expert */
    int64_t table_rows;
    void *workspace; /* at an address that 16 divides, as in the calls below */
    int64_t workspace_bytes;
    int32_t *topk_idx;      /* out [num_tokens, top_k] */
    void *weights;          /* out [num_tokens, top_k] */
    void *scores;           /* out [num_tokens, E] of weights_type */
    uint32_t type;          /* of logits: F32, BF16, F16 or F64 */
    uint32_t weights_type;  /* 0: F32; or F64, with F64 logits only */
    uint32_t token_id_type; /* 0: I32; or I64 */
    uint32_t flags;         /* 0 */
} epic_router_args;

/* Chooses top_k experts for each token, best first, and weighs them.  Computed in float32 (F64
 * logits: in float64).  Every tie goes to the lower id, a NaN is chosen last.  Where the choice
 * is by the scores alone (no bias, no sum over a group), it is made on the logits, which rise
 * with the scores and do not underflow.  Chosen scores that add up to 0 give weights of 0, not
 * NaN.  EPIC_WEIGHT_SPARSEMIXER is the inference rule of Phi-3.5-MoE: it draws nothing at random.
 * Errors: EPIC_EINVAL; EPIC_ENOTSUP on CUDA contexts for it. */
static inline epic_result epic_router_forward(epic_context *ctx, const epic_router_args *args);

typedef struct epic_router_backward_args {
    epic_call call;
    const epic_router *router;
    const void *logits; /* as forward */
    int64_t num_tokens;
    const int32_t *topk_idx;     /* [num_tokens, top_k], as forward gave it */
    const void *scale_of_expert; /* as forward */
    const void *d_weights;       /* [num_tokens, top_k] of weights_type */
    void *workspace;
    int64_t workspace_bytes;
    void *d_logits;          /* out [num_tokens, E] */
    void *d_scale_of_expert; /* out [E] of weights_type, of these tokens; NULL: not wanted */
    uint32_t type;           /* of logits */
    uint32_t weights_type;   /* as forward */
    uint32_t grad_type;      /* of d_logits; 0: type; or F32 */
    uint32_t flags;          /* EPIC_ACCUMULATE */
} epic_router_backward_args;

/* The gradient of the weights; the choice, and so the bias, has none.  d_scale_of_expert is added
 * up in float64 by ascending token (on CUDA contexts in a few runs of tokens, added last) and
 * rounded once.  Errors: as forward. */
static inline epic_result epic_router_backward(epic_context *ctx,
                                               const epic_router_backward_args *args);

/* T is total_tokens: the tokens of all ranks over which the load was counted.  The losses that
 * the ranks get for their tokens add up to the loss. */
typedef struct epic_balance_loss_args {
    epic_call call;
    const epic_router *router; /* num_experts, zero_experts, top_k and score are used */
    const void *logits;        /* [num_tokens, E], of this rank */
    int64_t num_tokens;
    int64_t total_tokens;
    int64_t sequence_tokens; /* 0: one loss over all; else one for each so many tokens */
    const int32_t *load;     /* [num_experts], of all ranks (epic_plan's load; with replicas its
                                logical_load); not read sequence-wise */
    const int32_t *topk_idx; /* sequence-wise: [num_tokens, top_k] */
    double coeff;
    void *workspace;
    int64_t workspace_bytes;
    void *loss;         /* out [1] */
    uint32_t type;      /* of logits */
    uint32_t loss_type; /* 0: F32; or F64 */
} epic_balance_loss_args;

/* num_experts * coeff / (top_k * T^2) * sum over experts of load * (sum over tokens of P): P is
 * the scores over their sum over all E (EPIC_SCORE_LOGITS: softmax).  Zero-experts have no load.
 * Sequence-wise: the same for each sequence, with its own choices counted and its length as T,
 * averaged over the T / sequence_tokens sequences; a sequence lies on one rank.
 * Errors: EPIC_EINVAL. */
static inline epic_result epic_balance_loss_forward(epic_context *ctx,
                                                    const epic_balance_loss_args *args);

typedef struct epic_balance_loss_backward_args {
    epic_call call;
    const epic_router *router; /* these as forward had them */
    const void *logits;
    int64_t num_tokens;
    int64_t total_tokens;
    int64_t sequence_tokens;
    const int32_t *load;
    const int32_t *topk_idx;
    double coeff;
    void *workspace;
    int64_t workspace_bytes;
    const float *d_loss; /* [1]; NULL: 1 */
    void *d_logits;      /* out [num_tokens, E] */
    uint32_t type;       /* of logits */
    uint32_t grad_type;  /* of d_logits; 0: type; or F32 */
    uint32_t flags;      /* EPIC_ACCUMULATE */
    uint32_t reserved;   /* 0 */
} epic_balance_loss_backward_args;

static inline epic_result
epic_balance_loss_backward(epic_context *ctx, const epic_balance_loss_backward_args *args);

typedef struct epic_z_loss_args {
    epic_call call;
    const epic_router *router; /* num_experts and zero_experts are used */
    const void *logits;        /* [num_tokens, E], of this rank */
    int64_t num_tokens;
    int64_t total_tokens;
    double coeff;
    void *workspace;
    int64_t workspace_bytes;
    void *loss;         /* out [1] */
    uint32_t type;      /* of logits */
    uint32_t loss_type; /* 0: F32; or F64 */
} epic_z_loss_args;

/* coeff / T * sum over tokens of logsumexp(z)^2.  Errors: EPIC_EINVAL. */
static inline epic_result epic_z_loss_forward(epic_context *ctx, const epic_z_loss_args *args);

typedef struct epic_z_loss_backward_args {
    epic_call call;
    const epic_router *router; /* these as forward had them */
    const void *logits;
    int64_t num_tokens;
    int64_t total_tokens;
    double coeff;
    void *workspace;
    int64_t workspace_bytes;
    const float *d_loss; /* [1]; NULL: 1 */
    void *d_logits;      /* out [num_tokens, E] */
    uint32_t type;       /* of logits */
    uint32_t grad_type;  /* of d_logits; 0: type; or F32 */
    uint32_t flags;      /* EPIC_ACCUMULATE */
    uint32_t reserved;   /* 0 */
} epic_z_loss_backward_args;

static inline epic_result epic_z_loss_backward(epic_context *ctx,
                                               const epic_z_loss_backward_args *args);

typedef struct epic_bias_update_args {
    epic_call call;
    float *bias;         /* [num_experts], in place */
    const int32_t *load; /* [num_experts], as epic_plan gives it, or its logical_load */
    int64_t num_experts;
    float rate;
    uint32_t flags; /* 0 */
} epic_bias_update_args;

/* bias += rate * sign(mean load - load), sign(0) = 0; compared exactly.  Errors: EPIC_EINVAL. */
static inline epic_result epic_bias_update(epic_context *ctx,
                                           const epic_bias_update_args *args);

/* -------------------------------------------------------------------- experts and layer ----
 *
 * The experts are local, the layer is collective.  NULL for the experts: host memory.  On a CUDA
 * context all arrays of the experts lie on its device, counts included: nothing waits on the
 * host, and a captured graph may be replayed with other counts.  What the layer can do there is
 * said at epic_moe_forward. */

typedef enum epic_activation {
    EPIC_SILU = 0,
    EPIC_GELU = 1,           /* exact, with erf */
    EPIC_GELU_TANH = 2,      /* the tanh approximation */
    EPIC_RELU2 = 3,          /* max(x, 0)^2 */
    EPIC_CLAMPED_SWIGLU = 4, /* gated only: g = min(gate, limit), u = up in [-limit, limit],
                                g * sigmoid(alpha * g) * (u + 1) */
    EPIC_CLAMPED_SILU = 5 /* gated only: g and u as above, g * sigmoid(g) * u: DeepSeek-V4's */
} epic_activation;

/* Where a choice's weight is multiplied in. */
typedef enum epic_weighting {
    EPIC_WEIGHT_LATE = 0,  /* in combine: the experts do not see it */
    EPIC_WEIGHT_EARLY = 1, /* on the activation, and on the down bias */
    EPIC_WEIGHT_INPUT = 2  /* on the expert's input */
} epic_weighting;

/* A product over the slabs of local experts, W[e] the matrix of expert e.  A row that carries a
 * token is one of the first expert_tokens[e] of a slab.  On devices only. */
typedef enum epic_gemm_pass {
    EPIC_GEMM_FORWARD = 0, /* out [num_slots, n] = a [num_slots, k] W[e]; W is b */
    EPIC_GEMM_INPUT = 1,   /* out [num_slots, k] = a [num_slots, n] W[e]^T; W is b */
    EPIC_GEMM_WEIGHT = 2   /* out[e] [k, n] = the sum over slab e of a^T b, for a [num_slots, k]
                              and b [num_slots, n]; zeros for an expert with no token */
} epic_gemm_pass;

typedef struct epic_gemm_args {
    epic_call call;
    const void *a;
    const void *b;
    void *out;
    const int32_t *expert_rows;   /* [num_experts], on the device */
    const int32_t *expert_tokens; /* [num_experts], on the device */
    int64_t num_slots;
    int64_t k; /* W is [num_experts, k, n] */
    int64_t n;
    uint32_t num_experts;
    uint32_t pass;        /* an epic_gemm_pass */
    uint32_t row_type;    /* of arrays with a row for each slot */
    uint32_t weight_type; /* of W */
    uint32_t out_type;    /* EPIC_GEMM_WEIGHT: of out */
    uint32_t flags;       /* EPIC_ACCUMULATE, of EPIC_GEMM_WEIGHT */
} epic_gemm_args;

/* A caller's own product, in place of ours.  It enqueues on call.stream and does not wait.  Rows
 * of a slab that carry no token must have no part in a sum; of `out` they are zeros in rows that
 * it writes at all.  What it returns but EPIC_OK the call of the experts returns. */
typedef struct epic_gemm {
    epic_result (*multiply)(void *self, const epic_gemm_args *args);
    void *self;
} epic_gemm;

/* y = (act(x W_gate) * (x W_up)) W_down for each local expert, biases where given; ungated:
 * y = act(x W) W_down.  Below, width is 2 * inner, ungated inner: gate first, then up. */
typedef struct epic_experts {
    uint32_t num_local_experts;
    uint32_t hidden;
    uint32_t inner;
    uint32_t activation;   /* an epic_activation */
    uint32_t ungated;      /* 1: no gate */
    uint32_t interleaved;  /* 1: gate in the even columns, up in the odd ones */
    uint32_t weighting;    /* an epic_weighting */
    uint32_t row_type;     /* of x and y: F32, BF16, F16, or F64 */
    uint32_t weight_type;  /* of weights and biases: 0: row_type; F64 goes with F64 only; E4M3:
                              CUDA contexts (epic_experts_forward) */
    uint32_t flags;        /* 0 */
    float limit;           /* EPIC_CLAMPED_SWIGLU; 0: 7.  EPIC_CLAMPED_SILU; 0: 10.  What is
                             clamped has no gradient; at the limit itself it has */
    float alpha;           /* EPIC_CLAMPED_SWIGLU; 0: 1.702 */
    const epic_gemm *gemm; /* CUDA contexts: what multiplies; NULL: ours */
} epic_experts;

/* Bytes of memory that the caller passes to the experts. */
typedef struct epic_experts_memory_info {
    int64_t saved_bytes;    /* from forward to backward.  Host: [num_slots, width] float32 (F64
                               rows: float64) */
    int64_t forward_bytes;  /* workspace of forward, enough even if one expert has all slots */
    int64_t backward_bytes; /* workspace of backward; never less than forward_bytes */
} epic_experts_memory_info;

/* Computes how much memory the experts need for a receive buffer of num_slots slots.  Pass the
 * context that will run them, and NULL as config; or, before it is open, NULL as ctx and the
 * config: only config.backend matters then.  NULL for both means host memory.  Local.
 * Errors: EPIC_EINVAL; EPIC_ENOTSUP as epic_experts_forward. */
static inline epic_result epic_experts_memory(epic_context *ctx, const epic_config *config,
                                              const epic_experts *experts, int64_t num_slots,
                                              epic_experts_memory_info *out);

typedef struct epic_experts_args {
    epic_call call;
    const epic_experts *experts;
    const void *x;                 /* [num_slots, hidden]; padding slots are zero */
    const float *x_scales;         /* E4M3: [num_slots, ceil(hidden / 128)] */
    int64_t num_slots;             /* what the buffers have */
    const int32_t *expert_rows;    /* [num_local_experts], padded counts, of epic_plan */
    const int32_t *expert_tokens;  /* [num_local_experts], true counts; NULL: expert_rows */
    const void *slot_weights;      /* [num_slots], with EARLY and INPUT only */
    const void *w_gate_up;         /* [num_local_experts, hidden, width] */
    const void *w_down;            /* [num_local_experts, inner, hidden] */
    const float *w_gate_up_scales; /* E4M3: [num_local_experts, ceil(width / 128),
                                      ceil(hidden / 128)] */
    const float *w_down_scales;    /* E4M3: [num_local_experts, ceil(hidden / 128),
                                      ceil(inner / 128)] */
    const void *b_gate_up;         /* [num_local_experts, width]; NULL: none */
    const void *b_down;            /* [num_local_experts, hidden]; NULL: none */
    void *saved;                   /* out; any alignment of 16, as workspace */
    int64_t saved_bytes;
    void *workspace;
    int64_t workspace_bytes;
    void *y;               /* out [num_slots, hidden]; 0 on padding; not x */
    uint32_t flags;        /* EPIC_RECOMPUTE: out is `saved` alone, for a backward whose forward
                              kept none; y is not looked at */
    uint32_t weights_type; /* of slot_weights: 0: F32; or F64, with F64 rows only */
} epic_experts_args;

/* The experts' MLP over the slabs.  Slots past the last slab are neither read nor written.  The
 * matrix products are OpenBLAS's, else plain loops.  Looked for at first use: libopenblas.so.0;
 * one that the process has loaded, as Python's numpy and scipy do; libscipy_openblas.so, of pip's
 * scipy-openblas32; what the build was told (EPIC_OPENBLAS).  One thread each: OpenBLAS's number
 * of threads is set to 1 for the whole process while a call runs, and put back after the last.
 * The bits of a slab's rows depend on that slab alone.  BF16 rows with BF16 weights: oneDNN's, if
 * the build has found one (or was told, EPIC_ONEDNN) and the processor has instructions for them;
 * what lies between the two products is rounded to BF16 then.
 *
 * On a CUDA context, on call.stream: F32, BF16 or F16, sums in float32, and what lies between
 * the two products has row_type.  Counts are not looked at: what they say past num_slots is cut
 * off.  On Hopper 16-bit rows and weights of one type go through the tensor cores where 8 divides
 * hidden and inner and arrays begin at multiples of 16; everything else, and every other GPU,
 * takes plain loops.  call.max_sms 0: all SMs, whatever the context's share of them is.
 *
 * With weight_type E4M3, on a CUDA context: x is e4m3 with a scale for each 128 numbers of a
 * row, as dispatch brings it with EPIC_QUANTIZE_1X128; the activations go through the same.
 * Weights have a scale for each 128 x 128 and lie turned, as tensor cores want them: w_gate_up
 * [num_local_experts, width, hidden], w_down [num_local_experts, hidden, inner].  Biases, saved
 * and y have row_type, F32, BF16 or F16.  Sums are float32; Hopper's tensor cores add up to 128
 * products with fewer bits.  They take it where row_type has 16 bits and 16 divides hidden and
 * inner.  epic_experts_backward takes this `saved` beside x of row_type, and weights of row_type
 * or E4M3.
 *
 * Errors: EPIC_EINVAL; EPIC_ENOTSUP (F64 rows; E4M3 on the host, or with experts.gemm). */
static inline epic_result epic_experts_forward(epic_context *ctx,
                                               const epic_experts_args *args);

typedef struct epic_experts_backward_args {
    epic_call call;
    const epic_experts *experts; /* these as forward had them */
    const void *x;
    int64_t num_slots;
    const int32_t *expert_rows;
    const int32_t *expert_tokens;
    const void *slot_weights;
    const void *w_gate_up;
    const void *w_down;
    const void *b_gate_up;
    const void *b_down;
    const void *saved; /* as forward left it */
    int64_t saved_bytes;
    void *workspace;
    int64_t workspace_bytes;
    const void *d_y;   /* [num_slots, hidden]; 0 on padding */
    void *d_x;         /* out [num_slots, hidden]; 0 on padding; NULL: not wanted, as below */
    void *d_w_gate_up; /* out, as w_gate_up in float32 (F64: float64) or grad_type, as the three
                          below */
    void *d_w_down;    /* out */
    void *d_b_gate_up; /* out */
    void *d_b_down;    /* out */
    void *d_slot_weights;  /* out [num_slots], with EARLY and INPUT only; 0 on padding */
    uint32_t flags;        /* EPIC_ACCUMULATE, of weights and biases */
    uint32_t weights_type; /* of slot_weights and d_slot_weights */
    uint32_t grad_type;    /* of the gradients of weights and biases: 0: as above; on a CUDA
                              context also row_type */
    uint32_t reserved;     /* 0 */
    const float *w_gate_up_scales; /* E4M3: [num_local_experts, ceil(hidden / 128),
                                      ceil(width / 128)] */
    const float *w_down_scales;    /* E4M3: [num_local_experts, ceil(inner / 128),
                                      ceil(hidden / 128)] */
} epic_experts_backward_args;

/* The gradients of epic_experts_forward; d_x is not x.  Weights and biases of an expert with no
 * token get zeros (accumulating: nothing).  With weight_type E4M3, on a CUDA context: weights
 * are as above, not turned, and the gradients of rows that are multiplied by them are quantized
 * first (1x128); x, d_y and all results are as ever.  Errors: EPIC_EINVAL; EPIC_ENOTSUP as
 * forward. */
static inline epic_result epic_experts_backward(epic_context *ctx,
                                                const epic_experts_backward_args *args);

/* A Mixture-of-Experts layer: router, plan, dispatch, experts, combine.  hidden is the
 * experts'; E is the router's num_experts + zero_experts.
 *
 * All options must be equal on all ranks, except num_local_experts, gemm, capacity and
 * EPIC_RECOMPUTE, and all ranks must have the same weights of those that may be NULL.  The first
 * call of every pass compares them: a difference is EPIC_EMISMATCH, and names the option and both
 * values (CUDA contexts compare a hash: they name the ranks). */
typedef struct epic_moe {
    const epic_layer *layer; /* num_experts (with replicas: num_logical) and top_k as the
                                   router's; EPIC_EXPERT_MAJOR */
    const epic_router *router;
    const epic_experts *experts; /* num_local_experts: what one rank owns, at most */
    const epic_experts *shared;  /* an expert that sees every token, num_local_experts 1,
                                   EPIC_WEIGHT_LATE; NULL: none */
    double balance_coeff;        /* of epic_balance_loss, 0 or more; 0: none */
    double z_coeff;              /* of epic_z_loss, likewise */
    int64_t sequence_tokens;     /* of epic_balance_loss */
    int64_t capacity; /* slots of this rank; or EPIC_CAPACITY_EXACT, for epic_moe_plan */
    uint32_t flags;   /* EPIC_SUM_DENSE, not with F64 rows; EPIC_RECOMPUTE; EPIC_DISPATCH_AGAIN;
                       EPIC_LOSS_BY_CALLER */
    uint32_t reserved; /* 0 */
} epic_moe;

/* Bytes of memory that the caller passes to a layer, at addresses that 64 divides. */
typedef struct epic_moe_memory_info {
    int64_t saved_bytes;    /* from forward to backward */
    int64_t forward_bytes;  /* workspace of forward */
    int64_t backward_bytes; /* workspace of backward */
} epic_moe_memory_info;

/* Computes how much memory a layer needs for config.max_tokens tokens of each rank.  Pass the
 * context that will run it, and NULL as config; or, before it is open, NULL as ctx and its config
 * with num_ranks: config.backend says whether the sizes are those of a host context (also NULL) or of
 * a CUDA context.  For each slot `saved` holds the received row and the outputs of gate and up.
 * EPIC_DISPATCH_AGAIN leaves out the rows and EPIC_RECOMPUTE the outputs; backward makes them again
 * in its workspace, with the same bits.  Local.
 * Errors: EPIC_EINVAL; EPIC_ENOTSUP as epic_moe_forward. */
static inline epic_result epic_moe_memory(epic_context *ctx, const epic_config *config,
                                          const epic_moe *moe, epic_moe_memory_info *out);

/* The parameters of a layer.  Types: gate and its bias F32 (F64 rows: F64), the experts' and the
 * shared expert's weight_type. */
typedef struct epic_moe_weights {
    const void *w_gate;          /* [hidden, E] */
    const void *b_gate;          /* [E], inside the logits; NULL: none */
    const float *bias;           /* [E], for the choice only; NULL: none */
    const void *scale_of_expert; /* [E], type as w_gate: of epic_router_args; NULL: 1 */
    const void *w_gate_up;       /* of the local experts, as epic_experts_args */
    const void *w_down;
    const void *b_gate_up;
    const void *b_down;
    const void *shared_gate_up; /* of the shared expert */
    const void *shared_down;
    const void *shared_b_gate_up;
    const void *shared_b_down;
    const void *w_shared_gate;     /* [hidden], type as w_gate: the shared expert's output is
                                  times sigmoid(x w_shared_gate); NULL: added as it is */
    const float *w_gate_up_scales; /* E4M3: of epic_experts_args; of its backward, or NULL */
    const float *w_down_scales;
} epic_moe_weights;

typedef struct epic_moe_args {
    epic_call call;
    const epic_moe *moe;
    const epic_moe_weights *weights;
    epic_const_rows x;     /* [num_tokens, hidden] of the experts' row_type */
    epic_rows out;         /* out, as x */
    const void *token_ids; /* of epic_router_args, as the three below */
    const int32_t *table;
    int64_t table_rows;
    const int32_t *rank_of_expert;    /* [num_experts]; NULL: contiguous blocks */
    const int32_t *logical_of_expert; /* as epic_plan_args */
    void *saved;                      /* begins with the plan, for epic_sum_replicas */
    int64_t saved_bytes;
    void *workspace;
    int64_t workspace_bytes;
    void *loss;             /* out [1]: balance loss + z-loss; NULL: not wanted, as below */
    void *balance_loss;     /* out [1] */
    void *z_loss;           /* out [1] */
    int32_t *load;          /* out [num_experts] */
    int32_t *logical_load;  /* out [num_logical] */
    int32_t *demand;        /* out [1] */
    uint32_t token_id_type; /* 0 or EPIC_I32, or EPIC_I64 */
    uint32_t loss_type;     /* of the losses: 0: F32; or F64, with F64 rows only */
    uint32_t flags;         /* EPIC_PLANNED */
    uint32_t reserved;      /* 0 */
} epic_moe_args;

/* out, which is not x, = the layer of x: for each token the weighted sum of its experts' outputs,
 * plus w * x for zero-experts, plus the shared expert, gated if it has one.  Weights are
 * multiplied where experts->weighting says.  F64 rows: everything is float64, the weights of
 * choices and their gradients too.  They travel beside the rows, so config.max_row_bytes is at
 * least 8 * top_k, and EPIC_WEIGHT_LATE is done as EPIC_WEIGHT_EARLY, which is the same number.
 * With EPIC_TREE (not by EPIC_BY_HOSTS) num_tokens must be equal on all ranks and a multiple of
 * leaves / num_ranks; then outputs and gradients have the same bits for every number of ranks
 * (with EPIC_SUM_DENSE also the dense ones and the loss).  Errors: as epic_plan, epic_dispatch,
 * epic_combine; a token id or a table entry that is none is class (b).
 *
 * On a CUDA context everything is on the device, the losses and what comes in for them too, and
 * runs on call.stream; the host waits for nothing, and a graph can hold it.  A rank_of_expert that gives a rank more than num_local_experts, and
 * with EPIC_TREE unequal numbers of tokens, are class (b) there.  Not there yet (EPIC_ENOTSUP):
 * F64 rows, shared->gemm, epic_moe_plan.
 *
 * experts->weight_type E4M3, on a CUDA context: rows are quantized on their way (1x128) and the
 * experts are those of epic_experts_forward, their weights and biases as there.  Such rows are not
 * saved, so moe.flags has EPIC_DISPATCH_AGAIN.  epic_moe_backward takes weights that are not
 * turned, [.., hidden, width] and [.., inner, hidden]: of row_type, of which those of E4M3 were
 * made, or, if they come with scales, of E4M3, as epic_experts_backward has them.  Gradients pass
 * straight through the rounding.  EPIC_RECOMPUTE wants those of row_type, and does not round what
 * is made again. */
static inline epic_result epic_moe_forward(epic_context *ctx, const epic_moe_args *args);

/* The first part of epic_moe_forward, up to the plan, for a caller who brings memory for what
 * really lands instead of for the worst case:
 *
 *     moe.capacity = EPIC_CAPACITY_EXACT      epic_moe_memory tells what the plan takes
 *     epic_moe_plan(ctx, &args, &slots)
 *     moe.capacity = slots                    epic_moe_memory tells what the rest takes
 *     args.flags = EPIC_PLANNED               args.saved: that, beginning with what was saved
 *     epic_moe_forward(ctx, &args)            and backward as ever, with this capacity
 *
 * All ranks do it or none.  *slots are those that this rank's experts have got, padding included;
 * 0 is a capacity too then.  `out` and the losses are not written.  Errors: as epic_plan. */
static inline epic_result epic_moe_plan(epic_context *ctx, const epic_moe_args *args,
                                        int64_t *slots);

/* Gradients, float32 (F64 rows: float64; the experts' also grad_type of the call); NULL: not
 * wanted. */
typedef struct epic_moe_gradients {
    void *w_gate;
    void *b_gate;
    void *scale_of_expert; /* needs weights.scale_of_expert */
    void *w_gate_up;       /* of the local experts: complete; of replicas: of what each has been
                          given, epic_sum_replicas adds them */
    void *w_down;
    void *b_gate_up;
    void *b_down;
    void *shared_gate_up;
    void *shared_down;
    void *shared_b_gate_up;
    void *shared_b_down;
    void *w_shared_gate;
} epic_moe_gradients;

typedef struct epic_moe_backward_args {
    epic_call call;
    const epic_moe *moe; /* these as forward had them */
    const epic_moe_weights *weights;
    epic_const_rows x;
    epic_const_rows d_out;               /* [num_tokens, hidden] */
    epic_rows d_x;                       /* out; data NULL: not wanted, on this rank */
    const epic_moe_gradients *gradients; /* NULL: none are wanted */
    const void *saved;                   /* as forward left it */
    int64_t saved_bytes;
    void *workspace;
    int64_t workspace_bytes;
    const void *d_loss;         /* [1], equal on all ranks, as the two below; NULL: 1 */
    const void *d_balance_loss; /* [1]; NULL: 0 */
    const void *d_z_loss;       /* [1]; NULL: 0 */
    uint32_t flags;             /* EPIC_ACCUMULATE, of gradients */
    uint32_t loss_type;         /* of d_loss and the two after it, as forward */
    uint32_t grad_type;         /* of the gradients of w_gate_up, w_down and their biases: 0: as
                                   of the others; on a CUDA context also experts->row_type */
    uint32_t reserved;          /* 0 */
} epic_moe_backward_args;

/* The gradients of epic_moe_forward's out and of its three losses, added.  Errors: as
 * epic_combine_backward and epic_dispatch_backward; damage seen in `saved` is class (b). */
static inline epic_result epic_moe_backward(epic_context *ctx,
                                            const epic_moe_backward_args *args);

/* --------------------------------------------------------------------------- advanced ----
 *
 * Bootstraps.  gather blocks until every rank has given `bytes` bytes and leaves all of them in
 * `all`, in rank order; all ranks pass the same `bytes`.  It returns EPIC_OK, or the reason why
 * the bootstrap failed.  epic_open alone uses it.  {.num_ranks = 1} is a group of one, whatever the
 * environment says. */
struct epic_bootstrap {
    int32_t rank;
    int32_t num_ranks;
    epic_result (*gather)(void *self, const void *mine, void *all, int64_t bytes);
    void (*close)(void *self); /* what epic_bootstrap_close calls; NULL: nothing to do */
    void *self;
};

/* A bootstrap over TCP; rank 0 listens. */
typedef struct epic_tcp {
    const char *address; /* rank 0's host; NULL: 127.0.0.1 */
    const char *secret;  /* NULL: none.  Proved by HMAC-SHA-256 both ways, never sent; all
                            that is said in the bootstrap is authenticated by it */
    int32_t rank;
    int32_t num_ranks;
    uint32_t port;       /* 1 to 65535 */
    uint32_t timeout_ms; /* for every gather; 0: 300000 */
} epic_tcp;

/* Meets over TCP.  Collective.  `address` must be one of rank 0's host.  With a secret rank 0
 * listens there (on every address of its host if its own name has a loopback address there, as
 * Debian sets it), and who does not know the secret can neither take a rank's place nor make the
 * bootstrap fail, but by cutting connections or holding the port.  Without one it listens on
 * loopback, as nothing else keeps strangers out: the ranks are then processes of one host, and a
 * rank of another is told at once that it takes a secret.  Strangers and garbage on the port are
 * refused and the bootstrap goes on.  docs/guide/security.md says what a secret protects and what
 * it does not.  Errors: EPIC_EINVAL, EPIC_ETIMEOUT (names the ranks that did not come), EPIC_EPEER,
 * EPIC_EDEVICE, EPIC_ENOTSUP (a secret without libcrypto); the sentence is in epic_error(NULL). */
static inline epic_result epic_bootstrap_tcp(epic_bootstrap *out, const epic_tcp *tcp);

/* Meets as the environment says (above), over TCP.  Without any of those variables: one rank.
 * Only rank 0's host and a port must be known: MASTER_ADDR and MASTER_PORT; without MASTER_ADDR
 * launchers of MPI ranks mean this host, and tasks of srun find both by themselves.  A variable
 * that says that there are several ranks never ends in a group of one: where the number is not
 * known, where two launchers contradict each other, or in a batch script or shell of Slurm with
 * several tasks but without srun, it is EPIC_EINVAL, and RANK=0 WORLD_SIZE=1 the way to one. */
EPIC_API epic_result epic_bootstrap_env(epic_bootstrap *out);

/* Meets over an MPI communicator: `comm` points to an MPI_Comm, NULL is MPI_COMM_WORLD (and
 * initializes MPI if nobody has).  Collective over it.  timeout_ms, for every gather: 0: 300000.
 * Messages travel on a duplicate; only when ranks are missing after half of the time, those that
 * came look for each other on `comm` itself, with tag 32767.  Loads libepic_mpi.so, which must be
 * of the caller's MPI.  MPI should be initialized with MPI_THREAD_MULTIPLE.  With less, no other
 * thread may be in MPI during the bootstrap; backend mpi needs MPI_THREAD_SERIALIZED, and then that
 * no thread of the caller's is in MPI while a context is open.  Errors: EPIC_EINVAL, EPIC_ENOTSUP
 * (no libepic_mpi.so), EPIC_ETIMEOUT (names the ranks that did not come), EPIC_EMISMATCH,
 * EPIC_EDEVICE. */
EPIC_API epic_result epic_bootstrap_mpi(epic_bootstrap *out, const void *comm,
                                        uint32_t timeout_ms);

/* Fills out[0 .. num_ranks) with the bootstraps of num_ranks threads of this process.  Local.
 * timeout_ms 0: 300000.  Close each of them. */
EPIC_API epic_result epic_bootstrap_threads(epic_bootstrap *out, int32_t num_ranks,
                                            uint32_t timeout_ms);

/* Ends a bootstrap; allowed right after epic_open.  Local.  NULL is allowed. */
EPIC_API void epic_bootstrap_close(epic_bootstrap *bootstrap);

/* Write the bytes of a plan to *bytes, and to *slots the smallest capacity of a rank that can
 * never overflow, from config.num_ranks, config.max_tokens and the layer.  They need no context;
 * epic_layer_sizes returns both for an open one.  The capacity is for contiguous blocks of experts,
 * or for any rank_of_expert where num_ranks does not divide num_experts.  The result is 0 when
 * a call fails.  Local.  Errors: EPIC_EINVAL. */
static inline epic_result epic_plan_bytes(const epic_config *config, const epic_layer *layer,
                                          int64_t *bytes);
static inline epic_result epic_capacity_bound(const epic_config *config,
                                              const epic_layer *layer, int64_t *slots);

/* Bytes that a rank will hold, from sizes alone. */
typedef struct epic_memory_info {
    int64_t host_bytes;   /* private host memory of a context */
    int64_t shared_bytes; /* host memory shared with peers, this rank's part */
    int64_t device_bytes; /* CUDA memory of a context */
    int64_t plan_bytes;   /* of one plan of the layer; 0 without a layer */
} epic_memory_info;

/* What a context and a plan will take.  Local, before any open.  config.num_ranks is needed;
 * layer may be NULL; config.backend NULL: "shm"; "gpu": "p2p".  Of "hosts" at most: what the network
 * reads and writes counts in host_bytes and in device_bytes, unless EPIC_NET_MEMORY says in which. */
static inline epic_result epic_memory(const epic_config *config, const epic_layer *layer,
                                      epic_memory_info *out);

#define EPIC_FATE_NONE (-1)        /* no expert was chosen */
#define EPIC_FATE_EXPERT_FULL (-2) /* dropped: past expert_capacity */
#define EPIC_FATE_RANK_FULL (-3)   /* dropped: past what the rank's capacity allows */

/* Read from a plan's bytes. */
typedef struct epic_plan_info {
    uint64_t id;        /* the ranks agreed on it */
    int64_t num_tokens; /* of this rank */
    int64_t num_slots;  /* occupied on this rank, padding included */
    int64_t capacity;   /* what the plan was given */
    int64_t num_kept;   /* choices of this rank's tokens; these four add up to */
    int64_t num_none;   /*   num_tokens * top_k */
    int64_t num_expert_full;
    int64_t num_rank_full;
    uint32_t result; /* EPIC_OK; EPIC_EOVERFLOW or EPIC_EINVAL: moves nothing */
    uint32_t num_local_experts;
    uint32_t first_leaf; /* TREE: this rank's leaves */
    uint32_t num_leaves;
    int64_t total_tokens; /* of all ranks */
    int64_t fate_offset; /* bytes into the plan: int32 [num_tokens, top_k], the slot on the rank
                             that owns the expert, or an EPIC_FATE */
    int64_t rank_offset; /* bytes into the plan: int32 [num_tokens, top_k], the rank that owns
                             the expert, -1 if none; on CUDA contexts also -1 where the choice
                             was dropped */
} epic_plan_info;

/* Reads a plan of a host context; or of a CUDA context, from the device's memory or a copy of the
 * bytes on the host.  A query of the host: it copies from the device and waits for that, so the
 * plan must be finished (its stream synchronized).  Local.  Errors: EPIC_EINVAL (not a plan, or
 * damaged); EPIC_EDEVICE. */
static inline epic_result epic_plan_read(const void *plan, int64_t plan_bytes,
                                         epic_plan_info *out);

#define EPIC_MAX_CULPRITS 16

typedef enum epic_operation {
    EPIC_OP_NONE = 0,
    EPIC_OP_OPEN = 1,
    EPIC_OP_PLAN = 2,
    EPIC_OP_DISPATCH = 3,
    EPIC_OP_COMBINE = 4,
    EPIC_OP_DISPATCH_BACKWARD = 5,
    EPIC_OP_COMBINE_BACKWARD = 6,
    EPIC_OP_SUM = 7
} epic_operation;

/* What broke the group. */
typedef struct epic_failure_info {
    uint32_t result;    /* an epic_result; EPIC_OK: the group is whole */
    uint32_t operation; /* an epic_operation */
    uint64_t tag;
    uint64_t sequence; /* place among the operations of that tag, from 0 */
    int32_t rank;      /* the rank that noticed */
    uint32_t num_culprits;
    int32_t culprits[EPIC_MAX_CULPRITS]; /* ascending */
    char sentence[512];
} epic_failure_info;

/* What broke the group, once something has.  Local. */
static inline epic_result epic_failure(const epic_context *ctx, epic_failure_info *out);

/* What multiplies matrices: "OpenBLAS 0.3.21 Haswell", or "plain loops"; where oneDNN has a part
 * in it, ", oneDNN 2.6.3 for bfloat16" follows. */
EPIC_API const char *epic_blas_name(void);

#ifdef __cplusplus
}
#endif

#include "epic/epic_abi.h" /* what the typed calls above are made of */

#endif
