/* SPDX-License-Identifier: Apache-2.0 */
/* Tests epic-trace and epic-place as programs. Exported ids are the imported ones, replays are
 * correct for any number of ranks, and a proposed placement has the predicted balance. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "epic/epic.h"
#include "epic/placement.h"
#include "run.h"
#include "unit/tools.h"

#define STEPS 5
#define TOKENS 64
#define TOP_K 3
#define EXPERTS 12

static int32_t ids[STEPS][TOKENS][TOP_K];

/* Writes an array of int16 as numpy.save does. */
static void write_npy(void)
{
    char header[128];
    memcpy(header, "\x93NUMPY\x01\x00\x76\x00", 10);
    char text[118];
    snprintf(text, sizeof text,
             "{'descr': '<i2', 'fortran_order': False, 'shape': (%d, %d, %d), }", STEPS, TOKENS,
             TOP_K);
    snprintf(header + 10, 118, "%-117s", text);
    header[127] = '\n';
    FILE *out = create("in.npy");
    if (!CHECK(out != NULL)) return;
    fwrite(header, 1, sizeof header, out);
    for (int i = 0; i < STEPS * TOKENS * TOP_K; i++) {
        const int16_t id = (int16_t)(&ids[0][0][0])[i];
        fwrite(&id, sizeof id, 1, out);
    }
    fclose(out);
}

/* Draws ids: low ids are chosen most often, and some choices are -1. A token chooses an expert
 * at most once. */
static void draw_ids(void)
{
    run_random random = {3};
    for (int i = 0; i < STEPS * TOKENS * TOP_K; i++) {
        const int64_t a = run_below(&random, EXPERTS + 1), b = run_below(&random, EXPERTS + 1);
        int32_t *id = &(&ids[0][0][0])[i];
        *id = (int32_t)(a < b ? a : b) - (run_chance(&random, 5) ? EXPERTS + 1 : 0);
        if (i == 0) *id = EXPERTS - 1;
        if (*id < 0 || *id == EXPERTS) *id = -1;
        for (int k = 1; k <= i % TOP_K; k++)
            if (id[-k] == *id) *id = -1;
    }
}

static long long num_choices(void)
{
    long long num = 0;
    for (int i = 0; i < STEPS * TOKENS * TOP_K; i++) num += (&ids[0][0][0])[i] >= 0;
    return num;
}

static void in_and_out(void)
{
    static unsigned char bytes[1 << 16];
    CHECK_EQ(tool("epic-trace", "import in.npy recorded --ranks 3"), 0);
    CHECK_EQ(tool("epic-trace", "show recorded"), 0);
    CHECK(says("3 ranks, 12 experts") && says("steps       5\n") &&
          !strstr(output, "incomplete"));
    CHECK_EQ(number("choices     "), STEPS * TOKENS * TOP_K);
    CHECK_EQ(tool("epic-trace", "export recorded out.npy"), 0);
    CHECK_EQ(bytes_of("out.npy", bytes, sizeof bytes), 128 + sizeof ids);
    CHECK(!memcmp(bytes + 128, ids, sizeof ids));
    CHECK(!memcmp(bytes + 10,
                  "{'descr': '<i4', 'fortran_order': False, 'shape': (5, 64, 3, ), }", 60));
    CHECK_EQ(tool("epic-trace", "export recorded part.npy --layer 1/2 --steps 1:1"), 0);
    CHECK_EQ(bytes_of("part.npy", bytes, sizeof bytes), 128 + sizeof ids[0]);
    CHECK(!memcmp(bytes + 128, ids[3], sizeof ids[3]));
}

static void replays(void)
{
    static const int ranks[] = {1, 2, 3, 5, 8};
    char words[64];
    for (int i = 0; i < 5; i++) {
        snprintf(words, sizeof words, "replay recorded --ranks %d --json", ranks[i]);
        CHECK_EQ(tool("epic-trace", words), 0);
        CHECK_EQ(number("\"slots\": "), num_choices());
    }
    CHECK_EQ(tool("epic-trace", "replay in.npy --ranks 2 --hidden 8"), 0);
    CHECK(says("all rows returned correctly") && says("rank   1"));
    CHECK_EQ(tool("epic-trace", "replay in.npy --ranks 4 --balanced --json"), 0);
    CHECK(number("\"busiest\": ") * 4 < num_choices() * 11 / 10);
}

static void pictures(void)
{
    static unsigned char bytes[1 << 20];
    CHECK_EQ(tool("epic-trace", "draw recorded load.svg"), 0);
    const size_t svg = bytes_of("load.svg", bytes, sizeof bytes - 1);
    bytes[svg] = 0;
    int cells = 0;
    for (const char *at = (char *)bytes; (at = strstr(at, "fill=\"#")); at++) cells++;
    CHECK_EQ(cells, STEPS * EXPERTS);
    CHECK_EQ(tool("epic-trace", "draw recorded load.png"), 0);
    const size_t png = bytes_of("load.png", bytes, sizeof bytes);
    CHECK(png > 100 && !memcmp(bytes, "\x89PNG\r\n\x1a\n\0\0\0\rIHDR", 16));
    CHECK(png > 100 && !memcmp(bytes + png - 8, "IEND\xae\x42\x60\x82", 8));
    CHECK_EQ(tool("epic-trace", "draw recorded load.jpg"), 1);
    CHECK(says(".svg or .png"));
}

static void numbers(void)
{
    char words[64];
    int lines = 0;
    long long load = 0;
    CHECK_EQ(tool("epic-trace", "metrics recorded"), 0);
    for (const char *at = output; (at = strchr(at, '\n')); at++) lines++;
    CHECK_EQ(lines, STEPS);
    CHECK(says("{\"group\": \"npy\", \"tag\": 0, \"sequence\": 4, "));
    for (int i = 0; i < STEPS * TOKENS * TOP_K; i++) load += (&ids[0][0][0])[i] == 2;
    CHECK_EQ(tool("epic-trace", "metrics recorded --prometheus"), 0);
    snprintf(words, sizeof words, "epic_expert_load_total{group=\"npy\",expert=\"2\"} %lld\n",
             load);
    CHECK(says(words) && says("# TYPE epic_expert_load_total counter\n"));
    CHECK(says("epic_plans_total{group=\"npy\"} 5\n"));
}

/* ------------------------------------------------------------------------- placements ---- */

static void a_placement(const char *wish)
{
    char words[128], path[128];
    epic_placement place;
    snprintf(words, sizeof words, "recorded --ranks 4 %s --out place.txt", wish);
    CHECK_EQ(tool("epic-place", words), 0);
    const long long predicted = number("proposed       busiest rank ");
    CHECK(predicted > 0 && predicted <= number("greedy         busiest rank "));
    CHECK(predicted <= number("round robin    busiest rank "));
    CHECK(predicted >= number("bound          busiest rank "));
    CHECK_EQ(tool("epic-trace", "replay recorded --ranks 4 --place place.txt --json"), 0);
    CHECK_EQ(number("\"busiest\": "), predicted);
    CHECK_EQ(number("\"slots\": "), num_choices());
    snprintf(path, sizeof path, "%s/place.txt", folder);
    CHECK(epic_placement_read(&place, path) == NULL);
    CHECK_EQ(place.num_ranks, 4);
    CHECK_EQ(place.num_logical, place.num_experts == EXPERTS ? 0 : EXPERTS);
    epic_placement_free(&place);
}

static void broken_placements(void)
{
    static const char *const texts[] = {
        "epic-placement 2\n",
        "epic-placement 1\nranks 0\n",
        "epic-placement 1\nranks 2\nexperts x",
        "epic-placement 1 ranks 2 experts 2 logical 3",
        "epic-placement 1 ranks 2 experts 2 logical 0 rank_of_expert 0 2",
        "epic-placement 1 ranks 2 experts 2 logical 0 rank_of_expert 0 1 1",
        "epic-placement 1 ranks 2 experts 2 logical 2 rank_of_expert 0 1 logical_of_expert 0"};
    char path[128];
    snprintf(path, sizeof path, "%s/broken.txt", folder);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        epic_placement place;
        FILE *out = create("broken.txt");
        if (!CHECK(out != NULL)) return;
        fputs(texts[i], out);
        fclose(out);
        CHECK_SAY(epic_placement_read(&place, path) != NULL, "%s was read", texts[i]);
        CHECK(!place.rank_of_expert && !place.logical_of_expert);
    }
    CHECK_EQ(tool("epic-trace", "replay recorded --ranks 4 --place broken.txt"), 1);
    CHECK(says("logical_of_expert: must have a logical expert for each expert"));
}

/* ------------------------------------------------------------------- recorded by a run ---- */

/* Records a sum and a plan of a group of one rank. */
static void record(void)
{
    char path[128];
    epic_context *ctx;
    float data[1] = {1};
    const int32_t chosen[2] = {1, -1};
    const epic_bootstrap alone = {.num_ranks = 1};
    const epic_config config = {
        .max_tokens = 1, .max_row_bytes = 8, .num_ranks = 1, .name = "one \"rank\""};
    const epic_layer layer = {.num_experts = 4, .top_k = 2};
    int64_t bytes;
    CHECK(epic_plan_bytes(&config, &layer, &bytes) == EPIC_OK);
    void *plan = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
    const epic_plan_args args = {.layer = &layer,
                                 .plan = plan,
                                 .plan_bytes = bytes,
                                 .topk_idx = chosen,
                                 .num_tokens = 1};
    snprintf(path, sizeof path, "%s/run", folder);
    CHECK(setenv("EPIC_TRACE", path, 1) == 0);
    CHECK(epic_open(&ctx, &alone, &config) == EPIC_OK);
    CHECK(epic_allreduce_sum(ctx, &(epic_allreduce_sum_args){.data = data, .count = 1}) ==
          EPIC_OK);
    CHECK(epic_plan(ctx, &args) == EPIC_OK);
    epic_close(ctx);
    unsetenv("EPIC_TRACE");
    free(plan);
}

static void a_run(void)
{
    static unsigned char bytes[1 << 16];
    record();
    CHECK_EQ(tool("epic-trace", "show run"), 0);
    CHECK(says("operations  2\n") && says("choices     2, of these 1 name no expert"));
    CHECK_EQ(tool("epic-trace", "chrome run run.json"), 0);
    bytes[bytes_of("run.json", bytes, sizeof bytes - 1)] = 0;
    CHECK(strstr((char *)bytes, "\"name\": \"sum\"") &&
          strstr((char *)bytes, "\"name\": \"plan\""));
    CHECK(strstr((char *)bytes, "\"ts\": 0.000") &&
          strstr((char *)bytes, "\"result\": \"EPIC_OK\"}}\n]}"));
    CHECK_EQ(tool("epic-trace", "metrics run --prometheus"), 0);
    CHECK(says(
        "epic_operations_total{group=\"one \\\"rank\\\"\",rank=\"0\",operation=\"sum\"} 1\n"));
}

/* ------------------------------------------------------------------------------ damage ---- */

static void damage(void)
{
    CHECK_EQ(tool("epic-trace", "nonsense in.npy"), 2);
    CHECK_EQ(tool("epic-trace", "draw in.npy"), 2);
    CHECK_EQ(tool("epic-trace", "show nowhere"), 1);
    CHECK(says("epic-trace: nowhere: "));
    CHECK_EQ(tool("epic-place", "recorded"), 2);
    CHECK_EQ(tool("epic-place", "recorded --ranks 5 --slots 2"), 1);
    CHECK(says("with 5 ranks it must be at least 3 for 12 experts"));
    CHECK_EQ(tool("epic-place", "recorded --ranks 2 --slots 13"), 1);
    CHECK(says("it must be at most 12"));
    CHECK_EQ(tool("epic-place", "recorded --ranks 2 --slots 12"), 0);
    CHECK_EQ(tool("epic-place", "recorded --ranks 6 --hosts 4"), 1);
    CHECK(says("--hosts is 4: it must divide --ranks 6"));
    CHECK_EQ(tool("epic-place", "recorded --ranks 65 --hosts 5"), 1);
    CHECK(says("--ranks is 65: with --hosts it must be at most 64"));
    CHECK_EQ(tool("epic-trace", "show in.npy --experts 3"), 1);
    CHECK(says("it must be below 3"));
    /* A rank was killed while it wrote, so its last plan is ignored. */
    char command[256];
    snprintf(command, sizeof command, "cd %s/recorded && truncate -s -8 *-1.epictrace", folder);
    CHECK_EQ(system(command), 0);
    CHECK_EQ(tool("epic-trace", "show recorded"), 0);
    CHECK(says("incomplete  1 plans") && says("steps       4\n"));
    /* An invalid record after the header. */
    snprintf(command, sizeof command,
             "cd %s/recorded && printf '\\377\\377' | dd of=$(ls *-1.epictrace) bs=1 seek=168 "
             "conv=notrunc 2>/dev/null",
             folder);
    CHECK_EQ(system(command), 0);
    CHECK_EQ(tool("epic-trace", "show recorded"), 1);
    CHECK(says("a damaged record"));
}

int main(void)
{
    check_begin();
    tools_begin();
    draw_ids();
    write_npy();
    in_and_out();
    replays();
    pictures();
    numbers();
    a_placement("");
    a_placement("--slots 4");
    a_placement("--hosts 2");
    a_placement("--slots 5 --hosts 2");
    broken_placements();
    a_run();
    damage();
    tools_end();
    return check_end();
}
