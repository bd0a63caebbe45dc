/* SPDX-License-Identifier: Apache-2.0 */
/* The language model.  It predicts the next byte from the last CONTEXT bytes:
 *
 *     x = sum over places of table[place][byte]
 *     x = x + moe(norm(x))            LAYERS times, each with a gain of its own
 *     logits = norm(x) head
 *
 * Every rank has the same number of tokens and all of the dense parameters, but only its own
 * experts.  The tokens of all ranks are cut into LEAVES blocks.  Every sum over tokens is
 * computed for each block, with matrix products of its own.  Then the sums of the blocks are
 * added in a binary tree, first inside each rank, then across the ranks.  So the bits of the
 * results do not depend on the number of ranks. */
#ifndef TRAIN_MODEL_H
#define TRAIN_MODEL_H

#include "group.h"
#include "text.h"

enum { BYTES = 256, LAYERS = 2, EXPERTS = 8, TOP_K = 2, LEAVES = 8 };

/* Bounds for the command line and for checkpoints. hidden and inner are multiples of
 * LEAST_WIDTH. */
enum {
    LEAST_WIDTH = 16,
    MOST_HIDDEN = 4096,
    MOST_INNER = 16384,
    MOST_TOKENS = 1 << 20,
    MOST_STEPS = 1000000
};

/* Numbers of the parameters: first the dense ones, then the experts' by layer and expert. */
enum {
    EMBED = 0,                    /* [CONTEXT, BYTES, hidden] */
    HEAD = 1,                     /* [hidden, BYTES] */
    NORM = 2,                     /* LAYERS + 1 of [hidden] */
    GATE = NORM + LAYERS + 1,     /* LAYERS of [hidden, EXPERTS] */
    UP = GATE + LAYERS,           /* LAYERS * EXPERTS of [hidden, 2 * inner]: gate, up */
    DOWN = UP + LAYERS * EXPERTS, /* LAYERS * EXPERTS of [inner, hidden] */
    NUM_PARAMETERS = DOWN + LAYERS * EXPERTS
};

typedef struct parameter {
    char name[32];
    int64_t count;
    int64_t offset; /* index into the model's four arrays; -1: another rank's expert */
    double spread;  /* standard deviation of the initial values; 0: all are 1 */
    bool decays;
} parameter;

/* Numbers that are summed over the ranks in the same call as the dense gradients. The balance
 * losses of the layers are summed separately, because the order of additions changes the
 * bits. */
enum { SUM_LOSS = 0, SUM_STOP = 1, SUM_BALANCE = 2, NUM_SUMS = 16 };

typedef struct device device; /* device.h */

typedef struct model {
    group group;
    device *device; /* --device cuda: performs everything below on the GPU; else NULL */
    int64_t hidden, inner;
    parameter parameters[NUM_PARAMETERS];
    /* [count] each: values, gradients, and the moments of the optimizer. */
    float *value, *gradient, *first, *second;
    int64_t count, dense_count;
    float *sums; /* [NUM_SUMS], right after the dense gradients */
    epic_layer layer;
    epic_router router;
    epic_experts experts;
    epic_moe moe;
    epic_moe_memory_info moe_memory;
    int32_t load[LAYERS][EXPERTS]; /* choices of the last forward pass, over all ranks */

    /* Buffers of one pass. */
    const unsigned char *const *at;       /* [tokens] bytes to predict */
    int64_t tokens, block;                /* tokens of this rank, and of one block */
    int64_t all_tokens;                   /* tokens of all ranks */
    float *x[LAYERS + 1], *h[LAYERS + 1]; /* [tokens, hidden]: before and after norm */
    float *d_x, *d_h;
    float *logits;        /* [block, BYTES] */
    float *scratch;       /* partial sums of blocks */
    float losses[LEAVES]; /* losses of this rank's blocks */
    void *saved[LAYERS], *work;
    int64_t work_bytes;
} model;

/* Opens a model. tokens: the largest number of tokens of a pass over all ranks; LEAVES
 * divides it. */
model *model_open(const group *g, int64_t hidden, int64_t inner, int64_t tokens, uint64_t seed);
void model_close(model *m);

/* Returns the configuration for the context of such a model. */
epic_config model_config(int num_ranks, int64_t hidden, int64_t tokens);

/* Computes this rank's part of the mean loss in nats per byte. The loss is the sum over
 * ranks. */
bool model_loss(model *m, const unsigned char *const *at, int64_t tokens, float *loss);

/* Computes the loss like model_loss(), and all gradients. Those of the experts are complete.
 * The dense ones and the sums are this rank's part, ready for sum_over_ranks(&m->group,
 * m->gradient, m->dense_count + NUM_SUMS). */
bool model_gradients(model *m, const unsigned char *const *at, int64_t tokens);

/* Writes the logits after each context to out [tokens, BYTES]. */
bool model_predict(model *m, const unsigned char *const *at, int64_t tokens, float *out);

/* Describes a parameter of a model of these widths: name, size and initial values. */
void parameter_describe(parameter *out, int number, int64_t hidden, int64_t inner);

/* Returns the rank that owns an expert's parameter; -1: all ranks have it. */
int model_owner(const model *m, int number);

#endif
