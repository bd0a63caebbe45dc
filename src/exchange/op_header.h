/* SPDX-License-Identifier: Apache-2.0 */
/* The note that every rank publishes at the start of an operation: what must be equal, and what
 * this rank brings. */
#ifndef EPIC_OP_HEADER_H
#define EPIC_OP_HEADER_H

#include "backend/transport.h"
#include "exchange/layer_options.h"

enum { /* epic_op_header.common */
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
       COMMON_OPTIONS,       /* layer_options.hash; 0: not compared, as the next */
       COMMON_LAYER_WEIGHTS, /* layer_options.weights_hash */
       NUM_COMMON
};

enum { /* epic_op_header.local */
       LOCAL_TOKENS,
       LOCAL_CAPACITY,
       LOCAL_ROWS,          /* of the receive buffer */
       LOCAL_NEEDED_ROWS,   /* slots that the plan occupies */
       LOCAL_NEXT_DISPATCH, /* of the dispatch that follows in the same call: the same number for
                      rows that may travel together; 0: none follows */
       LOCAL_ERROR,         /* an enum data_error, then what it is about */
       LOCAL_ERROR_DETAILS,
       NUM_LOCAL = LOCAL_ERROR_DETAILS + 4
};

enum data_error {
    DATA_OK,
    DATA_EXPERT,    /* token, k, value */
    DATA_DUPLICATE, /* token, k, value */
    DATA_PLACEMENT, /* expert, value */
    DATA_REPLICAS,  /* expert (-1: none has it), logical expert, num_logical */
    DATA_PLAN,      /* an enum plan_damage */
    DATA_TOKEN_ID,  /* token, value, table_rows */
    DATA_TABLE,     /* row, k, value, experts */
    DATA_SAVED,     /* of a forward that failed, or of none */
    DATA_SAVED_PART /* an enum saved_part, place, value */
};

enum saved_part { SAVED_TOKENS, SAVED_ROWS, SAVED_COUNT, SAVED_CHOICE };

/* What a rank found wrong in its own data before an operation: it takes part all the same, with
 * this in its note, so that every rank gets the same error. */
typedef struct data_fault {
    int64_t error; /* an enum data_error; DATA_OK: nothing */
    int64_t about[4];
} data_fault;

/* What a caller inside the core adds to the note of an operation. */
typedef struct op_header_extra {
    const data_fault *fault;      /* NULL: none */
    const layer_options *options; /* NULL: not known */
} op_header_extra;

/* Puts a fault into a note; NULL is allowed. */
void op_header_set_fault(epic_op_header *note, const data_fault *fault);

/* Puts the options of a layer into a note; NULL is allowed. */
void op_header_set_options(epic_op_header *note, const layer_options *options);

const char *operation_name(uint32_t operation);

/* Do two ranks' notes describe the same operation?  false: `sentence` says what differs. */
bool op_header_compare(const epic_op_header *a, int rank_a, const epic_op_header *b, int rank_b,
                       char *sentence, size_t size);

/* Compares the layer of a call with that of its plan.  Returns false if a field differs, which
 * `sentence` names then. */
bool op_header_compare_layer(const epic_op_header *given, const epic_op_header *plan,
                             char *sentence, size_t size);

/* The class (b) error that the notes of all ranks tell, in the same words on every rank. */
epic_result op_header_data_error(const epic_op_header *const *notes, int num_ranks);

#endif
