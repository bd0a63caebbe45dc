/* SPDX-License-Identifier: Apache-2.0 */
/* The op header is the first message that every rank sends in an operation. This file names its
 * elements and declares the functions that compare two headers.
 *
 * Every rank reads the headers of all ranks. So all ranks find the same difference between two
 * headers, or the same reported error, and return the same result. */
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
       COMMON_OPTIONS,       /* layer_options.hash; 0: not compared */
       COMMON_LAYER_WEIGHTS, /* layer_options.weights_hash; 0: not compared */
       NUM_COMMON
};

enum { /* elements of epic_op_header.local */
       LOCAL_TOKENS,
       LOCAL_CAPACITY,
       LOCAL_ROWS,          /* rows of the receive buffer */
       LOCAL_NEEDED_ROWS,   /* slots that the plan occupies */
       LOCAL_NEXT_DISPATCH, /* dispatch_signature() of a dispatch in the same call, or 0 */
       LOCAL_ERROR,         /* an enum data_error; its details follow */
       LOCAL_ERROR_DETAILS,
       /* where the outputs of this rank lie in its windows: window_place() of each
          enum window_output */
       LOCAL_WINDOWS = LOCAL_ERROR_DETAILS + 4,
       NUM_LOCAL = LOCAL_WINDOWS + 3 /* NUM_WINDOW_OUTPUTS */
};

/* The outputs of one operation that may lie in windows. */
enum window_output { WINDOW_ROWS, WINDOW_SCALES, WINDOW_WEIGHTS, NUM_WINDOW_OUTPUTS };

enum data_error {
    DATA_OK,
    DATA_EXPERT,     /* details: token, k, id */
    DATA_DUPLICATE,  /* details: token, k, id */
    DATA_PLACEMENT,  /* details: expert, rank */
    DATA_REPLICAS,   /* details: expert or -1, logical expert, num_logical */
    DATA_PLAN,       /* details: an enum plan_damage */
    DATA_TOKEN_ID,   /* details: token, id, table_rows */
    DATA_TABLE,      /* details: row, k, id, number of experts */
    DATA_FORCED,     /* details: token, k, id, number of experts */
    DATA_SAVED,      /* `saved` is from a forward that failed or never ran */
    DATA_SAVED_PART, /* details: an enum saved_part, index, value */
    DATA_WINDOW      /* details: an epic_result; the sentence is in `bytes` */
};

enum saved_part { SAVED_TOKENS, SAVED_ROWS, SAVED_COUNT, SAVED_CHOICE };

/* An error that a rank found in its own data before an operation. The rank still takes part in
 * the operation and reports the error in its op header, so that all ranks return the same
 * error. */
typedef struct data_fault {
    int64_t error; /* an enum data_error; DATA_OK: no error */
    int64_t about[4];
} data_fault;

/* Data that src/moe adds to the op header of an operation. */
typedef struct op_header_extra {
    const data_fault *fault;      /* error in this rank's data; NULL: no error */
    const layer_options *options; /* options of the layer; NULL: unknown */
} op_header_extra;

/* Stores an error in this rank's data in its op header. Does nothing if `fault` is NULL or
 * DATA_OK. */
void op_header_set_fault(epic_op_header *header, const data_fault *fault);

/* Stores the options of a layer in an op header. Does nothing if options is NULL. */
void op_header_set_options(epic_op_header *header, const layer_options *options);

/* Returns the name of an epic_operation as errors print it. */
const char *operation_name(uint32_t operation);

/* Returns whether two ranks' op headers describe the same operation. If not, writes the first
 * difference to `sentence`. If a header reports an error in its rank's data, its other fields
 * are not filled in, so only the operation is compared. */
bool op_header_compare(const epic_op_header *a, int rank_a, const epic_op_header *b, int rank_b,
                       char *sentence, size_t size);

/* Returns whether the layer that a caller passed equals the layer of its plan. If not, writes
 * the first field that differs to `sentence`. */
bool op_header_compare_layer(const epic_op_header *given, const epic_op_header *plan,
                             char *sentence, size_t size);

/* Returns the error that the headers report, or EPIC_OK. If several ranks report one, the
 * lowest rank counts. So every rank returns the same result and sentence. */
epic_result op_header_data_error(const epic_op_header *const *headers, int num_ranks);

#endif
