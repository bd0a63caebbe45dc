/* SPDX-License-Identifier: Apache-2.0 */
/* Fuzzes operations with a plan whose bytes the input changes. The input also decides whether
 * the checksums are corrected. Every call must return a result or an error, without an invalid
 * memory access. */
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "check.h"
#include "plan/plan.h"
#include "step.h"

#define HIDDEN 24
#define KINDS 3

static step steps[KINDS];
static unsigned char *good[KINDS];
static epic_context *ctx;

/* Makes three plans: by rank, in a tree, and flat. */
static void begin(void)
{
    const epic_config config = {
        .max_tokens = STEP_MAX_TOKENS, .max_row_bytes = STEP_MAX_ROW_BYTES, .max_in_flight = 2};
    check_begin();
    if (epic_open(&ctx, NULL, &config) != EPIC_OK) abort();
    for (int kind = 0; kind < KINDS; kind++) {
        step *s = &steps[kind];
        const epic_call call = {.tag = 2};
        step_open(s, ctx, 7, HIDDEN);
        s->layer.layout = kind == 2 ? EPIC_FLAT : EPIC_EXPERT_MAJOR;
        s->layer.sum_order = kind == 1 ? EPIC_TREE : EPIC_BY_RANK;
        s->layer.leaves = kind == 1 ? 8 : 0;
        if (step_call(s, EPIC_OP_PLAN, &call, STEP_SAME) != EPIC_OK) abort();
        good[kind] = malloc(s->plan_bytes);
        memcpy(good[kind], s->plan, s->plan_bytes);
    }
}

static void reseal(unsigned char *plan, size_t bytes)
{
    plan_header *h = (plan_header *)(void *)plan;
    if (h->tokens_of >= 0 && h->bytes > h->tokens_of && (uint64_t)h->bytes <= bytes)
        h->body_sum = hash_bytes(plan + h->tokens_of, (size_t)(h->bytes - h->tokens_of));
    h->header_sum = 0;
    h->header_sum = hash_bytes(h, sizeof *h);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint32_t operations[] = {EPIC_OP_DISPATCH, EPIC_OP_COMBINE,
                                          EPIC_OP_COMBINE_BACKWARD, EPIC_OP_DISPATCH_BACKWARD};
    const epic_call call = {.tag = 3};
    epic_plan_info info;
    if (!ctx) begin();
    uint8_t head[3] = {0};
    memcpy(head, data, size < sizeof head ? size : sizeof head);
    step *s = &steps[head[0] % KINDS];
    const size_t used =
        (size_t)((const plan_header *)(const void *)good[head[0] % KINDS])->bytes;
    const size_t bytes = head[1] & 8 ? (head[2] * 64u) % used : s->plan_bytes;
    /* this memory ends where the plan ends, so that a sanitizer detects reads past its end */
    unsigned char *plan = aligned_alloc(16, (bytes + 31) / 16 * 16);
    memcpy(plan, good[head[0] % KINDS], bytes);
    for (size_t i = 3; i + 6 <= size; i += 6) {
        const size_t at = ((size_t)data[i] << 8 | data[i + 1]) * 4 % used;
        if (at + 4 <= bytes) memcpy(plan + at, data + i + 2, 4);
    }
    if (head[1] & 4 && bytes >= sizeof(plan_header)) reseal(plan, bytes);
    unsigned char *const kept = s->plan;
    const size_t kept_bytes = s->plan_bytes;
    s->plan = plan;
    s->plan_bytes = bytes;
    (void)epic_plan_read(plan, bytes, &info);
    const epic_result result = step_call(s, operations[head[1] % 4], &call, STEP_SAME);
    if (result != EPIC_OK && result != EPIC_EINVAL && result != EPIC_EOVERFLOW)
        __builtin_trap();
    s->plan = kept;
    s->plan_bytes = kept_bytes;
    free(plan);
    return 0;
}
