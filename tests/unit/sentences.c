/* SPDX-License-Identifier: Apache-2.0 */
/* Tests errors whose parts are as long as possible. The remedy at the end is never cut, and
 * errors use the names of the header. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/rank_info.h"
#include "base/error.h"
#include "check.h"
#include "exchange/op_header.h"
#include "plan/plan.h"
#include "run.h"

static void ends(const char *sentence, const char *end)
{
    const size_t length = strlen(sentence), tail = strlen(end);
    CHECK_SAY(length < 512 && length >= tail && strcmp(sentence + length - tail, end) == 0,
              "\"%s\" does not end with \"%s\"", sentence, end);
}

static char *long_word(size_t length)
{
    char *word = malloc(length + 1);
    memset(word, 'x', length);
    word[length] = 0;
    return word;
}

/* Tests every length around the limit. A text stays whole if it fits, otherwise its middle is
 * cut. */
static void check_fit(void)
{
    for (size_t length = 400; length < 2000; length++) {
        char *word = long_word(length);
        epic_fail(EPIC_EINVAL, "config.name is \"%s\": give another one", word);
        const bool whole = length + 35 < 512;
        CHECK_EQ(strlen(epic_error(NULL)), whole ? length + 35 : 511);
        CHECK(strncmp(epic_error(NULL), "config.name is \"xxx", 19) == 0);
        CHECK_EQ(strstr(epic_error(NULL), " ... ") == NULL, whole);
        ends(epic_error(NULL), "xxx\": give another one");
        free(word);
    }
    for (size_t size = 16; size < 600; size++) {
        char out[600];
        char *word = long_word(599);
        memset(out, 7, sizeof out);
        epic_fit_text(out, size, word);
        CHECK(strlen(out) == size - 1 && (size == sizeof out || out[size] == 7));
        free(word);
    }
}

/* Control characters and invalid UTF-8 are replaced, and no character is cut. */
static void check_clean(void)
{
    static const struct {
        const char *from, *to;
    } texts[] = {
        {"plain", "plain"},
        {"\x01\t\n\x1b[2J\x7f", "????[2J?"},
        {"\xc2\x80\xc2\x9b\xc2\x9f", "??????"},
        {"\xc2\xa0 \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80",
         "\xc2\xa0 \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"},
        {"\x80 \xbf \xc3 \xe2\x82 \xf0\x9f\x98", "? ? ? ?? ???"},
        {"\xc0\xaf \xe0\x80\xaf \xed\xa0\x80 \xf4\x90\x80\x80 \xfe\xff", "?? ??? ??? ???? ??"}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        epic_fail(EPIC_EINVAL, "%s", texts[i].from);
        CHECK_SAY(!strcmp(epic_error(NULL), texts[i].to), "text %zu became \"%s\"", i,
                  epic_error(NULL));
    }
    for (size_t extra = 0; extra < 8; extra++) { /* tries all cuts inside a character */
        char word[8 + 3 * 400 + 1] = "";
        memset(word, 'x', extra);
        for (size_t i = 0; i < 400; i++) memcpy(word + extra + 3 * i, "\xe2\x82\xac", 4);
        epic_fail(EPIC_EINVAL, "%s", word);
        CHECK(strlen(epic_error(NULL)) > 500 && strchr(epic_error(NULL), '?') == NULL);
    }
}

/* Values of environment variables are cleaned before an error repeats them. */
static void check_environment(void)
{
    static const char *const names[] = {
        "JOB_COMPLETION_INDEX", "ALPS_APP_PE", "PALS_RANKID", "RANK", "PMI_RANK", "PMIX_RANK",
        "MASTER_PORT"};
    epic_bootstrap bootstrap;
    setenv("WORLD_SIZE", "1", 1);
    setenv("PMI_SIZE", "1", 1);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        setenv("RANK", "0", 1);
        setenv("PMI_RANK", "0", 1);
        setenv(names[i], "0\x1b]0;\x07\xc2\x9b\x80", 1);
        CHECK_EQ(epic_bootstrap_env(&bootstrap), EPIC_EINVAL);
        char value[128];
        snprintf(value, sizeof value, "%s is \"0?]0;????\"", names[i]);
        CHECK_SAY(strstr(epic_error(NULL), value) != NULL, "%s", epic_error(NULL));
        unsetenv(names[i]);
    }
    unsetenv("WORLD_SIZE");
    unsetenv("PMI_SIZE");
    unsetenv("RANK");
    unsetenv("PMI_RANK");
}

static void refused_open(const epic_config *config, const char *begin, const char *end)
{
    epic_context *ctx;
    CHECK(epic_open(&ctx, NULL, config) != EPIC_OK);
    CHECK_SAY(strstr(epic_error(ctx), begin) != NULL, "%s", epic_error(ctx));
    ends(epic_error(ctx), end);
    epic_close(ctx);
}

static void check_open(void)
{
    char *word = long_word(100000);
    epic_config config = {.max_tokens = 4, .max_row_bytes = 64};
    setenv("EPIC_TIMEOUT_MS", word, 1);
    refused_open(&config, "EPIC_TIMEOUT_MS is \"xxx", "correct or unset it");
    unsetenv("EPIC_TIMEOUT_MS");
    static const char *const wrong[] = {" 5",
                                        "-1",
                                        "+5",
                                        "5 ",
                                        "0",
                                        "0x10",
                                        "4294967296",
                                        " -18446744073709551615",
                                        "99999999999999999999"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        setenv("EPIC_TIMEOUT_MS", wrong[i], 1);
        refused_open(&config, wrong[i], "correct or unset it");
    }
    unsetenv("EPIC_TIMEOUT_MS");
    setenv("EPIC_EARLY_START", "off", 1);
    refused_open(&config, "EPIC_EARLY_START is \"off\": it must be 0 or 1",
                 "correct or unset it");
    unsetenv("EPIC_EARLY_START");
    setenv("EPIC_BACKEND", word, 1);
    refused_open(&config, "config.backend is \"xxx", "no backend has that name");
    unsetenv("EPIC_BACKEND");
    config.name = word;
    refused_open(&config, "config.name is \"xxx", "must have at most 63 bytes");
    free(word);
}

/* The sentence of one rank, of any length, reaches the other ranks with its end. */
static void check_verdict(void)
{
    static rank_info all[3];
    const epic_bootstrap bootstrap = {.num_ranks = 3};
    const epic_config config = {.name = "epic"};
    for (int r = 0; r < 3; r++) {
        CHECK(rank_info_fill(&all[r], &bootstrap, &config) == EPIC_OK);
        all[r].rank = r;
    }
    CHECK(rank_info_compare(all, 3) == EPIC_OK);
    char *word = long_word(1000);
    epic_fail(EPIC_ENOMEM, "shm: %s; lower config.max_in_flight", word);
    epic_fit_text(all[2].sentence, sizeof all[2].sentence, epic_error(NULL));
    all[2].refused = EPIC_ENOMEM;
    all[0].refused = EPIC_EPEER;
    all[1].refused = EPIC_ETIMEOUT;
    snprintf(all[0].sentence, sizeof all[0].sentence, "shm: rank 1 left");
    snprintf(all[1].sentence, sizeof all[1].sentence, "shm: rank 0 did not answer");
    CHECK(rank_info_compare(all, 3) == EPIC_ENOMEM);
    CHECK_SAY(strncmp(epic_error(NULL), "open: rank 2: shm: ", 19) == 0, "%s",
              epic_error(NULL));
    ends(epic_error(NULL), "; lower config.max_in_flight");
    all[2].refused = EPIC_OK;
    CHECK(rank_info_compare(all, 3) == EPIC_EPEER);
    CHECK(strncmp(epic_error(NULL), "open: rank 0: shm: ", 19) == 0);
    /* all ranks return it */
    snprintf(all[0].sentence, sizeof all[0].sentence, "rank 2: no memory");
    CHECK(rank_info_compare(all, 3) == EPIC_EPEER);
    CHECK(strcmp(epic_error(NULL), "open: rank 2: no memory") == 0);
    free(word);
}

/* -------------------------------------------------------------------------- mismatches ---- */

static void mismatch(int field, int64_t a, int64_t b, const char *first, const char *second)
{
    epic_op_header note_a = {.common = {[COMMON_OPERATION] = EPIC_OP_PLAN}}, note_b = note_a;
    char sentence[256], words[128];
    note_a.common[field] = a;
    note_b.common[field] = b;
    CHECK(!op_header_compare(&note_a, 1022, &note_b, 1023, sentence, sizeof sentence));
    snprintf(words, sizeof words, "%s, rank 1023 passed %s; ", first, second);
    CHECK_SAY(strstr(sentence, words) != NULL, "no \"%s\" in: %s", words, sentence);
}

static void check_mismatches(void)
{
    mismatch(COMMON_TYPE, EPIC_F32, EPIC_BF16, "type EPIC_F32", "EPIC_BF16");
    mismatch(COMMON_TYPE, EPIC_BYTES, EPIC_I64, "type EPIC_BYTES", "EPIC_I64");
    mismatch(COMMON_TYPE, EPIC_F16, 99, "type EPIC_F16", "99");
    mismatch(COMMON_PARTIAL_TYPE, 0, EPIC_F32, "partial_type 0 (the rows' type)", "EPIC_F32");
    mismatch(COMMON_QUANTIZE, 0, 2, "quantize EPIC_QUANTIZE_NONE", "EPIC_QUANTIZE_1X32");
    mismatch(COMMON_LAYOUT, 0, 1, "layout EPIC_EXPERT_MAJOR", "EPIC_FLAT");
    mismatch(COMMON_OVERFLOW, 1, 0, "overflow EPIC_OVERFLOW_DROP", "EPIC_OVERFLOW_ERROR");
    mismatch(COMMON_SUM_ORDER, 0, 1, "sum_order EPIC_BY_RANK", "EPIC_TREE");
    mismatch(COMMON_WEIGHTS, 1, 0, "weights some", "none");
    mismatch(COMMON_PLACEMENT, 0, 255, "rank_of_expert none", "ff");
    mismatch(COMMON_REPLICAS, 0, 255, "logical_of_expert none", "ff");
    mismatch(COMMON_COUNT, 3, 4, "count 3", "4");
    for (int field = COMMON_OPERATION; field < NUM_COMMON; field++) {
        epic_op_header a = {0}, b = {0};
        char sentence[256];
        a.common[field] = INT64_MIN;
        b.common[field] = -1;
        CHECK(!op_header_compare(&a, 1022, &b, 1023, sentence, sizeof sentence));
        ends(sentence, field == COMMON_OPERATION ? "in the same order on every rank"
                       : field == COMMON_PLAN    ? "use the plan of the same epic_plan call"
                                                 : "pass the same on every rank");
    }
}

/* The op header of a peer may contain any bytes. */
static void check_data_errors(void)
{
    static const char *const way_out[] = {[DATA_EXPERT] = "or negative for no expert",
                                          [DATA_DUPLICATE] = "or a layer without it",
                                          [DATA_PLACEMENT] = "must be a rank, 0 to 2",
                                          [DATA_REPLICAS] = "give the layer EPIC_DROP_ABSENT",
                                          [DATA_PLAN] = "for this rank and group",
                                          [DATA_TOKEN_ID] = "and not negative",
                                          [DATA_TABLE] = "or negative for no expert",
                                          [DATA_FORCED] = "or negative for no expert",
                                          [DATA_SAVED] = "call epic_moe_forward again",
                                          [DATA_SAVED_PART] = "wrote on this rank; pass those"};
    for (int error = DATA_EXPERT; error <= DATA_SAVED_PART; error++) {
        epic_op_header good = {0}, bad = {0};
        const epic_op_header *const headers[] = {&good, &good, &bad};
        bad.local[LOCAL_ERROR] = error;
        for (int i = 0; i < 4; i++) bad.local[LOCAL_ERROR_DETAILS + i] = INT64_MIN + i;
        CHECK(op_header_data_error(headers, 3) == EPIC_EINVAL);
        CHECK(strstr(epic_error(NULL), "rank 2") != NULL);
        ends(epic_error(NULL), way_out[error]);
    }
}

int main(void)
{
    check_begin();
    run_alarm(60);
    check_fit();
    check_clean();
    check_environment();
    check_open();
    check_verdict();
    check_mismatches();
    check_data_errors();
    return check_end();
}
