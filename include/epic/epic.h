/* SPDX-License-Identifier: Apache-2.0 */
/* EPIC: Expert Parallelism In C.  Moves tokens to experts and back for Mixture-of-Experts
 * models.
 *
 * The experts of a layer are spread over the ranks of a group.  In each step every token's row
 * is sent to the ranks that own its chosen experts (dispatch).  The experts transform the rows,
 * and the results return to the token's rank, where they are summed (combine).  The backward
 * pass does the same in reverse.
 *
 * This header goes from the simple to the advanced:
 *
 *     dispatcher             one handle that owns the plan and the buffers: start here
 *     contexts               a rank of a group: open, close, errors, deadlines
 *     operations             plan, dispatch, combine and gradients over memory of your own
 *     router and losses      which experts a token chooses, with which weights
 *     experts and layer      the experts' MLP; the whole layer as one call
 *     advanced               bootstraps, sizes before open, reading plans, what broke a group
 *
 * Words.  A *token* is a row that the caller owns.  A *choice* is a pair (token, k): one of the
 * top-k experts of a token.  A *slot* is a row of the receive buffer: one choice that arrived
 * on this rank.  A *slab* is the slots of one local expert: contiguous, padded to the
 * alignment. *Capacity* is the number of slots of the receive buffer.
 * docs/reference/glossary.md has all words.
 *
 * Host and device.  A call that computes takes the context first.  With a host context it
 * reads and writes host memory, and returns when the work is done.  With a CUDA context it
 * reads and writes memory of that device, enqueues the work on call.stream, and does not wait
 * for it.  Local calls accept NULL as context, which means host memory.
 *
 * CUDA contexts.  Make the device current (cudaSetDevice) and open with config.backend "gpu":
 * the context is bound to that device.  epic_open then loads libepic_cuda.so, or
 * libepic_hosts.so for ranks on several hosts.  A program that uses no GPU needs neither.  All
 * calls on an open CUDA context may be captured in a CUDA graph and replayed with new data.
 *
 * Each description of a call ends with three lines:
 *
 *     Errors:  the results that it can return, with their class (a), (b) or (c), as below.  A
 *              call with a context can also return EPIC_ECLOSED, and the class (c) error that
 *              broke the group
 *     Threads: "collective" or "local", and from which threads the call may be made
 *     CUDA:    the differences on a CUDA context
 *
 * Collective calls.  Every rank of the group makes the same call, and calls with the same tag
 * come in the same order on every rank.
 *   - On host contexts operations with different tags are independent.  They may run in any
 *     order, also at the same time from different threads, up to config.max_in_flight.
 *   - A CUDA context does one operation after the other, in the same order on every rank,
 *     whatever their tags are.  Make the calls from one thread at a time, on one stream or on
 *     streams that wait for each other.  Two operations that run at the same time are
 *     EPIC_EMISMATCH.
 *
 * Local calls involve no other rank.  Any thread may make them at any time, unless its
 * description excludes that.
 *
 * Memory.  Pointers are borrowed for the call and aligned to the elements of their arrays.  An
 * array that a call writes must not overlap any other array of that call.  After epic_open no
 * call allocates memory, except 32 bytes at the first use of a new tag.
 *
 * Numbers.  Counts and sizes in bytes are int64_t, and negative ones are refused.  Zero is the
 * default of every field.  NULL means "not wanted" for outputs and "none" for inputs.
 *
 * Errors have three classes.
 *   (a) Arguments that the host can check (EPIC_EINVAL, EPIC_ENOTSUP).  The call has done
 *       nothing and may be repeated.  The other ranks wait for it; a rank that cannot repeat it
 *       should call epic_abort.
 *   (b) Data (EPIC_EINVAL for expert ids and damaged plans, EPIC_EOVERFLOW).  All ranks
 *       complete the operation with the same result, outputs are zero, and the group stays
 *       usable.  On a CUDA context the call returns EPIC_OK and epic_check returns the error
 *       later.
 *   (c) Lost order (EPIC_ETIMEOUT, EPIC_EPEER, EPIC_EMISMATCH, EPIC_EDEVICE).  The group is
 *       broken: every later call returns the same error at once.  epic_close works, and the
 *       process can open a new group. Every wait has a deadline.  epic_error returns a sentence
 *       with the argument, its value, the rule and the remedy.  The library never prints,
 *       exits, aborts or traps.
 *
 * docs/reference/errors.md lists the error codes, docs/reference/environment.md the environment
 * variables, which epic_open reads.
 *
 * Compatibility.  Structs are extended at their end.  The calls below pass the size of each
 * struct to versioned symbols (epic/epic_abi.h).  So a program that was built with an older
 * header runs with a newer library.  A program built with a newer header runs with an older
 * library as long as it uses no new field.  docs/reference/abi.md has the rules. */
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

/* 1 if this header is of that version or a later one.  Also for #if. */
#define EPIC_VERSION_AT_LEAST(major, minor, patch) \
    (EPIC_VERSION >= (major)*10000 + (minor)*100 + (patch))

#if defined(__GNUC__)
#define EPIC_API __attribute__((visibility("default")))
#else
#define EPIC_API
#endif

/* ---------------------------------------------------------------------- common types ---- */

/* One rank of one group. */
typedef struct epic_context epic_context;

/* A cudaStream_t; NULL for host contexts. */
typedef void *epic_stream;

/* The result of a call.  The numbers are ABI: new ones are appended, none is renumbered. */
typedef enum epic_result {
    EPIC_OK = 0,
    EPIC_EINVAL = 1,    /* an argument or a value in the data is invalid */
    EPIC_ENOMEM = 2,    /* no memory: at open, or for the first operation with a new tag */
    EPIC_ENOTSUP = 3,   /* this context does not support the call, or no backend connects these
                           ranks */
    EPIC_ETIMEOUT = 4,  /* a rank did not make its call before the deadline */
    EPIC_EDEVICE = 5,   /* CUDA, NCCL, MPI or the system reported an error */
    EPIC_EOVERFLOW = 6, /* a rank needs more slots than it has */
    EPIC_EMISMATCH = 7, /* the ranks made different calls */
    EPIC_EPEER = 8,     /* a rank died, closed its context or aborted */
    EPIC_ECLOSED = 9    /* this context never opened, or belongs to the parent of a forked
                           process */
} epic_result;

/* The type of the elements of an array.  EPIC_BYTES leaves it open: calls that only move rows
 * accept it, calls that compute refuse it.  A field that begins its description with "0:" has
 * that default. */
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

/* Bits of the `flags` fields.  A flag has its own bit, whatever call it is for.  A call refuses
 * the flags that its description does not name. */
typedef enum epic_flag {
    /* Also write zeros to the slots after the last slab. */
    EPIC_ZERO_TAIL = 1,
    /* Add the gradients to what the arrays hold, instead of overwriting it. */
    EPIC_ACCUMULATE = 2,
    /* Layer: sum the gradients of gate and shared expert and the losses over the ranks.
     * Without it each rank gets the part of its own tokens. */
    EPIC_SUM_DENSE = 4,
    /* Layer of a plan: the expert ids of a token are distinct.  The caller promises it, and
     * epic_plan checks it: a duplicate is a class (b) error.  Then a token takes at most
     * min(top_k, local experts) slots of a rank, so capacity bounds are smaller and layers need
     * less memory. */
    EPIC_DISTINCT = 8,
    /* epic_moe_forward: epic_moe_plan has made the plan. */
    EPIC_PLANNED = 16,
    /* Do not write padding slots, for experts that use expert_tokens.  Ranks may differ. */
    EPIC_LEAVE_PADDING = 32,
    /* Layer: `saved` does not hold the outputs of the first product of the experts and of the
     * shared expert; backward computes them again.  epic_experts_forward: compute only these
     * outputs. */
    EPIC_RECOMPUTE = 64,
    /* Layer, equal on all ranks: `saved` does not hold the received rows; backward sends them
     * again, which is one more operation. */
    EPIC_DISPATCH_AGAIN = 128,
    /* Layer, equal on all ranks: the caller computes the losses.  The layer compares
     * balance_coeff and z_coeff between the ranks, and computes as if both were 0. */
    EPIC_LOSS_BY_CALLER = 256
} epic_flag;

/* A contiguous matrix, seen as rows of bytes, that a call may write.  {NULL, 0, 0} is a matrix
 * without rows; the call derives its row_bytes from the other matrices. */
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

/* Returns the rows as an input: for example, combine reads the buffer that dispatch wrote. */
static inline epic_const_rows epic_rows_as_const(epic_rows rows)
{
    epic_const_rows input;
    input.data = rows.data;
    input.num_rows = rows.num_rows;
    input.row_bytes = rows.row_bytes;
    return input;
}

/* Fields that every call that computes has in common.  Local calls use only the stream. */
typedef struct epic_call {
    epic_stream stream;
    uint64_t tag;        /* which operations of different ranks belong together */
    uint32_t timeout_ms; /* deadline of every wait of this call; 0: the context's */
    uint32_t max_sms;    /* CUDA: largest number of SMs to use; 0: the context's */
} epic_call;

/* ------------------------------------------------------------------------ dispatcher ----
 *
 *     epic_dispatcher_open(&dispatcher, &config);
 *     epic_dispatcher_dispatch(dispatcher, tokens, topk_idx, weights, num_tokens, &slots);
 *     ...                             the experts, from slots.rows to slots.results
 *     epic_dispatcher_combine(dispatcher, out);
 *     epic_dispatcher_close(dispatcher);
 *
 * A dispatcher owns everything that a step needs: context, plan, receive buffer and weights.
 * It runs one step at a time, and one thread at a time may call it.  examples/step.c and
 * examples/step_cuda.c are whole programs. */

/* Handle of a dispatcher. */
typedef struct epic_dispatcher epic_dispatcher;

/* Configuration of a dispatcher.  Equal on all ranks, except max_tokens, ctx and stream. */
typedef struct epic_dispatcher_config {
    int64_t max_tokens;   /* largest number of tokens that this rank sends in a step;
                             required */
    uint32_t num_experts; /* of the layer; num_ranks divides it */
    uint32_t top_k;
    uint32_t hidden;     /* elements of a row */
    uint32_t type;       /* epic_type of an element: F32, BF16, F16 or F64 */
    uint32_t alignment;  /* slabs begin and end at multiples of it; 0: 1 */
    uint32_t gradients;  /* 1: allocate the buffers of the two backward calls */
    const char *backend; /* as epic_config.backend: "gpu" for GPUs */
    epic_stream stream;  /* CUDA: the stream of every call */
    uint64_t tag;        /* of every call: dispatchers that share a context need different
                            tags */
    epic_context *ctx;   /* a context of yours, which must outlive the dispatcher; NULL: the
                            dispatcher opens one by epic_bootstrap_env, and closes it */
} epic_dispatcher_config;

/* The rows that arrived on this rank.  The slots of local expert e are expert_rows[e] rows,
 * after those of the experts before it.  The dispatcher owns the arrays. */
typedef struct epic_slots {
    void *rows;           /* [capacity, hidden]: the received rows; padding rows are zero */
    void *results;        /* [capacity, hidden]: the experts write their outputs here; the same
                             memory as rows, unless the dispatcher has gradients */
    float *weights;       /* [capacity]: the weight of each slot's choice, 0 on padding; NULL if
                             dispatch got no weights */
    int32_t *expert_rows; /* [num_local_experts]: rows of each slab, with padding */
    int32_t *expert_tokens; /* [num_local_experts]: rows of each slab that carry a token */
    int64_t capacity;       /* always enough for what can arrive here */
    int32_t first_expert;   /* global id of local expert 0 */
    int32_t num_local_experts;
} epic_slots;

/* Opens a dispatcher.  *out is NULL if it fails; epic_error(NULL) then returns the reason.
 * Errors:  those of epic_open, EPIC_EINVAL, EPIC_ENOMEM.
 * Threads: collective.
 * CUDA:    config.backend "gpu" opens it on the current device. */
static inline epic_result epic_dispatcher_open(epic_dispatcher **out,
                                               const epic_dispatcher_config *config);

/* Sends each of num_tokens tokens [num_tokens, hidden] to the experts that topk_idx
 * [num_tokens, top_k] names; a negative id names none.  The dispatcher keeps weights
 * [num_tokens, top_k] for combine; NULL on all ranks means 1.  The arrays of `out` are valid
 * until the next dispatch.
 * Errors:  those of epic_plan.
 * Threads: collective, one thread at a time.
 * CUDA:    enqueued on config.stream; the arrays are on the device. */
static inline epic_result epic_dispatcher_dispatch(epic_dispatcher *dispatcher,
                                                   const void *tokens, const int32_t *topk_idx,
                                                   const float *weights, int64_t num_tokens,
                                                   epic_slots *out);

/* Writes to out [num_tokens, hidden] the weighted sum of each token's slots in slots.results.
 * Errors:  those of epic_combine.
 * Threads: collective, one thread at a time.
 * CUDA:    enqueued on config.stream. */
EPIC_API epic_result epic_dispatcher_combine(epic_dispatcher *dispatcher, void *out);

/* The first half of the backward pass, after combine.  Needs config.gradients.  Sends d_out
 * [num_tokens, hidden] to the slots: out->rows is then the gradient of the slots' results, and
 * out->weights that of the weights.  The experts write the gradient of the received rows to
 * out->results, which is the same memory.
 * Errors:  those of epic_combine_backward.
 * Threads: collective, one thread at a time.
 * CUDA:    enqueued on config.stream. */
static inline epic_result epic_dispatcher_combine_backward(epic_dispatcher *dispatcher,
                                                           const void *d_out, epic_slots *out);

/* The second half of the backward pass, after epic_dispatcher_combine_backward.  Returns the
 * experts' gradients to the tokens: writes d_tokens [num_tokens, hidden] and d_weights
 * [num_tokens, top_k] (NULL: not wanted).
 * Errors:  those of epic_dispatch_backward.
 * Threads: collective, one thread at a time.
 * CUDA:    enqueued on config.stream. */
EPIC_API epic_result epic_dispatcher_dispatch_backward(epic_dispatcher *dispatcher,
                                                       void *d_tokens, float *d_weights);

/* Returns the context of a dispatcher, for epic_rank, epic_error, epic_allreduce_sum,
 * epic_check.
 * Errors:  none.
 * Threads: local.
 * CUDA:    no difference. */
EPIC_API epic_context *epic_dispatcher_context(const epic_dispatcher *dispatcher);

/* Frees the dispatcher, and closes its context if the dispatcher opened it.  NULL is allowed.
 * Errors:  none.
 * Threads: local; no call may be running on the dispatcher.
 * CUDA:    no difference. */
EPIC_API void epic_dispatcher_close(epic_dispatcher *dispatcher);

/* -------------------------------------------------------------------------- contexts ---- */

/* A connection through which the ranks find each other while a group opens.
 * epic_bootstrap_env, epic_bootstrap_tcp and others make one: see "advanced". */
typedef struct epic_bootstrap epic_bootstrap;

/* Configuration of a group.  Equal on all ranks. */
typedef struct epic_config {
    int64_t max_tokens;     /* largest number of tokens of a rank in one operation; required */
    int64_t max_row_bytes;  /* largest row, for tokens and for scales; required */
    int64_t staging_bytes;  /* largest staging memory of this rank; 0: enough for full speed */
    uint32_t num_ranks;     /* 0: the bootstrap's.  Required by the size queries */
    uint32_t timeout_ms;    /* deadline of every wait; 0: 300000 */
    uint32_t max_in_flight; /* operations at the same time, at most 64; 0: 64 */
    uint32_t max_sms;       /* CUDA: largest number of SMs of one operation; 0: chosen by
                               measurement, and epic_max_sms returns it.  All contexts of a
                               process on one GPU together use at most its SMs */
    const char *backend;    /* "gpu": "p2p" for GPUs of one host, "hosts" for GPUs of several
                               hosts. NULL: the first that connects the ranks on CPUs, of
                               "self", "shm" or "threads", "mpi" */
    const char *name;       /* of the group, for messages and epic-info; NULL: "epic" */
    void *native;           /* for backend mpi, and for epic_open without a bootstrap: an
                               MPI_Comm * whose ranks form the group, borrowed for the call;
                               else NULL */
    uint32_t max_top_k;     /* largest top_k of a layer; 0: 64.  Backend hosts allocates less
                           memory for a smaller one; the other backends only check it */
    uint32_t reserved;      /* 0 */
} epic_config;

/* Opens this rank's context.  If bootstrap is NULL, epic_open uses config.native (by
 * epic_bootstrap_mpi), or else the environment (by epic_bootstrap_env). If the environment
 * names no group, it opens a group of one rank.  *out is NULL only after EPIC_ENOMEM.  After
 * any other error it is a context that epic_error, epic_failure and epic_close accept.  If the
 * ranks pass different configurations or versions, or a num_ranks that is not the bootstrap's,
 * all of them get EPIC_EMISMATCH.
 * Errors:  EPIC_EINVAL, EPIC_ENOMEM, EPIC_ENOTSUP, EPIC_ETIMEOUT, EPIC_EDEVICE, EPIC_EMISMATCH,
 *          EPIC_EPEER.
 * Threads: collective over the bootstrap.
 * CUDA:    config.backend "gpu" opens the context on the current device. */
static inline epic_result epic_open(epic_context **out, const epic_bootstrap *bootstrap,
                                    const epic_config *config);

/* Closes the context and frees it.  NULL is allowed.  Waits until no other rank uses memory of
 * this context, but not longer than the context's deadline.  In a forked child it frees the
 * child's copy and leaves the group alone; every other call with that context returns
 * EPIC_ECLOSED there.
 * Errors:  none.
 * Threads: local; no call may be running on ctx.
 * CUDA:    no difference. */
EPIC_API void epic_close(epic_context *ctx);

/* Returns the sentence of this thread's last failed call, or "" if none failed.  ctx may be
 * NULL. The text is valid until this thread's next failing call.
 * Errors:  none.
 * Threads: local.
 * CUDA:    no difference. */
EPIC_API const char *epic_error(const epic_context *ctx);

/* Returns EPIC_OK, or the class (c) error that broke the group.  Never waits.
 * Errors:  (b) on CUDA contexts; (c).
 * Threads: local.
 * CUDA:    also returns errors that the device has reported since the last call: a class (c)
 *          error, and once each class (b) error, the oldest first, equal on all ranks.  An
 *          operation reports nothing before its stream has finished it. */
EPIC_API epic_result epic_check(epic_context *ctx);

/* Reports to the other ranks that this rank cannot make its next call with `tag`: they get
 * EPIC_EPEER with the sentence `why` at once.  The group is broken afterwards.
 * Errors:  none.
 * Threads: local.
 * CUDA:    no difference. */
EPIC_API void epic_abort(epic_context *ctx, uint64_t tag, const char *why);

/* Facts about a context.
 *   - epic_rank and epic_num_ranks return this rank and the size of the group.
 *   - epic_backend_name returns the name of the backend, such as "shm".
 *   - epic_max_sms returns the largest number of SMs of one operation, 0 on host contexts.
 *   - epic_num_hosts returns the number of hosts that the ranks are on.
 *   - epic_net_name describes how rows reach other hosts, such as "ucx 1.13.1, host memory,
 *     tcp/eth0 by messages".  It is "" for backends that use no network.
 *   - epic_version returns the EPIC_VERSION of the library.
 * Errors:  none.
 * Threads: local.
 * CUDA:    no difference. */
EPIC_API int32_t epic_rank(const epic_context *ctx);
EPIC_API int32_t epic_num_ranks(const epic_context *ctx);
EPIC_API const char *epic_backend_name(const epic_context *ctx);
EPIC_API uint32_t epic_max_sms(const epic_context *ctx);
EPIC_API int32_t epic_num_hosts(const epic_context *ctx);
EPIC_API const char *epic_net_name(const epic_context *ctx);
EPIC_API uint32_t epic_version(void);

/* Names for logs.
 *   - epic_result_name returns the name of a result, "EPIC_ETIMEOUT".
 *   - epic_result_string returns one sentence about the code in general; epic_error has the
 *     sentence of the last failure.
 *   - The other functions return the name of an enum's constant, such as "EPIC_FLAT", or
 *     "unknown epic_layout" for another number.
 * Errors:  none.
 * Threads: local.
 * CUDA:    no difference. */
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

/* ------------------------------------------------------------------------ operations ----
 *
 *     epic_layer_sizes       how much memory the next calls need
 *     epic_plan              where every choice goes: from topk_idx to the bytes of a plan
 *     epic_dispatch          sends rows to their experts
 *     ...                    the expert MLP over the received slots, whatever it is
 *     epic_combine           returns the rows and sums them
 *     epic_combine_backward  sends gradients to the experts, with the same plan
 *     epic_dispatch_backward returns gradients to the tokens, with the same plan
 *
 * The calls after epic_plan take the plan and its layer, so only arguments decide how they run.
 * The layer must equal the one that epic_plan got.  A 0 equals the default that it stands for,
 * and EPIC_BY_HOSTS equals the order that it stands for.  Another layer is EPIC_EINVAL, like a
 * wrong number of tokens: class (a) on host contexts, class (b) on CUDA contexts, or
 * EPIC_EMISMATCH if some ranks pass the right one. */

/* How received rows lie in the receive buffer. */
typedef enum epic_layout {
    EPIC_EXPERT_MAJOR = 0, /* one row for each choice, slab by slab */
    EPIC_FLAT = 1          /* one row for each (token, rank), by source rank, then by token */
} epic_layout;

/* The rule for choices that do not fit on a rank or into an expert's capacity. */
typedef enum epic_overflow {
    EPIC_OVERFLOW_ERROR = 0, /* the plan fails on every rank with EPIC_EOVERFLOW */
    EPIC_OVERFLOW_DROP = 1   /* choices that do not fit are dropped, by the same rule on all
                                ranks */
} epic_overflow;

/* In which order the rows of a token are added. */
typedef enum epic_sum_order {
    EPIC_BY_RANK = 0, /* one partial sum for each rank, added by ascending rank */
    EPIC_TREE = 1,    /* one partial sum for each leaf of experts, added in a binary tree: the
                         same bits for every number of ranks */
    /* The faster of the two, without a promise about bits.  EPIC_TREE with num_ranks leaves on
     * the GPUs of several hosts (backend hosts), if num_ranks is a power of two that divides
     * num_experts and there is no rank_of_expert; EPIC_BY_RANK otherwise.  Not for
     * epic_allreduce_sum. */
    EPIC_BY_HOSTS = 2
} epic_sum_order;

/* Which choices of an expert are kept if it has more than expert_capacity. */
typedef enum epic_priority {
    EPIC_BY_TOKEN = 0, /* the first by source rank, token, k */
    EPIC_BY_K = 1      /* the first by k, source rank, token: all first choices first (GShard,
                          NLLB) */
} epic_priority;

/* The fixed properties of a layer, equal on all ranks.
 *
 * Replicas.  An expert has weights, a slab and a rank.  Some experts can be copies of each
 * other, so that they share the work of a busy one.  Then ids name *logical experts*,
 * num_logical of them, and logical_of_expert maps each expert to the logical expert that it is
 * a replica of.  Each logical expert has at least one replica.  The choices of a logical
 * expert, ordered by source rank, token and k, go to its replicas round-robin: choice n goes to
 * replica n modulo their number, in the order of their ids.  So the loads of its replicas
 * differ by at most one, and no communication is needed to balance them.  With expert_capacity
 * C, replica i of r keeps (C + r - 1 - i) / r choices. By token, the choices that a logical
 * expert drops do not depend on its replicas. */
typedef struct epic_layer {
    uint32_t num_experts;     /* 1 to 65536 */
    uint32_t num_logical;     /* with replicas: number of logical experts; ids are below it.
                                 0: no replicas; ids are below num_experts */
    uint32_t top_k;           /* 1 to 64 */
    uint32_t alignment;       /* slab lengths are multiples of it; 0: 1 */
    uint32_t layout;          /* an epic_layout */
    uint32_t overflow;        /* an epic_overflow */
    uint32_t expert_capacity; /* DROP: largest number of choices that an expert keeps over the
                                 group, with replicas a logical expert; 0: no limit */
    uint32_t priority;        /* DROP: an epic_priority.  It does not change the order of
                                 slots */
    uint32_t sum_order;       /* an epic_sum_order */
    uint32_t leaves;          /* TREE: number of leaves, a power of two that divides num_experts
                                 and that num_ranks divides; 0: num_ranks */
    uint32_t partial_type;    /* epic_type of the partial sums that are sent back: 0: the rows'
                                 type; or EPIC_F32 */
    uint32_t flags;           /* EPIC_DISTINCT */
} epic_layer;

/* Sizes that follow from a layer and an open context. */
typedef struct epic_layer_info {
    int64_t plan_bytes; /* of one plan */
    int64_t capacity;   /* smallest number of slots of a rank that can never overflow, for
                           contiguous blocks of experts; equals capacity_any_placement if
                           num_ranks does not divide num_experts */
    int64_t capacity_any_placement; /* smallest number of slots of a rank that can never
                                       overflow, for every rank_of_expert */
    int64_t host_bytes;             /* memory of the context, as in epic_memory_info */
    int64_t shared_bytes;
    int64_t device_bytes;
    uint32_t num_local_experts; /* in contiguous blocks: ceil(num_experts / num_ranks) */
    uint32_t first_expert;      /* id of this rank's first expert; num_experts if it has none */
} epic_layer_info;

/* Computes the sizes of a layer on an open context.
 * Errors:  (a) EPIC_EINVAL.
 * Threads: local.
 * CUDA:    no difference. */
static inline epic_result epic_layer_sizes(epic_context *ctx, const epic_layer *layer,
                                           epic_layer_info *out);

/* A capacity: the plan has no bound.  Read `demand` afterwards, then allocate the slots. */
#define EPIC_CAPACITY_EXACT 0

/* Arguments of epic_plan. */
typedef struct epic_plan_args {
    epic_call call;
    const epic_layer *layer;
    void *plan;                       /* out [plan_bytes], at an address that 16 divides */
    int64_t plan_bytes;               /* at least the plan_bytes of epic_layer_sizes */
    const void *topk_idx;             /* [num_tokens, top_k] expert ids; negative: no expert */
    int64_t num_tokens;               /* 0 to max_tokens; may differ between ranks */
    const int32_t *rank_of_expert;    /* [num_experts]; NULL: contiguous blocks of num_experts /
                                         num_ranks, which must be a whole number */
    const int32_t *logical_of_expert; /* [num_experts], with num_logical; else NULL */
    int64_t capacity;                 /* slots of this rank, or EPIC_CAPACITY_EXACT */
    uint32_t index_type;              /* epic_type of topk_idx: 0: EPIC_I32; or EPIC_I64 */
    uint32_t flags;                   /* 0 */
    int32_t *expert_rows;             /* out [num_local_experts]: rows of each slab, with
                                         padding */
    int32_t *expert_tokens;           /* out [num_local_experts]: rows of each slab that carry a
                                   token */
    int32_t *load;                    /* out [num_experts]: choices of the whole group, before
                                   drops */
    int32_t *logical_load;            /* out [num_logical]: choices of the logical experts */
    int32_t *demand;                  /* out [1]: slots that this rank needs to hold all its
                                   choices */
    const struct epic_moe *moe; /* the layer that the plan is made for: its options are compared
                                   between the ranks (epic_moe).  NULL: no comparison */
} epic_plan_args;

/* Makes a plan.  The order of slots is local expert, source rank, token, k.  A slab's length is
 * the number of its tokens, rounded up to the alignment; an expert without tokens takes no
 * slot. num_local_experts is the largest number of experts that one rank owns.  An expert that
 * drops keeps its first choices by the layer's priority.  With expert_capacity as the only
 * limit these are the same for any number of ranks.  A plan holds no addresses, so its bytes
 * may be copied and moved.
 *
 * An id that is not below num_experts (with replicas: num_logical) is a class (b) error with
 * rank, token, k and value.  An invalid rank_of_expert or logical_of_expert is class (b), too;
 * different ones on different ranks are EPIC_EMISMATCH.  Demand above the capacity is
 * EPIC_EOVERFLOW on every rank, unless the layer drops.  Too small a plan_bytes is class (a)
 * here, and class (b) in the calls that read the plan, like any damage of its bytes.
 * Errors:  (a) EPIC_EINVAL, EPIC_ENOTSUP; (b) EPIC_EINVAL, EPIC_EOVERFLOW; (c).
 * Threads: collective.
 * CUDA:    all arrays and the plan are on the device. */
static inline epic_result epic_plan(epic_context *ctx, const epic_plan_args *args);

/* How dispatch converts rows while it sends them. */
typedef enum epic_quantize {
    EPIC_QUANTIZE_NONE = 0,
    EPIC_QUANTIZE_1X128 = 1, /* to e4m3, with a float32 scale for each 128 elements */
    EPIC_QUANTIZE_1X32 = 2   /* to e4m3, with an e8m0 scale for each 32 elements */
} epic_quantize;

/* Arguments of epic_dispatch. */
typedef struct epic_dispatch_args {
    epic_call call;
    const epic_layer *layer; /* the layer that epic_plan got for this plan */
    const void *plan;
    int64_t plan_bytes;
    epic_const_rows tokens; /* [num_tokens, row_bytes] */
    epic_rows recv;         /* out [slots, row_bytes]; num_rows is the size of the buffer */
    epic_const_rows scales; /* [num_tokens, scale_bytes]: a second row array, or none */
    epic_rows recv_scales;  /* out [slots, scale_bytes] */
    const float *weights;   /* [num_tokens, top_k], or NULL */
    float *slot_weights;    /* out [slots], 0 on padding; FLAT: [rows, top_k] by ascending k, 0
                               where there is no choice */
    int32_t *recv_expert;   /* out, FLAT only: [rows, top_k] local experts, then -1 */
    uint32_t type;          /* epic_type of tokens; EPIC_BYTES is enough without quantize */
    uint32_t quantize;      /* an epic_quantize: tokens are F32, BF16 or F16, recv becomes e4m3,
                               recv_scales the scales, and `scales` must be none */
    uint32_t flags;         /* EPIC_ZERO_TAIL, EPIC_LEAVE_PADDING */
    uint32_t reserved;      /* 0 */
} epic_dispatch_args;

/* Sends the row of each token to every expert that the plan chose for it.  For the slot of
 * choice (t, k): recv[slot] = tokens[t] and slot_weights[slot] = weights[t, k].  Padding slots
 * inside slabs become zeros in every output, or stay as they are with EPIC_LEAVE_PADDING.  The
 * tail after the last slab stays as it is, or becomes zeros with EPIC_ZERO_TAIL.  Pass weights
 * and slot_weights together, and on all ranks or none: a rank without tokens or slots passes
 * any address.  If any rank has fewer recv rows than its slots of the plan, all ranks get
 * EPIC_EOVERFLOW.
 *
 * Quantized rows of n elements.  1x128: scale = max|x| / 448 (1 if that is 0), q = e4m3(x /
 * scale); recv_scales rows are ceil(n / 128) float32.  1x32: scale = 2^ceil(log2(max|x| / 448))
 * as e8m0 (byte 127 if max|x| is 0); recv_scales rows are ceil(n / 32) bytes.  Rounding is to
 * nearest even and saturates.  Non-finite input makes the scale a NaN.
 * Errors:  (a) EPIC_EINVAL, EPIC_ENOTSUP; (b) EPIC_EINVAL, EPIC_EOVERFLOW; (c).
 * Threads: collective.
 * CUDA:    all arrays are on the device. */
static inline epic_result epic_dispatch(epic_context *ctx, const epic_dispatch_args *args);

/* Makes a plan and dispatches with it, in one operation.  The call, the layer and the plan come
 * from `plan`; those of `dispatch` are ignored.  Needs a capacity.
 * Errors:  (a) EPIC_EINVAL, EPIC_ENOTSUP; (b) EPIC_EINVAL, EPIC_EOVERFLOW; (c).
 * Threads: collective.
 * CUDA:    all arrays are on the device. */
static inline epic_result epic_plan_dispatch(epic_context *ctx, const epic_plan_args *plan,
                                             const epic_dispatch_args *dispatch);

/* Arguments of epic_combine. */
typedef struct epic_combine_args {
    epic_call call;
    const epic_layer *layer; /* the layer that epic_plan got for this plan */
    const void *plan;
    int64_t plan_bytes;
    epic_const_rows rows;      /* [slots, row_bytes]; FLAT: one finished partial sum per row */
    epic_rows out;             /* out [num_tokens, row_bytes] */
    const float *slot_weights; /* [slots]; NULL: 1.  Not with FLAT */
    uint32_t type;             /* epic_type of rows and out: F32, BF16, F16 or F64 */
    uint32_t flags;            /* 0 */
} epic_combine_args;

/* Returns rows to their tokens and sums them: out[t] = sum over k of slot_weights[slot(t, k)] *
 * rows[slot(t, k)], in float32 (F64: float64), in the layer's order.
 *   - BY_RANK: each rank makes a partial sum of its choices by ascending k, with fused
 *     multiply-add after the first product.  Then the partial sums are added by ascending rank.
 *   - TREE: each leaf makes such a partial sum.  The leaves are added in a binary tree; an
 *     empty node adds nothing. Partial sums and inner nodes are rounded to the layer's
 *     partial_type, the result once to `type`.  A token without kept choices gives +0.  One row
 *     is sent for each (token, rank).
 * Errors:  (a) EPIC_EINVAL, EPIC_ENOTSUP; (b) EPIC_EINVAL, EPIC_EOVERFLOW; (c).
 * Threads: collective.
 * CUDA:    all arrays are on the device; F64 is EPIC_ENOTSUP. */
static inline epic_result epic_combine(epic_context *ctx, const epic_combine_args *args);

/* Arguments of epic_dispatch_backward. */
typedef struct epic_dispatch_backward_args {
    epic_call call;
    const epic_layer *layer; /* the layer that epic_plan got for this plan */
    const void *plan;
    int64_t plan_bytes;
    epic_const_rows d_recv;      /* [slots, row_bytes] */
    epic_rows d_tokens;          /* out [num_tokens, row_bytes] */
    const float *d_slot_weights; /* [slots]; FLAT: [rows, top_k], as slot_weights; or NULL */
    float *d_weights;            /* out [num_tokens, top_k]; 0 where no choice was kept */
    uint32_t type;               /* epic_type of d_recv and d_tokens */
    uint32_t flags;              /* 0 */
} epic_dispatch_backward_args;

/* The gradient of epic_dispatch: d_tokens = epic_combine of d_recv without weights, and
 * d_weights[t, k] = d_slot_weights[slot(t, k)], exactly.
 * Errors:  those of epic_combine.
 * Threads: collective.
 * CUDA:    as epic_combine. */
static inline epic_result epic_dispatch_backward(epic_context *ctx,
                                                 const epic_dispatch_backward_args *args);

/* Arguments of epic_combine_backward. */
typedef struct epic_combine_backward_args {
    epic_call call;
    const epic_layer *layer; /* the layer that epic_plan got for this plan */
    const void *plan;
    int64_t plan_bytes;
    epic_const_rows d_out;     /* [num_tokens, row_bytes] */
    epic_const_rows rows;      /* [slots, row_bytes]: the rows that combine read; none without
                                  d_slot_weights */
    epic_rows d_rows;          /* out [slots, row_bytes]; quantized: e4m3 rows */
    epic_rows d_rows_scales;   /* out, with quantize only */
    const float *slot_weights; /* [slots]; NULL: 1.  Not with FLAT */
    float *d_slot_weights;     /* out [slots].  Not with FLAT */
    uint32_t type;             /* epic_type of d_out, rows and d_rows */
    uint32_t quantize;         /* an epic_quantize, of d_rows */
    uint32_t flags;            /* EPIC_ZERO_TAIL, EPIC_LEAVE_PADDING, for every output */
    uint32_t reserved;         /* 0 */
} epic_combine_backward_args;

/* The gradient of epic_combine: d_rows[slot] = slot_weights[slot] * d_out[token] and
 * d_slot_weights[slot] = dot(d_out[token], rows[slot]).  Padding slots become zeros, or stay as
 * they are with EPIC_LEAVE_PADDING.
 *
 * The dot product is computed in float32 (F64: float64), in blocks of 1024 elements.
 * Accumulator i of 256 takes the elements i, i+256, i+512 and i+768 of a block, with fused
 * multiply-add after the first product.  Inside each aligned group of 8 accumulators those at
 * distance 4, then 2, then 1 are added.  The 32 groups are then added at distances 16, 8, 4, 2,
 * 1, and the blocks in ascending order.
 * Errors:  those of epic_combine.
 * Threads: collective.
 * CUDA:    as epic_combine. */
static inline epic_result epic_combine_backward(epic_context *ctx,
                                                const epic_combine_backward_args *args);

/* Arguments of epic_allreduce_sum. */
typedef struct epic_allreduce_sum_args {
    epic_call call;
    float *data;    /* [count], replaced by the sum */
    int64_t count;  /* equal on all ranks; 0 is allowed */
    uint32_t order; /* EPIC_BY_RANK: ascending; EPIC_TREE: in a binary tree, num_ranks must be a
                       power of two */
    uint32_t flags; /* 0 */
} epic_allreduce_sum_args;

/* Adds float32 arrays over the ranks, in place.  All ranks get the same bits.
 * Errors:  (a) EPIC_EINVAL, EPIC_ENOTSUP; (c).
 * Threads: collective.
 * CUDA:    data is on the device. */
static inline epic_result epic_allreduce_sum(epic_context *ctx,
                                             const epic_allreduce_sum_args *args);

/* Arguments of epic_sum_replicas. */
typedef struct epic_sum_replicas_args {
    epic_call call;
    const void *plan; /* records which experts are replicas of each other */
    int64_t plan_bytes;
    epic_rows data;    /* [num_local_experts, row_bytes]: a row of float32 for each expert of
                          this rank, replaced by the sum; row_bytes is equal on all ranks */
    float *workspace;  /* [row_bytes / 4] */
    uint32_t flags;    /* 0 */
    uint32_t reserved; /* 0 */
} epic_sum_replicas_args;

/* Adds the rows of all replicas of a logical expert, for example gradients of its weights, and
 * writes the sum to each of them.  Experts without replicas keep their rows.  So weights that
 * were equal stay equal under any optimizer.  The order is the layer's:
 *   - BY_RANK: each rank adds its own replicas in ascending order, then as epic_allreduce_sum
 *     by rank.
 *   - TREE: each leaf adds its own replicas in ascending order, from 0.  Then the leaves of a
 *     rank are added in a binary tree, and then the ranks by their numbers.  The bits are the
 *     same for every number of ranks if rank i has block i of the experts, as without a table.
 * Errors:  those of epic_combine.
 * Threads: collective; it runs several operations with call.tag, one after the other.
 * CUDA:    one operation; data and plan are on the device, and the workspace is not used. */
static inline epic_result epic_sum_replicas(epic_context *ctx,
                                            const epic_sum_replicas_args *args);

/* ----------------------------------------------------------------- router and losses ----
 *
 * These calls are local and allocate nothing: the caller passes workspace.  On host contexts
 * (and without a context) their errors are class (a), also for ids found in arrays: nothing has
 * been written then.
 *
 * On a CUDA context arrays, workspace, losses and d_loss are on its device. Results have the
 * host's bits, except that losses may differ in the last one.  An id out of range counts there
 * as no expert, without an error.  At most 4096 experts, and no F64 logits. */

/* The score of an expert, from the logits z of one token. */
typedef enum epic_score {
    EPIC_SCORE_SOFTMAX = 0,
    EPIC_SCORE_SIGMOID = 1,
    EPIC_SCORE_SQRTSOFTPLUS = 2, /* sqrt(log(1 + e^z)) */
    EPIC_SCORE_LOGITS = 3        /* z itself */
} epic_score;

/* The score of a group of experts, from the selection values of its experts. */
typedef enum epic_group_score {
    EPIC_GROUP_MAX = 0,
    EPIC_GROUP_SUM = 1 /* the sum of its group_best largest */
} epic_group_score;

/* The rule for experts of groups that are not kept.  DeepSeek-V3 has EPIC_OTHERS_OUT;
 * the package transformers had EPIC_OTHERS_ZERO before its release 5. */
typedef enum epic_group_others {
    EPIC_OTHERS_OUT = 0, /* never chosen */
    EPIC_OTHERS_ZERO = 1 /* their selection value is 0, which beats a kept expert below 0 */
} epic_group_others;

/* How the weights of the chosen experts are computed. */
typedef enum epic_weight_rule {
    EPIC_WEIGHT_OF_SCORE = 0,       /* their scores, without the bias */
    EPIC_WEIGHT_SOFTMAX_CHOSEN = 1, /* softmax over the top_k chosen logits */
    EPIC_WEIGHT_SIGMOID_CHOSEN = 2, /* sigmoid of the chosen logits */
    EPIC_WEIGHT_SPARSEMIXER = 3     /* for choice k: softmax over the logits z that no choice
                                       before k has taken and that are close to the largest of
                                       them, m: (m - z) / max(|z|, m) <= 2 * jitter */
} epic_weight_rule;

/* How the weights of a token are normalized. */
typedef enum epic_normalize {
    EPIC_NORMALIZE_NONE = 0,
    EPIC_NORMALIZE_SUM = 1,    /* divide by sum + eps */
    EPIC_NORMALIZE_CLAMPED = 2 /* divide by max(sum, norm_min) */
} epic_normalize;

/* How experts are chosen and weighted.  The logits have num_experts + zero_experts columns,
 * which this header calls E. */
typedef struct epic_router {
    uint32_t num_experts;  /* 1 to 65536, with zero_experts */
    uint32_t zero_experts; /* number of identity experts, with ids from num_experts up; their
                              rows are never sent */
    uint32_t top_k;        /* 1 to 64, at most E */
    uint32_t score;        /* an epic_score */
    uint32_t num_groups;   /* equal blocks of experts; divides E; at most 1024; 0: no groups */
    uint32_t topk_groups;  /* groups that are kept; they must have top_k experts or more */
    uint32_t group_score;  /* an epic_group_score */
    uint32_t group_best;   /* EPIC_GROUP_SUM: 1 to 64, at most the experts of a group; 0:
                              top_k / topk_groups */
    uint32_t group_others; /* an epic_group_others */
    uint32_t weight_rule;  /* an epic_weight_rule */
    uint32_t normalize;    /* an epic_normalize */
    uint32_t flags;        /* 0 */
    double eps;            /* EPIC_NORMALIZE_SUM */
    double norm_min;       /* EPIC_NORMALIZE_CLAMPED; above 0 */
    double jitter;         /* EPIC_WEIGHT_SPARSEMIXER; at least 0, below 1 */
    double scale;          /* factor of the weights; 0: 1 */
} epic_router;

/* Writes to *bytes how much workspace each call of this chapter needs, for any number of
 * tokens. *bytes is 0 if it fails.
 * Errors:  (a) EPIC_EINVAL.
 * Threads: local.
 * CUDA:    the same size. */
static inline epic_result epic_router_workspace(const epic_router *router, int64_t *bytes);

/* Arguments of epic_router_forward. */
typedef struct epic_router_args {
    epic_call call;
    const epic_router *router;
    const void *logits; /* [num_tokens, E] */
    int64_t num_tokens;
    const float *bias;           /* [E], added to the scores for the choice only */
    const void *scale_of_expert; /* [E] of weights_type: last factor of the weight of each
                                    chosen expert; NULL: 1 */
    const void *token_ids;       /* [num_tokens]: the token's row of `table`; NULL: no table */
    const int32_t *table;        /* [table_rows, top_k]: experts by token id, instead of a
                                    choice; negative: no expert */
    int64_t table_rows;
    void *workspace; /* at an address that 16 divides, as in the calls below */
    int64_t workspace_bytes;
    int32_t *topk_idx;      /* out [num_tokens, top_k] */
    void *weights;          /* out [num_tokens, top_k] of weights_type */
    void *scores;           /* out [num_tokens, E] of weights_type */
    uint32_t type;          /* epic_type of logits: F32, BF16, F16 or F64 */
    uint32_t weights_type;  /* 0: F32; or F64, with F64 logits only */
    uint32_t token_id_type; /* 0: I32; or I64 */
    uint32_t flags;         /* 0 */
} epic_router_args;

/* Chooses top_k experts for each token, best first, and computes their weights, in float32 (F64
 * logits: float64).  A tie goes to the lower id; a NaN is chosen last.  If only scores decide
 * (no bias, no sum over a group), the choice is made on the logits. They have the same order as
 * the scores and do not underflow.  If the chosen scores add up to 0, the weights are 0, not
 * NaN. EPIC_WEIGHT_SPARSEMIXER is the inference rule of Phi-3.5-MoE: it draws nothing at
 * random.
 * Errors:  (a) EPIC_EINVAL; EPIC_ENOTSUP on CUDA contexts.
 * Threads: local.
 * CUDA:    on call.stream; EPIC_WEIGHT_SPARSEMIXER is EPIC_ENOTSUP. */
static inline epic_result epic_router_forward(epic_context *ctx, const epic_router_args *args);

/* Arguments of epic_router_backward. */
typedef struct epic_router_backward_args {
    epic_call call;
    const epic_router *router;
    const void *logits; /* as in forward */
    int64_t num_tokens;
    const int32_t *topk_idx;     /* [num_tokens, top_k], as forward wrote it */
    const void *scale_of_expert; /* as in forward */
    const void *d_weights;       /* [num_tokens, top_k] of weights_type */
    void *workspace;
    int64_t workspace_bytes;
    void *d_logits;          /* out [num_tokens, E] */
    void *d_scale_of_expert; /* out [E] of weights_type, for these tokens; NULL: not wanted */
    uint32_t type;           /* epic_type of logits */
    uint32_t weights_type;   /* as in forward */
    uint32_t grad_type;      /* epic_type of d_logits; 0: type; or F32 */
    uint32_t flags;          /* EPIC_ACCUMULATE */
} epic_router_backward_args;

/* The gradient of the weights.  The choice has none, and so the bias has none.
 * d_scale_of_expert is added up in float64 by ascending token and rounded once.
 * Errors:  (a) EPIC_EINVAL; EPIC_ENOTSUP on CUDA contexts.
 * Threads: local.
 * CUDA:    on call.stream; d_scale_of_expert is added up in a few runs of tokens, then over the
 *          runs. */
static inline epic_result epic_router_backward(epic_context *ctx,
                                               const epic_router_backward_args *args);

/* Arguments of epic_balance_loss_forward. */
typedef struct epic_balance_loss_args {
    epic_call call;
    const epic_router *router; /* num_experts, zero_experts, top_k and score are used */
    const void *logits;        /* [num_tokens, E], of this rank */
    int64_t num_tokens;
    int64_t total_tokens;    /* T: tokens of all ranks over which the load was counted */
    int64_t sequence_tokens; /* 0: one loss over all tokens; else one for each this many
                                tokens */
    const int32_t *load;     /* [num_experts], of all ranks: epic_plan's load, with replicas its
                                logical_load; not read by sequences */
    const int32_t *topk_idx; /* by sequences: [num_tokens, top_k] */
    double coeff;
    void *workspace;
    int64_t workspace_bytes;
    void *loss;         /* out [1] of loss_type */
    uint32_t type;      /* epic_type of logits */
    uint32_t loss_type; /* 0: F32; or F64 */
} epic_balance_loss_args;

/* Computes this rank's part of the balance loss; the parts of all ranks add up to the loss:
 * num_experts * coeff / (top_k * T^2) * sum over experts of load * (sum over tokens of P).  P
 * is the score divided by the sum of the scores over all E (EPIC_SCORE_LOGITS: softmax).
 * Zero-experts have no load.  By sequences: this loss for each sequence, with its own choices
 * counted and its length as T, averaged over the T / sequence_tokens sequences.  A sequence
 * must not cross ranks.
 * Errors:  (a) EPIC_EINVAL; EPIC_ENOTSUP on CUDA contexts.
 * Threads: local.
 * CUDA:    on call.stream. */
static inline epic_result epic_balance_loss_forward(epic_context *ctx,
                                                    const epic_balance_loss_args *args);

/* Arguments of epic_balance_loss_backward; those of forward must have forward's values. */
typedef struct epic_balance_loss_backward_args {
    epic_call call;
    const epic_router *router;
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
    uint32_t type;       /* epic_type of logits */
    uint32_t grad_type;  /* epic_type of d_logits; 0: type; or F32 */
    uint32_t flags;      /* EPIC_ACCUMULATE */
    uint32_t reserved;   /* 0 */
} epic_balance_loss_backward_args;

/* The gradient of the balance loss; the load counts as a constant.
 * Errors:  those of epic_balance_loss_forward.
 * Threads: local.
 * CUDA:    on call.stream. */
static inline epic_result
epic_balance_loss_backward(epic_context *ctx, const epic_balance_loss_backward_args *args);

/* Arguments of epic_z_loss_forward. */
typedef struct epic_z_loss_args {
    epic_call call;
    const epic_router *router; /* num_experts and zero_experts are used */
    const void *logits;        /* [num_tokens, E], of this rank */
    int64_t num_tokens;
    int64_t total_tokens; /* T: tokens of all ranks */
    double coeff;
    void *workspace;
    int64_t workspace_bytes;
    void *loss;         /* out [1] of loss_type */
    uint32_t type;      /* epic_type of logits */
    uint32_t loss_type; /* 0: F32; or F64 */
} epic_z_loss_args;

/* Computes this rank's part of the z-loss: coeff / T * sum over tokens of logsumexp(z)^2.
 * Errors:  (a) EPIC_EINVAL; EPIC_ENOTSUP on CUDA contexts.
 * Threads: local.
 * CUDA:    on call.stream. */
static inline epic_result epic_z_loss_forward(epic_context *ctx, const epic_z_loss_args *args);

/* Arguments of epic_z_loss_backward; those of forward must have forward's values. */
typedef struct epic_z_loss_backward_args {
    epic_call call;
    const epic_router *router;
    const void *logits;
    int64_t num_tokens;
    int64_t total_tokens;
    double coeff;
    void *workspace;
    int64_t workspace_bytes;
    const float *d_loss; /* [1]; NULL: 1 */
    void *d_logits;      /* out [num_tokens, E] */
    uint32_t type;       /* epic_type of logits */
    uint32_t grad_type;  /* epic_type of d_logits; 0: type; or F32 */
    uint32_t flags;      /* EPIC_ACCUMULATE */
    uint32_t reserved;   /* 0 */
} epic_z_loss_backward_args;

/* The gradient of the z-loss.
 * Errors:  those of epic_z_loss_forward.
 * Threads: local.
 * CUDA:    on call.stream. */
static inline epic_result epic_z_loss_backward(epic_context *ctx,
                                               const epic_z_loss_backward_args *args);

/* Arguments of epic_bias_update. */
typedef struct epic_bias_update_args {
    epic_call call;
    float *bias;         /* [num_experts], in place */
    const int32_t *load; /* [num_experts]: epic_plan's load or logical_load */
    int64_t num_experts;
    float rate;
    uint32_t flags; /* 0 */
} epic_bias_update_args;

/* Moves the bias of each expert towards a balanced load: bias += rate * sign(mean load - load),
 * with sign(0) = 0.  The comparison is exact.
 * Errors:  (a) EPIC_EINVAL.
 * Threads: local.
 * CUDA:    on call.stream. */
static inline epic_result epic_bias_update(epic_context *ctx,
                                           const epic_bias_update_args *args);

/* ----------------------------------------------------------------- experts and layer ----
 *
 * The calls of the experts are local; without a context they use host memory.  The calls of the
 * layer, epic_moe_*, are collective.  On a CUDA context all arrays are on the device, counts
 * included.  Nothing waits on the host, so a captured graph may be replayed with other
 * counts. */

/* The activation between the two products of an expert. */
typedef enum epic_activation {
    EPIC_SILU = 0,
    EPIC_GELU = 1,           /* exact, with erf */
    EPIC_GELU_TANH = 2,      /* the tanh approximation */
    EPIC_RELU2 = 3,          /* max(x, 0)^2 */
    EPIC_CLAMPED_SWIGLU = 4, /* gated only: g * sigmoid(alpha * g) * (u + 1), with g = min(gate,
                                limit) and u = up, clamped to [-limit, limit] */
    EPIC_CLAMPED_SILU = 5    /* gated only: g * sigmoid(g) * u, with g and u as above
                                (DeepSeek-V4) */
} epic_activation;

/* The place where the weight of a choice is multiplied in. */
typedef enum epic_weighting {
    EPIC_WEIGHT_LATE = 0,  /* in combine; the experts do not see it */
    EPIC_WEIGHT_EARLY = 1, /* on the activation and on the down bias */
    EPIC_WEIGHT_INPUT = 2  /* on the expert's input */
} epic_weighting;

/* A product over the slabs of local experts on a device; W[e] is the matrix of expert e.  The
 * first expert_tokens[e] rows of a slab carry a token. */
typedef enum epic_gemm_pass {
    EPIC_GEMM_FORWARD = 0, /* out [num_slots, n] = a [num_slots, k] W[e]; W is b */
    EPIC_GEMM_INPUT = 1,   /* out [num_slots, k] = a [num_slots, n] W[e]^T; W is b */
    EPIC_GEMM_WEIGHT = 2   /* out[e] [k, n] = sum over slab e of a^T b, with a [num_slots, k]
                              and b [num_slots, n]; zeros for an expert without tokens */
} epic_gemm_pass;

/* Arguments of epic_gemm.multiply; all arrays are on the device. */
typedef struct epic_gemm_args {
    epic_call call;
    const void *a;
    const void *b;
    void *out;
    const int32_t *expert_rows;   /* [num_experts] */
    const int32_t *expert_tokens; /* [num_experts] */
    int64_t num_slots;
    int64_t k; /* W is [num_experts, k, n] */
    int64_t n;
    uint32_t num_experts;
    uint32_t pass;        /* an epic_gemm_pass */
    uint32_t row_type;    /* epic_type of the arrays with a row for each slot */
    uint32_t weight_type; /* epic_type of W */
    uint32_t out_type;    /* EPIC_GEMM_WEIGHT: epic_type of out */
    uint32_t flags;       /* EPIC_ACCUMULATE, for EPIC_GEMM_WEIGHT */
} epic_gemm_args;

/* A matrix product of the caller's, instead of the library's.  multiply() enqueues its work on
 * call.stream and does not wait.  Rows of a slab that carry no token must not contribute to a
 * sum.  If multiply() writes such rows of `out`, it writes zeros.  The call of the experts
 * returns its result unless that is EPIC_OK. */
typedef struct epic_gemm {
    epic_result (*multiply)(void *self, const epic_gemm_args *args);
    void *self;
} epic_gemm;

/* The MLP of each local expert: y = (act(x W_gate) * (x W_up)) W_down, plus biases if given;
 * ungated: y = act(x W) W_down.  W_gate and W_up are one matrix, w_gate_up, whose number of
 * columns this header calls width: 2 * inner (gate first, then up), or inner if ungated. */
typedef struct epic_experts {
    uint32_t num_local_experts;
    uint32_t hidden;
    uint32_t inner;
    uint32_t activation;   /* an epic_activation */
    uint32_t ungated;      /* 1: no gate */
    uint32_t interleaved;  /* 1: gate in the even columns, up in the odd ones */
    uint32_t weighting;    /* an epic_weighting */
    uint32_t row_type;     /* epic_type of x and y: F32, BF16, F16 or F64 */
    uint32_t weight_type;  /* epic_type of weights and biases: 0: row_type; F64 only with F64
                              rows; E4M3 on CUDA contexts (epic_experts_forward) */
    uint32_t flags;        /* 0 */
    float limit;           /* EPIC_CLAMPED_SWIGLU: 0: 7.  EPIC_CLAMPED_SILU: 0: 10.  A clamped
                              value has no gradient; a value equal to the limit has one */
    float alpha;           /* EPIC_CLAMPED_SWIGLU: 0: 1.702 */
    const epic_gemm *gemm; /* CUDA contexts: the product to use; NULL: the library's */
} epic_experts;

/* Bytes of memory that the caller passes to the experts. */
typedef struct epic_experts_memory_info {
    int64_t saved_bytes;    /* from forward to backward.  Host: [num_slots, width] float32 (F64
                               rows: float64) */
    int64_t forward_bytes;  /* workspace of forward, enough even if one expert has all slots */
    int64_t backward_bytes; /* workspace of backward; never less than forward_bytes */
} epic_experts_memory_info;

/* Computes how much memory the experts need for a receive buffer of num_slots slots.  Pass the
 * context that will run them, and NULL as config.  Before it is open, pass NULL as ctx and its
 * config; only config.backend matters then.  NULL for both means host memory.
 * Errors:  (a) EPIC_EINVAL, EPIC_ENOTSUP as epic_experts_forward.
 * Threads: local.
 * CUDA:    the sizes of that context. */
static inline epic_result epic_experts_memory(epic_context *ctx, const epic_config *config,
                                              const epic_experts *experts, int64_t num_slots,
                                              epic_experts_memory_info *out);

/* Arguments of epic_experts_forward. */
typedef struct epic_experts_args {
    epic_call call;
    const epic_experts *experts;
    const void *x;                 /* [num_slots, hidden]; padding slots are zero */
    const float *x_scales;         /* E4M3: [num_slots, ceil(hidden / 128)] */
    int64_t num_slots;             /* size of the buffers */
    const int32_t *expert_rows;    /* [num_local_experts]: rows with padding, from epic_plan */
    const int32_t *expert_tokens;  /* [num_local_experts]: rows with a token; NULL:
                                      expert_rows */
    const void *slot_weights;      /* [num_slots], with EARLY and INPUT only */
    const void *w_gate_up;         /* [num_local_experts, hidden, width] */
    const void *w_down;            /* [num_local_experts, inner, hidden] */
    const float *w_gate_up_scales; /* E4M3: [num_local_experts, ceil(width / 128),
                                      ceil(hidden / 128)] */
    const float *w_down_scales;    /* E4M3: [num_local_experts, ceil(hidden / 128),
                                      ceil(inner / 128)] */
    const void *b_gate_up;         /* [num_local_experts, width]; NULL: none */
    const void *b_down;            /* [num_local_experts, hidden]; NULL: none */
    void *saved;                   /* out, at an address that 16 divides, as workspace */
    int64_t saved_bytes;
    void *workspace;
    int64_t workspace_bytes;
    void *y;               /* out [num_slots, hidden]; 0 on padding; not x */
    uint32_t flags;        /* EPIC_RECOMPUTE: write `saved` alone, for a backward whose forward
                              did not save it; y is ignored */
    uint32_t weights_type; /* epic_type of slot_weights: 0: F32; or F64, with F64 rows only */
} epic_experts_args;

/* Runs the experts' MLP over the slabs.  Slots after the last slab are neither read nor
 * written.  The bits of a slab's rows depend on that slab alone.
 *
 * On the host OpenBLAS multiplies, or plain loops if there is none.  The library looks for it
 * at first use: libopenblas.so.0; one that the process has loaded, as Python's numpy and scipy
 * do; libscipy_openblas.so of pip's scipy-openblas32; the path in EPIC_OPENBLAS at build time.
 * While a call runs, OpenBLAS's number of threads is 1 for the whole process; it is restored
 * after the last call.  BF16 rows with BF16 weights use oneDNN, if the build found one (or
 * EPIC_ONEDNN) and the processor has instructions for BF16.  The values between the two
 * products are then rounded to BF16.
 *
 * On a CUDA context rows are F32, BF16 or F16, sums are float32, and values between the two
 * products have row_type.  Counts are not checked: rows beyond num_slots are ignored.  Hopper's
 * tensor cores are used if rows and weights have one type of 16 bits, 8 divides hidden and
 * inner, and arrays begin at multiples of 16.  Other shapes, types and GPUs use plain loops.
 * call.max_sms 0 means all SMs, whatever the context's limit is.
 *
 * weight_type E4M3, on CUDA contexts only.  x is e4m3 with a scale for each 128 elements of a
 * row, as dispatch writes it with EPIC_QUANTIZE_1X128; the activations are quantized in this
 * way, too. Weights have a scale for each block of 128 x 128, and are transposed: w_gate_up
 * [num_local_experts, width, hidden] and w_down [num_local_experts, hidden, inner].  Biases,
 * saved and y have row_type: F32, BF16 or F16.  Sums are float32, but Hopper's tensor cores add
 * up to 128 products with fewer bits.  They are used if row_type has 16 bits and 16 divides
 * hidden and inner. epic_experts_backward reads this `saved`, with x of row_type and weights of
 * row_type or E4M3.
 * Errors:  (a) EPIC_EINVAL; EPIC_ENOTSUP for F64 rows on CUDA contexts, for E4M3 on host
 *          contexts or with experts.gemm.
 * Threads: local.
 * CUDA:    on call.stream, as above. */
static inline epic_result epic_experts_forward(epic_context *ctx,
                                               const epic_experts_args *args);

/* Arguments of epic_experts_backward; those of forward must have forward's values. */
typedef struct epic_experts_backward_args {
    epic_call call;
    const epic_experts *experts;
    const void *x;
    int64_t num_slots;
    const int32_t *expert_rows;
    const int32_t *expert_tokens;
    const void *slot_weights;
    const void *w_gate_up;
    const void *w_down;
    const void *b_gate_up;
    const void *b_down;
    const void *saved; /* as forward wrote it */
    int64_t saved_bytes;
    void *workspace;
    int64_t workspace_bytes;
    const void *d_y;      /* [num_slots, hidden]; 0 on padding */
    void *d_x;            /* out [num_slots, hidden]; 0 on padding.  NULL: not wanted, also
                          below */
    void *d_w_gate_up;    /* out, like w_gate_up, in float32 (F64: float64) or grad_type, as the
                          next three */
    void *d_w_down;       /* out */
    void *d_b_gate_up;    /* out */
    void *d_b_down;       /* out */
    void *d_slot_weights; /* out [num_slots], with EARLY and INPUT only; 0 on padding */
    uint32_t flags;       /* EPIC_ACCUMULATE, for weights and biases */
    uint32_t weights_type; /* epic_type of slot_weights and d_slot_weights */
    uint32_t grad_type;    /* epic_type of the gradients of weights and biases: 0: float32 (F64:
                              float64); on a CUDA context also row_type */
    uint32_t reserved;     /* 0 */
    const float *w_gate_up_scales; /* E4M3: [num_local_experts, ceil(hidden / 128),
                                      ceil(width / 128)] */
    const float *w_down_scales;    /* E4M3: [num_local_experts, ceil(inner / 128),
                                      ceil(hidden / 128)] */
} epic_experts_backward_args;

/* The gradients of epic_experts_forward; d_x is not x.  Weights and biases of an expert without
 * tokens get zeros, or stay as they are with EPIC_ACCUMULATE.  With weight_type E4M3 the
 * weights are not transposed here, and the gradients of rows are quantized (1x128) before they
 * are multiplied by weights; x, d_y and all results have row_type.
 * Errors:  those of epic_experts_forward.
 * Threads: local.
 * CUDA:    on call.stream. */
static inline epic_result epic_experts_backward(epic_context *ctx,
                                                const epic_experts_backward_args *args);

/* A Mixture-of-Experts layer: router, plan, dispatch, experts and combine.  hidden is the
 * experts'; E is the router's num_experts + zero_experts.  The whole program is in
 * docs/guide/c.md, "The whole layer"; its calls are:
 *
 *     epic_open(&ctx, NULL, &config);
 *     epic_layer_sizes(ctx, &layer, &info);           moe.capacity = info.capacity
 *     epic_moe_memory(ctx, NULL, &moe, &memory);      then allocate saved and workspace
 *     epic_moe_forward(ctx, &forward);                x to out, loss and saved
 *     epic_moe_backward(ctx, &backward);              d_out and saved to d_x and gradients
 *     epic_close(ctx);
 *
 * All options must be equal on all ranks, except num_local_experts, gemm, capacity and
 * EPIC_RECOMPUTE.  A weight that may be NULL must be NULL on all ranks or on none.  The first
 * operation of each pass compares them.  A difference is EPIC_EMISMATCH with the option and
 * both values; CUDA contexts compare a hash and name only the ranks. */
typedef struct epic_moe {
    const epic_layer *layer; /* num_experts (with replicas: num_logical) and top_k equal the
                                    router's; EPIC_EXPERT_MAJOR */
    const epic_router *router;
    const epic_experts *experts; /* num_local_experts: largest number that one rank owns */
    const epic_experts *shared;  /* an expert that computes every token, with num_local_experts
                                    1 and EPIC_WEIGHT_LATE; NULL: none */
    double balance_coeff;        /* coeff of the balance loss, 0 or more; 0: no loss */
    double z_coeff;              /* coeff of the z-loss, 0 or more; 0: no loss */
    int64_t sequence_tokens;     /* as in epic_balance_loss_args */
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
 * context that will run it, and NULL as config.  Before it is open, pass NULL as ctx and its
 * config with num_ranks; config.backend then selects the sizes of a host context or of a CUDA
 * context. `saved` holds for each slot the received row and the outputs of gate and up.
 * EPIC_DISPATCH_AGAIN leaves out the rows, and EPIC_RECOMPUTE the outputs.  Backward then makes
 * them again in its workspace, with the same bits.
 * Errors:  (a) EPIC_EINVAL, EPIC_ENOTSUP as epic_moe_forward.
 * Threads: local.
 * CUDA:    the sizes of that context. */
static inline epic_result epic_moe_memory(epic_context *ctx, const epic_config *config,
                                          const epic_moe *moe, epic_moe_memory_info *out);

/* The parameters of a layer.  The gate and its bias are F32 (F64 rows: F64); the experts and
 * the shared expert have their weight_type. */
typedef struct epic_moe_weights {
    const void *w_gate;          /* [hidden, E] */
    const void *b_gate;          /* [E], added to the logits; NULL: none */
    const float *bias;           /* [E], for the choice only; NULL: none */
    const void *scale_of_expert; /* [E], type of w_gate: as in epic_router_args; NULL: 1 */
    const void *w_gate_up;       /* of the local experts, as in epic_experts_args */
    const void *w_down;
    const void *b_gate_up;
    const void *b_down;
    const void *shared_gate_up; /* of the shared expert */
    const void *shared_down;
    const void *shared_b_gate_up;
    const void *shared_b_down;
    const void *w_shared_gate;     /* [hidden], type of w_gate: the shared expert's output is
                                      multiplied by sigmoid(x w_shared_gate); NULL: by 1 */
    const float *w_gate_up_scales; /* E4M3: as in epic_experts_args; in backward as in
                                      epic_experts_backward_args, or NULL */
    const float *w_down_scales;
} epic_moe_weights;

/* Arguments of epic_moe_plan and epic_moe_forward. */
typedef struct epic_moe_args {
    epic_call call;
    const epic_moe *moe;
    const epic_moe_weights *weights;
    epic_const_rows x;     /* [num_tokens, hidden] of the experts' row_type */
    epic_rows out;         /* out, like x; not x */
    const void *token_ids; /* as in epic_router_args, like the next two */
    const int32_t *table;
    int64_t table_rows;
    const int32_t *rank_of_expert;    /* [num_experts]; NULL: contiguous blocks */
    const int32_t *logical_of_expert; /* as in epic_plan_args */
    void *saved;                      /* begins with the plan, for epic_sum_replicas */
    int64_t saved_bytes;
    void *workspace;
    int64_t workspace_bytes;
    void *loss;             /* out [1]: balance loss + z-loss; NULL: not wanted, also below */
    void *balance_loss;     /* out [1] */
    void *z_loss;           /* out [1] */
    int32_t *load;          /* out [num_experts] */
    int32_t *logical_load;  /* out [num_logical] */
    int32_t *demand;        /* out [1] */
    uint32_t token_id_type; /* 0: EPIC_I32; or EPIC_I64 */
    uint32_t loss_type;     /* epic_type of the losses: 0: F32; or F64, with F64 rows only */
    uint32_t flags;         /* EPIC_PLANNED */
    uint32_t reserved;      /* 0 */
} epic_moe_args;

/* Computes the layer: `out` is, for each token, the weighted sum of its experts' outputs, plus
 * weight * x for zero-experts, plus the shared expert's output.  Weights of choices are
 * multiplied where experts->weighting selects.
 *
 * F64 rows.  Everything is float64, also the weights of choices and their gradients.  These are
 * sent next to the rows, so config.max_row_bytes must be at least 8 * top_k.  EPIC_WEIGHT_LATE
 * is computed as EPIC_WEIGHT_EARLY, which gives the same value.
 *
 * EPIC_TREE (not by EPIC_BY_HOSTS).  num_tokens must be equal on all ranks and a multiple of
 * leaves / num_ranks.  Then outputs and gradients have the same bits for every number of ranks;
 * with EPIC_SUM_DENSE also the gradients of gate and shared expert and the losses.
 *
 * experts->weight_type E4M3, on CUDA contexts.  Rows are quantized (1x128) while they are sent,
 * and weights and biases are those of epic_experts_forward.  The received rows are not saved,
 * so moe.flags must have EPIC_DISPATCH_AGAIN.  epic_moe_backward reads weights that are not
 * transposed, [.., hidden, width] and [.., inner, hidden]: those of row_type from which the
 * E4M3 weights were made, or E4M3 weights with scales as in epic_experts_backward.  Gradients
 * pass straight through the rounding. EPIC_RECOMPUTE needs weights of row_type and does not
 * round what it computes again.
 * Errors:  (a) EPIC_EINVAL, EPIC_ENOTSUP; (b) EPIC_EINVAL, also for invalid token ids and
 *          entries of the table, and EPIC_EOVERFLOW; (c).
 * Threads: collective.
 * CUDA:    all arrays are on the device, also the losses and their gradients.  The host waits
 *          for nothing, and a graph can hold the call.  A rank_of_expert that gives a rank more
 *          than num_local_experts, and with EPIC_TREE unequal numbers of tokens, are class (b).
 *          F64 rows, shared->gemm and epic_moe_plan are EPIC_ENOTSUP. */
static inline epic_result epic_moe_forward(epic_context *ctx, const epic_moe_args *args);

/* Runs the first part of epic_moe_forward, up to the plan.  So the caller can allocate memory
 * for the slots that really arrive, instead of for the worst case:
 *
 *     moe.capacity = EPIC_CAPACITY_EXACT      epic_moe_memory returns what the plan needs
 *     epic_moe_plan(ctx, &args, &slots)
 *     moe.capacity = slots                    epic_moe_memory returns what the rest needs
 *     args.flags = EPIC_PLANNED               args.saved: that size, first copy what was saved
 *     epic_moe_forward(ctx, &args)            and backward as usual, with this capacity
 *
 * All ranks do this or none.  *slots is the number of slots of this rank's experts, with
 * padding; 0 is a valid capacity then.  `out` and the losses are not written.
 * Errors:  those of epic_plan.
 * Threads: collective.
 * CUDA:    EPIC_ENOTSUP. */
static inline epic_result epic_moe_plan(epic_context *ctx, const epic_moe_args *args,
                                        int64_t *slots);

/* Gradients of the parameters of a layer, in float32 (F64 rows: float64), those of the experts
 * also in grad_type of the call.  NULL: not wanted. */
typedef struct epic_moe_gradients {
    void *w_gate;
    void *b_gate;
    void *scale_of_expert; /* needs weights.scale_of_expert */
    void *w_gate_up; /* of the local experts, complete.  With replicas: for the choices that
                        each replica computed; epic_sum_replicas adds them */
    void *w_down;
    void *b_gate_up;
    void *b_down;
    void *shared_gate_up;
    void *shared_down;
    void *shared_b_gate_up;
    void *shared_b_down;
    void *w_shared_gate;
} epic_moe_gradients;

/* Arguments of epic_moe_backward; moe, weights and x must have forward's values. */
typedef struct epic_moe_backward_args {
    epic_call call;
    const epic_moe *moe;
    const epic_moe_weights *weights;
    epic_const_rows x;
    epic_const_rows d_out;               /* [num_tokens, hidden] */
    epic_rows d_x;                       /* out; data NULL: not wanted on this rank */
    const epic_moe_gradients *gradients; /* NULL: none are wanted */
    const void *saved;                   /* as forward wrote it */
    int64_t saved_bytes;
    void *workspace;
    int64_t workspace_bytes;
    const void *d_loss;         /* [1], equal on all ranks, like the next two; NULL: 1 */
    const void *d_balance_loss; /* [1]; NULL: 0 */
    const void *d_z_loss;       /* [1]; NULL: 0 */
    uint32_t flags;             /* EPIC_ACCUMULATE, for `gradients` */
    uint32_t loss_type;         /* epic_type of d_loss and the next two, as in forward */
    uint32_t grad_type;         /* epic_type of the gradients of w_gate_up, w_down and their
                                   biases: 0: float32 (F64: float64); on a CUDA context also
                                   experts->row_type */
    uint32_t reserved;          /* 0 */
} epic_moe_backward_args;

/* The gradients of epic_moe_forward: of `out` and of its three losses, added.
 * Errors:  those of epic_combine_backward and epic_dispatch_backward; (b) EPIC_EINVAL if
 *          `saved` is damaged.
 * Threads: collective.
 * CUDA:    as epic_moe_forward. */
static inline epic_result epic_moe_backward(epic_context *ctx,
                                            const epic_moe_backward_args *args);

/* -------------------------------------------------------------------------- advanced ---- */

/* A bootstrap.  Only epic_open uses it.  {.num_ranks = 1} is a group of one rank, whatever the
 * environment contains. */
struct epic_bootstrap {
    int32_t rank;
    int32_t num_ranks;
    /* Collects `bytes` bytes of every rank, equal on all ranks, in `all` by rank, and waits for
     * all ranks.  Returns EPIC_OK, or the reason why the bootstrap failed. */
    epic_result (*gather)(void *self, const void *mine, void *all, int64_t bytes);
    void (*close)(void *self); /* what epic_bootstrap_close calls; NULL: nothing to do */
    void *self;
};

/* Arguments of epic_bootstrap_tcp. */
typedef struct epic_tcp {
    const char *address; /* rank 0's host; NULL: 127.0.0.1 */
    const char *secret;  /* NULL: none.  Both sides prove that they know it by HMAC-SHA-256; it
                            is never sent, and it authenticates all messages of the
                            bootstrap */
    int32_t rank;
    int32_t num_ranks;
    uint32_t port;       /* 1 to 65535 */
    uint32_t timeout_ms; /* of every gather; 0: 300000 */
} epic_tcp;

/* Makes a bootstrap over TCP; rank 0 listens.  `address` must be an address of rank 0's host.
 *
 * With a secret rank 0 listens on that address. It listens on every address of its host if the
 * host's own name resolves to a loopback address there, as Debian configures it.  A process
 * that does not know the secret cannot take the place of a rank.  It can make the bootstrap
 * fail only by cutting connections or by occupying the port.  Without a secret rank 0 listens
 * on loopback, because nothing else keeps strangers out, so all ranks must be processes of one
 * host.  A rank of another host gets an error at once that asks for a secret.  Connections of
 * strangers are refused, and the bootstrap goes on.  docs/guide/security.md describes what a
 * secret protects.
 * Errors:  EPIC_EINVAL, EPIC_ETIMEOUT (names the ranks that are missing), EPIC_EPEER,
 *          EPIC_EDEVICE, EPIC_ENOTSUP (a secret without libcrypto).  epic_error(NULL) returns
 *          the sentence.
 * Threads: collective.
 * CUDA:    no difference. */
static inline epic_result epic_bootstrap_tcp(epic_bootstrap *out, const epic_tcp *tcp);

/* Makes a bootstrap over TCP from the environment variables of the launcher, or a group of one
 * rank if none of them is set.  Only rank 0's host and a port are needed: MASTER_ADDR and
 * MASTER_PORT. Without MASTER_ADDR, launchers of MPI ranks mean this host; tasks of srun find
 * both by themselves. If a variable shows that there are several ranks, the result is never a
 * group of one.  It is EPIC_EINVAL if the number of ranks is unknown or if two launchers
 * contradict each other. It is also EPIC_EINVAL in a batch script or shell of Slurm with
 * several tasks but without srun.  RANK=0 WORLD_SIZE=1 asks for a group of one rank.
 * Errors:  those of epic_bootstrap_tcp.
 * Threads: collective.
 * CUDA:    no difference. */
EPIC_API epic_result epic_bootstrap_env(epic_bootstrap *out);

/* Makes a bootstrap over an MPI communicator.  `comm` points to an MPI_Comm; NULL means
 * MPI_COMM_WORLD, and initializes MPI if it is not initialized.  timeout_ms is for every
 * gather; 0: 300000.  Messages use a duplicate of the communicator.  If ranks are missing after
 * half of the time, the others look for each other on `comm` itself, with tag 32767.  Loads
 * libepic_mpi.so, which must be built for the caller's MPI.
 * Errors:  EPIC_EINVAL, EPIC_ENOTSUP (no libepic_mpi.so), EPIC_ETIMEOUT (names the ranks that
 *          are missing), EPIC_EMISMATCH, EPIC_EDEVICE.
 * Threads: collective over `comm`.  MPI should have MPI_THREAD_MULTIPLE.  With less, no other
 *          thread may be in MPI during the bootstrap.  Backend mpi needs MPI_THREAD_SERIALIZED
 *          at least, and then no thread of the caller may be in MPI while a context is open.
 * CUDA:    no difference. */
EPIC_API epic_result epic_bootstrap_mpi(epic_bootstrap *out, const void *comm,
                                        uint32_t timeout_ms);

/* Fills out[0 .. num_ranks) with the bootstraps of num_ranks threads of this process.
 * timeout_ms 0: 300000.  Close each of them.
 * Errors:  EPIC_EINVAL, EPIC_ENOMEM.
 * Threads: local.
 * CUDA:    no difference. */
EPIC_API epic_result epic_bootstrap_threads(epic_bootstrap *out, int32_t num_ranks,
                                            uint32_t timeout_ms);

/* Closes a bootstrap.  Allowed as soon as epic_open has returned.  NULL is allowed.
 * Errors:  none.
 * Threads: local.
 * CUDA:    no difference. */
EPIC_API void epic_bootstrap_close(epic_bootstrap *bootstrap);

/* Writes the bytes of a plan to *bytes, from config.num_ranks, config.max_tokens and the layer;
 * 0 if it fails.  epic_layer_sizes returns them for an open context.
 * Errors:  (a) EPIC_EINVAL.
 * Threads: local.
 * CUDA:    the same size. */
static inline epic_result epic_plan_bytes(const epic_config *config, const epic_layer *layer,
                                          int64_t *bytes);

/* Writes to *slots the smallest capacity of a rank that can never overflow, from
 * config.num_ranks, config.max_tokens and the layer; 0 if it fails.  It is for contiguous
 * blocks of experts, or for every rank_of_expert if num_ranks does not divide num_experts.
 * epic_layer_sizes returns both for an open context.
 * Errors:  (a) EPIC_EINVAL.
 * Threads: local.
 * CUDA:    the same size. */
static inline epic_result epic_capacity_bound(const epic_config *config,
                                              const epic_layer *layer, int64_t *slots);

/* Memory of a context and of a plan. */
typedef struct epic_memory_info {
    int64_t host_bytes;   /* private host memory of a context */
    int64_t shared_bytes; /* this rank's part of the host memory that ranks share */
    int64_t device_bytes; /* CUDA memory of a context */
    int64_t plan_bytes;   /* of one plan of the layer; 0 without a layer */
} epic_memory_info;

/* Computes what a context and a plan will need, before any open.  config.num_ranks is required;
 * layer may be NULL.  A NULL config.backend counts as "shm", and "gpu" as "p2p".  For "hosts"
 * the result is an upper bound: memory that the network reads and writes counts in host_bytes
 * and in device_bytes, unless EPIC_NET_MEMORY selects one of them.
 * Errors:  (a) EPIC_EINVAL; EPIC_ENOTSUP if the backend's library cannot be loaded.
 * Threads: local.
 * CUDA:    no difference. */
static inline epic_result epic_memory(const epic_config *config, const epic_layer *layer,
                                      epic_memory_info *out);

/* Fates of choices that have no slot. */
#define EPIC_FATE_NONE (-1)        /* no expert was chosen */
#define EPIC_FATE_EXPERT_FULL (-2) /* dropped: more than expert_capacity */
#define EPIC_FATE_RANK_FULL (-3)   /* dropped: more than the rank's capacity */

/* The facts that the bytes of a plan record. */
typedef struct epic_plan_info {
    uint64_t id;        /* equal on all ranks */
    int64_t num_tokens; /* of this rank */
    int64_t num_slots;  /* occupied slots of this rank, with padding */
    int64_t capacity;   /* the capacity that epic_plan got */
    int64_t num_kept;   /* choices of this rank's tokens by fate: these four numbers add up
                           to */
    int64_t num_none;   /*   num_tokens * top_k */
    int64_t num_expert_full;
    int64_t num_rank_full;
    uint32_t result; /* an epic_result.  EPIC_OK; with EPIC_EOVERFLOW and EPIC_EINVAL the plan
                        moves nothing */
    uint32_t num_local_experts;
    uint32_t first_leaf; /* TREE: this rank's leaves */
    uint32_t num_leaves;
    int64_t total_tokens; /* of all ranks */
    int64_t fate_offset;  /* bytes into the plan: int32 [num_tokens, top_k], the slot on the
                             rank that owns the expert, or an EPIC_FATE */
    int64_t rank_offset;  /* bytes into the plan: int32 [num_tokens, top_k], the rank that owns
                             the expert, -1 if none; on CUDA contexts also -1 for a dropped
                             choice */
} epic_plan_info;

/* Reads a plan.  The plan must be finished: synchronize its stream first.
 * Errors:  (a) EPIC_EINVAL (not a plan, or damaged), EPIC_EDEVICE.
 * Threads: local.
 * CUDA:    reads the plan from device memory, or a copy of its bytes from host memory; copies
 *          from the device and waits for that. */
static inline epic_result epic_plan_read(const void *plan, int64_t plan_bytes,
                                         epic_plan_info *out);

/* Largest number of culprits that a failure lists. */
#define EPIC_MAX_CULPRITS 16

/* The operations that a failure can name. */
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

/* A failure that broke the group. */
typedef struct epic_failure_info {
    uint32_t result;    /* an epic_result; EPIC_OK: the group is not broken */
    uint32_t operation; /* an epic_operation */
    uint64_t tag;
    uint64_t sequence; /* number of the operation among those with its tag, from 0 */
    int32_t rank;      /* the rank that noticed the failure */
    uint32_t num_culprits;
    int32_t culprits[EPIC_MAX_CULPRITS]; /* ranks that caused it, ascending */
    char sentence[512];
} epic_failure_info;

/* Returns what broke the group, if something has.
 * Errors:  (a) EPIC_EINVAL.
 * Threads: local.
 * CUDA:    no difference. */
static inline epic_result epic_failure(const epic_context *ctx, epic_failure_info *out);

/* Returns the name of the library that multiplies matrices on the host: "OpenBLAS 0.3.21
 * Haswell" or "plain loops".  ", oneDNN 2.6.3 for bfloat16" follows if oneDNN is used as well.
 * Errors:  none.
 * Threads: local.
 * CUDA:    no difference. */
EPIC_API const char *epic_blas_name(void);

#ifdef __cplusplus
}
#endif

#include "epic/epic_abi.h" /* the symbols behind the typed calls above */

#endif
