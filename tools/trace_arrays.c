/* SPDX-License-Identifier: Apache-2.0 */
/* Makes traces from .npy files. The values of a file are ids of experts, with one row for each
 * token. With --loads the values are numbers of choices of each expert, with one row for each
 * layer or step. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "npy.h"
#include "trace_read.h"

#define FEW_EXPERTS 1024 /* more experts than any published model has in a layer */

/* ---------------------------------------------------------- ids, or a table of loads? ---- */

static int compare_values(const void *a, const void *b)
{
    const int64_t p = *(const int64_t *)a, q = *(const int64_t *)b;
    return (p > q) - (p < q);
}

/* Returns a value of at least 0 that occurs twice in a row of k values (1 to MAX_TOP_K), or -1
 * if there is none. */
static int64_t find_repeated(const int64_t *row, int64_t k)
{
    int64_t sorted[MAX_TOP_K];
    memcpy(sorted, row, (size_t)k * sizeof *row);
    qsort(sorted, (size_t)k, sizeof *sorted, compare_values);
    for (int64_t i = 1; i < k; i++)
        if (sorted[i] >= 0 && sorted[i] == sorted[i - 1]) return sorted[i];
    return -1;
}

/* Returns true if the array has at least three rows of at least four values, and the sums of
 * all rows are equal. With small values sums may be equal by chance, so the largest value,
 * `most`, must be at least 4 k. */
static bool has_equal_sums(const npy *a, int64_t k, int64_t most)
{
    int64_t first = 0;
    if (k < 4 || a->num < 3 * k || most < 4 * k) return false;
    for (int64_t i = 0; i < a->num; i += k) {
        int64_t sum = 0;
        for (int64_t c = 0; c < k; c++) sum += a->values[i + c];
        if (i == 0) first = sum;
        if (sum != first) return false;
    }
    return true;
}

/* Guesses whether an array contains loads (numbers of choices) and not ids of experts. If it
 * looks like loads, returns true and writes the reason to `why`.
 *
 * An array of ids has three signs: no row contains an expert twice, a row is short compared
 * with the number of rows, and most experts occur in some row. A table of loads has other
 * signs: values repeat, there are as many columns as experts, the values grow with the number
 * of tokens, and the sums of all layers are equal. */
static bool looks_like_loads(const npy *a, bool experts_given, char *why, size_t size)
{
    const int64_t k = a->shape[a->dims - 1], tokens = a->dims > 1 ? a->shape[a->dims - 2] : 1;
    int64_t most = -1;
    if (k > MAX_TOP_K) {
        snprintf(why, size, "its rows have %" PRId64 " values, and top_k is at most %d", k,
                 MAX_TOP_K);
        return true;
    }
    for (int64_t i = 0; i < a->num; i += k) {
        const int64_t repeated = find_repeated(a->values + i, k);
        if (repeated >= 0) {
            snprintf(why, size, "row %" PRId64 " has the value %" PRId64 " twice", i / k,
                     repeated);
            return true;
        }
        for (int64_t c = 0; c < k; c++)
            if (a->values[i + c] > most) most = a->values[i + c];
    }
    if (k > 8 && tokens < k) {
        snprintf(why, size, "it has %" PRId64 " rows of %" PRId64 " values", tokens, k);
        return true;
    }
    if (has_equal_sums(a, k, most)) {
        snprintf(why, size, "the sums of all rows are equal");
        return true;
    }
    if (experts_given || most < FEW_EXPERTS || most < a->num / 16) return false;
    snprintf(why, size, "it has %" PRId64 " values, the largest of them %" PRId64, a->num,
             most);
    return true;
}

/* ------------------------------------------------------------------------------- ids ---- */

/* Returns the number of experts: --experts, or the largest id plus 1. */
static uint32_t count_experts(const npy *a, const char *path, const trace_choice *choice)
{
    int64_t experts = choice->num_experts;
    for (int64_t i = 0; i < a->num; i++)
        if (a->values[i] >= experts) {
            if (choice->num_experts || a->values[i] >= MAX_EXPERTS)
                tool_fail("%s: id %" PRId64 ": it must be below %" PRId64, path, a->values[i],
                          choice->num_experts ? experts : (int64_t)MAX_EXPERTS);
            experts = a->values[i] + 1;
        }
    return experts ? (uint32_t)experts : 1;
}

/* Makes steps from an array of ids: [tokens, k], [steps, tokens, k] or [steps, ranks, tokens,
 * k]. */
static void make_ids(trace *out, const npy *a, const char *path, const trace_choice *choice)
{
    if (a->dims < 2 || a->shape[a->dims - 1] > MAX_TOP_K)
        tool_fail(
            "%s: its shape must be [tokens, top_k], [steps, tokens, top_k] or [steps, ranks, "
            "tokens, top_k], top_k at most %d",
            path, MAX_TOP_K);
    const uint32_t experts = count_experts(a, path, choice);
    const int64_t k = a->shape[a->dims - 1], tokens = a->shape[a->dims - 2];
    const int64_t ranks = a->dims == 4 ? a->shape[1] : 1;
    if (ranks > MAX_RANKS)
        tool_fail("%s: %" PRId64 " ranks: must be at most %d", path, ranks, MAX_RANKS);
    out->num_ranks = (int32_t)ranks;
    out->num_steps = a->dims > 2 ? a->shape[0] : 1;
    out->steps = tool_alloc((size_t)out->num_steps * sizeof *out->steps);
    for (int64_t i = 0, at = 0; i < out->num_steps; i++) {
        trace_step *s = &out->steps[i];
        *s = (trace_step){.sequence = (uint64_t)i,
                          .time_ns = i,
                          .top_k = (uint32_t)k,
                          .num_experts = experts,
                          .alignment = 1,
                          .num_tokens = tokens * out->num_ranks};
        s->tokens_of = tool_alloc((size_t)out->num_ranks * sizeof *s->tokens_of);
        for (int32_t r = 0; r < out->num_ranks; r++) s->tokens_of[r] = tokens;
        s->ids = tool_alloc((size_t)(s->num_tokens * k) * sizeof *s->ids);
        for (int64_t c = 0; c < s->num_tokens * k; c++, at++)
            s->ids[c] = (int32_t)(a->values[at] < 0 ? -1 : a->values[at]);
    }
}

/* ----------------------------------------------------------------------------- loads ---- */

/* Makes a step from each row of a table of loads: [experts], [layers, experts] or [steps,
 * layers, experts]. */
static void make_loads(trace *out, const npy *a, const char *path, const trace_choice *choice)
{
    const int64_t experts = a->shape[a->dims - 1];
    if (a->dims > 3 || experts > MAX_EXPERTS)
        tool_fail("%s: --loads needs [experts], [layers, experts] or [steps, layers, experts], "
                  "at most %d experts",
                  path, MAX_EXPERTS);
    if (choice->num_experts && choice->num_experts != experts)
        tool_fail("--experts is %u: %s has loads of %" PRId64 " experts", choice->num_experts,
                  path, experts);
    out->num_ranks = 1;
    out->has_loads = true;
    out->num_steps = a->num / experts;
    out->steps = tool_alloc((size_t)out->num_steps * sizeof *out->steps);
    for (int64_t i = 0; i < out->num_steps; i++) {
        trace_step *s = &out->steps[i];
        *s = (trace_step){.sequence = (uint64_t)i,
                          .time_ns = i,
                          .num_experts = (uint32_t)experts,
                          .alignment = 1,
                          .load = tool_alloc((size_t)experts * sizeof *s->load)};
        for (int64_t e = 0; e < experts; e++) {
            s->load[e] = a->values[i * experts + e];
            if (s->load[e] < 0 || s->load[e] > INT32_MAX)
                tool_fail("%s: row %" PRId64 ", expert %" PRId64 " has load %" PRId64
                          ": must be 0 to %d; divide all loads by the same number",
                          path, i, e, s->load[e], INT32_MAX);
        }
    }
}

void trace_load_npy(trace *out, const char *path, const trace_choice *choice)
{
    npy a;
    char why[160];
    npy_read(&a, path);
    if (a.dims < 1) tool_fail("%s: it is a single number, not an array", path);
    snprintf(out->name, sizeof out->name, "npy");
    if (!choice->values && looks_like_loads(&a, choice->num_experts != 0, why, sizeof why))
        tool_fail(
            "%s: these look like loads, not like ids of experts: %s.  Add --loads if a row "
            "counts how often each expert was chosen, --ids if it has the experts of a token",
            path, why);
    if (choice->values && !strcmp(choice->values, "--loads"))
        make_loads(out, &a, path, choice);
    else
        make_ids(out, &a, path, choice);
    free(a.values);
}
