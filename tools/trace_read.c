/* SPDX-License-Identifier: Apache-2.0 */
/* Reads a folder with one trace file for each rank, and joins the plans of all ranks to steps.
 * Checks every size and value, because the files may be damaged or forged. */
#include "trace_read.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ENDING ".epictrace"

/* The file of one rank. */
typedef struct trace_file {
    char path[4096];
    unsigned char *bytes;
    size_t size;
    trace_header header;
} trace_file;

/* One rank's part of a step. */
typedef struct rank_plan {
    trace_record record;
    int32_t rank;
    const unsigned char *ids;
} rank_plan;

typedef struct found_records {
    rank_plan *plans;
    int64_t num_plans, room_plans;
    trace_event *events;
    int64_t num_events, room_events;
} found_records;

static void read_pair(const char *option, const char *text, char between, int64_t *a,
                      int64_t *b)
{
    char first[32];
    const char *at = strchr(text, between);
    if (!at || at - text >= (long)sizeof first)
        tool_fail("%s is \"%.80s\": it must be two numbers with '%c' between them", option,
                  text, between);
    memcpy(first, text, (size_t)(at - text));
    first[at - text] = 0;
    *a = tool_parse_number(option, first, 0, INT32_MAX);
    *b = tool_parse_number(option, at + 1, 1, INT32_MAX);
}

static void read_layer(trace_choice *choice, const char *text)
{
    read_pair("--layer", text, '/', &choice->layer_index, &choice->num_layers);
    if (choice->layer_index >= choice->num_layers)
        tool_fail("--layer is \"%.80s\": the first number must be less than the second", text);
}

bool trace_read_flag(trace_choice *choice, const char *name)
{
    if (strcmp(name, "--loads") && strcmp(name, "--ids")) return false;
    choice->values = name;
    return true;
}

bool trace_read_option(trace_choice *choice, const char *name, const char *value)
{
    if (!strcmp(name, "--group"))
        choice->group = value;
    else if (!strcmp(name, "--layer"))
        read_layer(choice, value);
    else if (!strcmp(name, "--steps"))
        read_pair(name, value, ':', &choice->first, &choice->num);
    else if (!strcmp(name, "--experts"))
        choice->num_experts = (uint32_t)tool_parse_number(name, value, 1, 65536);
    else
        return false;
    return true;
}

/* ---------------------------------------------------------------------- trace files ---- */

static bool ends_with(const char *text, const char *end)
{
    const size_t length = strlen(text), tail = strlen(end);
    return length >= tail && !strcmp(text + length - tail, end);
}

static void read_bytes(trace_file *f)
{
    FILE *in = tool_open_file(f->path);
    size_t room = 1 << 16;
    f->bytes = tool_alloc(room);
    for (size_t more; (more = fread(f->bytes + f->size, 1, room - f->size, in)) > 0;) {
        f->size += more;
        if (f->size < room) continue;
        room *= 2;
        f->bytes = realloc(f->bytes, room);
        if (!f->bytes) tool_fail("%s: no memory for %zu bytes", f->path, room);
    }
    if (ferror(in)) tool_fail("%s: %s", f->path, strerror(errno));
    fclose(in);
}

static void read_header(trace_file *f)
{
    trace_header *h = &f->header;
    if (f->size < sizeof *h)
        tool_fail("%s: not a trace, as it has only %zu bytes", f->path, f->size);
    memcpy(h, f->bytes, sizeof *h);
    if (memcmp(h->magic, TRACE_MAGIC, sizeof h->magic)) tool_fail("%s: not a trace", f->path);
    if (h->version != TRACE_VERSION)
        tool_fail("%s: has version %u of the format; this program reads version %d", f->path,
                  h->version, TRACE_VERSION);
    if (h->header_bytes < sizeof *h || h->header_bytes > f->size)
        tool_fail("%s: its header has an invalid size of %u bytes", f->path, h->header_bytes);
    if (h->num_ranks < 1 || h->num_ranks > MAX_RANKS || h->rank < 0 ||
        h->rank >= h->num_ranks || !memchr(h->name, 0, sizeof h->name))
        tool_fail("%s: its rank %d of %d, or its name, is invalid", f->path, h->rank,
                  h->num_ranks);
}

static bool is_valid_plan(const trace_record *r)
{
    const int64_t tokens = r->plan.num_tokens, k = r->plan.top_k;
    return tokens >= 0 && tokens <= INT32_MAX && k >= 1 && k <= MAX_TOP_K &&
           r->plan.num_experts >= 1 && r->plan.num_experts <= MAX_EXPERTS &&
           r->id_bytes == trace_id_bytes(r->plan.num_experts) &&
           r->payload == ((uint64_t)(tokens * k) * r->id_bytes + 7) / 8 * 8;
}

static bool is_valid_operation(const trace_record *r)
{
    return r->time_ns >= 0 && r->done.end_ns >= 0;
}

static void *grow_list(void *list, int64_t num, int64_t *room, size_t size)
{
    if (num < *room) return list;
    *room = *room ? 2 * *room : 1024;
    void *larger = realloc(list, (size_t)*room * size);
    if (!larger) tool_fail("no memory for %" PRId64 " records", *room);
    return larger;
}

/* Reads the records of a file up to the first incomplete record. An incomplete record is no
 * error, because the rank may have been killed while it wrote the record. */
static void read_records(const trace_file *f, found_records *out)
{
    size_t at = f->header.header_bytes;
    trace_record r;
    while (f->size - at >= sizeof r) {
        memcpy(&r, f->bytes + at, sizeof r);
        at += sizeof r;
        if (r.payload > f->size - at) return;
        if ((r.kind == TRACE_PLAN && !is_valid_plan(&r)) ||
            (r.kind == TRACE_OPERATION && !is_valid_operation(&r)))
            tool_fail("%s: has a damaged record before byte %zu", f->path, at);
        if (r.kind == TRACE_PLAN) {
            out->plans =
                grow_list(out->plans, out->num_plans, &out->room_plans, sizeof(rank_plan));
            out->plans[out->num_plans++] = (rank_plan){r, f->header.rank, f->bytes + at};
        } else if (r.kind == TRACE_OPERATION) {
            out->events =
                grow_list(out->events, out->num_events, &out->room_events, sizeof(trace_event));
            out->events[out->num_events++] = (trace_event){f->header.rank, r};
        }
        at += r.payload;
    }
}

/* ---------------------------------------------------------------------------- steps ---- */

static int compare_places(const void *a, const void *b)
{
    const rank_plan *p = a, *q = b;
    if (p->record.tag != q->record.tag) return p->record.tag < q->record.tag ? -1 : 1;
    if (p->record.sequence != q->record.sequence)
        return p->record.sequence < q->record.sequence ? -1 : 1;
    return (p->rank > q->rank) - (p->rank < q->rank);
}

static int compare_times(const void *a, const void *b)
{
    const int64_t p = ((const trace_step *)a)->time_ns, q = ((const trace_step *)b)->time_ns;
    return (p > q) - (p < q);
}

static int compare_starts(const void *a, const void *b)
{
    const trace_event *p = a, *q = b;
    if (p->record.time_ns != q->record.time_ns)
        return p->record.time_ns < q->record.time_ns ? -1 : 1;
    return (p->rank > q->rank) - (p->rank < q->rank);
}

static int32_t id_at(const rank_plan *p, int64_t i)
{
    uint32_t id = 0;
    memcpy(&id, p->ids + (size_t)i * p->record.id_bytes, p->record.id_bytes);
    if (id == UINT32_MAX >> (32 - 8 * p->record.id_bytes)) return -1;
    if (id >= p->record.plan.num_experts)
        tool_fail("rank %d: id %u of %u experts", p->rank, id, p->record.plan.num_experts);
    return (int32_t)id;
}

/* Joins the plans of all ranks to a step. Returns false if the plan of a rank is missing, or if
 * the plans have different numbers of experts or choices. */
static bool join_parts(trace_step *out, const rank_plan *parts, int32_t num_ranks)
{
    const trace_record *first = &parts[0].record;
    *out = (trace_step){.tag = first->tag,
                        .sequence = first->sequence,
                        .time_ns = first->time_ns,
                        .top_k = first->plan.top_k,
                        .num_experts = first->plan.num_experts,
                        .alignment = first->plan.alignment};
    for (int32_t r = 0; r < num_ranks; r++) {
        const trace_record *part = &parts[r].record;
        if (parts[r].rank != r || part->plan.top_k != out->top_k ||
            part->plan.num_experts != out->num_experts)
            return false;
        if (part->time_ns < out->time_ns) out->time_ns = part->time_ns;
        out->num_tokens += part->plan.num_tokens;
    }
    out->tokens_of = tool_alloc((size_t)num_ranks * sizeof *out->tokens_of);
    out->ids = tool_alloc((size_t)(out->num_tokens * out->top_k) * sizeof *out->ids);
    int32_t *id = out->ids;
    for (int32_t r = 0; r < num_ranks; r++) {
        out->tokens_of[r] = parts[r].record.plan.num_tokens;
        for (int64_t i = 0; i < out->tokens_of[r] * out->top_k; i++)
            *id++ = id_at(&parts[r], i);
    }
    return true;
}

/* Sorts the plans of all ranks and joins them to steps. */
static void make_steps(trace *out, found_records *found)
{
    if (found->num_plans)
        qsort(found->plans, (size_t)found->num_plans, sizeof(rank_plan), compare_places);
    if (found->num_events)
        qsort(found->events, (size_t)found->num_events, sizeof(trace_event), compare_starts);
    out->steps = tool_alloc((size_t)(found->num_plans + 1) * sizeof *out->steps);
    for (int64_t i = 0, end; i < found->num_plans; i = end) {
        const trace_record *first = &found->plans[i].record;
        for (end = i; end < found->num_plans; end++)
            if (found->plans[end].record.tag != first->tag ||
                found->plans[end].record.sequence != first->sequence)
                break;
        const bool whole =
            end - i == out->num_ranks &&
            join_parts(&out->steps[out->num_steps], &found->plans[i], out->num_ranks);
        if (whole)
            out->num_steps++;
        else
            out->num_incomplete++;
    }
    qsort(out->steps, (size_t)out->num_steps, sizeof *out->steps, compare_times);
    out->events = found->events;
    out->num_events = found->num_events;
}

static void free_step(trace_step *s)
{
    free(s->tokens_of);
    free(s->ids);
    free(s->load);
}

int64_t trace_count_load(const trace_step *s, int64_t *load)
{
    int64_t none = 0;
    if (s->load) {
        memcpy(load, s->load, s->num_experts * sizeof *load);
        return 0;
    }
    memset(load, 0, s->num_experts * sizeof *load);
    for (int64_t i = 0; i < s->num_tokens * s->top_k; i++)
        if (s->ids[i] < 0)
            none++;
        else
            load[s->ids[i]]++;
    return none;
}

void trace_need_choices(const trace *t, const char *what)
{
    if (t->has_loads)
        tool_fail("%s needs the choices of each token, but with --loads the file has counts",
                  what);
}

/* Keeps the steps that the options select, in order. */
static void select_steps(trace *t, const trace_choice *choice)
{
    int64_t num_kept = 0, seen = 0;
    for (int64_t i = 0; i < t->num_steps; i++) {
        bool wanted = !choice->num_layers || i % choice->num_layers == choice->layer_index;
        if (wanted) {
            wanted =
                seen >= choice->first && (!choice->num || seen < choice->first + choice->num);
            seen++;
        }
        if (wanted)
            t->steps[num_kept++] = t->steps[i];
        else
            free_step(&t->steps[i]);
    }
    t->num_steps = num_kept;
    for (int64_t i = 0; i < num_kept; i++)
        if (t->steps[i].num_experts > t->num_experts) t->num_experts = t->steps[i].num_experts;
}

/* ----------------------------------------------------------------- folders of traces ---- */

static bool is_chosen(const trace_file *f, const char *group)
{
    char id[32];
    snprintf(id, sizeof id, "%016" PRIx64, f->header.group_id);
    return !group || !strcmp(group, f->header.name) || !strcmp(group, id);
}

/* Adds a file to the group in *out. Checks that all files belong to one group with one number
 * of ranks, and that each rank has only one file. seen[r] is true if rank r has a file. */
static void add_to_group(trace *out, const trace_file *f, const char *path, bool *seen)
{
    const trace_header *h = &f->header;
    if (out->num_ranks && out->group_id != h->group_id)
        tool_fail("%s: has groups %016" PRIx64 " and %016" PRIx64 "; choose one with --group",
                  path, out->group_id, h->group_id);
    if (out->num_ranks && out->num_ranks != h->num_ranks)
        tool_fail("%s: its group has %d ranks, but that of other files has %d", f->path,
                  h->num_ranks, out->num_ranks);
    if (seen[h->rank]) tool_fail("%s: another file has rank %d too", f->path, h->rank);
    seen[h->rank] = true;
    out->num_ranks = h->num_ranks;
    out->group_id = h->group_id;
    memcpy(out->name, h->name, sizeof out->name);
}

/* Reads all trace files of a folder that belong to the group. */
static void load_folder(trace *out, DIR *folder, const char *path, const trace_choice *choice)
{
    found_records found = {0};
    trace_file **files = tool_alloc(MAX_RANKS * sizeof *files);
    bool *seen = tool_alloc(MAX_RANKS * sizeof *seen);
    int num = 0;
    for (struct dirent *entry; (entry = readdir(folder)) && num < MAX_RANKS;) {
        if (!ends_with(entry->d_name, ENDING)) continue;
        trace_file *f = tool_alloc(sizeof *f);
        snprintf(f->path, sizeof f->path, "%s/%s", path, entry->d_name);
        read_bytes(f);
        read_header(f);
        files[num++] = f;
        if (!is_chosen(f, choice->group)) continue;
        add_to_group(out, f, path, seen);
        read_records(f, &found);
    }
    if (!out->num_ranks)
        tool_fail("%s: has no %s file%s", path, ENDING, choice->group ? " of that group" : "");
    make_steps(out, &found);
    free(found.plans);
    for (int i = 0; i < num; i++) {
        free(files[i]->bytes);
        free(files[i]);
    }
    free(files), free(seen);
}

void trace_load(trace *out, const char *path, const trace_choice *choice)
{
    memset(out, 0, sizeof *out);
    if (ends_with(path, ".npy")) {
        trace_load_npy(out, path, choice);
    } else if (choice->values) {
        tool_fail("%s: %s is for .npy files only", path, choice->values);
    } else {
        DIR *folder = opendir(path);
        if (!folder)
            tool_fail("%s: %s: it must be a folder of traces or an .npy file", path,
                      strerror(errno));
        load_folder(out, folder, path, choice);
        closedir(folder);
    }
    select_steps(out, choice);
}

void trace_free(trace *t)
{
    for (int64_t i = 0; i < t->num_steps; i++) free_step(&t->steps[i]);
    free(t->steps);
    free(t->events);
}
