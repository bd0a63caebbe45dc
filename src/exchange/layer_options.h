/* SPDX-License-Identifier: Apache-2.0 */
/* Lists the options of a layer that must be equal on all ranks. They are sent as 32-bit words
 * of an op header (the first message of each rank in an operation).
 *
 * If an option differs between ranks, for example the activation, all shapes still fit but the
 * results are wrong. Therefore the first op header of each pass contains a hash of all options.
 * If two hashes differ, the words in the headers show which option differs. */
#ifndef EPIC_LAYER_OPTIONS_H
#define EPIC_LAYER_OPTIONS_H

#include "backend/transport.h"

/* number of 32-bit words for options in an op header; a double takes two words */
#define OPTION_WORDS (sizeof(((epic_op_header *)0)->options) / sizeof(uint32_t))

typedef struct layer_options {
    uint64_t hash; /* hash of the options in `words`; 0: unknown, so ranks do not compare it */
    /* hash of the words for weights (layer_weight); 0: unknown, so ranks do not compare it */
    uint64_t weights_hash;
    uint32_t words[OPTION_WORDS];
} layer_options;

/* The weights of a layer that either all ranks or no rank must pass. The op header has one word
 * for each weight: 0 if the pointer is NULL. If the pointer is not NULL, the word is 1 or, with
 * EPIC_CHECK_WEIGHTS, a checksum of the weight. */
typedef enum layer_weight {
    WEIGHT_W_GATE,
    WEIGHT_B_GATE,
    WEIGHT_BIAS,
    WEIGHT_SCALE_OF_EXPERT,
    WEIGHT_SHARED_GATE_UP,
    WEIGHT_SHARED_DOWN,
    WEIGHT_SHARED_B_GATE_UP,
    WEIGHT_SHARED_B_DOWN,
    WEIGHT_W_SHARED_GATE,
    WEIGHT_B_GATE_UP, /* never a checksum, because each rank owns different experts */
    WEIGHT_B_DOWN,    /* never a checksum, for the same reason */
    NUM_LAYER_WEIGHTS
} layer_weight;

/* Reads the options of the layer that the caller passed. If moe is NULL, ranks do not compare
 * the options. Returns EPIC_EINVAL if the router or the experts are missing. */
epic_result layer_options_read(layer_options *out, const epic_moe *moe);

/* Fills in the options from full-size copies (READ_SIZED, base/sized.h) of the caller's
 * structs; `shared` may be NULL. layer_options_set_weights() adds the words about the
 * weights. */
void layer_options_fill(layer_options *out, const epic_moe *moe, const epic_router *router,
                        const epic_experts *experts, const epic_experts *shared);

/* Fills in the header words about weights. are_checked is true if `words` are checksums
 * (EPIC_CHECK_WEIGHTS). */
void layer_options_set_weights(layer_options *out, bool are_checked,
                               const uint32_t words[NUM_LAYER_WEIGHTS]);

/* Returns the header word for a weight of `bytes` bytes at `data`: 0 if data is NULL; otherwise
 * a checksum of the weight if is_checked is true, and 1 if not. */
uint32_t layer_options_weight_word(const void *data, int64_t bytes, bool is_checked);

/* Writes a text with the first option or weight that differs between two op headers. Called if
 * the hashes in the two headers differ. */
void layer_options_describe_difference(const epic_op_header *a, int rank_a,
                                       const epic_op_header *b, int rank_b, char *sentence,
                                       size_t size);

#endif
