/* SPDX-License-Identifier: Apache-2.0 */
/* Converts traces for other programs: Perfetto, readers of JSON lines, Prometheus. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "info.h"
#include "trace_draw.h"

/* ---------------------------------------------------------------------------- Chrome ---- */

/* Writes the operations of all ranks for Perfetto or chrome://tracing. The times in the file
 * are microseconds since the first operation of any rank. The ranks must be on one host, so
 * that their times come from one clock. */
void trace_chrome(const trace *t, const char *path)
{
    FILE *out = fopen(path, "w");
    if (!out) tool_fail("%s: %s", path, strerror(errno));
    const int64_t zero = t->num_events ? t->events[0].record.time_ns : 0;
    fprintf(out, "{\"displayTimeUnit\": \"ns\", \"traceEvents\": [\n");
    for (int32_t r = 0; r < t->num_ranks; r++)
        fprintf(out,
                "{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": %d, "
                "\"args\": {\"name\": \"rank %d\"}}%s\n",
                r, r, t->num_events || r + 1 < t->num_ranks ? "," : "");
    for (int64_t i = 0; i < t->num_events; i++) {
        const trace_record *e = &t->events[i].record;
        fprintf(out,
                "{\"ph\": \"X\", \"name\": \"%s\", \"cat\": \"epic\", \"pid\": %d, \"tid\": "
                "%" PRIu64 ", \"ts\": %.3f, \"dur\": %.3f, \"args\": {\"tag\": %" PRIu64
                ", \"sequence\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"result\": \"%s\"}}%s\n",
                info_operation(e->done.operation), t->events[i].rank, info_thread(e->tag),
                (double)(e->time_ns - zero) / 1e3, (double)(e->done.end_ns - e->time_ns) / 1e3,
                e->tag, e->sequence, e->done.bytes,
                epic_result_name((epic_result)e->done.result),
                i + 1 < t->num_events ? "," : "");
    }
    fprintf(out, "]}\n");
    const bool bad = ferror(out) != 0;
    if (fclose(out) || bad) tool_fail("%s: cannot write the file", path);
}

/* ----------------------------------------------------------------------------- loads ---- */

/* Returns the load of the busiest rank divided by the mean load, if each rank owns a contiguous
 * block of experts. */
static double imbalance_of(const int64_t *load, int64_t experts, int64_t ranks)
{
    int64_t most = 0, all = 0;
    for (int64_t r = 0; r < ranks; r++) {
        int64_t sum = 0;
        for (int64_t e = experts * r / ranks; e < experts * (r + 1) / ranks; e++)
            sum += load[e];
        all += sum;
        if (sum > most) most = sum;
    }
    return all ? (double)(most * ranks) / (double)all : 1;
}

void trace_metrics(const trace *t)
{
    int64_t *load = tool_alloc((t->num_experts + 1) * sizeof *load);
    for (int64_t i = 0; i < t->num_steps; i++) {
        const trace_step *s = &t->steps[i];
        const int64_t none = trace_count_load(s, load);
        printf("{\"group\": ");
        info_json(stdout, t->name);
        printf(", \"tag\": %" PRIu64 ", \"sequence\": %" PRIu64, s->tag, s->sequence);
        if (!t->has_loads)
            printf(", \"time_ns\": %" PRId64 ", \"tokens\": %" PRId64
                   ", \"top_k\": %u, \"none\": %" PRId64 ", \"rank_imbalance\": %.4f",
                   s->time_ns, s->num_tokens, s->top_k, none,
                   imbalance_of(load, s->num_experts, t->num_ranks));
        printf(", \"expert_imbalance\": %.4f, \"load\": [",
               imbalance_of(load, s->num_experts, s->num_experts));
        for (uint32_t e = 0; e < s->num_experts; e++)
            printf("%s%" PRId64, e ? ", " : "", load[e]);
        printf("]}\n");
    }
    free(load);
}

static void print_head(const char *name, const char *kind, const char *help)
{
    printf("# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind);
}

static void print_sample(const trace *t, const char *name)
{
    printf("%s{group=", name);
    info_label(stdout, t->name);
}

/* Prints the number, failures and time of operations of each rank. */
static void print_operations(const trace *t)
{
    enum { NUM = EPIC_OP_WINDOW + 1 };
    const int64_t cells = (int64_t)t->num_ranks * NUM;
    double *seconds = tool_alloc((size_t)cells * sizeof *seconds);
    int64_t *count = tool_alloc((size_t)cells * sizeof *count);
    int64_t *failed = tool_alloc((size_t)cells * sizeof *failed);
    for (int64_t i = 0; i < t->num_events; i++) {
        const trace_record *e = &t->events[i].record;
        if (e->done.operation >= NUM) continue;
        const int64_t at = (int64_t)t->events[i].rank * NUM + e->done.operation;
        count[at]++;
        failed[at] += e->done.result != EPIC_OK;
        seconds[at] += (double)(e->done.end_ns - e->time_ns) * 1e-9;
    }
    static const char *const names[] = {"epic_operations_total", "epic_operations_failed_total",
                                        "epic_operation_seconds_total"};
    static const char *const helps[] = {"Operations that ended.",
                                        "Operations that ended with an error.",
                                        "Time from the calls of operations to their ends."};
    for (int what = 0; what < 3; what++) {
        print_head(names[what], "counter", helps[what]);
        for (int64_t at = 0; at < cells; at++) {
            if (!count[at]) continue;
            print_sample(t, names[what]);
            printf(",rank=\"%" PRId64 "\",operation=\"%s\"} ", at / NUM,
                   info_operation((uint32_t)(at % NUM)));
            if (what == 2)
                printf("%.9f\n", seconds[at]);
            else
                printf("%" PRId64 "\n", what ? failed[at] : count[at]);
        }
    }
    free(seconds), free(count), free(failed);
}

void trace_prometheus(const trace *t)
{
    int64_t *load = tool_alloc((t->num_experts + 1) * sizeof *load);
    int64_t *total = tool_alloc((t->num_experts + 1) * sizeof *total);
    int64_t tokens = 0, none = 0;
    double last = 1;
    for (int64_t i = 0; i < t->num_steps; i++) {
        const trace_step *s = &t->steps[i];
        tokens += s->num_tokens;
        none += trace_count_load(s, load);
        for (uint32_t e = 0; e < s->num_experts; e++) total[e] += load[e];
        last = imbalance_of(load, s->num_experts, t->num_ranks);
    }
    print_head("epic_plans_total", "counter", "Plans of the group.");
    print_sample(t, "epic_plans_total");
    printf("} %" PRId64 "\n", t->num_steps);
    print_head("epic_tokens_total", "counter", "Tokens of all ranks in these plans.");
    print_sample(t, "epic_tokens_total");
    printf("} %" PRId64 "\n", tokens);
    print_head("epic_choices_none_total", "counter", "Choices that name no expert.");
    print_sample(t, "epic_choices_none_total");
    printf("} %" PRId64 "\n", none);
    print_head("epic_expert_load_total", "counter",
               "Choices of each expert, before any is dropped.");
    for (uint32_t e = 0; e < t->num_experts; e++) {
        print_sample(t, "epic_expert_load_total");
        printf(",expert=\"%u\"} %" PRId64 "\n", e, total[e]);
    }
    print_head("epic_rank_imbalance", "gauge",
               "Load of the busiest rank over the mean, contiguous blocks, in the last plan.");
    print_sample(t, "epic_rank_imbalance");
    printf("} %.6f\n", last);
    print_operations(t);
    free(load), free(total);
}
