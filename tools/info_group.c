/* SPDX-License-Identifier: Apache-2.0 */
/* Prints what the ranks of a running group are doing. Reads their flight recorders in memory,
 * so the output also includes ranks that hang. */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "info.h"
#include "info_waits.h"
#include "recordings.h"

#define NUM_FINISHED 5 /* number of finished operations to show for each rank */

typedef struct operation {
    recorder_entry entry;
    char sentence[RECORDER_SENTENCE];
} operation;

/* -------------------------------------------------------------- names and durations ---- */

static const char *state_name(uint32_t state)
{
    static const char *const names[] = {"announced", "moving rows", "done"};
    return state < sizeof names / sizeof *names ? names[state] : "unknown";
}

/* Returns the time from `from` to `to` in nanoseconds. Returns 0 if `to` is before `from`, for
 * example because the clock was set back, or if the difference does not fit into an int64_t,
 * because the recorder may be damaged. */
static int64_t elapsed_ns(int64_t from, int64_t to)
{
    int64_t ns;
    return to < from || __builtin_sub_overflow(to, from, &ns) ? 0 : ns;
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Comparison for qsort(): operations in flight come first, the oldest of them first. Finished
 * operations follow, the latest of them first. */
static int compare_interest(const void *a, const void *b)
{
    const recorder_entry *p = &((const operation *)a)->entry;
    const recorder_entry *q = &((const operation *)b)->entry;
    if (!p->end_ns != !q->end_ns) return p->end_ns ? 1 : -1;
    if (!p->end_ns) return (p->number > q->number) - (p->number < q->number);
    if (p->end_ns != q->end_ns) return p->end_ns > q->end_ns ? -1 : 1;
    return (p->number < q->number) - (p->number > q->number);
}

/* Reads the operations of a rank that are to be shown, and returns their number. The first
 * *num_in_flight of them are in flight. */
static int read_operations(const recorder_page *page, operation out[RECORDER_RECORDS],
                           int *num_in_flight)
{
    int num = 0;
    for (int i = 0; i < RECORDER_RECORDS; i++)
        if (recorder_read(page, i, &out[num].entry, out[num].sentence)) num++;
    qsort(out, (size_t)num, sizeof *out, compare_interest);
    *num_in_flight = 0;
    while (*num_in_flight < num && !out[*num_in_flight].entry.end_ns) ++*num_in_flight;
    return num - *num_in_flight > NUM_FINISHED ? *num_in_flight + NUM_FINISHED : num;
}

/* --------------------------------------------------------------------------- text ---- */

static void print_operation(const operation *o, int64_t now)
{
    char took[32], ago[32];
    const recorder_entry *e = &o->entry;
    const int64_t end = e->end_ns ? e->end_ns : now;
    printf("  %s  %-17s tag %" PRIu64 " sequence %" PRIu64 "  %" PRIu64 " bytes  %s  ",
           e->end_ns ? "finished " : "in flight", info_operation(e->operation), e->tag,
           e->sequence, e->bytes, info_duration(elapsed_ns(e->start_ns, end), took));
    if (e->end_ns) {
        printf("%s, %s ago\n", epic_result_name((epic_result)e->result),
               info_duration(elapsed_ns(e->end_ns, now), ago));
        if (!*o->sentence) return;
        printf("             ");
        info_text(stdout, o->sentence);
        printf("\n");
    } else if (e->waits_for >= 0) {
        printf("%s, waits for rank %d\n", state_name(e->state), e->waits_for);
    } else {
        printf("%s, waits for no rank\n", state_name(e->state));
    }
}

/* Returns true if kernels perform the operations of the rank's backend. The flight recorder of
 * such a rank contains no operations. */
static bool is_on_gpu(const recorder_page *page)
{
    return !strcmp(page->backend, "p2p") || !strcmp(page->backend, "hosts");
}

static void print_rank(const recording *s, const operation *list, int num)
{
    char age[32];
    const int64_t now = now_ns();
    printf("rank %d of %d  pid %lld  ", s->page->rank, s->page->num_ranks,
           (long long)s->page->pid);
    info_text(stdout, s->page->backend);
    printf("  opened %s ago", info_duration(elapsed_ns(s->page->opened_ns, now), age));
    if (s->holder != s->page->pid) printf("  (held by pid %d)", s->holder);
    printf("\n");
    if (*s->page->net) {
        printf("  to other hosts by ");
        info_text(stdout, s->page->net);
        printf("\n");
    }
    for (int i = 0; i < num; i++) print_operation(&list[i], now);
    if (num == 0)
        printf(is_on_gpu(s->page) ? "  operations on GPUs are not recorded\n"
                                  : "  no operation yet\n");
    waits_print(s);
}

/* Prints the ranks of the group that have no flight recorder on this host. */
static void print_missing(const recording *list, int num)
{
    const int num_ranks = list[0].page->num_ranks;
    const char *separator = "not found on this host, for this user: rank ";
    for (int rank = 0, i = 0; rank < num_ranks && rank < MAX_RECORDINGS; rank++) {
        while (i < num && list[i].page->rank < rank) i++;
        if (i < num && list[i].page->rank == rank) continue;
        printf("%s%d", separator, rank);
        separator = ", ";
    }
    if (*separator == ',') printf("\n");
}

/* --------------------------------------------------------------------------- JSON ---- */

static void print_json_string(const char *key, const char *text)
{
    printf("\"%s\": ", key);
    info_json(stdout, text);
}

static void print_json_operation(const operation *o, int64_t now)
{
    const recorder_entry *e = &o->entry;
    const int64_t end = e->end_ns ? e->end_ns : now;
    printf("        {\"operation\": \"%s\", \"tag\": %" PRIu64 ", \"sequence\": %" PRIu64
           ", \"bytes\": %" PRIu64 ", \"start_ns\": %" PRId64 ", \"elapsed_ns\": %" PRId64 ", ",
           info_operation(e->operation), e->tag, e->sequence, e->bytes, e->start_ns,
           elapsed_ns(e->start_ns, end));
    print_json_string("state", state_name(e->state));
    if (e->end_ns) {
        printf(", \"result\": \"%s\", ", epic_result_name((epic_result)e->result));
        print_json_string("sentence", o->sentence);
    } else if (e->waits_for >= 0) {
        printf(", \"waits_for\": %d", e->waits_for);
    } else {
        printf(", \"waits_for\": null");
    }
    putchar('}');
}

static void print_json_operations(const char *key, const operation *list, int num, int64_t now)
{
    printf(",\n      \"%s\": [", key);
    for (int i = 0; i < num; i++) {
        printf(i ? ",\n" : "\n");
        print_json_operation(&list[i], now);
    }
    putchar(']');
}

static void print_json_rank(const recording *s, const operation *list, int num,
                            int num_in_flight)
{
    const int64_t now = now_ns();
    printf("    {\"group_id\": \"%016" PRIx64 "\", \"rank\": %d, \"num_ranks\": %d, "
           "\"pid\": %lld, \"holder\": %d, ",
           s->page->group_id, s->page->rank, s->page->num_ranks, (long long)s->page->pid,
           s->holder);
    print_json_string("backend", s->page->backend);
    printf(", ");
    print_json_string("net", s->page->net);
    printf(", \"opened_ns\": %" PRId64, s->page->opened_ns);
    print_json_operations("in_flight", list, num_in_flight, now);
    print_json_operations("finished", list + num_in_flight, num - num_in_flight, now);
    waits_print_json(s);
    putchar('}');
}

/* -------------------------------------------------------------------------- Chrome ---- */

static void print_chrome_operation(const recording *s, const recorder_entry *e, int64_t zero,
                                   int64_t now)
{
    const int64_t end = e->end_ns ? e->end_ns : now;
    printf(",\n{\"ph\": \"X\", \"name\": \"%s%s\", \"cat\": \"epic\", \"pid\": %d, \"tid\": "
           "%" PRIu64 ", \"ts\": %.3f, \"dur\": %.3f, \"args\": {\"tag\": %" PRIu64
           ", \"sequence\": %" PRIu64 ", \"bytes\": %" PRIu64 ", ",
           info_operation(e->operation), e->end_ns ? "" : ", in flight", s->page->rank,
           info_thread(e->tag), (double)elapsed_ns(zero, e->start_ns) / 1e3,
           (double)elapsed_ns(e->start_ns, end) / 1e3, e->tag, e->sequence, e->bytes);
    if (e->end_ns)
        printf("\"result\": \"%s\"}}", epic_result_name((epic_result)e->result));
    else
        printf("\"waits_for\": %d}}", e->waits_for);
}

/* Prints the operations of all ranks in the format of chrome://tracing. Time 0 is the time at
 * which the first rank opened its context. All ranks are on this host, so their times are from
 * the same clock. */
static void print_chrome_found(const recordings *found, const char *group)
{
    const int64_t now = now_ns();
    int64_t zero = now;
    (void)group;
    for (int i = 0; i < found->num; i++)
        if (found->list[i].page->opened_ns < zero) zero = found->list[i].page->opened_ns;
    printf("{\"displayTimeUnit\": \"ns\", \"traceEvents\": [");
    for (int i = 0; i < found->num; i++) {
        const recording *s = &found->list[i];
        recorder_entry entry;
        printf("%s\n{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": %d, \"args\": "
               "{\"name\": \"rank %d, process %lld\"}}",
               i ? "," : "", s->page->rank, s->page->rank, (long long)s->page->pid);
        for (int r = 0; r < RECORDER_RECORDS; r++)
            if (recorder_read(s->page, r, &entry, NULL))
                print_chrome_operation(s, &entry, zero, now);
    }
    printf("\n]}\n");
}

/* ----------------------------------------------------------------- finding groups ---- */

static int read_rank(const recording *s, const operation **list, int *num_in_flight)
{
    static operation all[RECORDER_RECORDS];
    *list = all;
    return read_operations(s->page, all, num_in_flight);
}

static void print_json_found(const recordings *found, const char *group)
{
    printf("{\n  ");
    print_json_string("group", group);
    printf(",\n  \"ranks\": [\n");
    for (int i = 0; i < found->num; i++) {
        const operation *list;
        int num_in_flight;
        const int num = read_rank(&found->list[i], &list, &num_in_flight);
        print_json_rank(&found->list[i], list, num, num_in_flight);
        printf(i + 1 < found->num ? ",\n" : "]\n}\n");
    }
}

/* Returns the index after the last rank of the group that begins at index `first`. The list is
 * sorted by group. */
static int end_of_group(const recordings *found, int first)
{
    int end = first;
    while (end < found->num &&
           found->list[end].page->group_id == found->list[first].page->group_id)
        end++;
    return end;
}

/* Prints each group with this name. Several jobs may have groups with the same name. */
static void print_found(const recordings *found, const char *group)
{
    for (int first = 0, end; first < found->num; first = end) {
        end = end_of_group(found, first);
        printf(first ? "\ngroup \"" : "group \"");
        info_text(stdout, group);
        if (first || end < found->num)
            printf("\", one of several of that name, id %016" PRIx64 "\n",
                   found->list[first].page->group_id);
        else
            printf("\"\n");
        for (int i = first; i < end; i++) {
            const operation *list;
            int num_in_flight;
            const int num = read_rank(&found->list[i], &list, &num_in_flight);
            print_rank(&found->list[i], list, num);
        }
        waits_print_group(&found->list[first], end - first);
        print_missing(&found->list[first], end - first);
    }
}

static bool is_in_group(const recording *s, const char *group)
{
    return !strncmp(s->page->group, group, sizeof s->page->group - 1);
}

static void keep_group(recordings *out, const recordings *all, const char *group)
{
    for (int i = 0; i < all->num; i++)
        if (is_in_group(&all->list[i], group)) out->list[out->num++] = all->list[i];
}

static void print_group_names(const recordings *all)
{
    for (int i = 0; i < all->num; i++) {
        bool said = false;
        for (int j = 0; j < i; j++)
            said |= is_in_group(&all->list[j], all->list[i].page->group);
        if (said) continue;
        fprintf(stderr, "group found: \"");
        info_text(stderr, all->list[i].page->group);
        fprintf(stderr, "\"\n");
    }
}

int info_group(const char *group, info_form form)
{
    static void (*const prints[])(const recordings *, const char *) = {
        print_found, print_json_found, print_chrome_found};
    static recordings all, found;
    recordings_find(&all);
    keep_group(&found, &all, group);
    if (found.num > 0) {
        prints[form](&found, group);
        return 0;
    }
    fprintf(stderr, "epic-info: no rank of group \"");
    info_text(stderr, group);
    fprintf(stderr, "\" in this user's processes on this host\n");
    print_group_names(&all);
    return 1;
}
