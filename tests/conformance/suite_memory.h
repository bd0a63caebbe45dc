/* SPDX-License-Identifier: Apache-2.0 */
/* Where the contexts of a backend compute.  The suite makes and checks every array in host memory
 * and lends a call copies of them: for host backends by malloc and memcpy, for others in the
 * memory of a device. */
#ifndef SUITE_MEMORY_H
#define SUITE_MEMORY_H

#include <stdbool.h>

#include "epic/epic.h"

/* What a backend may lack; a call that needs it must be refused with EPIC_ENOTSUP. */
enum suite_need {
    SUITE_QUANTIZE = 1, /* quantizing on the way */
    SUITE_SCALES = 2,   /* a second row array */
    SUITE_F64 = 4,      /* sums of float64 */
    SUITE_EXPERTS = 8,  /* more experts than most_experts */
    SUITE_BY_K = 16, /* dropping by EPIC_BY_K with more num_experts * top_k than most_experts */
    SUITE_REPLICAS = 32 /* layer.num_logical */
};

/* The hooks are called by a rank's thread. */
typedef struct suite_memory {
    void (*open)(
        const epic_bootstrap *bootstrap); /* before its first context; NULL: nothing to do */
    void (*close)(void);                  /* after its last one; NULL */
    void *(*allocate)(int64_t bytes);     /* at an address that 16 divides */
    void (*release)(void *memory);
    void (*copy)(void *to, const void *from, int64_t bytes); /* either way; done on return */
    void (*synchronise)(void);          /* with the calls; NULL: they wait */
    epic_stream (*stream)(void);        /* for the calls; NULL: none */
    uint32_t (*max_sms)(int num_ranks); /* of one context, of two a rank; NULL: 0 */
    bool device;                        /* CUDA contexts: calls of all tags come in one order */
    uint32_t lacks;                     /* of suite_need */
    uint32_t most_experts;              /* with SUITE_EXPERTS */
} suite_memory;

extern const suite_memory *suite_there; /* the host's, unless a main says otherwise */

#endif
