/* SPDX-License-Identifier: Apache-2.0 */
/* The memory in which the contexts of a backend compute. The suite makes and checks every
 * array in host memory and gives copies to each call: in malloc memory for host backends, in
 * device memory for others. */
#ifndef SUITE_MEMORY_H
#define SUITE_MEMORY_H

#include <stdbool.h>

#include "epic/epic.h"

/* Features that a backend may lack. A call that needs one must be refused with EPIC_ENOTSUP. */
enum suite_need {
    SUITE_QUANTIZE = 1,  /* quantizing in dispatch */
    SUITE_SCALES = 2,    /* a second array of rows, for scales */
    SUITE_F64 = 4,       /* sums of float64 */
    SUITE_EXPERTS = 8,   /* more experts than most_experts */
    SUITE_BY_K = 16,     /* EPIC_BY_K with num_experts * top_k above most_experts */
    SUITE_REPLICAS = 32, /* layer.num_logical */
    SUITE_TREE = 64      /* layer.sum_order EPIC_TREE */
};

/* Functions of a backend's test, called by the thread of a rank. */
typedef struct suite_memory {
    /* called before the first context; may be NULL */
    void (*open)(const epic_bootstrap *bootstrap);
    /* called after the last context; may be NULL */
    void (*close)(void);
    void *(*allocate)(int64_t bytes); /* returns memory at a multiple of 16 */
    void (*release)(void *memory);
    /* copies in either direction, and returns when the copy is complete */
    void (*copy)(void *to, const void *from, int64_t bytes);
    void (*synchronise)(void);   /* waits for the calls; NULL: calls wait themselves */
    epic_stream (*stream)(void); /* returns the stream for the calls; NULL: no stream */
    /* returns the SMs of one context, for two contexts per rank; NULL: 0 */
    uint32_t (*max_sms)(int num_ranks);
    bool device;           /* CUDA contexts: calls of all tags must come in one order */
    uint32_t lacks;        /* bits of suite_need */
    uint32_t most_experts; /* used with SUITE_EXPERTS */
} suite_memory;

/* where the arrays of calls are: host memory, unless a main function sets another memory */
extern const suite_memory *suite_there;

#endif
