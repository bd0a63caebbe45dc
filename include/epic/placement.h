/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the file that epic-place writes.  The file records which rank owns each expert.  With
 * replicas, it also records of which logical expert each expert is a replica.
 *
 *     epic_placement place;
 *     const char *why = epic_placement_read(&place, "place.txt");   NULL: success
 *     layer.num_experts = place.num_experts;
 *     layer.num_logical = place.num_logical;                        0: no replicas
 *     args.rank_of_expert = place.rank_of_expert;
 *     args.logical_of_expert = place.logical_of_expert;             NULL: no replicas
 *     epic_placement_free(&place);
 *
 * The file is text.  Its words and numbers are separated by blanks and line ends, in this
 * order:
 *
 *     epic-placement 1
 *     ranks 4
 *     experts 8
 *     logical 6             0: no replicas, and no logical_of_expert
 *     rank_of_expert 0 0 1 1 2 2 3 3
 *     logical_of_expert 0 1 2 3 4 5 0 2
 *
 * All functions are defined in this header, so a program that uses them need not link with
 * libepic. */
#ifndef EPIC_PLACEMENT_H
#define EPIC_PLACEMENT_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A placement.  It owns its arrays; epic_placement_free() frees them. */
typedef struct epic_placement {
    uint32_t num_ranks;
    uint32_t num_experts;
    uint32_t num_logical;
    int32_t *rank_of_expert;    /* [num_experts] */
    int32_t *logical_of_expert; /* [num_experts]; NULL: no replicas */
} epic_placement;

/* Frees the arrays of a placement that epic_placement_read() has filled in, and clears it.
 * Errors:  none.
 * Threads: local.
 * CUDA:    no difference. */
static inline void epic_placement_free(epic_placement *place)
{
    free(place->rank_of_expert);
    free(place->logical_of_expert);
    memset(place, 0, sizeof *place);
}

/* Reads one word.  Returns 1 if the word is `wanted`, otherwise 0.  This function and the next
 * three are helpers of epic_placement_read(), not for programs. */
static inline int epic_placement_word(FILE *file, const char *wanted)
{
    char word[32];
    return fscanf(file, "%31s", word) == 1 && strcmp(word, wanted) == 0;
}

/* Returns 1 if the file ends here, except for blanks and line ends, otherwise 0. */
static inline int epic_placement_ends(FILE *file)
{
    char more;
    return fscanf(file, " %c", &more) == EOF;
}

/* Reads `word`, then a number from `least` to `most`, which it writes to *out.  Returns 1 if
 * the file continues like this, otherwise 0. */
static inline int epic_placement_number(FILE *file, const char *word, long least, long most,
                                        uint32_t *out)
{
    long value;
    if (!epic_placement_word(file, word) || fscanf(file, "%ld", &value) != 1) return 0;
    *out = (uint32_t)value;
    return value >= least && value <= most;
}

/* Reads `word` and `num` numbers from 0 to limit - 1.  Returns the numbers, or NULL if the file
 * does not continue like this.  The caller frees them. */
static inline int32_t *epic_placement_list(FILE *file, const char *word, uint32_t num,
                                           uint32_t limit)
{
    int32_t *list = (int32_t *)malloc(num * sizeof *list);
    int good = list && epic_placement_word(file, word);
    for (uint32_t i = 0; good && i < num; i++) {
        long value;
        good = fscanf(file, "%ld", &value) == 1 && value >= 0 && value < (long)limit;
        if (good) list[i] = (int32_t)value;
    }
    if (good) return list;
    free(list);
    return NULL;
}

/* Reads the placement in the file `path`.  Returns NULL on success; the caller frees *out
 * later.  Errors:  returns the reason, a constant string, and *out is empty.
 * Threads: local.
 * CUDA:    no difference; the arrays are in host memory. */
static inline const char *epic_placement_read(epic_placement *out, const char *path)
{
    uint32_t version;
    const char *why = NULL;
    memset(out, 0, sizeof *out);
    FILE *file = fopen(path, "r");
    if (!file) return "the placement cannot be opened";
    if (!epic_placement_number(file, "epic-placement", 1, 1, &version))
        why = "not a placement of version 1, as epic-place writes it";
    else if (!epic_placement_number(file, "ranks", 1, 65536, &out->num_ranks))
        why = "ranks: must be 1 to 65536";
    else if (!epic_placement_number(file, "experts", 1, 65536, &out->num_experts))
        why = "experts: must be 1 to 65536";
    else if (!epic_placement_number(file, "logical", 0, (long)out->num_experts,
                                    &out->num_logical))
        why = "logical: must be 0 to the number of experts";
    else if (!(out->rank_of_expert = epic_placement_list(file, "rank_of_expert",
                                                         out->num_experts, out->num_ranks)))
        why = "rank_of_expert: must have a rank for each expert";
    else if (out->num_logical && !(out->logical_of_expert =
                                       epic_placement_list(file, "logical_of_expert",
                                                           out->num_experts, out->num_logical)))
        why = "logical_of_expert: must have a logical expert for each expert";
    else if (!epic_placement_ends(file))
        why = "there is text after its last list";
    fclose(file);
    if (why) epic_placement_free(out);
    return why;
}

#ifdef __cplusplus
}
#endif
#endif
