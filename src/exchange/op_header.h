/* SPDX-License-Identifier: Apache-2.0 */
/* The op header is the first message that every rank sends in an operation. This file names its
 * elements and declares the functions that compare two headers.
 *
 * Every rank reads the headers of all ranks, so all ranks find the same difference or the same
 * reported error, and return the same result. */
#ifndef EPIC_OP_HEADER_H
#define EPIC_OP_HEADER_H

#include "backend/transport.h"
#include "exchange/layer_options.h"

enum { /* elements of epic_op_header.common */
       COMMON_OPERATION,
       COMMON_PLAN,
       COMMON_TYPE,
       COMMON_ROW_BYTES,
       COMMON_SCALE_BYTES,
       COMMON_QUANTIZE,
       COMMON_WEIGHTS,
       COMMON_NUM_EXPERTS,
       COMMON_NUM_LOGICAL,
       COMMON_TOP_K,
       COMMON_ALIGNMENT,
       COMMON_LAYOUT,
       COMMON_OVERFLOW,
       COMMON_EXPERT_CAPACITY,
       COMMON_PRIORITY,
       COMMON_SUM_ORDER,
       COMMON_LEAVES,
       COMMON_PARTIAL_TYPE,
       COMMON_PLACEMENT,
       COMMON_REPLICAS,
       COMMON_COUNT,
       COMMON_LAYER_FLAGS,
       COMMON_OPTIONS, /* layer_options.hash; 0: the ranks do not compare their options */
       /* layer_options.weights_hash; 0: the ranks do not compare their weights */
       COMMON_LAYER_WEIGHTS,
       NUM_COMMON
};

enum { /* elements of epic_op_header.local */
       LOCAL_TOKENS,
       LOCAL_CAPACITY,
       /* number of rows of the caller's array that has one row per slot; in EPIC_OP_WINDOW:
        * size of the window in bytes */
       LOCAL_ROWS,
       LOCAL_NEEDED_ROWS, /* number of slots that the plan uses */
       /* result of dispatch_signature() for the dispatch that follows this plan in the same
        * public call; 0: no dispatch follows */
       LOCAL_NEXT_DISPATCH,
       LOCAL_ERROR,         /* an enum data_error */
       LOCAL_ERROR_DETAILS, /* index of the first of four details about LOCAL_ERROR */
       /* window_place() of each output (enum window_output) of this rank */
       LOCAL_WINDOWS = LOCAL_ERROR_DETAILS + 4,
       NUM_LOCAL = LOCAL_WINDOWS + 3 /* 3 is NUM_WINDOW_OUTPUTS, which is defined below */
};

/* The outputs of one operation that may lie in windows. */
enum window_output { WINDOW_ROWS, WINDOW_SCALES, WINDOW_WEIGHTS, NUM_WINDOW_OUTPUTS };

/* The errors in the data of a rank. The comment of each error lists its details, in the order
 * in which data_fault.about stores them. */
enum data_error {
    DATA_OK,
    DATA_EXPERT, /* An expert id is out of range. Details: token, k, id, number of valid ids. */
    /* A token has an expert twice in a layer with EPIC_DISTINCT. Details: token, k, id. */
    DATA_DUPLICATE,
    /* The owner of an expert is invalid. Details: expert, owner, enum placement_error,
     * members. */
    DATA_PLACEMENT,
    /* An entry of logical_of_expert is invalid (details: expert, logical expert, num_logical),
     * or a logical expert has no replica (details: -1, logical expert). */
    DATA_REPLICAS,
    DATA_PLAN, /* The bytes of a plan are damaged. Detail: an enum plan_damage. */
    /* An element of token_ids (the row of the router's table for a token) is out of range.
     * Details: token, id, table_rows. */
    DATA_TOKEN_ID,
    /* An expert id in the router's table is invalid. Details: row, k, id, number of ids. */
    DATA_TABLE,
    /* A forced expert id (topk_idx_in) is invalid. Details: token, k, id, number of ids. */
    DATA_FORCED,
    /* The forward call that should have written `saved` of epic_moe_backward failed or never
     * ran. No details. */
    DATA_SAVED,
    /* A part of the argument `saved` is damaged. Details: an enum saved_part, index, value. */
    DATA_SAVED_PART,
    /* A window cannot be added. Detail: an epic_result. epic_op_header.bytes: error text. */
    DATA_WINDOW
};

enum saved_part { SAVED_TOKENS, SAVED_ROWS, SAVED_COUNT, SAVED_CHOICE };

/* An error that a rank found in its own data before an operation. The rank still takes part and
 * reports the error in its op header, so that all ranks return the error. */
typedef struct data_fault {
    int64_t error;    /* an enum data_error; DATA_OK: no error */
    int64_t about[4]; /* the details of the error */
} data_fault;

/* Data that src/moe adds to the op header of an operation. */
typedef struct op_header_extra {
    const data_fault *fault;      /* error in this rank's data; NULL: no error */
    const layer_options *options; /* options of the layer; NULL: unknown */
} op_header_extra;

/* Stores an error in an op header. Does nothing if `fault` is NULL or contains DATA_OK. */
void op_header_set_fault(epic_op_header *header, const data_fault *fault);

/* Stores the options of a layer in an op header. Does nothing if `options` is NULL. */
void op_header_set_options(epic_op_header *header, const layer_options *options);

/* Returns the name of an epic_operation for error texts. */
const char *operation_name(uint32_t operation);

/* Returns true if the op headers of two ranks describe the same operation. If not, writes the
 * first difference to `sentence`. If one of the headers reports an error, compares only the
 * operation, because its other fields are empty. */
bool op_header_compare(const epic_op_header *a, int rank_a, const epic_op_header *b, int rank_b,
                       char *sentence, size_t size);

/* Returns true if the layer that a caller passed equals the layer of its plan. If not, writes
 * the first difference to `sentence`. */
bool op_header_compare_layer(const epic_op_header *given, const epic_op_header *plan,
                             char *sentence, size_t size);

/* Returns the error that the headers report, or EPIC_OK. If several headers report an error,
 * returns the error of the lowest rank, so every rank returns the same result and text. */
epic_result op_header_data_error(const epic_op_header *const *headers, int num_ranks);

#endif
