/* SPDX-License-Identifier: Apache-2.0 */
/* Reads traces.  What the files say is checked like any stranger's word. */
#include "trace_read.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "info.h"

#define ENDING ".epictrace"

typedef struct file { /* one rank's */
    char path[4096];
    unsigned char *bytes;
    size_t size;
    trace_header header;
} file;

typedef struct plan { /* one rank's part of a step */
    trace_record record;
    int32_t rank;
    const unsigned char *ids;
} plan;

typedef struct heap { /* what has been found in all files */
    plan *plans;
    int64_t num_plans, room_plans;
    trace_event *events;
    int64_t num_events, room_events;
} heap;

_Noreturn void complain(const char *format, ...)
{
    char sentence[8192];
    va_list more;
    va_start(more, format);
    vsnprintf(sentence, sizeof sentence, format, more);
    va_end(more);
    fprintf(stderr, "%s: ", program_invocation_short_name);
    info_text(stderr, sentence);
    fprintf(stderr, "\n");
    exit(1);
}

FILE *open_file(const char *path)
{
    struct stat kind;
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &kind)) complain("%s: %s", path, strerror(errno));
    if (!S_ISREG(kind.st_mode)) complain("%s: not a file", path);
    FILE *in = fdopen(fd, "rb");
    if (!in) complain("%s: %s", path, strerror(errno));
    return in;
}

void *grab(size_t bytes)
{
    void *memory = calloc(1, bytes ? bytes : 1);
    if (!memory) complain("no memory for %zu bytes", bytes);
    return memory;
}

int64_t number_of(const char *option, const char *text, int64_t least, int64_t most)
{
    char *end;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (errno || end == text || *end || value < least || value > most)
        complain("%s is \"%.80s\": %" PRId64 " to %" PRId64 " are possible", option, text,
                 least, most);
    return value;
}

static void read_pair(const char *option, const char *text, char between, int64_t *a,
                      int64_t *b)
{
    char first[32];
    const char *at = strchr(text, between);
    if (!at || at - text >= (long)sizeof first)
        complain("%s is \"%.80s\": two numbers with '%c' between are needed", option, text,
                 between);
    memcpy(first, text, (size_t)(at - text));
    first[at - text] = 0;
    *a = number_of(option, first, 0, INT32_MAX);
    *b = number_of(option, at + 1, 1, INT32_MAX);
}

static void read_layer(trace_choice *choice, const char *text)
{
    read_pair("--layer", text, '/', &choice->turn, &choice->of);
    if (choice->turn >= choice->of)
        complain("--layer is \"%.80s\": of N layers the last is N - 1", text);
}

bool trace_flag(trace_choice *choice, const char *name)
{
    if (strcmp(name, "--loads") && strcmp(name, "--ids")) return false;
    choice->values = name;
    return true;
}

bool trace_option(trace_choice *choice, const char *name, const char *value)
{
    if (!strcmp(name, "--group"))
        choice->group = value;
    else if (!strcmp(name, "--layer"))
        read_layer(choice, value);
    else if (!strcmp(name, "--steps"))
        read_pair(name, value, ':', &choice->first, &choice->num);
    else if (!strcmp(name, "--experts"))
        choice->num_experts = (uint32_t)number_of(name, value, 1, 65536);
    else
        return false;
    return true;
}

/* ---------------------------------------------------------------------------- files ---- */

static bool ends_with(const char *text, const char *end)
{
    const size_t length = strlen(text), tail = strlen(end);
    return length >= tail && !strcmp(text + length - tail, end);
}

static void read_bytes(file *f)
{
    FILE *in = open_file(f->path);
    size_t room = 1 << 16;
    f->bytes = grab(room);
    for (size_t more; (more = fread(f->bytes + f->size, 1, room - f->size, in)) > 0;) {
        f->size += more;
        if (f->size < room) continue;
        room *= 2;
        f->bytes = realloc(f->bytes, room);
        if (!f->bytes) complain("%s: no memory for %zu bytes", f->path, room);
    }
    if (ferror(in)) complain("%s: %s", f->path, strerror(errno));
    fclose(in);
}

static void read_header(file *f)
{
    trace_header *h = &f->header;
    if (f->size < sizeof *h) complain("%s: %zu bytes are not a trace", f->path, f->size);
    memcpy(h, f->bytes, sizeof *h);
    if (memcmp(h->magic, TRACE_MAGIC, sizeof h->magic)) complain("%s: not a trace", f->path);
    if (h->version != TRACE_VERSION)
        complain("%s: version %u of the format: this program reads version %d", f->path,
                 h->version, TRACE_VERSION);
    if (h->header_bytes < sizeof *h || h->header_bytes > f->size)
        complain("%s: a header of %u bytes", f->path, h->header_bytes);
    if (h->num_ranks < 1 || h->num_ranks > MOST_RANKS || h->rank < 0 ||
        h->rank >= h->num_ranks || !memchr(h->name, 0, sizeof h->name))
        complain("%s: rank %d of %d", f->path, h->rank, h->num_ranks);
}

static bool good_plan(const trace_record *r)
{
    const int64_t tokens = r->plan.num_tokens, k = r->plan.top_k;
    return tokens >= 0 && tokens <= INT32_MAX && k >= 1 && k <= MOST_TOP_K &&
           r->plan.num_experts >= 1 && r->plan.num_experts <= MOST_EXPERTS &&
           r->id_bytes == trace_id_bytes(r->plan.num_experts) &&
           r->payload == ((uint64_t)(tokens * k) * r->id_bytes + 7) / 8 * 8;
}

static bool good_operation(const trace_record *r)
{
    return r->time_ns >= 0 && r->done.end_ns >= 0;
}

static void *grow(void *list, int64_t num, int64_t *room, size_t size)
{
    if (num < *room) return list;
    *room = *room ? 2 * *room : 1024;
    void *larger = realloc(list, (size_t)*room * size);
    if (!larger) complain("no memory for %" PRId64 " records", *room);
    return larger;
}

/* Up to the first record that is not whole: a rank may have been killed while it wrote. */
static void read_records(const file *f, heap *out)
{
    size_t at = f->header.header_bytes;
    trace_record r;
    while (f->size - at >= sizeof r) {
        memcpy(&r, f->bytes + at, sizeof r);
        at += sizeof r;
        if (r.payload > f->size - at) return;
        if ((r.kind == TRACE_PLAN && !good_plan(&r)) ||
            (r.kind == TRACE_OPERATION && !good_operation(&r)))
            complain("%s: a damaged record before byte %zu", f->path, at);
        if (r.kind == TRACE_PLAN) {
            out->plans = grow(out->plans, out->num_plans, &out->room_plans, sizeof(plan));
            out->plans[out->num_plans++] = (plan){r, f->header.rank, f->bytes + at};
        } else if (r.kind == TRACE_OPERATION) {
            out->events =
                grow(out->events, out->num_events, &out->room_events, sizeof(trace_event));
            out->events[out->num_events++] = (trace_event){f->header.rank, r};
        }
        at += r.payload;
    }
}

/* ---------------------------------------------------------------------------- steps ---- */

static int by_place(const void *a, const void *b)
{
    const plan *p = a, *q = b;
    if (p->record.tag != q->record.tag) return p->record.tag < q->record.tag ? -1 : 1;
    if (p->record.place != q->record.place) return p->record.place < q->record.place ? -1 : 1;
    return (p->rank > q->rank) - (p->rank < q->rank);
}

static int by_time(const void *a, const void *b)
{
    const int64_t p = ((const trace_step *)a)->time_ns, q = ((const trace_step *)b)->time_ns;
    return (p > q) - (p < q);
}

static int by_start(const void *a, const void *b)
{
    const trace_event *p = a, *q = b;
    if (p->record.time_ns != q->record.time_ns)
        return p->record.time_ns < q->record.time_ns ? -1 : 1;
    return (p->rank > q->rank) - (p->rank < q->rank);
}

static int32_t id_at(const plan *p, int64_t i)
{
    uint32_t id = 0;
    memcpy(&id, p->ids + (size_t)i * p->record.id_bytes, p->record.id_bytes);
    if (id == UINT32_MAX >> (32 - 8 * p->record.id_bytes)) return -1;
    if (id >= p->record.plan.num_experts)
        complain("rank %d: id %u of %u experts", p->rank, id, p->record.plan.num_experts);
    return (int32_t)id;
}

/* The parts of all ranks make a step, if they agree. */
static bool join(trace_step *out, const plan *parts, int32_t num_ranks)
{
    const trace_record *first = &parts[0].record;
    *out = (trace_step){.tag = first->tag,
                        .place = first->place,
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
    out->tokens_of = grab((size_t)num_ranks * sizeof *out->tokens_of);
    out->ids = grab((size_t)(out->num_tokens * out->top_k) * sizeof *out->ids);
    int32_t *id = out->ids;
    for (int32_t r = 0; r < num_ranks; r++) {
        out->tokens_of[r] = parts[r].record.plan.num_tokens;
        for (int64_t i = 0; i < out->tokens_of[r] * out->top_k; i++)
            *id++ = id_at(&parts[r], i);
    }
    return true;
}

static void make_steps(trace *out, heap *found)
{
    if (found->num_plans) qsort(found->plans, (size_t)found->num_plans, sizeof(plan), by_place);
    if (found->num_events)
        qsort(found->events, (size_t)found->num_events, sizeof(trace_event), by_start);
    out->steps = grab((size_t)(found->num_plans + 1) * sizeof *out->steps);
    for (int64_t i = 0, end; i < found->num_plans; i = end) {
        const trace_record *first = &found->plans[i].record;
        for (end = i; end < found->num_plans; end++)
            if (found->plans[end].record.tag != first->tag ||
                found->plans[end].record.place != first->place)
                break;
        const bool whole = end - i == out->num_ranks &&
                           join(&out->steps[out->num_steps], &found->plans[i], out->num_ranks);
        if (whole)
            out->num_steps++;
        else
            out->num_incomplete++;
    }
    qsort(out->steps, (size_t)out->num_steps, sizeof *out->steps, by_time);
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
        complain("%s needs the choices of each token, and with --loads the file has counts",
                 what);
}

/* Keeps those that the choice names, in order. */
static void choose(trace *t, const trace_choice *choice)
{
    int64_t kept = 0, seen = 0;
    for (int64_t i = 0; i < t->num_steps; i++) {
        bool wanted = !choice->of || i % choice->of == choice->turn;
        if (wanted) {
            wanted =
                seen >= choice->first && (!choice->num || seen < choice->first + choice->num);
            seen++;
        }
        if (wanted)
            t->steps[kept++] = t->steps[i];
        else
            free_step(&t->steps[i]);
    }
    t->num_steps = kept;
    for (int64_t i = 0; i < kept; i++)
        if (t->steps[i].num_experts > t->num_experts) t->num_experts = t->steps[i].num_experts;
}

/* --------------------------------------------------------------------------- folders ---- */

static bool is_chosen(const file *f, const char *group)
{
    char id[32];
    snprintf(id, sizeof id, "%016" PRIx64, f->header.group_id);
    return !group || !strcmp(group, f->header.name) || !strcmp(group, id);
}

/* Files of a group: all of as many ranks, and one of each. */
static void add_to_group(trace *out, const file *f, const char *path, bool *seen)
{
    const trace_header *h = &f->header;
    if (out->num_ranks && out->group_id != h->group_id)
        complain("%s: groups %016" PRIx64 " and %016" PRIx64 " are both there: say which by "
                 "--group",
                 path, out->group_id, h->group_id);
    if (out->num_ranks && out->num_ranks != h->num_ranks)
        complain("%s: of a group of %d ranks, where other files are of %d", f->path,
                 h->num_ranks, out->num_ranks);
    if (seen[h->rank]) complain("%s: there is another file of rank %d", f->path, h->rank);
    seen[h->rank] = true;
    out->num_ranks = h->num_ranks;
    out->group_id = h->group_id;
    memcpy(out->name, h->name, sizeof out->name);
}

static void load_folder(trace *out, DIR *folder, const char *path, const trace_choice *choice)
{
    heap found = {0};
    file **files = grab(MOST_RANKS * sizeof *files);
    bool *seen = grab(MOST_RANKS * sizeof *seen);
    int num = 0;
    for (struct dirent *entry; (entry = readdir(folder)) && num < MOST_RANKS;) {
        if (!ends_with(entry->d_name, ENDING)) continue;
        file *f = grab(sizeof *f);
        snprintf(f->path, sizeof f->path, "%s/%s", path, entry->d_name);
        read_bytes(f);
        read_header(f);
        files[num++] = f;
        if (!is_chosen(f, choice->group)) continue;
        add_to_group(out, f, path, seen);
        read_records(f, &found);
    }
    if (!out->num_ranks)
        complain("%s: no %s file%s there", path, ENDING, choice->group ? " of that group" : "");
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
        complain("%s: %s is for .npy files, and this is none", path, choice->values);
    } else {
        DIR *folder = opendir(path);
        if (!folder)
            complain("%s: %s: a folder of traces or an .npy file is needed", path,
                     strerror(errno));
        load_folder(out, folder, path, choice);
        closedir(folder);
    }
    choose(out, choice);
}

void trace_free(trace *t)
{
    for (int64_t i = 0; i < t->num_steps; i++) free_step(&t->steps[i]);
    free(t->steps);
    free(t->events);
}
