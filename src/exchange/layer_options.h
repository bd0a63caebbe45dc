/* SPDX-License-Identifier: Apache-2.0 */
/* The options of a whole layer that must be equal on all ranks, as a note carries them.
 *
 * A rank whose experts have another activation, or whose router has another score, gives wrong
 * results that nobody sees: no shape differs.  So the first note of every pass has a hash of all
 * these options; where two differ, the values beside it say which option it is. */
#ifndef EPIC_LAYER_OPTIONS_H
#define EPIC_LAYER_OPTIONS_H

#include "backend/transport.h"

/* Words of a note for options; a double takes two. */
#define OPTION_WORDS (sizeof(((epic_op_header *)0)->options) / sizeof(uint32_t))

typedef struct layer_options {
    uint64_t hash;         /* of the options; 0: not known, so nothing is compared */
    uint64_t weights_hash; /* of which weights there are, and of checksums; 0: not known */
    uint32_t words[OPTION_WORDS];
} layer_options;

/* Weights that every rank has, each a word of its own: 0 if there is none, 1 if there is one, or
 * a checksum of its numbers. */
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
    WEIGHT_B_GATE_UP, /* of the experts: never a checksum, as ranks have different ones */
    WEIGHT_B_DOWN,
    NUM_LAYER_WEIGHTS
} layer_weight;

/* Reads the options of a caller's layer; NULL: none are known.  EPIC_EINVAL: a part is missing. */
epic_result layer_options_read(layer_options *out, const epic_moe *moe);

/* Takes them from parts that were read; shared may be NULL.  The weights are not known yet. */
void layer_options_fill(layer_options *out, const epic_moe *moe, const epic_router *router,
                        const epic_experts *experts, const epic_experts *shared);

/* Adds the weights.  are_checked: EPIC_CHECK_WEIGHTS asks for checksums. */
void layer_options_set_weights(layer_options *out, bool are_checked,
                               const uint32_t words[NUM_LAYER_WEIGHTS]);

/* The word of a weight: `bytes` bytes of numbers at `data` (NULL: there is none), of which a
 * checksum is taken if `is_checked`. */
uint32_t layer_options_weight_word(const void *data, int64_t bytes, bool is_checked);

/* Writes to `sentence` which option of two notes differs, whose hashes do. */
void layer_options_describe_difference(const epic_op_header *a, int rank_a,
                                       const epic_op_header *b, int rank_b, char *sentence,
                                       size_t size);

#endif
