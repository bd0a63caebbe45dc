/* SPDX-License-Identifier: Apache-2.0 */
/* The flight recorder: a ring of records in a memfd. Each record has a seqlock, a counter that
 * is odd while the record is written.
 *
 * A record has one writer at a time: the thread that has set in_flight. It makes the seqlock
 * odd, stores each word of the record with release order, and makes the seqlock even with
 * release order. A reader loads the seqlock, then each word with acquire order, then the
 * seqlock again. If the writer changes a word while the reader reads the record, the second
 * load of the seqlock returns a new value, because the writer stored the odd seqlock before the
 * word. So the two values of the seqlock differ, and the reader tries again. */
#include "base/recorder.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"
#include "base/process.h"

#define NO_RECORD UINT64_MAX
#define SENTENCE_WORDS (RECORDER_SENTENCE / sizeof(uint64_t))
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

struct epic_recorder {
    recorder_page *page;
    int fd; /* the memfd; open for epic-info, which finds it in /proc/PID/fd */
    epic_trace *trace;
};

static int64_t wall_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Creates a sealed memfd of `bytes` bytes for one recorder_page. Allocates the whole memory
 * now, so that no later write can fail. Returns the descriptor, or -1 with errno set. */
static int make_memfd(const char *group, int rank, size_t bytes)
{
    char name[160];
    snprintf(name, sizeof name, "epic:%.127s:%d", group, rank);
    if (!process_may_create_file(bytes)) {
        errno = EFBIG;
        return -1;
    }
    const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return -1;

    int refused = fchmod(fd, 0600) < 0 ? errno : 0;
    if (!refused) refused = posix_fallocate(fd, 0, (off_t)bytes);
    if (!refused && fcntl(fd, F_ADD_SEALS, SEALS) < 0) refused = errno;
    if (!refused) return fd;
    close(fd);
    errno = refused;
    return -1;
}

static void write_header(recorder_page *page, const char *group, uint64_t group_id, int rank,
                         int num_ranks, const char *backend, const char *net)
{
    page->version = RECORDER_VERSION;
    page->page_bytes = (uint32_t)recorder_bytes(num_ranks);
    page->group_id = group_id;
    page->rank = rank;
    page->num_ranks = num_ranks;
    page->pid = getpid();
    page->opened_ns = wall_ns();
    snprintf(page->group, sizeof page->group, "%s", group);
    snprintf(page->backend, sizeof page->backend, "%s", backend);
    snprintf(page->net, sizeof page->net, "%s", net);
    atomic_store_explicit(&page->magic, RECORDER_MAGIC, memory_order_release);
}

epic_result recorder_open(epic_recorder **out, const char *group, uint64_t group_id, int rank,
                          int num_ranks, const char *backend, const char *net)
{
    *out = NULL;
    epic_recorder *recorder = calloc(1, sizeof *recorder);
    if (!recorder) return epic_fail(EPIC_ENOMEM, "no memory for the flight recorder");

    const size_t bytes = recorder_bytes(num_ranks);
    recorder->fd = make_memfd(group, rank, bytes);
    void *page = MAP_FAILED;
    if (recorder->fd >= 0)
        page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, recorder->fd, 0);
    if (page == MAP_FAILED) {
        const int refused = errno;
        if (recorder->fd >= 0) close(recorder->fd);
        free(recorder);
        return epic_fail(EPIC_EDEVICE, "the flight recorder's memfd of %zu bytes: %s%s", bytes,
                         strerror(refused), epic_remedy(refused));
    }
    recorder->page = page;
    write_header(recorder->page, group, group_id, rank, num_ranks, backend, net);
    *out = recorder;
    return EPIC_OK;
}

void recorder_trace(epic_recorder *recorder, epic_trace *trace)
{
    if (recorder) recorder->trace = trace;
}

void recorder_close(epic_recorder *recorder)
{
    if (!recorder) return;
    /* A forked child may keep the memfd open. `closed` shows epic-info that no operation writes
     * to the memfd any more. */
    atomic_store_explicit(&recorder->page->closed, 1, memory_order_release);
    recorder_forget(recorder);
}

void recorder_forget(epic_recorder *recorder)
{
    if (!recorder) return;
    munmap(recorder->page, recorder->page->page_bytes);
    close(recorder->fd);
    free(recorder);
}

static void store_words(_Atomic uint64_t *to, const void *from, size_t num_words)
{
    const char *bytes = from;
    for (size_t i = 0; i < num_words; i++) {
        uint64_t word;
        memcpy(&word, bytes + i * sizeof word, sizeof word);
        atomic_store_explicit(&to[i], word, memory_order_release);
    }
}

static void load_words(void *to, const _Atomic uint64_t *from, size_t num_words)
{
    char *bytes = to;
    for (size_t i = 0; i < num_words; i++) {
        const uint64_t word = atomic_load_explicit(&from[i], memory_order_acquire);
        memcpy(bytes + i * sizeof word, &word, sizeof word);
    }
}

/* Writes a record and, if the operation failed, its error text. Only the thread that claimed
 * the record may call this function. */
static void publish_entry(recorder_page *page, size_t i, const recorder_entry *entry,
                          const char *sentence)
{
    recorder_record *record = &page->records[i];
    const uint64_t seqlock = atomic_load_explicit(&record->seqlock, memory_order_relaxed);
    atomic_store_explicit(&record->seqlock, seqlock + 1, memory_order_relaxed);
    store_words(record->words, entry, RECORDER_WORDS);
    if (sentence) {
        char copy[RECORDER_SENTENCE] = {0};
        snprintf(copy, sizeof copy, "%s", sentence);
        store_words(page->sentences[i].words, copy, SENTENCE_WORDS);
    }
    atomic_store_explicit(&record->seqlock, seqlock + 2, memory_order_release);
}

/* Claims the first record that is not in flight, beginning at position `number` of the ring.
 * Returns its index, or -1 if all records are in flight. The acquire order pairs with the
 * release in recorder_end() of the previous writer. */
static int claim_record(recorder_page *page, uint64_t number)
{
    for (uint64_t i = 0; i < RECORDER_RECORDS; i++) {
        const int at = (int)((number + i) % RECORDER_RECORDS);
        uint64_t free_record = 0;
        if (atomic_compare_exchange_strong_explicit(&page->records[at].in_flight, &free_record,
                                                    1, memory_order_acquire,
                                                    memory_order_relaxed))
            return at;
    }
    return -1;
}

uint64_t recorder_begin(epic_recorder *recorder, uint32_t operation, uint64_t tag,
                        uint64_t sequence, uint64_t bytes)
{
    if (!recorder) return NO_RECORD;
    recorder_page *page = recorder->page;
    const uint64_t number = atomic_fetch_add_explicit(&page->next, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&page->num_operations[operation], 1, memory_order_relaxed);
    const int at = claim_record(page, number);
    if (at < 0) return NO_RECORD;

    const recorder_entry entry = {
        .number = number,
        .tag = tag,
        .sequence = sequence,
        .bytes = bytes,
        .start_ns = wall_ns(),
        .operation = operation,
        .state = RECORDER_ANNOUNCED,
        .waits_for = -1,
    };
    publish_entry(page, (size_t)at, &entry, NULL);
    return number * RECORDER_RECORDS + (uint64_t)at;
}

/* Copies the entry of a record that the caller has begun. Returns false if no record was free
 * when the operation began, or if recorder_end() was already called for the record. */
static bool get_own_entry(epic_recorder *recorder, uint64_t record, recorder_entry *out)
{
    if (!recorder || record == NO_RECORD) return false;
    load_words(out, recorder->page->records[record % RECORDER_RECORDS].words, RECORDER_WORDS);
    return out->number == record / RECORDER_RECORDS && out->end_ns == 0;
}

void recorder_phase(epic_recorder *recorder, uint64_t record, uint32_t phase, int32_t waits_for)
{
    recorder_entry entry;
    if (!get_own_entry(recorder, record, &entry)) return;
    if (entry.state == phase && entry.waits_for == waits_for) return;
    entry.state = phase;
    entry.waits_for = waits_for;
    publish_entry(recorder->page, record % RECORDER_RECORDS, &entry, NULL);
}

/* The release order here and in recorder_set_wait() pairs with the acquire in
 * recorder_read_wait(): a reader that finds the new alone_ns also finds the new wait_ns. */
void recorder_add_wait(epic_recorder *recorder, uint32_t operation, const uint64_t *peers,
                       uint64_t ns)
{
    if (!recorder) return;
    const int32_t num_ranks = recorder->page->num_ranks;
    recorder_wait *waits = recorder->page->waits + operation * (size_t)num_ranks;
    int num_peers = 0, peer = 0;
    for (int w = 0; w * 64 < num_ranks; w++)
        for (uint64_t left = peers[w]; left; left &= left - 1, num_peers++) {
            peer = w * 64 + __builtin_ctzll(left);
            atomic_fetch_add_explicit(&waits[peer].wait_ns, ns, memory_order_relaxed);
        }
    if (num_peers == 1)
        atomic_fetch_add_explicit(&waits[peer].alone_ns, ns, memory_order_release);
}

void recorder_end(epic_recorder *recorder, uint64_t record, epic_result result,
                  const char *sentence)
{
    recorder_entry entry;
    if (!get_own_entry(recorder, record, &entry)) return;
    const size_t at = record % RECORDER_RECORDS;
    entry.state = RECORDER_DONE;
    entry.waits_for = -1;
    entry.result = (uint32_t)result;
    entry.end_ns = wall_ns();
    publish_entry(recorder->page, at, &entry,
                  result == EPIC_OK ? NULL
                  : sentence        ? sentence
                                    : "");
    atomic_store_explicit(&recorder->page->records[at].in_flight, 0, memory_order_release);
    const trace_record ended = {
        .tag = entry.tag,
        .sequence = entry.sequence,
        .time_ns = entry.start_ns,
        .done = {entry.end_ns, entry.bytes, entry.operation, entry.result}};
    trace_operation(recorder->trace, ended);
}

recorder_page *recorder_get_page(const epic_recorder *recorder)
{
    return recorder ? recorder->page : NULL;
}

void recorder_read_wait(const recorder_page *page, int32_t num_ranks, uint32_t operation,
                        int32_t peer, epic_wait_info *out)
{
    const recorder_wait *wait = &page->waits[operation * (size_t)num_ranks + (size_t)peer];
    out->num_operations +=
        atomic_load_explicit(&page->num_operations[operation], memory_order_relaxed);
    out->alone_ns += atomic_load_explicit(&wait->alone_ns, memory_order_acquire);
    out->wait_ns += atomic_load_explicit(&wait->wait_ns, memory_order_relaxed);
}

static bool is_valid_page(const recorder_page *page, size_t bytes)
{
    return atomic_load_explicit(&page->magic, memory_order_acquire) == RECORDER_MAGIC &&
           page->version == RECORDER_VERSION && page->num_ranks >= 1 &&
           page->page_bytes == bytes && recorder_bytes(page->num_ranks) == bytes &&
           memchr(page->group, 0, sizeof page->group) &&
           memchr(page->backend, 0, sizeof page->backend) &&
           memchr(page->net, 0, sizeof page->net);
}

const recorder_page *recorder_map(int fd)
{
    struct stat file;
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        /* refuse a file that is not sealed: if it shrank, reading its mapping would raise
         * SIGBUS */
        return NULL;
    if (fstat(fd, &file) < 0 || file.st_size < (off_t)sizeof(recorder_page)) return NULL;

    const size_t bytes = (size_t)file.st_size;
    recorder_page *page = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED) return NULL;
    if (is_valid_page(page, bytes)) return page;
    munmap(page, bytes);
    return NULL;
}

void recorder_unmap(const recorder_page *page)
{
    if (page) munmap((void *)(uintptr_t)page, page->page_bytes);
}

bool recorder_read(const recorder_page *page, int i, recorder_entry *out,
                   char sentence[RECORDER_SENTENCE])
{
    const recorder_record *record = &page->records[i];
    for (int tries = 0; tries < 10000; tries++) {
        /* yield the core from time to time, because the writer may need it to finish its
         * write */
        if (tries % 64 == 63) sched_yield();
        const uint64_t before = atomic_load_explicit(&record->seqlock, memory_order_acquire);
        if (before == 0) return false;
        if (before & 1) continue;
        load_words(out, record->words, RECORDER_WORDS);
        if (sentence) {
            load_words(sentence, page->sentences[i].words, SENTENCE_WORDS);
            sentence[RECORDER_SENTENCE - 1] = 0;
            if (out->end_ns == 0 || out->result == EPIC_OK) sentence[0] = 0;
        }
        if (atomic_load_explicit(&record->seqlock, memory_order_relaxed) == before) return true;
    }
    return false;
}
