/* SPDX-License-Identifier: Apache-2.0 */
/* Tests tables of loads [layers, experts] in epic-trace and epic-place. They are refused as
 * ids. With --loads they give the results of the choices that they count. */
#include <stdint.h>

#include "check.h"
#include "epic/placement.h"
#include "run.h"
#include "unit/tools.h"

#define STEPS 6
#define TOKENS 40
#define TOP_K 2
#define EXPERTS 16
#define RANKS 4

/* The table in the README of DeepSeek's EPLB: two layers of 12 experts. */
static const int64_t published[2][12] = {
    {90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86},
    {20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27},
};

/* Writes an array of int64 as numpy.save does. */
static void write_npy(const char *name, const char *shape, const int64_t *values, size_t num)
{
    char text[118], header[128];
    FILE *out = create(name);
    if (!CHECK(out != NULL)) return;
    memcpy(header, "\x93NUMPY\x01\x00\x76\x00", 10);
    snprintf(text, sizeof text, "{'descr': '<i8', 'fortran_order': False, 'shape': %s, }",
             shape);
    snprintf(header + 10, 118, "%-117s", text);
    header[127] = '\n';
    fwrite(header, 1, sizeof header, out);
    fwrite(values, sizeof *values, num, out);
    fclose(out);
}

static void refused(const char *file, const char *why)
{
    char words[128];
    snprintf(words, sizeof words, "show %s", file);
    CHECK_EQ(tool("epic-trace", words), 1);
    CHECK(says(why) && says("look like loads") && says("--loads") && says("--ids"));
    snprintf(words, sizeof words, "%s --ranks 2", file);
    CHECK_EQ(tool("epic-place", words), 1);
    CHECK(says(why) && says("look like loads"));
}

/* Shapes and values that ids of a router cannot have. */
static void tables_as_ids(void)
{
    static int64_t wide[3][128], few[32][8], level[40][16];
    /* all layers route the same tokens */
    static const int64_t sums[3][8] = {{90, 132, 40, 61, 104, 165, 39, 4},
                                       {4, 90, 132, 40, 61, 104, 165, 39},
                                       {10, 20, 30, 40, 50, 60, 70, 355}};
    for (int i = 0; i < 3 * 128; i++) (&wide[0][0])[i] = i;
    for (int i = 0; i < 32 * 8; i++) (&few[0][0])[i] = 3000 + 7 * i;
    for (int i = 0; i < 40 * 16; i++) (&level[0][0])[i] = 10 + i % 16 / 2;
    write_npy("published.npy", "(2, 12)", &published[0][0], 24);
    write_npy("wide.npy", "(3, 128)", &wide[0][0], 3 * 128);
    write_npy("few.npy", "(32, 8)", &few[0][0], 32 * 8);
    write_npy("level.npy", "(40, 16)", &level[0][0], 40 * 16);
    write_npy("line.npy", "(12,)", published[0], 12);
    refused("published.npy", "it has 2 rows of 12 values");
    refused("wide.npy", "its rows have 128 values, and top_k is at most 64");
    refused("few.npy", "it has 256 values, the largest of them 4785");
    refused("level.npy", "row 0 has the value 10 twice");
    write_npy("sums.npy", "(3, 8)", &sums[0][0], 24);
    refused("sums.npy", "the sums of all rows are equal");
    refused("line.npy", "it has 1 rows of 12 values");
    /* ids of few tokens, and of a router with top-1 that chooses one expert */
    static const int64_t few_ids[3][4] = {{0, 1, 2, 7}, {0, 1, 3, 6}, {0, 1, 4, 5}},
                         hot[3] = {70, 70, 70};
    write_npy("few_ids.npy", "(3, 4)", &few_ids[0][0], 12);
    write_npy("hot.npy", "(3, 1)", hot, 3);
    CHECK_EQ(tool("epic-trace", "show few_ids.npy"), 0);
    CHECK_EQ(tool("epic-trace", "show hot.npy"), 0);
    CHECK_EQ(tool("epic-trace", "show published.npy --ids"), 0);
    CHECK(says("198 experts") && says("tokens      2\n"));
    CHECK_EQ(tool("epic-trace", "show few.npy --experts 5000"), 0);
}

/* ---------------------------------------------------------------------- what it counts ---- */

static int64_t ids[STEPS][TOKENS][TOP_K], loads[STEPS][EXPERTS];

static void draw(void)
{
    run_random random = {11};
    for (int s = 0; s < STEPS; s++)
        for (int t = 0; t < TOKENS; t++) {
            const int64_t a = run_below(&random, EXPERTS), b = run_below(&random, EXPERTS);
            ids[s][t][0] = a < b ? a : b;
            ids[s][t][1] = (ids[s][t][0] + 1 + run_below(&random, EXPERTS - 1)) % EXPERTS;
        }
    ids[0][0][0] = 0, ids[0][0][1] = EXPERTS - 1;
    for (int i = 0; i < STEPS * TOKENS * TOP_K; i++)
        loads[i / (TOKENS * TOP_K)][(&ids[0][0][0])[i]]++;
    write_npy("ids.npy", "(6, 40, 2)", &ids[0][0][0], STEPS * TOKENS * TOP_K);
    write_npy("loads.npy", "(6, 16)", &loads[0][0], STEPS * EXPERTS);
}

/* Returns the sum over every `every`-th row, beginning with row `first`, of the choices on the
 * busiest rank under the placement in the file. */
static long long cost_of(const char *file, int first, int every)
{
    char path[128];
    epic_placement place;
    long long cost = 0;
    snprintf(path, sizeof path, "%s/%s", folder, file);
    if (!CHECK(epic_placement_read(&place, path) == NULL)) return -1;
    CHECK_EQ(place.num_experts, EXPERTS);
    for (int s = first; s < STEPS; s += every) {
        long long busy[RANKS] = {0}, most = 0;
        for (int e = 0; e < EXPERTS; e++) busy[place.rank_of_expert[e]] += loads[s][e];
        for (int r = 0; r < RANKS; r++) most = busy[r] > most ? busy[r] : most;
        cost += most;
    }
    epic_placement_free(&place);
    return cost;
}

static void placements(void)
{
    static char from_ids[1 << 16];
    static unsigned char one[1 << 16], two[1 << 16];
    for (int slots = 4; slots <= 6; slots++) { /* more than 4 slots per rank: replicas */
        char words[128];
        snprintf(words, sizeof words, "ids.npy --ranks 4 --slots %d --out one.txt", slots);
        CHECK_EQ(tool("epic-place", words), 0);
        snprintf(from_ids, sizeof from_ids, "%s", strchr(output, '\n') + 1);
        snprintf(words, sizeof words, "loads.npy --loads --ranks 4 --slots %d --out two.txt",
                 slots);
        CHECK_EQ(tool("epic-place", words), 0);
        CHECK(says("6 rows of loads of 16 experts") && says(from_ids));
        const size_t size = bytes_of("one.txt", one, sizeof one);
        CHECK_EQ(bytes_of("two.txt", two, sizeof two), size);
        CHECK(size > 0 && !memcmp(one, two, size));
        if (slots == 4)
            CHECK_EQ(number("proposed       busiest rank "), cost_of("two.txt", 0, 1));
    }
    CHECK_EQ(tool("epic-place", "loads.npy --loads --layer 1/3 --ranks 4 --out two.txt"), 0);
    CHECK(says("2 rows of loads of 16 experts"));
    CHECK_EQ(number("proposed       busiest rank "), cost_of("two.txt", 1, 3));
    CHECK_EQ(tool("epic-place", "published.npy --loads --layer 0/2 --ranks 4 --slots 4"), 0);
    CHECK(says("1 rows of loads of 12 experts, for 4 ranks with 4 experts each"));
}

static void looks(void)
{
    char words[128];
    long long choices = 0, fifth = 0;
    int lines = 0;
    for (int i = 0; i < 24; i++) choices += (&published[0][0])[i];
    for (int s = 0; s < 2; s++) fifth += published[s][5];
    CHECK_EQ(tool("epic-trace", "show published.npy --loads"), 0);
    snprintf(words, sizeof words, "expert 5 has %.2f times an even share",
             (double)fifth * 12 / (double)choices);
    CHECK(says("a table of loads, 12 experts") && says("rows        2\n") && says(words));
    CHECK_EQ(number("choices     "), choices);
    CHECK_EQ(tool("epic-trace", "metrics --loads published.npy"), 0);
    for (const char *at = output; (at = strchr(at, '\n')); at++) lines++;
    CHECK_EQ(lines, 2);
    CHECK(says("\"load\": [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]}"));
    CHECK_EQ(tool("epic-trace", "draw published.npy load.svg --loads"), 0);
}

static void refusals(void)
{
    static const char *const commands[] = {"replay t.npy --ranks 2", "export t.npy o.npy",
                                           "import t.npy o", "chrome t.npy o.json",
                                           "metrics t.npy --prometheus"};
    const int64_t bad[2][2] = {{5, 1}, {7, -2}}, large[2] = {1, INT64_C(1) << 31};
    write_npy("t.npy", "(2, 12)", &published[0][0], 24);
    write_npy("bad.npy", "(2, 2)", &bad[0][0], 4);
    write_npy("large.npy", "(1, 2)", large, 2);
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        char words[128];
        snprintf(words, sizeof words, "%s --loads", commands[i]);
        CHECK_EQ(tool("epic-trace", words), 1);
        CHECK(says("needs the choices of each token"));
    }
    CHECK_EQ(tool("epic-place", "t.npy --loads --ranks 4 --hosts 2"), 1);
    CHECK(says("--hosts needs the choices of each token"));
    CHECK_EQ(tool("epic-trace", "show bad.npy --loads"), 1);
    CHECK(says("row 1, expert 1 has load -2: must be 0 to 2147483647"));
    CHECK_EQ(tool("epic-trace", "show large.npy --loads"), 1);
    CHECK(says("divide all loads by the same number"));
    CHECK_EQ(tool("epic-trace", "show t.npy --loads --experts 13"), 1);
    CHECK(says("--experts is 13") && says("loads of 12 experts"));
    CHECK_EQ(tool("epic-trace", "show . --loads"), 1);
    CHECK(says("--loads is for .npy files"));
}

int main(void)
{
    check_begin();
    tools_begin();
    tables_as_ids();
    draw();
    placements();
    looks();
    refusals();
    tools_end();
    return check_end();
}
