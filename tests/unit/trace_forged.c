/* SPDX-License-Identifier: Apache-2.0 */
/* Tests epic-trace and epic-place with files that EPIC has not written. They must print a
 * sentence and exit with 1, or print what can be read. They must never crash, wait, or write
 * control characters to the terminal. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/trace.h"
#include "check.h"
#include "run.h"
#include "unit/tools.h"

static const char *const commands[] = {
    "show d",    "draw d o.svg",           "draw d o.png",  "replay d",
    "metrics d", "metrics d --prometheus", "chrome d o.js", "export d o.npy"};
enum { NUM_COMMANDS = sizeof commands / sizeof *commands };

static trace_header head_of(int32_t rank, int32_t num_ranks)
{
    return (trace_header){.magic = {TRACE_MAGIC},
                          .version = TRACE_VERSION,
                          .header_bytes = sizeof(trace_header),
                          .rank = rank,
                          .num_ranks = num_ranks,
                          .group_id = 7,
                          .name = "g"};
}

static trace_record plan_of(uint64_t sequence)
{
    return (trace_record){
        .kind = TRACE_PLAN,
        .id_bytes = 1,
        .payload = 8,
        .sequence = sequence,
        .plan = {.num_tokens = 2, .top_k = 2, .num_experts = 8, .alignment = 1}};
}

static trace_record operation(int64_t begin, int64_t end)
{
    return (trace_record){
        .kind = TRACE_OPERATION, .time_ns = begin, .done = {.end_ns = end, .operation = 2}};
}

static void begin_folder(void)
{
    char command[128];
    snprintf(command, sizeof command, "cd %s && rm -rf d && mkdir d", folder);
    CHECK_EQ(system(command), 0);
}

/* Writes a header, a plan with its ids, and a record. */
static void write_file(const char *name, trace_header head, trace_record plan,
                       trace_record record)
{
    static const unsigned char ids[8] = {0, 1, 2, 3};
    FILE *out = create(name);
    if (!CHECK(out != NULL)) return;
    fwrite(&head, sizeof head, 1, out);
    fwrite(&plan, sizeof plan, 1, out);
    fwrite(ids, sizeof ids, 1, out);
    fwrite(&record, sizeof record, 1, out);
    fclose(out);
}

/* Every command must succeed, or print one line that explains the error. */
static void survived(const char *what)
{
    for (int i = 0; i <= NUM_COMMANDS; i++) {
        const int status = i < NUM_COMMANDS ? tool("epic-trace", commands[i])
                                            : tool("epic-place", "d --ranks 2");
        const bool is_explained =
            !strncmp(output, "epic-trace: ", 12) || !strncmp(output, "epic-place: ", 12);
        const bool tidy = !strpbrk(output, "\033\a\b\r") && !strstr(output, "runtime error") &&
                          !strstr(output, "Sanitizer");
        CHECK_SAY(tidy && (status == 0 || (status == 1 && is_explained)),
                  "%s: %s: status %d: %.2000s", what,
                  i < NUM_COMMANDS ? commands[i] : "epic-place", status, output);
    }
}

static void refused(const char *command, const char *sentence)
{
    CHECK_EQ(tool("epic-trace", command), 1);
    CHECK(says(sentence));
}

/* ----------------------------------------------------------------------------- folders ---- */

static void headers(void)
{
    begin_folder();
    FILE *empty = create("d/a.epictrace");
    if (CHECK(empty != NULL)) fclose(empty);
    refused("show d", "not a trace, as it has only 0 bytes");

    write_file("d/a.epictrace", head_of(0, 2), plan_of(0), operation(1, 2));
    write_file("d/b.epictrace", head_of(900, 1000), plan_of(0), operation(1, 2));
    refused("metrics d --prometheus", "but that of other files has");
    survived("numbers of ranks that differ");
    write_file("d/b.epictrace", head_of(0, 2), plan_of(0), operation(1, 2));
    refused("show d", "another file has rank 0 too");

    begin_folder();
    write_file("d/a.epictrace", head_of(9, 65536), plan_of(0), operation(1, 2));
    survived("one of many ranks, so no plan is whole");
    refused("draw d o.svg", "the trace has no step to draw");
}

static void records(void)
{
    static const int64_t times[] = {INT64_MIN, -1, 0, INT64_MAX};
    for (int i = 0; i < 16; i++) {
        begin_folder();
        write_file("d/a.epictrace", head_of(0, 1), plan_of(0),
                   operation(times[i / 4], times[i % 4]));
        survived("times");
    }
    begin_folder();
    trace_record unknown = operation(2, 1);
    unknown.done.operation = unknown.done.result = UINT32_MAX;
    write_file("d/a.epictrace", head_of(0, 1), plan_of(0), unknown);
    survived("an operation with an invalid number");
    unknown.kind = 77;
    unknown.payload = UINT64_MAX;
    write_file("d/a.epictrace", head_of(0, 1), plan_of(0), unknown);
    survived("a record longer than all");
}

static void names(void)
{
    begin_folder();
    trace_header head = head_of(0, 1);
    memcpy(head.name, "\033[31m\a\xff\"\\", 10);
    write_file("d/a.epictrace", head, plan_of(0), operation(1, 2));
    survived("a name with controls");
    CHECK_EQ(tool("epic-trace", "show d"), 0);
    CHECK(says("group \"\\x1b[31m\\x07\\xff\"\\\""));
    CHECK_EQ(tool("epic-trace", "metrics d --prometheus"), 0);
    CHECK(says("{group=\"\\\\x1b[31m\\\\x07\\\\xff\\\"\\\\\""));
    memset(head.name, 'x', sizeof head.name);
    write_file("d/a.epictrace", head, plan_of(0), operation(1, 2));
    survived("a name without an end");
    begin_folder();
    write_file("d/\033[31m.epictrace", head_of(5, 2), plan_of(0), operation(1, 2));
    survived("a file's name with controls");
}

/* Changes random bytes, and cuts off the end. */
static void damage(void)
{
    unsigned char good[1024];
    begin_folder();
    write_file("d/b.epictrace", head_of(1, 2), plan_of(0), operation(1, 2));
    write_file("d/a.epictrace", head_of(0, 2), plan_of(0), operation(1, 2));
    const size_t size = bytes_of("d/a.epictrace", good, sizeof good);
    run_random random = {run_seed()};
    for (int i = 0; i < 12; i++) {
        unsigned char bad[sizeof good];
        memcpy(bad, good, size);
        for (int64_t changes = 1 + run_below(&random, 4); changes > 0; changes--) {
            static const int values[] = {0, 0xff, 0x7f, 1};
            const size_t at = (size_t)run_below(&random, (int64_t)size - 8);
            memset(bad + at, values[run_below(&random, 4)], 1 + (size_t)run_below(&random, 8));
        }
        FILE *out = create("d/a.epictrace");
        if (!CHECK(out != NULL)) return;
        fwrite(bad, 1, run_chance(&random, 4) ? (size_t)run_below(&random, 300) : size, out);
        fclose(out);
        survived("damage");
    }
}

static void no_files(void)
{
    char path[128];
    begin_folder();
    snprintf(path, sizeof path, "%s/d/a.epictrace", folder);
    CHECK_EQ(mkfifo(path, 0600), 0); /* no process ever writes into it */
    refused("show d", "not a regular file");
    snprintf(path, sizeof path, "%s/pipe.npy", folder);
    CHECK_EQ(mkfifo(path, 0600), 0);
    refused("show pipe.npy", "not a regular file");
    begin_folder();
    snprintf(path, sizeof path, "%s/d/a.epictrace", folder);
    CHECK_EQ(mkdir(path, 0700), 0);
    refused("show d", "not a regular file");
}

/* ------------------------------------------------------------------------------ arrays ---- */

/* Writes an .npy file of 12 values of 4 bytes, with `dictionary` in a header of `length` bytes.
 */
static void write_npy(const char *dictionary, int length)
{
    FILE *out = create("d.npy");
    if (!CHECK(out != NULL)) return;
    fwrite("\x93NUMPY\x01\x00", 8, 1, out);
    fputc(length % 256, out), fputc(length / 256, out);
    fprintf(out, "%-*s", length, dictionary);
    for (int i = 0; i < 48; i++) fputc(0xff, out);
    fclose(out);
}

static void an_array(const char *type, const char *shape, const char *sentence)
{
    char text[256];
    snprintf(text, sizeof text, "{'descr': %s, 'fortran_order': False, 'shape': %s, }", type,
             shape);
    write_npy(text, 246);
    refused("show d.npy", sentence);
}

static void arrays(void)
{
    static const char *const types[] = {"'<f4'", "'>i4'", "'|b1'", "'<i3'", "'<c8'",
                                        "'O'",   "''",    "'",     "",      "[('a', '<i4')]"};
    static const char *const empty[] = {"(0, 2, 2)", "(1099511627776, 0, 8)", "(2, 0)",
                                        "(0, 9223372036854775807, 8)", "(1, 4294967297, 0, 8)"};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        an_array(types[i], "(3, 2, 2)", "must be little-endian integers");
    for (size_t i = 0; i < sizeof empty / sizeof *empty; i++)
        an_array("'<i4'", empty[i], "its array is empty");
    an_array("'<i4'", "(1099511627776, 1, 1)", "it ends after 12 of 1099511627776 values");
    an_array("'<i4'", "(1099511627776, 1024, 1)", "more than 1099511627776 values");
    an_array("'<i4'", "(99999999999999999999, 1)", "its shape cannot be read");
    an_array("'<i4'", "(-1, 2)", "its shape cannot be read");
    an_array("'<i4'", "(6, 2", "its shape cannot be read");
    an_array("'<i4'", "(1, 1, 1, 1, 12)", "more than 4 dimensions");
    an_array("'<i4'", "12", "its shape is not a tuple");
    an_array("'|u1'", "(1, 70000, 1, 1)", "it ends after 48 of 70000 values");
    an_array("'<u8'", "(3, 2)", "row 0 has the value 9223372036854775807 twice");
    refused("show d.npy --ids", "id 9223372036854775807: it must be below 65536");
    refused("show d.npy --loads", "expert 0 has load 9223372036854775807: must be 0 to");
    write_npy("{'descr': '<i4', 'fortran_order': True, 'shape': (6, 2), }", 118);
    refused("show d.npy", "in Fortran order");
    char text[4097]; /* the header ends where a value should follow */
    snprintf(text, sizeof text,
             "%-4088s'descr':", "{'fortran_order': False, 'shape': (6, 2), ");
    write_npy(text, 4096);
    refused("show d.npy", "must be little-endian integers");
    write_npy("{'descr': '<i4', 'fortran_order': False, 'shape': (6, 2), }", 118);
    char command[128];
    snprintf(command, sizeof command, "cd %s && head -c 100 d.npy >cut.npy", folder);
    CHECK_EQ(system(command), 0);
    refused("show cut.npy", "cut.npy: it ends in its header");
    CHECK_EQ(tool("epic-trace", "show d.npy"), 0); /* all ids are -1 */
    CHECK(says("choices     12, of these 12 name no expert"));
    refused("show d.npy --layer 2/2", "the first number must be less than the second");
    refused("draw d.npy o.svg --steps 5:1", "the trace has no step to draw");
}

int main(void)
{
    check_begin();
    tools_begin();
    headers();
    records();
    names();
    damage();
    no_files();
    arrays();
    tools_end();
    return check_end();
}
