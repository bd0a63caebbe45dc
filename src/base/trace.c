/* SPDX-License-Identifier: Apache-2.0 */
/* Writes traces: one file per rank, one record after another. */
#include "base/trace.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"
#include "base/process.h"

#define BUFFER_BYTES (TRACE_BYTES - 256)

struct epic_trace {
    int fd;
    bool has_failed; /* true: a write has failed, so no more records are written */
    int64_t written; /* number of bytes written to the file so far */
    size_t filled;   /* number of bytes in `buffer` that are not written yet */
    /* guards all fields, because operations of different tags run in parallel */
    pthread_mutex_t mutex;
    unsigned char buffer[BUFFER_BYTES];
};

/* Writes the buffer to the file. On an error sets has_failed and errno. Requires that the
 * caller holds the mutex. */
static void flush_buffer(epic_trace *t)
{
    size_t at = 0;
    if (!t->has_failed && !process_may_create_file(t->written + (int64_t)t->filled)) {
        t->has_failed = true;
        errno = EFBIG;
    }
    while (!t->has_failed && at < t->filled) {
        const ssize_t more = write(t->fd, t->buffer + at, t->filled - at);
        if (more < 0 && errno == EINTR) continue;
        if (more <= 0) t->has_failed = true;
        if (more > 0) at += (size_t)more;
    }
    t->written += (int64_t)at;
    t->filled = 0;
}

static void put_bytes(epic_trace *t, const void *bytes, size_t size)
{
    if (t->filled + size > BUFFER_BYTES) flush_buffer(t);
    memcpy(t->buffer + t->filled, bytes, size);
    t->filled += size;
}

/* Writes the path of the trace file. Unsafe characters of the group's name become '_'. */
static void name_file(char *out, size_t size, const char *folder, const trace_header *header)
{
    char name[sizeof header->name];
    snprintf(name, sizeof name, "%s", header->name);
    for (char *c = name; *c; c++)
        if (!strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_", *c))
            *c = '_';
    snprintf(out, size, "%s/%s-%016llx-%d.epictrace", folder, name,
             (unsigned long long)header->group_id, header->rank);
}

epic_result trace_open(epic_trace **out, const char *folder, const trace_header *header)
{
    char path[4096];
    *out = NULL;
    epic_trace *t = malloc(sizeof *t);
    if (!t) return epic_fail(EPIC_ENOMEM, "no memory for a trace");
    memset(t, 0, offsetof(epic_trace, buffer));
    pthread_mutex_init(&t->mutex, NULL);
    name_file(path, sizeof path, folder, header);
    mkdir(folder, 0777);
    t->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    int refused = t->fd < 0 ? errno : 0;
    if (!refused) {
        put_bytes(t, header, sizeof *header);
        flush_buffer(t);
        refused = t->has_failed ? errno : 0;
    }
    if (!refused) {
        *out = t;
        return EPIC_OK;
    }
    trace_close(t);
    return epic_fail(
        EPIC_EINVAL,
        "EPIC_TRACE is \"%.200s\": rank %d cannot write a trace there (%s): name a "
        "folder that it may write to, or unset it",
        folder, header->rank, strerror(refused));
}

bool trace_close(epic_trace *t)
{
    if (!t) return true;
    const bool whole = !t->has_failed && t->fd >= 0 && close(t->fd) == 0;
    if (t->fd >= 0 && t->has_failed) close(t->fd);
    pthread_mutex_destroy(&t->mutex);
    free(t);
    return whole;
}

static int64_t id_at(const void *ids, uint32_t type, int64_t i)
{
    return type == EPIC_I64 ? ((const int64_t *)ids)[i] : ((const int32_t *)ids)[i];
}

static void put_id(epic_trace *t, int64_t id, uint32_t bytes)
{
    const uint32_t word = id < 0 ? UINT32_MAX : (uint32_t)id;
    /* little-endian: the first `bytes` bytes of the word are the low ones */
    put_bytes(t, &word, bytes);
}

void trace_plan(epic_trace *t, trace_record record, const void *ids, uint32_t type)
{
    if (!t || t->has_failed) return;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const int64_t all = record.plan.num_tokens * record.plan.top_k;
    const uint64_t zero = 0;
    record.kind = TRACE_PLAN;
    record.id_bytes = trace_id_bytes(record.plan.num_experts);
    record.payload = ((uint64_t)all * record.id_bytes + 7) / 8 * 8;
    record.time_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    pthread_mutex_lock(&t->mutex);
    put_bytes(t, &record, sizeof record);
    for (int64_t i = 0; i < all; i++) put_id(t, id_at(ids, type, i), record.id_bytes);
    put_bytes(t, &zero, record.payload - (uint64_t)all * record.id_bytes);
    flush_buffer(t);
    pthread_mutex_unlock(&t->mutex);
}

void trace_operation(epic_trace *t, trace_record record)
{
    if (!t || t->has_failed) return;
    record.kind = TRACE_OPERATION;
    pthread_mutex_lock(&t->mutex);
    put_bytes(t, &record, sizeof record);
    flush_buffer(t);
    pthread_mutex_unlock(&t->mutex);
}
