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
 *     windows                outputs that other ranks store into directly
 *     router and losses      which experts a token chooses, with which weights
 *     experts and layer      the experts' MLP; the whole layer as one call
 *     advanced               bootstraps, sizes before open, reading plans, what broke a group
 *     members                a group that continues after a rank has died or left
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
 * Collective calls.  Every rank of the group makes the same call.  Every rank makes its calls
 * with the same tag in the same order.
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
 * call allocates memory, except epic_regroup, and 32 bytes at the first use of a new tag.
 *
 * Values.  Counts and sizes in bytes are int64_t, and must not be negative.  Zero is the
 * default of every field.  NULL means "not wanted" for outputs and "none" for inputs.
 *
 * Errors have three classes.
 *   (a) Arguments that the host can check (EPIC_EINVAL, EPIC_ENOTSUP).  The call has done
 *       nothing and may be repeated.  Meanwhile the other ranks wait for this rank's call.  A
 *       rank that cannot repeat the call should call epic_abort.
 *   (b) Data (EPIC_EINVAL for expert ids and damaged plans, EPIC_EOVERFLOW; EPIC_ENOMEM and
 *       EPIC_ENOTSUP for memory that cannot be a window).  All ranks complete the operation
 *       with the same result, outputs are zero, and the group stays usable.  On a CUDA context
 *       the call returns EPIC_OK and epic_check returns the error later.
 *   (c) Failures of the group: a rank failed, or the ranks made different calls (EPIC_ETIMEOUT,
 *       EPIC_EPEER, EPIC_EMISMATCH, EPIC_EDEVICE, EPIC_EEVICTED).  The group is broken: every
 *       later call returns the same error at once, until epic_regroup or epic_close.  After
 *       epic_close the process can open a new group.
 *
 * Every wait has a deadline.  epic_error returns a text with the argument, its value, the rule
 * and the remedy.  The library never prints, exits, aborts or traps.
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

/* 1 if this header has that version or a later one.  May be used in #if. */
#define EPIC_VERSION_AT_LEAST(major, minor, patch) \
    (EPIC_VERSION >= (major)*10000 + (minor)*100 + (patch))

#if defined(__GNUC__)
#define EPIC_API __attribute__((visibility("default")))
#else
#define EPIC_API
#endif

/* ---------------------------------------------------------------------- common types ---- */

/* Handle of one rank of one group. */
typedef struct epic_context epic_context;

/* A cudaStream_t; NULL for host contexts. */
typedef void *epic_stream;

/* The result of a call.  The values are part of the ABI: they never change, and new ones are
 * added at the end. */
typedef enum epic_result {
    EPIC_OK = 0,
    EPIC_EINVAL = 1,    /* an argument or a value in the data is invalid */
    EPIC_ENOMEM = 2,    /* out of memory: at open, for a window, or in the first operation
                           with a new tag */
    EPIC_ENOTSUP = 3,   /* this context does not support the call, or no backend can connect
                           these ranks */
    EPIC_ETIMEOUT = 4,  /* a rank did not make its call before the deadline */
    EPIC_EDEVICE = 5,   /* CUDA, NCCL, MPI or the system reported an error */
    EPIC_EOVERFLOW = 6, /* a rank needs more slots than it has */
    EPIC_EMISMATCH = 7, /* the ranks made different calls */
    EPIC_EPEER = 8,     /* a rank died, closed its context or aborted */
    EPIC_ECLOSED = 9,   /* this context never opened, or belongs to the parent of a forked
                           process */
    EPIC_EEVICTED = 10  /* the other ranks continue without this rank (epic_regroup) */
} epic_result;

/* The type of the elements of an array.  EPIC_BYTES stands for any type: calls that only move
 * rows accept it, and calls that compute refuse it.  A comment that begins with "0:" gives the
 * default of its field. */
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

/* Bits of the `flags` fields.  Each flag has the same bit in all calls.  A call refuses flags
 * that its description does not name. */
typedef enum epic_flag {
    /* Also write zeros to the slots after the last slab. */
    EPIC_ZERO_TAIL = 1,
    /* Add the gradients to the contents of the arrays, instead of overwriting them. */
    EPIC_ACCUMULATE = 2,
    /* epic_moe.flags: add up the losses, and the gradients of the gate and the shared expert,
     * over the ranks.  Without this flag each rank gets the sums over its own tokens only. */
    EPIC_SUM_DENSE = 4,
    /* epic_layer.flags: the expert ids of a token are distinct.  A token then uses at most
     * min(top_k, local experts) slots of a rank.  So capacity bounds are smaller, and layers
     * need less memory.  epic_plan checks the ids: a duplicate is a class (b) error. */
    EPIC_DISTINCT = 8,
    /* epic_moe_forward: use the plan that epic_moe_plan has made. */
    EPIC_PLANNED = 16,
    /* Do not write padding slots.  Use this flag if the experts skip padding slots, with the
     * help of expert_tokens.  May differ between ranks. */
    EPIC_LEAVE_PADDING = 32,
    /* epic_moe.flags: `saved` does not hold the outputs of the first product of the experts and
     * of the shared expert.  Backward computes these outputs again.  epic_experts_forward:
     * compute only the outputs of the first product. */
    EPIC_RECOMPUTE = 64,
    /* epic_moe.flags, equal on all ranks: `saved` does not hold the received rows.  Backward
     * sends the rows again, in one more operation. */
    EPIC_DISPATCH_AGAIN = 128,
    /* epic_moe.flags, equal on all ranks: the caller computes the losses.  The layer still
     * compares balance_coeff and z_coeff between the ranks, but computes as if both were 0. */
    EPIC_LOSS_BY_CALLER = 256,
    /* epic_moe_backward: the caller passed topk_weights_in to epic_moe_forward.  Then the
     * router gets gradients only from the losses. */
    EPIC_FORCED_WEIGHTS = 512,
    /* epic_moe.flags, equal on all ranks: the bits of a token's results do not depend on other
     * tokens or on the layout of the group (epic_moe_forward).  epic_experts.flags: the bits of
     * a row of y and d_x depend only on its row of x, its weight and the weights of its
     * expert. */
    EPIC_INVARIANT = 1024,
    /* epic_layer.flags: the choices of an absent expert are dropped.  Without this flag, absent
     * experts are a class (b) error in epic_plan (epic_layer). */
    EPIC_DROP_ABSENT = 2048,
    /* epic_config.flags: the group can continue without a rank (epic_regroup).  Groups of the
     * backends "shm" and "threads" can do so without this flag, too. */
    EPIC_CAN_REGROUP = 4096
} epic_flag;

/* A contiguous matrix of rows of bytes that a call may write.  {NULL, 0, 0} is a matrix without
 * rows.  For such a matrix the call uses the row_bytes of its other matrices. */
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

/* Returns the rows as an input.  For example, combine reads the buffer that dispatch wrote. */
static inline epic_const_rows epic_rows_as_const(epic_rows rows)
{
    epic_const_rows input;
    input.data = rows.data;
    input.num_rows = rows.num_rows;
    input.row_bytes = rows.row_bytes;
    return input;
}

/* Fields that are common to all calls that compute.  Local calls use only the stream. */
typedef struct epic_call {
    epic_stream stream;
    uint64_t tag;        /* identifies the operation, with its position among the calls with
                            this tag; equal on all ranks */
    uint32_t timeout_ms; /* deadline of every wait of this call; 0: the context's deadline */
    uint32_t max_sms;    /* CUDA: largest number of SMs to use; 0: the context's limit */
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

/* Configuration of a dispatcher.  All fields are equal on all ranks, except ctx and stream. */
typedef struct epic_dispatcher_config {
    int64_t max_tokens;   /* largest number of tokens that any rank sends in one step;
                             required */
    uint32_t num_experts; /* number of experts of the layer, a multiple of num_ranks */
    uint32_t top_k;       /* number of experts that each token chooses */
    uint32_t hidden;      /* number of elements of a row */
    uint32_t type;        /* epic_type of an element: F32, BF16, F16 or F64 */
    uint32_t alignment;   /* slabs begin and end at multiples of this many slots; 0: 1 */
    uint32_t gradients;   /* 1: allocate the buffers of the two backward calls */
    const char *backend;  /* like epic_config.backend: "gpu" for GPUs */
    epic_stream stream;   /* CUDA: the stream of every call */
    uint64_t tag;         /* tag of every call.  Dispatchers that share a context need
                             different tags */
    epic_context *ctx;    /* a context of the caller, which must outlive the dispatcher.
                             NULL: the dispatcher opens one with epic_bootstrap_env, and
                             closes it */
} epic_dispatcher_config;

/* The rows that arrived on this rank.  The slots of local expert e are expert_rows[e]
 * consecutive rows, after the slots of the experts before it.  The dispatcher owns the
 * arrays. */
typedef struct epic_slots {
    void *rows;             /* [capacity, hidden]: the received rows; padding rows are zero */
    void *results;          /* [capacity, hidden]: memory for the outputs of the experts; the
                               same memory as rows, unless the dispatcher has gradients */
    float *weights;         /* [capacity]: weight of each slot's choice, 0 on padding; NULL if
                               dispatch got no weights */
    int32_t *expert_rows;   /* [num_local_experts]: rows of each slab, with padding */
    int32_t *expert_tokens; /* [num_local_experts]: rows of each slab that carry a token */
    int64_t capacity;     /* number of rows of the arrays; suffices for any choice of experts */
    int32_t first_expert; /* global id of local expert 0 */
    int32_t num_local_experts;
} epic_slots;

/* Opens a dispatcher.  If it fails, *out is NULL, and epic_error(NULL) returns the reason.
 * Errors:  those of epic_open, EPIC_EINVAL, EPIC_ENOMEM.
 * Threads: collective.
 * CUDA:    config.backend "gpu" opens it on the current device. */
static inline epic_result epic_dispatcher_open(epic_dispatcher **out,
                                               const epic_dispatcher_config *config);

/* Sends each of the tokens [num_tokens, hidden] to the experts in its row of topk_idx
 * [num_tokens, top_k].  A negative id stands for no expert.  The dispatcher copies the weights
 * [num_tokens, top_k] for combine.  If `weights` is NULL on all ranks, every weight is 1.  The
 * arrays of *out are valid until the next dispatch.
 * Errors:  those of epic_plan.
 * Threads: collective, one thread at a time.
 * CUDA:    enqueued on config.stream; the arrays are on the device. */
static inline epic_result epic_dispatcher_dispatch(epic_dispatcher *dispatcher,
                                                   const void *tokens, const int32_t *topk_idx,
                                                   const float *weights, int64_t num_tokens,
                                                   epic_slots *out);

/* Writes to out [num_tokens, hidden] the weighted sum of each token's rows in slots.results.
 * Errors:  those of epic_combine.
 * Threads: collective, one thread at a time.
 * CUDA:    enqueued on config.stream. */
EPIC_API epic_result epic_dispatcher_combine(epic_dispatcher *dispatcher, void *out);

/* First half of the backward pass, after combine.  Needs config.gradients.  Sends d_out
 * [num_tokens, hidden] to the slots.  Afterwards out->rows is the gradient of the slots'
 * results, and out->weights the gradient of their weights.  The experts write the gradient of
 * the received rows to out->results, which is the same memory as out->rows.
 * Errors:  those of epic_combine_backward.
 * Threads: collective, one thread at a time.
 * CUDA:    enqueued on config.stream. */
static inline epic_result epic_dispatcher_combine_backward(epic_dispatcher *dispatcher,
                                                           const void *d_out, epic_slots *out);

/* Second half of the backward pass, after epic_dispatcher_combine_backward.  Returns the
 * gradients of the received rows to their tokens: writes d_tokens [num_tokens, hidden] and
 * d_weights [num_tokens, top_k].  d_weights may be NULL.
 * Errors:  those of epic_dispatch_backward.
 * Threads: collective, one thread at a time.
 * CUDA:    enqueued on config.stream. */
EPIC_API epic_result epic_dispatcher_dispatch_backward(epic_dispatcher *dispatcher,
                                                       void *d_tokens, float *d_weights);

/* Returns the context of a dispatcher, for example for epic_rank or epic_error.
 * Errors:  none.
 * Threads: local.
 * CUDA:    no difference. */
EPIC_API epic_context *epic_dispatcher_context(const epic_dispatcher *dispatcher);

/* Frees the dispatcher, and closes its context if the dispatcher opened it.  Accepts NULL.
 * Errors:  none.
 * Threads: local; no call may be running on the dispatcher.
 * CUDA:    no difference. */
EPIC_API void epic_dispatcher_close(epic_dispatcher *dispatcher);

/* -------------------------------------------------------------------------- contexts ---- */

/* A connection through which the ranks find each other while a group opens. epic_bootstrap_env,
 * epic_bootstrap_tcp and others make one (chapter "advanced"). */
typedef struct epic_bootstrap epic_bootstrap;

/* NCCL's communicator, to which an ncclComm_t of nccl.h points. */
struct ncclComm;

/* Value of epic_config.staging_bytes: use the smallest staging memory that the backend
 * accepts. */
#define EPIC_LEAST_STAGING (-1)

/* Configuration of a group.  All fields are equal on all ranks. */
typedef struct epic_config {
    int64_t max_tokens;     /* largest number of tokens of a rank in one operation; required */
    int64_t max_row_bytes;  /* largest row in bytes, for tokens and for scales; required */
    int64_t staging_bytes;  /* largest staging memory of this rank in bytes; 0: enough for
                               full speed; EPIC_LEAST_STAGING: the least that works, for
                               contexts whose outputs lie in windows */
    uint32_t num_ranks;     /* number of ranks; 0: the bootstrap's number.  Required by the
                               calls that compute sizes */
    uint32_t timeout_ms;    /* deadline of every wait, in milliseconds; 0: 300000 */
    uint32_t max_in_flight; /* largest number of operations at the same time, up to 64; 0: 64 */
    uint32_t max_sms;       /* CUDA: largest number of SMs of one operation; 0: chosen by
                               measurement (epic_max_sms returns it).  All contexts of a
                               process on one GPU share the SMs of the GPU */
    const char *backend;    /* "gpu": "p2p" for GPUs of one host or one NVLink domain, "hosts"
                               for GPUs of several hosts that are not in one domain.  NULL:
                               the first of the CPU backends "self", "shm" or "threads", and
                               "mpi" that connects the ranks */
    const char *name;       /* name of the group, for messages and epic-info; NULL: "epic" */
    void *native;           /* an MPI_Comm * whose ranks form the group, for backend mpi or
                               for epic_open without a bootstrap; borrowed for the call.
                               Else NULL */
    uint32_t max_top_k;     /* largest top_k of a layer; 0: 64.  A smaller value reduces the
                               memory of a context, above all on GPUs */
    uint32_t flags;         /* 0, or EPIC_CAN_REGROUP.  With EPIC_CAN_REGROUP all ranks must be
                               on one host.  On GPUs the group then needs the backend "p2p"
                               with at most 32 ranks, and libepic_cuda_regroup.so.  Its
                               operations on few tokens take about 1.6 % more time */
} epic_config;

/* Opens this rank's context.  If bootstrap is NULL, epic_open uses config.native (with
 * epic_bootstrap_mpi), or else the environment (with epic_bootstrap_env).  If the environment
 * names no group, it opens a group of one rank.
 *
 * *out is NULL only after EPIC_ENOMEM.  After any other error *out is a context that
 * epic_error, epic_failure and epic_close accept.  If the ranks pass different configurations,
 * use different versions, or pass a num_ranks other than the bootstrap's, all of them get
 * EPIC_EMISMATCH.
 * Errors:  EPIC_EINVAL, EPIC_ENOMEM, EPIC_ENOTSUP, EPIC_ETIMEOUT, EPIC_EDEVICE, EPIC_EMISMATCH,
 *          EPIC_EPEER.
 * Threads: collective over the bootstrap.
 * CUDA:    config.backend "gpu" opens the context on the current device. */
static inline epic_result epic_open(epic_context **out, const epic_bootstrap *bootstrap,
                                    const epic_config *config);

/* Closes the context and frees it.  Accepts NULL.  Waits until no other rank uses memory of
 * this context, but not longer than the context's deadline.
 *
 * In a forked child it frees only the child's copy, and the group continues.  Every other call
 * with that context returns EPIC_ECLOSED in the child.
 * Errors:  none.
 * Threads: local; no call may be running on ctx.
 * CUDA:    no difference. */
EPIC_API void epic_close(epic_context *ctx);

/* Returns the error text of the last failed call of this thread, or "" if none failed.  ctx may
 * be NULL.  The text is valid until the next failing call of this thread.
 * Errors:  none.
 * Threads: local.
 * CUDA:    no difference. */
EPIC_API const char *epic_error(const epic_context *ctx);

/* Returns EPIC_OK, or the class (c) error that broke the group.  Never waits.
 * Errors:  (b) on CUDA contexts; (c).
 * Threads: local.
 * CUDA:    also returns errors that the device has reported since the last call: a class (c)
 *          error, and each class (b) error once, the oldest first, equal on all ranks.  An
 *          operation reports errors only after it has finished on its stream. */
EPIC_API epic_result epic_check(epic_context *ctx);

/* Reports to the other ranks that this rank cannot make its next call with `tag`.  Their calls
 * return EPIC_EPEER with the text `why` at once.  The group is broken afterwards.
 * Errors:  none.
 * Threads: local.
 * CUDA:    no difference. */
EPIC_API void epic_abort(epic_context *ctx, uint64_t tag, const char *why);

/* Facts about a context.
 *   - epic_rank and epic_num_ranks return this rank and the size of the group.
 *   - epic_backend_name returns the name of the backend, such as "shm".
 *   - epic_max_sms returns the largest number of SMs of one operation, 0 on host contexts.
 *   - epic_num_hosts returns the number of hosts that the ranks are on.
 *   - epic_net_name describes how rows are sent to other hosts, such as "ucx 1.13.1, host
 *     memory, tcp/eth0 by messages".  It is "" for backends that use no network.
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
 *   - epic_result_name returns the name of a result, such as "EPIC_ETIMEOUT".
 *   - epic_result_string returns a general description of a result.  epic_error returns the
 *     text of the last error.
 *   - The other functions return the name of an enum's constant, such as "EPIC_FLAT", or
 *     "unknown epic_layout" for any other value.
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
 *     ...                    any expert MLP over the received slots
 *     epic_combine           returns the rows and sums them
 *     epic_combine_backward  sends gradients to the experts, with the same plan
 *     epic_dispatch_backward returns gradients to the tokens, with the same plan
 *
 * The calls after epic_plan take the plan and its layer.  The layer must equal the layer that
 * was passed to epic_plan.  In this comparison 0 equals the default of its field, and
 * EPIC_BY_HOSTS equals the order that was chosen for it.  Another layer, or another number of
 * tokens, is EPIC_EINVAL: class (a) on host contexts, and class (b) on CUDA contexts.  On CUDA
 * contexts it is EPIC_EMISMATCH if only some ranks pass another layer. */

/* The order of received rows in the receive buffer. */
typedef enum epic_layout {
    EPIC_EXPERT_MAJOR = 0, /* one row for each choice, slab by slab */
    EPIC_FLAT = 1          /* one row for each (token, rank), by source rank, then by token */
} epic_layout;

/* The treatment of choices that do not fit on a rank or into an expert's capacity. */
typedef enum epic_overflow {
    EPIC_OVERFLOW_ERROR = 0, /* the plan fails on every rank with EPIC_EOVERFLOW */
    EPIC_OVERFLOW_DROP = 1   /* choices that do not fit are dropped, by the same rule on all
                                ranks */
} epic_overflow;

/* The order in which the rows of a token are added. */
typedef enum epic_sum_order {
    EPIC_BY_RANK = 0, /* one partial sum for each rank, added by ascending rank */
    EPIC_TREE = 1,    /* one partial sum for each leaf of experts, added in a binary tree: the
                         same bits for every number of ranks */
    /* The faster of the two orders above, without a guarantee about bits.  It is EPIC_TREE with
     * num_ranks leaves on GPUs of several hosts (backend "hosts"), if num_ranks is a power of
     * two that divides num_experts and rank_of_expert is NULL.  Otherwise it is EPIC_BY_RANK.
     * Not allowed in epic_allreduce_sum. */
    EPIC_BY_HOSTS = 2
} epic_sum_order;

/* Which choices an expert keeps if it has more than expert_capacity. */
typedef enum epic_priority {
    EPIC_BY_TOKEN = 0, /* the first choices in the order (source rank, token, k) */
    EPIC_BY_K = 1      /* the first choices in the order (k, source rank, token), as in
                          GShard and NLLB */
} epic_priority;

/* The fixed properties of a layer, equal on all ranks.
 *
 * Replicas.  Some experts can be copies of each other, so that they share the work of a busy
 * expert.  Expert ids then name *logical experts*, of which there are num_logical.
 * logical_of_expert maps each expert to the logical expert that it is a replica of.  An expert
 * may be a replica of no logical expert (EPIC_ABSENT).  It gets no choices.
 *
 * A logical expert without a replica is *absent*.  With EPIC_DROP_ABSENT its choices are
 * dropped, and their fate is EPIC_FATE_ABSENT.  Without this flag each logical expert must have
 * a replica.
 *
 * The choices of a logical expert go to its replicas round-robin: with r replicas, choice n
 * goes to replica n % r.  Choices count from 0 in the order (source rank, token, k), and
 * replicas in the order of their ids.  So the loads of the replicas differ by at most one, and
 * balancing needs no communication.  With expert_capacity C, replica i keeps
 * (C + r - 1 - i) / r choices.  With EPIC_BY_TOKEN, the replicas do not change which choices a
 * logical expert drops. */
typedef struct epic_layer {
    uint32_t num_experts;     /* number of experts, 1 to 65536 */
    uint32_t num_logical;     /* number of logical experts, and expert ids are below it.  0:
                                 no replicas, and expert ids are below num_experts */
    uint32_t top_k;           /* number of choices of a token, 1 to 64 */
    uint32_t alignment;       /* lengths of slabs are multiples of this many slots; 0: 1 */
    uint32_t layout;          /* an epic_layout */
    uint32_t overflow;        /* an epic_overflow */
    uint32_t expert_capacity; /* with EPIC_OVERFLOW_DROP: largest number of choices of the
                                 group that an expert (with replicas: a logical expert)
                                 keeps; 0: no limit */
    uint32_t priority;        /* with EPIC_OVERFLOW_DROP: an epic_priority.  It does not
                                 change the order of slots */
    uint32_t sum_order;       /* an epic_sum_order */
    uint32_t leaves;          /* with EPIC_TREE: number of leaves.  A power of two that
                                 divides num_experts, and a multiple of num_ranks; 0:
                                 num_ranks.  After epic_regroup the number of members
                                 takes the place of num_ranks */
    /* epic_type of the partial sums that are sent back: EPIC_F32 or the type of the
     * rows; 0: the type of the rows */
    uint32_t partial_type;
    uint32_t flags; /* EPIC_DISTINCT, EPIC_DROP_ABSENT */
} epic_layer;

/* Value of logical_of_expert: the expert is a replica of no logical expert. */
#define EPIC_ABSENT (-1)

/* Sizes that depend on a layer and an open context. */
typedef struct epic_layer_info {
    int64_t plan_bytes; /* bytes of one plan */
    int64_t capacity;   /* smallest number of slots of a rank that always suffices, for
                           contiguous blocks of experts; equals capacity_any_placement if
                           num_ranks does not divide num_experts */
    int64_t capacity_any_placement; /* smallest number of slots of a rank that always
                                       suffices, for every rank_of_expert */
    int64_t host_bytes;             /* memory of the context, as in epic_memory_info */
    int64_t shared_bytes;
    int64_t device_bytes;
    uint32_t num_local_experts; /* with contiguous blocks: ceil(num_experts / num_ranks) */
    uint32_t first_expert;      /* id of this rank's first expert; num_experts if it has none */
} epic_layer_info;

/* Computes the sizes of a layer on an open context.
 * Errors:  (a) EPIC_EINVAL.
 * Threads: local.
 * CUDA:    no difference. */
static inline epic_result epic_layer_sizes(epic_context *ctx, const epic_layer *layer,
                                           epic_layer_info *out);

/* Value of epic_plan_args.capacity: the plan has no limit.  After epic_plan, read `demand` and
 * allocate this many slots. */
#define EPIC_CAPACITY_EXACT 0

/* Arguments of epic_plan. */
typedef struct epic_plan_args {
    epic_call call;
    const epic_layer *layer;
    void *plan;                       /* out [plan_bytes], at an address that is a multiple
                                         of 16 */
    int64_t plan_bytes;               /* at least epic_layer_info.plan_bytes */
    const void *topk_idx;             /* [num_tokens, top_k] expert ids; negative: no expert */
    int64_t num_tokens;               /* 0 to max_tokens; may differ between ranks */
    const int32_t *rank_of_expert;    /* [num_experts]; NULL: contiguous blocks of
                                         num_experts / num_ranks experts, which must be a
                                         whole number */
    const int32_t *logical_of_expert; /* [num_experts] if the layer has num_logical; else
                                         NULL */
    int64_t capacity;                 /* slots of this rank, or EPIC_CAPACITY_EXACT */
    uint32_t index_type;              /* epic_type of topk_idx: I32 or I64; 0: I32 */
    uint32_t flags;                   /* must be 0 */
    int32_t *expert_rows;             /* out [num_local_experts]: rows of each slab, with
                                         padding */
    int32_t *expert_tokens;           /* out [num_local_experts]: rows of each slab that
                                         carry a token */
    int32_t *load;                    /* out [num_experts]: choices of the whole group,
                                         before drops */
    int32_t *logical_load;            /* out [num_logical]: choices of the logical experts */
    int32_t *demand;                  /* out [1]: slots that this rank would need for all
                                         choices of its experts */
    const struct epic_moe *moe;       /* the layer whose options epic_plan compares between the
                                         ranks (epic_moe); NULL: no comparison */
    const int32_t *capacity_limit;    /* [1]; NULL: no limit other than capacity */
    int64_t *expert_rows_i64;         /* out [num_local_experts]: like expert_rows */
    int64_t *expert_tokens_i64;       /* out [num_local_experts]: like expert_tokens */
} epic_plan_args;

/* Makes a plan.  The slots are ordered by local expert, source rank, token, k.  The length of a
 * slab is the number of its tokens, rounded up to the alignment.  An expert without tokens has
 * no slots.  num_local_experts is the largest number of experts that one rank owns.  A plan
 * holds no addresses, so its bytes may be copied and moved.
 *
 * An expert that drops choices keeps the first ones by the layer's priority.  If
 * expert_capacity is the only limit, the same choices are kept for any number of ranks.
 *
 * With capacity_limit the rank has min(capacity, *capacity_limit) slots, at least one.  The
 * operation reads the limit when it runs.  So each replay of a captured CUDA graph, in which
 * `capacity` is a constant, reads the current limit.  It must not change while the operation
 * runs.
 *
 * Errors in the data are class (b): an expert id that is not below num_experts (with replicas:
 * num_logical), and an invalid rank_of_expert or logical_of_expert.  Different tables on
 * different ranks are EPIC_EMISMATCH.  Demand above the capacity is EPIC_EOVERFLOW on every
 * rank, unless the layer drops.  A plan_bytes that is too small is a class (a) error in
 * epic_plan.  In calls that read the plan it is class (b), like any damage of the plan.
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
    const epic_layer *layer; /* the layer of this plan, as passed to epic_plan */
    const void *plan;
    int64_t plan_bytes;
    epic_const_rows tokens; /* [num_tokens, row_bytes]: the rows to send */
    epic_rows recv;         /* out [slots, row_bytes]; num_rows is the capacity of the buffer */
    epic_const_rows scales; /* [num_tokens, scale_bytes]: a second array of rows that is sent
                               with the tokens; or none */
    epic_rows recv_scales;  /* out [slots, scale_bytes]: the scales of recv */
    const float *weights;   /* [num_tokens, top_k], or NULL */
    float *slot_weights;    /* out [slots], 0 on padding.  With EPIC_FLAT: [rows, top_k], the
                               weights of a token's choices on this rank by ascending k, then
                               0 */
    int32_t *recv_expert;   /* out, FLAT only: [rows, top_k], the local experts of a token by
                               ascending k, then -1 */
    uint32_t type;          /* epic_type of tokens; may be EPIC_BYTES without quantize */
    uint32_t quantize;      /* an epic_quantize.  Tokens must then be F32, BF16 or F16.  recv
                               gets e4m3 rows and recv_scales their scales; `scales` must be
                               none */
    uint32_t flags;         /* EPIC_ZERO_TAIL, EPIC_LEAVE_PADDING */
    uint32_t reserved;      /* must be 0 */
} epic_dispatch_args;

/* Sends the row of each token to every expert that the plan chose for it.  For the slot of
 * choice (t, k): recv[slot] = tokens[t] and slot_weights[slot] = weights[t, k].
 *
 * Padding slots inside slabs become zeros in every output, or keep their contents with
 * EPIC_LEAVE_PADDING.  The slots after the last slab keep their contents, or become zeros with
 * EPIC_ZERO_TAIL.  Pass both weights and slot_weights or neither, in the same way on all ranks;
 * a rank without tokens or slots passes any address.  If any rank has fewer recv rows than
 * slots in its plan, all ranks get EPIC_EOVERFLOW.
 *
 * Quantized rows of n elements:
 *   - 1x128: scale = max|x| / 448, or 1 if all x are 0.  q = e4m3(x / scale).  A row of
 *     recv_scales has ceil(n / 128) float32.
 *   - 1x32: scale = 2^ceil(log2(max|x| / 448)) as e8m0 (byte 127 if max|x| is 0).  A row of
 *     recv_scales has ceil(n / 32) bytes.
 *
 * Rounding is to nearest even and saturates.  A non-finite x makes the scale a NaN.
 * Errors:  (a) EPIC_EINVAL, EPIC_ENOTSUP; (b) EPIC_EINVAL, EPIC_EOVERFLOW; (c).
 * Threads: collective.
 * CUDA:    all arrays are on the device. */
static inline epic_result epic_dispatch(epic_context *ctx, const epic_dispatch_args *args);

/* Makes a plan and dispatches with it, in one operation.  Uses call, layer and plan of `plan`,
 * and ignores those of `dispatch`.  Needs a capacity: EPIC_CAPACITY_EXACT is refused.
 * Errors:  (a) EPIC_EINVAL, EPIC_ENOTSUP; (b) EPIC_EINVAL, EPIC_EOVERFLOW; (c).
 * Threads: collective.
 * CUDA:    all arrays are on the device. */
static inline epic_result epic_plan_dispatch(epic_context *ctx, const epic_plan_args *plan,
                                             const epic_dispatch_args *dispatch);

/* Arguments of epic_combine. */
typedef struct epic_combine_args {
    epic_call call;
    const epic_layer *layer; /* the layer of this plan, as passed to epic_plan */
    const void *plan;
    int64_t plan_bytes;
    epic_const_rows rows;      /* [slots, row_bytes]; with EPIC_FLAT: each row is a finished
                                  partial sum */
    epic_rows out;             /* out [num_tokens, row_bytes] */
    const float *slot_weights; /* [slots]; NULL: 1.  Must be NULL for FLAT */
    uint32_t type;             /* epic_type of rows and out: F32, BF16, F16 or F64 */
    uint32_t flags;            /* must be 0 */
} epic_combine_args;

/* Returns rows to their tokens and sums them: out[t] = sum over k of slot_weights[slot(t, k)] *
 * rows[slot(t, k)], in float32 (F64: float64).  The layer's sum_order sets the order:
 *   - BY_RANK: each rank makes a partial sum of its choices by ascending k, with fused
 *     multiply-add after the first product.  Then the partial sums are added by ascending rank.
 *   - TREE: each leaf makes such a partial sum.  The leaves are added in a binary tree; an
 *     empty node adds nothing.
 *
 * Partial sums and inner nodes are rounded to the layer's partial_type.  The result is rounded
 * once to `type`.  A token without kept choices gets +0.  Each rank sends one row for each
 * token of which it has slots.
 * Errors:  (a) EPIC_EINVAL, EPIC_ENOTSUP; (b) EPIC_EINVAL, EPIC_EOVERFLOW; (c).
 * Threads: collective.
 * CUDA:    all arrays are on the device; F64 is EPIC_ENOTSUP. */
static inline epic_result epic_combine(epic_context *ctx, const epic_combine_args *args);

/* Arguments of epic_dispatch_backward. */
typedef struct epic_dispatch_backward_args {
    epic_call call;
    const epic_layer *layer; /* the layer of this plan, as passed to epic_plan */
    const void *plan;
    int64_t plan_bytes;
    epic_const_rows d_recv;      /* [slots, row_bytes]: gradient of recv */
    epic_rows d_tokens;          /* out [num_tokens, row_bytes]: gradient of the tokens */
    const float *d_slot_weights; /* [slots]; with EPIC_FLAT: [rows, top_k], like slot_weights of
                                    dispatch; or NULL */
    float *d_weights;            /* out [num_tokens, top_k]; 0 for choices without a slot */
    uint32_t type;               /* epic_type of d_recv and d_tokens */
    uint32_t flags;              /* must be 0 */
} epic_dispatch_backward_args;

/* Computes the gradient of epic_dispatch: d_tokens is epic_combine of d_recv without weights,
 * and d_weights[t, k] = d_slot_weights[slot(t, k)], exactly.
 * Errors:  those of epic_combine.
 * Threads: collective.
 * CUDA:    as epic_combine. */
static inline epic_result epic_dispatch_backward(epic_context *ctx,
                                                 const epic_dispatch_backward_args *args);

/* Arguments of epic_combine_backward. */
typedef struct epic_combine_backward_args {
    epic_call call;
    const epic_layer *layer; /* the layer of this plan, as passed to epic_plan */
    const void *plan;
    int64_t plan_bytes;
    epic_const_rows d_out;     /* [num_tokens, row_bytes]: gradient of `out` of combine */
    epic_const_rows rows;      /* [slots, row_bytes]: the rows that combine read; none if
                                  d_slot_weights is NULL */
    epic_rows d_rows;          /* out [slots, row_bytes]; with quantize: e4m3 rows */
    epic_rows d_rows_scales;   /* out: the scales of d_rows; with quantize only */
    const float *slot_weights; /* [slots]; NULL: 1.  Must be NULL for FLAT */
    float *d_slot_weights;     /* out [slots]: gradient of slot_weights; NULL for FLAT */
    uint32_t type;             /* epic_type of d_out, rows and d_rows */
    uint32_t quantize;         /* an epic_quantize, for d_rows */
    uint32_t flags;            /* EPIC_ZERO_TAIL and EPIC_LEAVE_PADDING, for every output */
    uint32_t reserved;         /* must be 0 */
} epic_combine_backward_args;

/* Computes the gradient of epic_combine: d_rows[slot] = slot_weights[slot] * d_out[token] and
 * d_slot_weights[slot] = dot(d_out[token], rows[slot]).  Padding slots become zeros, or keep
 * their contents with EPIC_LEAVE_PADDING.
 *
 * The dot product is computed in float32 (F64: float64), in blocks of 1024 elements:
 *   - Accumulator i of 256 adds the elements i, i + 256, i + 512 and i + 768 of a block, with
 *     fused multiply-add after the first product.
 *   - Each aligned group of 8 accumulators is reduced to one sum.  For the distances d = 4, 2
 *     and 1, accumulator i + d of the group is added to accumulator i, for all i below d.
 *   - The sums of the 32 groups are added in the same way, with the distances 16, 8, 4, 2 and
 *     1.  Then the sums of the blocks are added in ascending order.
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
    uint32_t order; /* an epic_sum_order.  EPIC_BY_RANK: ascending ranks; EPIC_TREE: a binary
                       tree, for which num_ranks must be a power of two */
    uint32_t flags; /* must be 0 */
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
    epic_rows data;    /* [num_local_experts, row_bytes]: for each expert of this rank a row
                          of float32, replaced by the sum; row_bytes is equal on all ranks */
    float *workspace;  /* [row_bytes / 4]: scratch memory */
    uint32_t flags;    /* must be 0 */
    uint32_t reserved; /* must be 0 */
} epic_sum_replicas_args;

/* Adds the rows of all replicas of each logical expert, for example gradients of its weights,
 * and writes the sum to each replica.  Rows of experts without replicas do not change.  So
 * replicas whose weights were equal stay equal under any optimizer.  The layer's sum_order sets
 * the order:
 *   - BY_RANK: each rank adds its own replicas in ascending order.  Then the sums of the ranks
 *     are added as in epic_allreduce_sum.
 *   - TREE: each leaf adds its own replicas in ascending order, starting from 0.  Then the
 *     leaves of a rank are added in a binary tree, and the sums of the ranks as in
 *     epic_allreduce_sum.  The bits are the same for every number of ranks if rank i owns block
 *     i of the experts, which is the default.
 * Errors:  those of epic_combine.
 * Threads: collective; it runs several operations with call.tag, one after the other.
 * CUDA:    one operation; data and plan are on the device, and the workspace is not used. */
static inline epic_result epic_sum_replicas(epic_context *ctx,
                                            const epic_sum_replicas_args *args);

/* --------------------------------------------------------------------------- windows ----
 *
 * A *window* is memory of this rank into which the other ranks of the context store rows
 * directly.  Without a window a row first arrives in staging memory, and its receiver copies
 * it.  A call finds windows by address: an output that lies completely in a window of the
 * context is stored directly where that is possible.  Results have the same bits as without
 * windows.  One output of a call may be in a window and another not, and this may differ
 * between ranks.  These outputs can be stored directly:
 *
 *   - epic_dispatch, epic_plan_dispatch: recv, recv_scales and slot_weights, for tokens with
 *     exactly one slot on a rank; with EPIC_FLAT recv and recv_scales of all tokens
 *   - epic_combine: out, for tokens whose top_k choices all have slots on one rank
 *   - epic_dispatch_backward: d_tokens and d_weights, for tokens whose top_k choices all have
 *     slots on one rank
 *   - epic_combine_backward: d_rows, like recv, if the call has no slot_weights, no
 *     d_slot_weights and no quantize
 *
 * On GPUs (backend p2p) rows are stored directly only if they have no scales and are aligned to
 * 16 bytes, and if every rank has more tokens than the low-latency kernels support.  Then
 * dispatch with top-1 always stores directly.  Some other calls do so only if the staging
 * memory is too small for all rows (docs/guide/c.md).
 *
 * Like any output, an output in a window is written only while the call of its own rank runs.
 * After a class (c) error peers may write the outputs of the failed call until epic_close has
 * returned.  docs/internals/windows.md explains the protocol. */

/* Arguments of epic_window_alloc and epic_window_register. */
typedef struct epic_window_args {
    epic_call call;
    int64_t bytes;     /* size of this rank's window; may differ between ranks; 0: this rank
                          has none */
    void *data;        /* register: memory of the caller.  alloc: NULL */
    int64_t fd_offset; /* register: offset of data in the file */
    int32_t fd;        /* register, backend shm: descriptor of the file (of memfd_create or
                          shm_open) that data maps with MAP_SHARED; the call copies the
                          descriptor.  -1 or 0: none */
    uint32_t reserved; /* must be 0 */
} epic_window_args;

/* A window of this rank. */
typedef struct epic_window_info {
    void *data;         /* address of the window; NULL if it has 0 bytes */
    int64_t bytes;      /* size of the window, as the caller passed it */
    uint32_t is_direct; /* 1: peers store into it directly.  0: it is ordinary memory, as on
                           backend mpi */
    uint32_t reserved;  /* always 0 */
} epic_window_info;

/* Allocates a window on every rank.  The memory is zero, and is aligned to a page.  epic_close
 * frees it.  A context has at most 256 windows; one window may hold the outputs of many calls.
 *
 * If a rank has no memory, all ranks return its error, which names the rank, and no rank gets a
 * window.
 * Errors:  (a) EPIC_EINVAL, EPIC_ENOTSUP; (b) EPIC_ENOMEM, EPIC_ENOTSUP; (c).
 * Threads: collective, in the same order on all ranks; two operations with call.tag.
 * CUDA:    waits for the other ranks on the host, not on a stream; call.stream and call.tag are
 *          not used.  Not while a stream of the process is captured.  Backend hosts:
 *          EPIC_ENOTSUP. */
static inline epic_result epic_window_alloc(epic_context *ctx, const epic_window_args *args,
                                            epic_window_info *out);

/* Makes memory of the caller a window on every rank.  The memory must stay valid until
 * epic_close has returned.  On backend shm other processes must be able to map the memory, so
 * the caller passes its fd.
 *
 * If the memory of a rank cannot be a window, all ranks return its error, which names the rank.
 * Errors:  those of epic_window_alloc.
 * Threads: as epic_window_alloc.  A rank may call it while others call epic_window_alloc.
 * CUDA:    as epic_window_alloc.  data is memory of cudaMalloc or cuMemCreate on the context's
 *          device, at any offset in its allocation.  It may span up to 250 allocations of
 *          cuMemCreate.  If ranks are processes, these must have a handle type that can be
 *          exported: POSIX file descriptor or fabric. */
static inline epic_result epic_window_register(epic_context *ctx, const epic_window_args *args,
                                               epic_window_info *out);

/* ----------------------------------------------------------------- router and losses ----
 *
 * These calls are local and allocate nothing: the caller passes workspace.  On host contexts
 * and without a context their errors are class (a), also for invalid ids in arrays.  A call
 * that fails has written nothing.
 *
 * On a CUDA context arrays, workspace, losses and d_loss are on its device.  Results have the
 * same bits as on the host, except that the last bit of a loss may differ.  If an id is out of
 * range on a CUDA context, the choice has no expert, and there is no error.  A CUDA context
 * supports at most 4096 experts, and no F64 logits. */

/* The score of an expert, from the logits z of one token. */
typedef enum epic_score {
    EPIC_SCORE_SOFTMAX = 0,
    EPIC_SCORE_SIGMOID = 1,
    EPIC_SCORE_SQRTSOFTPLUS = 2, /* sqrt(log(1 + e^z)) */
    EPIC_SCORE_LOGITS = 3        /* the logit z itself */
} epic_score;

/* The score of a group of experts.  It depends on the selection values of its experts, which
 * are their scores plus bias. */
typedef enum epic_group_score {
    EPIC_GROUP_MAX = 0,
    EPIC_GROUP_SUM = 1 /* the sum of the group_best largest values */
} epic_group_score;

/* The treatment of experts of groups that are not kept.  DeepSeek-V3 uses EPIC_OTHERS_OUT.  The
 * package transformers used EPIC_OTHERS_ZERO before its release 5. */
typedef enum epic_group_others {
    EPIC_OTHERS_OUT = 0, /* these experts are never chosen */
    EPIC_OTHERS_ZERO = 1 /* their selection value is 0, so they come before a kept expert
                            with a negative value */
} epic_group_others;

/* How the weights of the chosen experts are computed. */
typedef enum epic_weight_rule {
    EPIC_WEIGHT_OF_SCORE = 0,       /* their scores, without the bias */
    EPIC_WEIGHT_SOFTMAX_CHOSEN = 1, /* softmax over the top_k chosen logits */
    EPIC_WEIGHT_SIGMOID_CHOSEN = 2, /* sigmoid of the chosen logits */
    EPIC_WEIGHT_SPARSEMIXER = 3     /* for choice k: softmax over the logits z of the experts
                                       that earlier choices of the token have not chosen, and
                                       whose z is close to the largest such logit m:
                                       (m - z) / max(|z|, m) <= 2 * jitter */
} epic_weight_rule;

/* How the weights of a token are normalized. */
typedef enum epic_normalize {
    EPIC_NORMALIZE_NONE = 0,
    EPIC_NORMALIZE_SUM = 1,    /* divide each weight by (sum of the weights + eps) */
    EPIC_NORMALIZE_CLAMPED = 2 /* divide each weight by max(sum of the weights, norm_min) */
} epic_normalize;

/* How experts are chosen and weighted.  The logits have E columns: num_experts experts, then
 * zero_experts zero-experts. */
typedef struct epic_router {
    uint32_t num_experts;  /* 1 to 65536, together with zero_experts */
    uint32_t zero_experts; /* number of zero-experts (identity experts), with ids from
                              num_experts on; their rows are never sent */
    uint32_t top_k;        /* number of choices of a token, 1 to 64 and at most E */
    uint32_t score;        /* an epic_score */
    uint32_t num_groups;   /* number of equal blocks of experts; divides E; at most 1024; 0:
                              no groups */
    uint32_t topk_groups;  /* number of groups that are kept; they must have at least top_k
                              experts */
    uint32_t group_score;  /* an epic_group_score */
    uint32_t group_best;   /* with EPIC_GROUP_SUM: 1 to 64, and at most the experts of a group;
                              0: top_k / topk_groups */
    uint32_t group_others; /* an epic_group_others */
    uint32_t weight_rule;  /* an epic_weight_rule */
    uint32_t normalize;    /* an epic_normalize */
    uint32_t flags;        /* must be 0 */
    double eps;            /* with EPIC_NORMALIZE_SUM: added to the sum */
    double norm_min;       /* with EPIC_NORMALIZE_CLAMPED: smallest divisor; above 0 */
    double jitter;         /* with EPIC_WEIGHT_SPARSEMIXER: at least 0, below 1 */
    double scale;          /* factor of the weights; 0: 1 */
} epic_router;

/* Writes to *bytes the size of the workspace that each call of this chapter needs, for any
 * number of tokens.  *bytes is 0 if the call fails.
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
    const float *bias;           /* [E], added to the scores for the choice only; NULL: none */
    const void *scale_of_expert; /* [E] of weights_type: last factor of the weight of a
                                    chosen expert; NULL: 1 */
    const void *token_ids;       /* [num_tokens]: the row of `table` for each token; NULL: no
                                    table */
    const int32_t *table;        /* [table_rows, top_k]: experts by token id, used instead of
                                    a choice; negative: no expert */
    int64_t table_rows;
    void *workspace; /* at an address that is a multiple of 16, also in the calls below */
    int64_t workspace_bytes;
    int32_t *topk_idx; /* out [num_tokens, top_k]: ids of the chosen experts */
    void *weights;     /* out [num_tokens, top_k] of weights_type: weights of these experts */
    /* out [num_tokens, E] of weights_type: scores of all columns; NULL: not wanted */
    void *scores;
    uint32_t type;              /* epic_type of logits: F32, BF16, F16 or F64 */
    uint32_t weights_type;      /* epic_type of weights: F32, or F64 with F64 logits; 0: F32 */
    uint32_t token_id_type;     /* epic_type of token_ids: I32 or I64; 0: I32 */
    uint32_t flags;             /* must be 0 */
    const int32_t *topk_idx_in; /* [num_tokens, top_k]: forced experts, used instead of a
                                   choice; negative: no expert; NULL: the router chooses.  Not
                                   with token_ids */
} epic_router_args;

/* Chooses top_k experts for each token, the best first, and computes their weights, in float32
 * (F64 logits: float64).  Of equal values the lower id is chosen first, and a NaN is chosen
 * last.
 *
 * If only scores decide (no bias, no sum over a group), the choice is made by the logits.
 * Logits have the same order as the scores, and do not underflow.  If the chosen scores
 * add up to 0, the weights are 0, not NaN.  EPIC_WEIGHT_SPARSEMIXER is the inference rule of
 * Phi-3.5-MoE, without random numbers.
 *
 * With topk_idx_in, the call copies topk_idx_in to topk_idx and computes the weights of these
 * experts.  If an earlier call chose the same ids from the same logits, the weights have the
 * same bits.
 * Errors:  (a) EPIC_EINVAL; EPIC_ENOTSUP on CUDA contexts.
 * Threads: local.
 * CUDA:    on call.stream; EPIC_WEIGHT_SPARSEMIXER is EPIC_ENOTSUP. */
static inline epic_result epic_router_forward(epic_context *ctx, const epic_router_args *args);

/* Arguments of epic_router_backward. */
typedef struct epic_router_backward_args {
    epic_call call;
    const epic_router *router;
    const void *logits; /* the logits of forward */
    int64_t num_tokens;
    const int32_t *topk_idx;     /* [num_tokens, top_k], as forward wrote it */
    const void *scale_of_expert; /* as in forward */
    const void *d_weights;       /* [num_tokens, top_k] of weights_type */
    void *workspace;
    int64_t workspace_bytes;
    void *d_logits;          /* out [num_tokens, E]: gradient of the logits */
    void *d_scale_of_expert; /* out [E] of weights_type, summed over these tokens; NULL: not
                                wanted */
    uint32_t type;           /* epic_type of logits */
    uint32_t weights_type;   /* epic_type of the weights, as in forward */
    uint32_t grad_type;      /* epic_type of d_logits: F32 or `type`; 0: `type` */
    uint32_t flags;          /* 0 or EPIC_ACCUMULATE */
} epic_router_backward_args;

/* Computes the gradient of the weights with respect to the logits.  The choice, and therefore
 * the bias, has no gradient.  d_scale_of_expert is summed in float64 by ascending token, and
 * rounded once.
 * Errors:  (a) EPIC_EINVAL; EPIC_ENOTSUP on CUDA contexts.
 * Threads: local.
 * CUDA:    on call.stream; d_scale_of_expert is summed in several ranges of tokens, and then
 *          over the ranges. */
static inline epic_result epic_router_backward(epic_context *ctx,
                                               const epic_router_backward_args *args);

/* Arguments of epic_balance_loss_forward. */
typedef struct epic_balance_loss_args {
    epic_call call;
    const epic_router *router; /* uses num_experts, zero_experts, top_k and score */
    const void *logits;        /* [num_tokens, E], logits of this rank */
    int64_t num_tokens;
    int64_t total_tokens;    /* T: number of tokens of all ranks, over which `load` was
                                counted */
    int64_t sequence_tokens; /* 0: one loss over all tokens.  Else the loss is computed for
                                each sequence of this many tokens */
    const int32_t *load;     /* [num_experts], of all ranks: epic_plan_args.load, with
                                replicas logical_load.  Not used with sequence_tokens */
    const int32_t *topk_idx; /* [num_tokens, top_k], with sequence_tokens only */
    double coeff;
    void *workspace;
    int64_t workspace_bytes;
    void *loss;         /* out [1] of loss_type: this rank's part of the loss */
    uint32_t type;      /* epic_type of logits */
    uint32_t loss_type; /* epic_type of loss: F32 or F64; 0: F32 */
} epic_balance_loss_args;

/* Computes this rank's part of the balance loss.  The sum of the parts of all ranks is the
 * loss: num_experts * coeff / (top_k * T^2) * sum over experts of load * (sum over tokens of
 * P).  P is the score divided by the sum of the scores over all E columns (EPIC_SCORE_LOGITS:
 * the softmax).  Zero-experts have no load.
 *
 * With sequence_tokens, this loss is computed for each sequence, and averaged over the T /
 * sequence_tokens sequences.  It then uses the choices of the sequence as load and the length
 * of the sequence as T.  A sequence must not be divided between ranks.
 * Errors:  (a) EPIC_EINVAL; EPIC_ENOTSUP on CUDA contexts.
 * Threads: local.
 * CUDA:    on call.stream. */
static inline epic_result epic_balance_loss_forward(epic_context *ctx,
                                                    const epic_balance_loss_args *args);

/* Arguments of epic_balance_loss_backward.  Fields that forward has too must have the values of
 * forward. */
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
    const float *d_loss; /* [1]: gradient of the loss; NULL: 1 */
    void *d_logits;      /* out [num_tokens, E]: gradient of the logits */
    uint32_t type;       /* epic_type of logits */
    uint32_t grad_type;  /* epic_type of d_logits: F32 or `type`; 0: `type` */
    uint32_t flags;      /* 0 or EPIC_ACCUMULATE */
    uint32_t reserved;   /* must be 0 */
} epic_balance_loss_backward_args;

/* Computes the gradient of the balance loss, with the load as a constant.
 * Errors:  those of epic_balance_loss_forward.
 * Threads: local.
 * CUDA:    on call.stream. */
static inline epic_result
epic_balance_loss_backward(epic_context *ctx, const epic_balance_loss_backward_args *args);

/* Arguments of epic_z_loss_forward. */
typedef struct epic_z_loss_args {
    epic_call call;
    const epic_router *router; /* uses num_experts and zero_experts */
    const void *logits;        /* [num_tokens, E], logits of this rank */
    int64_t num_tokens;
    int64_t total_tokens; /* T: number of tokens of all ranks */
    double coeff;
    void *workspace;
    int64_t workspace_bytes;
    void *loss;         /* out [1] of loss_type: this rank's part of the loss */
    uint32_t type;      /* epic_type of logits */
    uint32_t loss_type; /* epic_type of loss: F32 or F64; 0: F32 */
} epic_z_loss_args;

/* Computes this rank's part of the z-loss: coeff / T * sum over tokens of logsumexp(z)^2.
 * Errors:  (a) EPIC_EINVAL; EPIC_ENOTSUP on CUDA contexts.
 * Threads: local.
 * CUDA:    on call.stream. */
static inline epic_result epic_z_loss_forward(epic_context *ctx, const epic_z_loss_args *args);

/* Arguments of epic_z_loss_backward.  Fields that forward has too must have the values of
 * forward. */
typedef struct epic_z_loss_backward_args {
    epic_call call;
    const epic_router *router;
    const void *logits;
    int64_t num_tokens;
    int64_t total_tokens;
    double coeff;
    void *workspace;
    int64_t workspace_bytes;
    const float *d_loss; /* [1]: gradient of the loss; NULL: 1 */
    void *d_logits;      /* out [num_tokens, E]: gradient of the logits */
    uint32_t type;       /* epic_type of logits */
    uint32_t grad_type;  /* epic_type of d_logits: F32 or `type`; 0: `type` */
    uint32_t flags;      /* 0 or EPIC_ACCUMULATE */
    uint32_t reserved;   /* must be 0 */
} epic_z_loss_backward_args;

/* Computes the gradient of the z-loss.
 * Errors:  those of epic_z_loss_forward.
 * Threads: local.
 * CUDA:    on call.stream. */
static inline epic_result epic_z_loss_backward(epic_context *ctx,
                                               const epic_z_loss_backward_args *args);

/* Arguments of epic_bias_update. */
typedef struct epic_bias_update_args {
    epic_call call;
    float *bias;         /* [num_experts], updated in place */
    const int32_t *load; /* [num_experts]: epic_plan_args.load or logical_load */
    int64_t num_experts;
    float rate;
    uint32_t flags; /* must be 0 */
} epic_bias_update_args;

/* Raises the bias of each expert whose load is below the mean load, and lowers it if the load
 * is above the mean: bias += rate * sign(mean load - load), with sign(0) = 0.  The comparison
 * is exact.
 * Errors:  (a) EPIC_EINVAL.
 * Threads: local.
 * CUDA:    on call.stream. */
static inline epic_result epic_bias_update(epic_context *ctx,
                                           const epic_bias_update_args *args);

/* ----------------------------------------------------------------- experts and layer ----
 *
 * The calls of the experts are local; without a context they use host memory.  The calls of the
 * layer, epic_moe_*, are collective.  On a CUDA context all arrays are on the device, also
 * expert_rows and expert_tokens.  The host never waits, so a captured graph may be replayed
 * with other counts. */

/* The activation function between the two matrix products of an expert. */
typedef enum epic_activation {
    EPIC_SILU = 0,
    EPIC_GELU = 1,           /* the exact GELU, with the error function */
    EPIC_GELU_TANH = 2,      /* the tanh approximation of GELU */
    EPIC_RELU2 = 3,          /* max(x, 0)^2 */
    EPIC_CLAMPED_SWIGLU = 4, /* gated only: g * sigmoid(alpha * g) * (u + 1), with g =
                                min(gate, limit), and u = up limited to -limit .. limit */
    EPIC_CLAMPED_SILU = 5    /* gated only: g * sigmoid(g) * u, with g and u of
                                EPIC_CLAMPED_SWIGLU (DeepSeek-V4) */
} epic_activation;

/* The place in the layer where a row is multiplied by the weight of its choice. */
typedef enum epic_weighting {
    EPIC_WEIGHT_LATE = 0,  /* in combine; the experts do not use weights */
    EPIC_WEIGHT_EARLY = 1, /* on the activations and on the bias of the second product */
    EPIC_WEIGHT_INPUT = 2  /* on the input of the expert */
} epic_weighting;

/* A product over the slabs of the local experts on a device.  W[e] is the matrix of expert e.
 * The first expert_tokens[e] rows of slab e carry a token. */
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
    const int32_t *expert_rows;   /* [num_experts]: rows of each slab, with padding */
    const int32_t *expert_tokens; /* [num_experts]: rows of each slab that carry a token */
    int64_t num_slots;
    int64_t k; /* W is [num_experts, k, n] */
    int64_t n;
    uint32_t num_experts;
    uint32_t pass;        /* an epic_gemm_pass */
    uint32_t row_type;    /* epic_type of the arrays with one row per slot */
    uint32_t weight_type; /* epic_type of W */
    uint32_t out_type;    /* EPIC_GEMM_WEIGHT: epic_type of out */
    uint32_t flags;       /* EPIC_ACCUMULATE, for EPIC_GEMM_WEIGHT */
} epic_gemm_args;

/* A function of the caller for matrix products, which replaces the library's. multiply()
 * enqueues its work on call.stream and does not wait.  It must not add padding rows of a slab
 * to a sum.  If it writes padding rows of `out`, it must write zeros.  If multiply() returns an
 * error, the calling function returns this error. */
typedef struct epic_gemm {
    epic_result (*multiply)(void *self, const epic_gemm_args *args);
    void *self;
} epic_gemm;

/* The MLP of each local expert: y = (act(x W_gate) * (x W_up)) W_down, plus biases if present.
 * Ungated: y = act(x W) W_down.
 *
 * W_gate and W_up are one matrix, w_gate_up.  Its number of columns is called width: 2 * inner
 * (first gate, then up), or inner if ungated. */
typedef struct epic_experts {
    uint32_t num_local_experts;
    uint32_t hidden;
    uint32_t inner;
    uint32_t activation;  /* an epic_activation */
    uint32_t ungated;     /* 1: no gate */
    uint32_t interleaved; /* 1: gate in the even columns, up in the odd columns */
    uint32_t weighting;   /* an epic_weighting */
    uint32_t row_type;    /* epic_type of x and y: F32, BF16, F16 or F64 */
    /* epic_type of weights and biases; 0: row_type. F64 with F64 rows only, E4M3 on CUDA
     * contexts only (epic_experts_forward) */
    uint32_t weight_type;
    uint32_t flags; /* EPIC_INVARIANT; 0 in a layer, which sets it from its own flags */
    /* limit of the clamped activations; 0: 7 for EPIC_CLAMPED_SWIGLU and 10 for
     * EPIC_CLAMPED_SILU. The gradient is 0 beyond the limit, but not at the limit */
    float limit;
    float alpha;           /* factor in EPIC_CLAMPED_SWIGLU; 0: 1.702 */
    const epic_gemm *gemm; /* CUDA contexts: product to use; NULL: the library's */
} epic_experts;

/* Bytes of the memory that the caller passes to the experts. */
typedef struct epic_experts_memory_info {
    /* size of `saved`, which forward writes and backward reads. Host: [num_slots, width]
     * float32 (F64 rows: float64) */
    int64_t saved_bytes;
    int64_t forward_bytes;  /* workspace of forward, enough even if one expert has all slots */
    int64_t backward_bytes; /* workspace of backward; never less than forward_bytes */
} epic_experts_memory_info;

/* Computes how much memory the experts need for a receive buffer of num_slots slots.  If the
 * context is open, pass it as ctx, and NULL as config.  Before it is open, pass NULL as ctx and
 * its config; then only config.backend is used.  NULL for both means host memory.
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
    const float *x_scales;         /* with E4M3 weights: [num_slots, ceil(hidden / 128)] */
    int64_t num_slots;             /* number of slots: rows of x and y */
    const int32_t *expert_rows;    /* [num_local_experts]: rows of each slab with padding,
                                      from epic_plan */
    const int32_t *expert_tokens;  /* [num_local_experts]: rows of each slab with a token;
                                      NULL: as expert_rows */
    const void *slot_weights;      /* [num_slots], with EPIC_WEIGHT_EARLY and _INPUT only */
    const void *w_gate_up;         /* [num_local_experts, hidden, width] */
    const void *w_down;            /* [num_local_experts, inner, hidden] */
    const float *w_gate_up_scales; /* with E4M3 weights: [num_local_experts, ceil(width / 128),
                                      ceil(hidden / 128)] */
    const float *w_down_scales;    /* with E4M3 weights: [num_local_experts, ceil(hidden / 128),
                                      ceil(inner / 128)] */
    const void *b_gate_up;         /* [num_local_experts, width]; NULL: none */
    const void *b_down;            /* [num_local_experts, hidden]; NULL: none */
    void *saved;                   /* out, at an address that is a multiple of 16, like
                                      workspace */
    int64_t saved_bytes;
    void *workspace;
    int64_t workspace_bytes;
    void *y;               /* out [num_slots, hidden]; 0 on padding; must not be x */
    uint32_t flags;        /* EPIC_RECOMPUTE: write only `saved`, for backward if forward did
                              not save it; y is ignored.  EPIC_LEAVE_PADDING: padding slots
                              of y may keep their contents */
    uint32_t weights_type; /* epic_type of slot_weights: 0: F32; or F64, with F64 rows only */
} epic_experts_args;

/* Runs the experts' MLP over the slabs.  Slots after the last slab are neither read nor
 * written.  The bits of a slab's rows depend only on that slab.
 *
 * Host contexts.  OpenBLAS multiplies, or plain loops if it is not found.  At first use the
 * library looks for it in this order: libopenblas.so.0; an OpenBLAS that the process has
 * loaded, for example through numpy; libscipy_openblas.so of the package scipy-openblas32; the
 * path in EPIC_OPENBLAS at build time.  While a call runs, OpenBLAS uses one thread in the
 * whole process.  The last call that ends restores its number of threads.  BF16 rows with BF16
 * weights use oneDNN, if the build found it (or has EPIC_ONEDNN) and the processor has BF16
 * instructions.  The values between the two products are then rounded to BF16.
 *
 * CUDA contexts.  Rows are F32, BF16 or F16, sums are float32, and the values between the two
 * products have row_type.  Counts are not checked: rows beyond num_slots are ignored.  Tensor
 * cores of Hopper are used if rows and weights have the same type of 16 bits, hidden and inner
 * are multiples of 8, and arrays begin at multiples of 16 bytes.  Other shapes, types and GPUs
 * use plain loops.  call.max_sms 0 means all SMs, even if the context has a limit.
 *
 * weight_type E4M3, on CUDA contexts only:
 *   - x has e4m3 elements, and x_scales has one scale for each 128 elements of a row.
 *     epic_dispatch writes such rows with EPIC_QUANTIZE_1X128.  The call quantizes the
 *     activations in the same way before the second product.
 *   - The weights have e4m3 elements, and one scale for each block of 128 x 128.  They are
 *     transposed: w_gate_up is [num_local_experts, width, hidden] and w_down is
 *     [num_local_experts, hidden, inner].
 *   - Biases, saved and y have row_type, which is F32, BF16 or F16.
 *   - Tensor cores of Hopper are used if row_type has 16 bits, and hidden and inner are
 *     multiples of 16.  They add up to 128 products with fewer bits than float32.  All other
 *     additions are in float32.
 *   - epic_experts_backward reads this `saved`.  It takes x of row_type, and weights of
 *     row_type or E4M3.
 *
 * Errors:  (a) EPIC_EINVAL; EPIC_ENOTSUP for F64 rows on CUDA contexts, for E4M3 on host
 *          contexts or with experts.gemm.
 * Threads: local.
 * CUDA:    on call.stream, as above. */
static inline epic_result epic_experts_forward(epic_context *ctx,
                                               const epic_experts_args *args);

/* Arguments of epic_experts_backward.  Fields that forward has too must have the values of
 * forward. */
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
    const void *saved; /* the buffer `saved` as forward wrote it */
    int64_t saved_bytes;
    void *workspace;
    int64_t workspace_bytes;
    const void *d_y;       /* [num_slots, hidden]; 0 on padding */
    void *d_x;             /* out [num_slots, hidden]; 0 on padding.  NULL: not wanted, like
                              the outputs below */
    void *d_w_gate_up;     /* out, shape of w_gate_up, in grad_type, like the next three */
    void *d_w_down;        /* out, shape of w_down */
    void *d_b_gate_up;     /* out, shape of b_gate_up */
    void *d_b_down;        /* out, shape of b_down */
    void *d_slot_weights;  /* out [num_slots], with EPIC_WEIGHT_EARLY and _INPUT only; 0 on
                              padding */
    uint32_t flags;        /* EPIC_ACCUMULATE, for weights and biases; EPIC_LEAVE_PADDING:
                              padding slots of d_x may keep their contents */
    uint32_t weights_type; /* epic_type of slot_weights and d_slot_weights */
    /* epic_type of the gradients of weights and biases: F32 (F64 rows: F64), on CUDA contexts
     * also row_type; 0: F32 (F64 rows: F64) */
    uint32_t grad_type;
    uint32_t reserved;             /* must be 0 */
    const float *w_gate_up_scales; /* with E4M3 weights: [num_local_experts, ceil(hidden / 128),
                                      ceil(width / 128)] */
    const float *w_down_scales;    /* with E4M3 weights: [num_local_experts, ceil(inner / 128),
                                      ceil(hidden / 128)] */
} epic_experts_backward_args;

/* Computes the gradients of epic_experts_forward.  d_x must not be x.  Gradients of weights and
 * biases of an expert without tokens become zeros, or keep their contents with EPIC_ACCUMULATE.
 *
 * With weight_type E4M3 the weights are not transposed here.  The gradients of rows are
 * quantized (1x128) before they are multiplied by weights.  x, d_y and all results have
 * row_type.
 * Errors:  those of epic_experts_forward.
 * Threads: local.
 * CUDA:    on call.stream. */
static inline epic_result epic_experts_backward(epic_context *ctx,
                                                const epic_experts_backward_args *args);

/* A Mixture-of-Experts layer: router, plan, dispatch, experts and combine.  In the shapes
 * below, `hidden` is experts->hidden, and E is the router's num_experts + zero_experts.  A
 * whole program is in docs/guide/c.md, "The whole layer".  Its calls are:
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
 * operation of each pass compares options and weights.  A difference is EPIC_EMISMATCH with the
 * option and both values.  CUDA contexts compare a hash, and report only the ranks. */
typedef struct epic_moe {
    const epic_layer *layer; /* EPIC_EXPERT_MAJOR.  Its num_experts (with replicas:
                                num_logical) and top_k equal those of the router */
    const epic_router *router;
    const epic_experts *experts; /* num_local_experts: largest number that one rank owns */
    const epic_experts *shared;  /* an expert that computes every token, with
                                    num_local_experts 1 and EPIC_WEIGHT_LATE; NULL: none */
    double balance_coeff;        /* coefficient of the balance loss, 0 or more; 0: no loss */
    double z_coeff;              /* coefficient of the z-loss, 0 or more; 0: no loss */
    int64_t sequence_tokens;     /* like epic_balance_loss_args.sequence_tokens */
    int64_t capacity;  /* slots of this rank; or EPIC_CAPACITY_EXACT, for epic_moe_plan */
    uint32_t flags;    /* EPIC_SUM_DENSE; EPIC_RECOMPUTE; EPIC_DISPATCH_AGAIN;
                         EPIC_LOSS_BY_CALLER; EPIC_INVARIANT */
    uint32_t reserved; /* must be 0 */
} epic_moe;

/* Bytes of the memory that the caller passes to a layer.  Its addresses must be multiples of
 * 64. */
typedef struct epic_moe_memory_info {
    int64_t saved_bytes;    /* size of `saved`, which forward writes and backward reads */
    int64_t forward_bytes;  /* size of the workspace of forward */
    int64_t backward_bytes; /* size of the workspace of backward */
} epic_moe_memory_info;

/* Computes how much memory a layer needs for config.max_tokens tokens of each rank.  If the
 * context is open, pass it as ctx, and NULL as config.  Before it is open, pass NULL as ctx and
 * its config with num_ranks.  config.backend then selects the sizes of a host context or of a
 * CUDA context.
 *
 * `saved` holds for each slot the received row and the result of the first product.
 * EPIC_DISPATCH_AGAIN leaves out the rows, and EPIC_RECOMPUTE the results.  Backward then
 * computes them again in its workspace, with the same bits.
 * Errors:  (a) EPIC_EINVAL, EPIC_ENOTSUP as epic_moe_forward.
 * Threads: local.
 * CUDA:    the sizes of that context. */
static inline epic_result epic_moe_memory(epic_context *ctx, const epic_config *config,
                                          const epic_moe *moe, epic_moe_memory_info *out);

/* The parameters of a layer.  The gate and its bias are F32 (F64 rows: F64).  The weights of
 * the experts and of the shared expert have their weight_type. */
typedef struct epic_moe_weights {
    const void *w_gate;          /* [hidden, E]: weights of the gate */
    const void *b_gate;          /* [E], added to the logits; NULL: none */
    const float *bias;           /* [E], added to the scores for the choice only; NULL: none */
    const void *scale_of_expert; /* [E], type of w_gate: like
                                    epic_router_args.scale_of_expert; NULL: 1 */
    const void *w_gate_up;       /* weights of the local experts, like epic_experts_args */
    const void *w_down;
    const void *b_gate_up;
    const void *b_down;
    const void *shared_gate_up; /* weights of the shared expert, if the layer has one */
    const void *shared_down;
    const void *shared_b_gate_up;
    const void *shared_b_down;
    const void *w_shared_gate;     /* [hidden], type of w_gate: the output of the shared
                                      expert is multiplied by sigmoid(x w_shared_gate); NULL:
                                      by 1 */
    const float *w_gate_up_scales; /* with E4M3 weights: like epic_experts_args; in backward
                                      like epic_experts_backward_args, or NULL */
    const float *w_down_scales;
} epic_moe_weights;

/* Arguments of epic_moe_plan and epic_moe_forward. */
typedef struct epic_moe_args {
    epic_call call;
    const epic_moe *moe;
    const epic_moe_weights *weights;
    epic_const_rows x;     /* [num_tokens, hidden] of the experts' row_type */
    epic_rows out;         /* out, shape and type of x; must not be x */
    const void *token_ids; /* token_ids, table, table_rows: as in epic_router_args */
    const int32_t *table;
    int64_t table_rows;
    const int32_t *rank_of_expert;    /* [num_experts]; NULL: contiguous blocks */
    const int32_t *logical_of_expert; /* like epic_plan_args.logical_of_expert */
    void *saved;                      /* out; begins with the plan, which epic_sum_replicas
                                         reads */
    int64_t saved_bytes;
    void *workspace;
    int64_t workspace_bytes;
    void *loss;                  /* out [1]: balance loss + z-loss; NULL: not wanted, like the
                                    outputs below */
    void *balance_loss;          /* out [1]: the balance loss alone */
    void *z_loss;                /* out [1]: the z-loss alone */
    int32_t *load;               /* out [num_experts]: like epic_plan_args.load */
    int32_t *logical_load;       /* out [num_logical]: like epic_plan_args.logical_load */
    int32_t *demand;             /* out [1]: like epic_plan_args.demand */
    uint32_t token_id_type;      /* epic_type of token_ids: I32 or I64; 0: I32 */
    uint32_t loss_type;          /* epic_type of losses: F32, or F64 with F64 rows; 0: F32 */
    uint32_t flags;              /* 0 or EPIC_PLANNED */
    uint32_t reserved;           /* must be 0 */
    const int32_t *topk_idx_in;  /* [num_tokens, top_k]: forced expert ids, used instead of the
                                    router's choice; negative: no expert; NULL: the router
                                    chooses */
    const void *topk_weights_in; /* [num_tokens, top_k], type of w_gate, with topk_idx_in: their
                                    weights; NULL: the router computes them */
    int32_t *topk_idx_out;       /* out [num_tokens, top_k]: the ids that the layer used */
    void *topk_weights_out;      /* out [num_tokens, top_k], type of w_gate: their weights */
    const int32_t *capacity_limit; /* [1]; like epic_plan_args.capacity_limit, for
                                      moe.capacity; NULL: no other limit */
} epic_moe_args;

/* Computes the layer.  For each token, `out` is the weighted sum of its experts' outputs, plus
 * weight * x for each zero-expert, plus the output of the shared expert.  experts->weighting
 * selects where rows are multiplied by the weights of choices.
 *
 * F64 rows.  All values are float64, also the weights of choices and their gradients.  These
 * are sent with the rows, so config.max_row_bytes must be at least 8 * top_k.  EPIC_WEIGHT_LATE
 * is computed as EPIC_WEIGHT_EARLY, which gives the same value.
 *
 * Record and replay.  topk_idx_out and topk_weights_out return the routing.  topk_idx_in forces
 * ids, such as those of another run.  It must not be combined with token_ids.  A rank may force
 * ids while the routers of other ranks choose.
 *   - Without topk_weights_in, the weights of forced ids are computed from the router's scores,
 *     and the router has the same gradients as without forced ids.
 *   - With topk_weights_in, the weights are used as they are, without scale_of_expert.  Then
 *     the router and scale_of_expert have no gradients, except those of the losses.
 *   - The losses use the scores of all experts, and the load that the forced ids cause.
 *   - With EPIC_PLANNED, epic_moe_forward does not read topk_idx_in and topk_weights_in,
 *     because epic_moe_plan has read them.  This is also true for capacity_limit.
 *
 * If the caller sets sum_order to EPIC_TREE, and all ranks have equally many tokens, outputs
 * and gradients have the same bits for every number of ranks.  With EPIC_SUM_DENSE this is also
 * true for the losses and for the gradients of the gate and the shared expert.  These are
 * summed in blocks of tokens, and the blocks are added in the tree.  The T tokens of a rank
 * form B = leaves / num_ranks blocks, some of which may be empty.  Block b begins at token
 * floor(b * T / B).  If the balance loss is computed per sequence, whole sequences take the
 * place of tokens.  None of this applies if EPIC_BY_HOSTS selects the tree.
 *
 * EPIC_INVARIANT:
 *   - The rows of a token in `out` and d_x depend only on its rows of x and d_out, its choices
 *     and their weights, the parameters and `leaves`.  They do not depend on other tokens, on
 *     the numbers of tokens, ranks, hosts and SMs, on the capacity or on the alignment.  But
 *     the gradients of losses, which are a part of d_x, depend on all tokens.
 *   - Gradients of parameters have the bits that EPIC_TREE promises.
 *   - The layer must have EPIC_TREE, `leaves` and EPIC_OVERFLOW_ERROR, and no gemm.
 *   - All replicas of a logical expert must have equal weights, and be in one leaf (of
 *     num_experts / leaves consecutive experts).  A choice may go to another replica in another
 *     batch, and a replica in another leaf would change the order of the sum.  CUDA contexts do
 *     not check this.
 *   - Host contexts multiply with EPIC's own kernels.  The bits then depend neither on OpenBLAS
 *     nor on the processor, and BF16 rows do not use oneDNN.
 *   - On CUDA contexts x, d_out, d_x and weights must begin at multiples of 16 bytes.  Results
 *     of CUDA contexts have other bits than results of host contexts, and may have other bits
 *     on another model of GPU.
 *
 * experts->weight_type E4M3, on CUDA contexts only:
 *   - Dispatch quantizes the rows (1x128) when it sends them.
 *   - epic_moe_forward takes weights and biases like epic_experts_forward: transposed, with
 *     scales.
 *   - Forward does not save the received rows, so moe.flags must have EPIC_DISPATCH_AGAIN.
 *   - epic_moe_backward takes weights that are not transposed: [num_local_experts, hidden,
 *     width] and [num_local_experts, inner, hidden].  They are either the weights of row_type
 *     from which the E4M3 weights were made, or E4M3 weights with scales, as in
 *     epic_experts_backward.
 *   - Gradients are computed as if rows and weights had not been rounded to e4m3.
 *   - With EPIC_RECOMPUTE, backward needs weights of row_type.  It does not round the values
 *     that it computes again.
 *
 * Errors:  (a) EPIC_EINVAL, EPIC_ENOTSUP; (b) EPIC_EINVAL, also for invalid token ids,
 *          entries of the table and forced ids, and EPIC_EOVERFLOW; (c).
 * Threads: collective.
 * CUDA:    all arrays are on the device, also the losses and their gradients.  The host never
 *          waits, and a CUDA graph can contain the call.  A rank_of_expert that gives a rank
 *          more than num_local_experts experts is a class (b) error.  F64 rows and shared->gemm
 *          are EPIC_ENOTSUP. */
static inline epic_result epic_moe_forward(epic_context *ctx, const epic_moe_args *args);

/* Runs the first part of epic_moe_forward, up to the plan.  The caller can then allocate memory
 * for the slots that really arrive, instead of for the worst case:
 *
 *     moe.capacity = EPIC_CAPACITY_EXACT      epic_moe_memory returns what the plan needs
 *     epic_moe_plan(ctx, &args, &slots)
 *     moe.capacity = slots                    epic_moe_memory returns what the rest needs
 *     args.flags = EPIC_PLANNED               args.saved: the new size, beginning with a copy
 *                                             of the old contents
 *     epic_moe_forward(ctx, &args)            and backward as usual, with this capacity
 *
 * All ranks do this or none.  *slots is the number of slots of this rank's experts, with
 * padding.  If it is 0, moe.capacity may be 0 in the second part.  `out` and the losses are not
 * written.
 * Errors:  those of epic_plan.
 * Threads: collective.
 * CUDA:    the host waits for the stream and for all ranks, and then returns errors in the
 *          data, too.  EPIC_ENOTSUP if the stream is being captured. */
static inline epic_result epic_moe_plan(epic_context *ctx, const epic_moe_args *args,
                                        int64_t *slots);

/* Gradients of the parameters of a layer.  They are float32 (F64 rows: float64); those of the
 * experts have the type epic_moe_backward_args.grad_type.  NULL: not wanted. */
typedef struct epic_moe_gradients {
    void *w_gate;
    void *b_gate;
    void *scale_of_expert; /* must be NULL if weights.scale_of_expert is NULL */
    void *w_gate_up; /* of the local experts, summed over all tokens.  With replicas: summed
                        over the choices that each replica computed; epic_sum_replicas adds
                        them */
    void *w_down;
    void *b_gate_up;
    void *b_down;
    void *shared_gate_up;
    void *shared_down;
    void *shared_b_gate_up;
    void *shared_b_down;
    void *w_shared_gate;
} epic_moe_gradients;

/* Arguments of epic_moe_backward.  moe, weights and x must have the values of forward. */
typedef struct epic_moe_backward_args {
    epic_call call;
    const epic_moe *moe;
    const epic_moe_weights *weights;
    epic_const_rows x;
    epic_const_rows d_out; /* [num_tokens, hidden]: gradient of `out` of forward */
    epic_rows d_x;         /* out; data NULL: this rank does not want it */
    const epic_moe_gradients *gradients; /* NULL: no gradients of parameters */
    const void *saved;                   /* the buffer `saved` as forward wrote it */
    int64_t saved_bytes;
    void *workspace;
    int64_t workspace_bytes;
    /* [1] each, equal on all ranks: gradients of the outputs loss, balance_loss and z_loss of
     * forward. NULL stands for 1 if it is d_loss, otherwise for 0 */
    const void *d_loss;
    const void *d_balance_loss;
    const void *d_z_loss;
    uint32_t flags;     /* EPIC_ACCUMULATE, for `gradients`; EPIC_FORCED_WEIGHTS */
    uint32_t loss_type; /* epic_type of the gradients of the losses, as in forward */
    /* epic_type of the gradients of w_gate_up, w_down and their biases, as in
     * epic_experts_backward_args */
    uint32_t grad_type;
    uint32_t reserved;       /* must be 0 */
    void *d_topk_weights_in; /* out [num_tokens, top_k], type of w_gate, with
                                EPIC_FORCED_WEIGHTS: the gradient of topk_weights_in; NULL:
                                not wanted */
} epic_moe_backward_args;

/* Computes the gradients of epic_moe_forward: the gradients of `out` plus the gradients of the
 * three losses.
 * Errors:  those of epic_combine_backward and epic_dispatch_backward; (b) EPIC_EINVAL if
 *          `saved` is damaged.
 * Threads: collective.
 * CUDA:    as epic_moe_forward. */
static inline epic_result epic_moe_backward(epic_context *ctx,
                                            const epic_moe_backward_args *args);

/* -------------------------------------------------------------------------- advanced ---- */

/* A bootstrap.  Only epic_open uses it.  {.num_ranks = 1} is a group of one rank, even if the
 * environment names a larger group. */
struct epic_bootstrap {
    int32_t rank;
    int32_t num_ranks;
    /* Sends `bytes` bytes from every rank to all ranks, and stores them in `all`, ordered by
     * rank. Waits for all ranks.  `bytes` is equal on all ranks.  Returns EPIC_OK, or the
     * reason why the bootstrap failed. */
    epic_result (*gather)(void *self, const void *mine, void *all, int64_t bytes);
    void (*close)(void *self); /* called by epic_bootstrap_close; NULL: nothing to do */
    void *self;                /* first argument of both functions */
};

/* Arguments of epic_bootstrap_tcp. */
typedef struct epic_tcp {
    const char *address; /* address of rank 0's host; NULL: 127.0.0.1 */
    const char *secret;  /* NULL: none.  Both sides prove by HMAC-SHA-256 that they know the
                            secret.  The secret is never sent, and it authenticates all
                            messages of the bootstrap */
    int32_t rank;
    int32_t num_ranks;
    uint32_t port;       /* port on rank 0's host, 1 to 65535 */
    uint32_t timeout_ms; /* deadline of every gather, in milliseconds; 0: 300000 */
} epic_tcp;

/* Makes a bootstrap over TCP; rank 0 listens.  `address` must be an address of rank 0's host.
 *
 * With a secret, rank 0 listens on that address.  Some systems, such as Debian, resolve the
 * host's own name to a loopback address; rank 0 then listens on all addresses of its host.  A
 * process that does not know the secret cannot take the place of a rank.  It can make the
 * bootstrap fail only by cutting connections or by occupying the port.
 *
 * Without a secret, rank 0 listens only on loopback, so that programs on other hosts cannot
 * connect.  So all ranks must be processes of one host.  A rank of another host immediately
 * returns an error that asks for a secret.  Connections of programs that are not ranks are
 * refused, and the bootstrap continues.
 * docs/guide/security.md describes what a secret protects.
 * Errors:  EPIC_EINVAL, EPIC_ETIMEOUT (names the ranks that are missing), EPIC_EPEER,
 *          EPIC_EDEVICE, EPIC_ENOTSUP (a secret without libcrypto).  epic_error(NULL) returns
 *          the error text.
 * Threads: collective.
 * CUDA:    no difference. */
static inline epic_result epic_bootstrap_tcp(epic_bootstrap *out, const epic_tcp *tcp);

/* Makes a bootstrap over TCP from the environment variables of the launcher, or a group of one
 * rank if none of them is set.  docs/reference/environment.md lists the variables.
 *
 * If a variable shows that there are several ranks, the call never makes a group of one rank.
 * It returns EPIC_EINVAL if the number of ranks is unknown or if two launchers contradict each
 * other.
 * Errors:  those of epic_bootstrap_tcp.
 * Threads: collective.
 * CUDA:    no difference. */
EPIC_API epic_result epic_bootstrap_env(epic_bootstrap *out);

/* Makes a bootstrap over an MPI communicator.  `comm` points to an MPI_Comm.  NULL means
 * MPI_COMM_WORLD, and initializes MPI if necessary.  timeout_ms is the deadline of every
 * gather; 0: 300000.  Loads libepic_mpi.so, which must be built for the caller's MPI.
 *
 * Messages use a duplicate of the communicator.  If ranks are missing after half of timeout_ms,
 * the other ranks send messages with tag 32767 on `comm` itself to find the missing ones.
 * Errors:  EPIC_EINVAL, EPIC_ENOTSUP (no libepic_mpi.so), EPIC_ETIMEOUT (names the ranks that
 *          are missing), EPIC_EMISMATCH, EPIC_EDEVICE.
 * Threads: collective over `comm`.  MPI should have MPI_THREAD_MULTIPLE.  With less, no other
 *          thread may be in MPI during the bootstrap.  Backend mpi needs MPI_THREAD_SERIALIZED
 *          at least, and then no thread of the caller may be in MPI while a context is open.
 * CUDA:    no difference. */
EPIC_API epic_result epic_bootstrap_mpi(epic_bootstrap *out, const void *comm,
                                        uint32_t timeout_ms);

/* Makes a bootstrap over an NCCL communicator, which the caller owns.  `comm` is an ncclComm_t,
 * which nccl.h declares as a pointer to struct ncclComm.  timeout_ms is the deadline of every
 * gather; 0: 300000.
 *
 * EPIC calls the NCCL that the process has already loaded, version 2.14 or newer, and does not
 * link it.  If the process has loaded several, an environment variable selects one
 * (docs/reference/environment.md).  epic_open calls only ncclAllGather, on a stream of the
 * bootstrap and in a thread of its own.  So epic_open counts as a collective on `comm`: all
 * ranks must call it at the same place among their own collectives, and no other thread may
 * use `comm` meanwhile.
 *
 * NCCL does not report which rank is missing, so EPIC_ETIMEOUT does not name it.  After a
 * failed gather NCCL may still wait for that rank: abort the communicator (ncclCommAbort).
 * Errors:  EPIC_EINVAL (also: another current device than that of `comm`), EPIC_ENOTSUP (no
 *          libepic_cuda.so, no NCCL or an old one), EPIC_ENOMEM, EPIC_EDEVICE, EPIC_ETIMEOUT.
 *          Gathers also return EPIC_EMISMATCH and EPIC_EPEER.
 * Threads: local; the gathers are collective over `comm`.
 * CUDA:    allocates 4096 (1 + num_ranks) bytes on the current device until the bootstrap is
 *          closed. */
EPIC_API epic_result epic_bootstrap_nccl(epic_bootstrap *out, struct ncclComm *comm,
                                         uint32_t timeout_ms);

/* Fills out[0 .. num_ranks) with bootstraps for num_ranks threads of this process.  timeout_ms
 * is the deadline of every gather; 0: 300000.  Each bootstrap must be closed.
 * Errors:  EPIC_EINVAL, EPIC_ENOMEM.
 * Threads: local.
 * CUDA:    no difference. */
EPIC_API epic_result epic_bootstrap_threads(epic_bootstrap *out, int32_t num_ranks,
                                            uint32_t timeout_ms);

/* Closes a bootstrap.  Allowed as soon as epic_open has returned.  Accepts NULL.
 * Errors:  none.
 * Threads: local.
 * CUDA:    no difference. */
EPIC_API void epic_bootstrap_close(epic_bootstrap *bootstrap);

/* Writes to *bytes the size of a plan for config.num_ranks, config.max_tokens and the layer, or
 * 0 if the call fails.  For an open context, epic_layer_sizes returns this size.
 * Errors:  (a) EPIC_EINVAL.
 * Threads: local.
 * CUDA:    the same size. */
static inline epic_result epic_plan_bytes(const epic_config *config, const epic_layer *layer,
                                          int64_t *bytes);

/* Writes to *slots the smallest capacity of a rank that always suffices, for config.num_ranks,
 * config.max_tokens and the layer, or 0 if the call fails.  It is valid for contiguous blocks
 * of experts, or for every rank_of_expert if num_ranks does not divide num_experts.  For an
 * open context epic_layer_sizes returns both capacities.
 * Errors:  (a) EPIC_EINVAL.
 * Threads: local.
 * CUDA:    the same size. */
static inline epic_result epic_capacity_bound(const epic_config *config,
                                              const epic_layer *layer, int64_t *slots);

/* Memory of a context and of a plan. */
typedef struct epic_memory_info {
    int64_t host_bytes;    /* private host memory of a context */
    int64_t shared_bytes;  /* this rank's part of the host memory that the ranks share */
    int64_t device_bytes;  /* device memory of a context */
    int64_t plan_bytes;    /* bytes of one plan of the layer; 0 without a layer */
    int64_t staging_bytes; /* staging memory of this rank, part of the bytes above; 0 for
                              backend "self" */
} epic_memory_info;

/* Computes how much memory a context and a plan will need, before a context is open.
 * config.num_ranks is required, and layer may be NULL.  A NULL config.backend counts as "shm",
 * and "gpu" as "p2p".
 *
 * For "hosts" the result is an upper bound.  Memory that the network reads and writes is
 * counted in both host_bytes and device_bytes, unless an environment variable selects one of
 * them (docs/reference/environment.md).
 * Errors:  (a) EPIC_EINVAL; EPIC_ENOTSUP if the backend's library cannot be loaded.  If the
 *          backend supports no group with this configuration, for example with so many ranks or
 *          such large rows: the error that epic_open returns.
 * Threads: local.
 * CUDA:    no difference. */
static inline epic_result epic_memory(const epic_config *config, const epic_layer *layer,
                                      epic_memory_info *out);

/* Values of `fate` for choices that have no slot. */
#define EPIC_FATE_NONE (-1)        /* no expert was chosen */
#define EPIC_FATE_EXPERT_FULL (-2) /* dropped: more than expert_capacity */
#define EPIC_FATE_RANK_FULL (-3)   /* dropped: more than the rank's capacity */
#define EPIC_FATE_ABSENT (-4)      /* dropped: the expert is absent */

/* The properties of a plan, read from its bytes. */
typedef struct epic_plan_info {
    uint64_t id;        /* equal on all ranks */
    int64_t num_tokens; /* number of tokens of this rank */
    int64_t num_slots;  /* number of slots in use on this rank, with padding */
    int64_t capacity;   /* the capacity that was passed to epic_plan, or its smaller limit */
    int64_t num_kept;   /* num_kept, num_none, num_expert_full, num_rank_full and num_absent:
                           number of choices of this rank's tokens with this fate.  Together
                           they are num_tokens * top_k */
    int64_t num_none;
    int64_t num_expert_full;
    int64_t num_rank_full;
    uint32_t result; /* an epic_result; after EPIC_EOVERFLOW and EPIC_EINVAL the plan has no
                        slots */
    uint32_t num_local_experts;
    uint32_t first_leaf;  /* with EPIC_TREE: first of this rank's leaves */
    uint32_t num_leaves;  /* with EPIC_TREE: number of this rank's leaves */
    int64_t total_tokens; /* number of tokens of all ranks */
    int64_t fate_offset;  /* offset in bytes of an array in the plan, int32 [num_tokens,
                             top_k]: the slot on the rank that owns the expert, or an
                             EPIC_FATE value */
    int64_t rank_offset;  /* offset in bytes of an array in the plan, int32 [num_tokens,
                             top_k]: the rank that owns the expert, or -1 for no expert and
                             for an absent one; on CUDA contexts also -1 for every other
                             dropped choice */
    int64_t num_absent;
} epic_plan_info;

/* Reads the properties of a plan.  The plan must be finished: synchronize its stream first.
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
    EPIC_OP_SUM = 7,
    EPIC_OP_WINDOW = 8
} epic_operation;

/* The failure that broke a group. */
typedef struct epic_failure_info {
    uint32_t result;    /* an epic_result; EPIC_OK: the group is not broken */
    uint32_t operation; /* an epic_operation */
    uint64_t tag;
    uint64_t sequence; /* sequence number of the operation among those with its tag, from 0;
                          after epic_regroup from generation * 2^32 */
    int32_t rank;      /* the rank that noticed the failure */
    uint32_t num_culprits;
    int32_t culprits[EPIC_MAX_CULPRITS]; /* ranks that caused the failure, in ascending order */
    char sentence[512];                  /* the error text */
} epic_failure_info;

/* Writes to *out the failure that broke the group.  out->result is EPIC_OK if the group is not
 * broken.
 * Errors:  (a) EPIC_EINVAL.
 * Threads: local.
 * CUDA:    no difference. */
static inline epic_result epic_failure(const epic_context *ctx, epic_failure_info *out);

/* How long this rank has waited for one peer, since epic_open.  The values never decrease. */
typedef struct epic_wait_info {
    uint64_t num_operations; /* operations that this rank has begun; equal for all peers */
    uint64_t wait_ns;        /* nanoseconds in which an operation could not continue without
                                data from the peer, or before the peer took data */
    uint64_t alone_ns;       /* part of wait_ns in which the operation waited for no other
                                peer */
} epic_wait_info;

/* Writes to out[r] how long the operations of this rank have waited for rank r.  Use it to find
 * a slow rank: all other ranks wait for it, and most of that time is alone_ns.
 *
 * `operation` is an epic_operation, or EPIC_OP_NONE for the sums over all of them.  `out` has
 * num_ranks elements, and num_ranks is the number of ranks of the group.  If one call makes two
 * operations (epic_plan_dispatch), the wait for the call of a peer counts in the first of them.
 * The times do not contain the time in which this process was suspended.  If several operations
 * of this rank wait at the same time, their times are added.  A peer that is late only because
 * it waits for a third rank counts, too.
 * Errors:  (a) EPIC_EINVAL; EPIC_ENOTSUP if epic_open got no memory for the times.
 * Threads: local.
 * CUDA:    copies from the device and waits for that, but not for kernels; may also fail with
 *          EPIC_EDEVICE.  Waiting kernels count their time about every 25 microseconds, so
 *          waits that are shorter do not count.  The time in which this process was suspended
 *          counts.  epic_plan_dispatch is one operation, EPIC_OP_DISPATCH. */
static inline epic_result epic_waits(const epic_context *ctx, uint32_t operation,
                                     epic_wait_info *out, int32_t num_ranks);

/* Returns the name of the library that multiplies matrices on the host: "OpenBLAS 0.3.21
 * Haswell" or "plain loops".  If oneDNN is used too, ", oneDNN 2.6.3 for bfloat16" follows.
 * Errors:  none.
 * Threads: local.
 * CUDA:    no difference. */
EPIC_API const char *epic_blas_name(void);

/* --------------------------------------------------------------------------- members ---- */

/* Number of words of a set of ranks.  Rank r is in the set if
 * set[r / 64] >> (r % 64) & 1. */
#define EPIC_RANK_WORDS 16

/* Arguments of epic_regroup.  All fields except `step` and `leaving` are equal on all ranks. */
typedef struct epic_regroup_args {
    int64_t step;         /* any value of the caller, usually the last step that this rank has
                              finished; out->least_step is the smallest of all members */
    uint32_t patience_ms; /* how long to wait for a rank that may live and has not made the
                              call, in milliseconds; 0: the context's deadline */
    uint32_t min_members; /* the call fails if fewer members would remain; 0: 1 */
    uint32_t leaving;     /* 1: this rank leaves the group */
    uint32_t flags;       /* must be 0 */
    uint64_t authority;   /* 0: the ranks decide which members remain.  Else a program outside
                              of the group decides, for example an orchestrator, and this is
                              the number of its decision.  A later decision for the same
                              generation needs a higher number */
    const uint64_t *only; /* [(num_ranks + 63) / 64] with authority: set of the ranks that
                              remain; else NULL */
} epic_regroup_args;

/* The members of a group. */
typedef struct epic_members_info {
    uint64_t generation; /* 0 after epic_open; epic_regroup adds 1 */
    uint64_t group_id;   /* random number; equal on all members, and another one in each
                              generation */
    int64_t least_step;  /* least and greatest `step` of the members of this generation, as
                              they passed it to epic_regroup; 0 in generation 0 */
    int64_t greatest_step;
    int32_t num_ranks; /* as epic_num_ranks */
    int32_t num_members;
    uint64_t members[EPIC_RANK_WORDS]; /* set of the members */
    uint64_t gone[EPIC_RANK_WORDS];    /* set of the members of the generation before that are
                                          not in this one */
} epic_members_info;

/* Makes the next *generation* of the group: the set of ranks that continue, its *members*.  Use
 * it after a class (c) error, and when a rank leaves.  All members that live make the call.
 * The members agree on a set that has all of them, except:
 *   - ranks that leave;
 *   - ranks whose process has ended, or that have closed their context.  They are left out at
 *     once;
 *   - ranks that do not make the call within patience_ms.  They are left out only if more than
 *     half of the members have made the call, where members that have died count as members.
 *     Their own calls then return EPIC_EEVICTED;
 *   - with `authority`, the ranks that are not in `only`.  Their calls return EPIC_EEVICTED.
 *     All ranks in `only` must make the call.  Two decisions for one generation must have a
 *     rank in common.
 *
 * After EPIC_OK the group works again, also if it was broken.  The ranks keep their numbers,
 * and num_ranks and all sizes stay as they are.  A rank that is not a member has no part in any
 * operation, and experts that are placed on it are absent (epic_layer).  The results are those
 * of a new group that has only the members.  Every tag starts again, and plans from before are
 * refused (class (b)).  Members that have finished different steps can go back to
 * out->least_step.
 *
 * A rank that has left gets EPIC_OK.  Its further calls return EPIC_EEVICTED, so it closes its
 * context.  After an error nothing has changed, and the rank may make the call again, except
 * after EPIC_EEVICTED.  A call ends after at most 4 patience_ms, on GPUs up to timeout_ms later.
 * It needs the memory of both generations for a moment.  `out` may be NULL.
 * Errors:  (a) EPIC_EINVAL (also while an operation of this rank is running); EPIC_ENOTSUP
 *          (a group that was opened without EPIC_CAN_REGROUP, on a backend other than "shm" and
 *          "threads"; or a context with windows); EPIC_ENOMEM; EPIC_EDEVICE.  Also EPIC_EPEER
 *          if too few members made the call; EPIC_ETIMEOUT; (c) EPIC_EEVICTED.
 * Threads: collective over the members.  No other call may be running on ctx.
 * CUDA:    waits until all work of this process on the device has ended.  If other ranks of the
 *          group are threads of this process on the same device, the caller must synchronize
 *          the streams of the context instead.  Memory, addresses and sizes do not change, so
 *          CUDA graphs that were captured in an earlier generation stay valid.  They keep the
 *          number of leaves (epic_layer) of their capture.  A plan in such a graph with
 *          sum_order EPIC_TREE gets a class (b) error if the number of members is no power of
 *          two, or if an expert is on no member.  The new generation has no windows.  If a
 *          member does not enter the generation in time, the call returns EPIC_ETIMEOUT, and
 *          the new generation is broken. */
static inline epic_result epic_regroup(epic_context *ctx, const epic_regroup_args *args,
                                       epic_members_info *out);

/* Writes the members of the group to *out.  If this rank has left or was evicted, *out
 * describes the last generation of which it was a member.
 * Errors:  (a) EPIC_EINVAL.
 * Threads: local; not while epic_regroup is running on ctx.
 * CUDA:    no difference. */
static inline epic_result epic_members(const epic_context *ctx, epic_members_info *out);

#ifdef __cplusplus
}
#endif

#include "epic/epic_abi.h" /* the symbols behind the typed calls above */

#endif
