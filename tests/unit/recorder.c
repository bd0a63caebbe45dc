/* SPDX-License-Identifier: Apache-2.0 */
/* Tests the flight recorder. Another process reads complete records, never half of one. A stuck
 * operation stays visible however many later ones finish. A closed recorder disappears. */
#include "base/recorder.h"
#include "run.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

#define GROUP "recorder-test"

/* Opens the recorder's memfd like another process, by its name in /proc/PID/fd. Returns -1 if
 * there is none. */
static int find(pid_t pid, const char *name)
{
    char folder[64], path[512], link[512], wanted[256];
    snprintf(folder, sizeof folder, "/proc/%d/fd", (int)pid);
    snprintf(wanted, sizeof wanted, "/memfd:%s (deleted)", name);
    DIR *files = opendir(folder);
    CHECK(files);
    int found = -1;
    for (struct dirent *file; found < 0 && (file = readdir(files));) {
        snprintf(path, sizeof path, "%s/%.255s", folder, file->d_name);
        const ssize_t length = readlink(path, link, sizeof link - 1);
        if (length < 0) continue;
        link[length] = 0;
        if (strcmp(link, wanted) == 0) found = open(path, O_RDONLY | O_CLOEXEC);
    }
    closedir(files);
    return found;
}

static const recorder_page *map(pid_t pid, const char *name)
{
    const int fd = find(pid, name);
    CHECK(fd >= 0);
    const recorder_page *page = recorder_map(fd);
    close(fd);
    return page;
}

static int find_tag(const recorder_page *page, uint64_t tag, recorder_entry *out,
                    char sentence[RECORDER_SENTENCE])
{
    for (int i = 0; i < RECORDER_RECORDS; i++)
        if (recorder_read(page, i, out, sentence) && out->tag == tag) return i;
    return -1;
}

static void use_no_recorder(void)
{
    const uint64_t record = recorder_begin(NULL, EPIC_OP_PLAN, 1, 2, 3);
    recorder_phase(NULL, record, RECORDER_MOVING, 0);
    recorder_end(NULL, record, EPIC_OK, NULL);
    recorder_close(NULL);
}

static void one_operation(void)
{
    epic_recorder *recorder;
    recorder_entry entry;
    char sentence[RECORDER_SENTENCE], longer[RECORDER_SENTENCE + 100];
    CHECK(recorder_open(&recorder, GROUP, 1, 3, 5, "shm", "") == EPIC_OK);
    const recorder_page *page = map(getpid(), "epic:" GROUP ":3");
    CHECK(page && page->rank == 3 && page->num_ranks == 5 && page->pid == getpid());
    CHECK(strcmp(page->group, GROUP) == 0 && strcmp(page->backend, "shm") == 0);
    CHECK(!recorder_read(page, 0, &entry, sentence));

    const uint64_t record = recorder_begin(recorder, EPIC_OP_DISPATCH, 7, 11, 4096);
    CHECK(find_tag(page, 7, &entry, sentence) >= 0);
    CHECK(entry.operation == EPIC_OP_DISPATCH && entry.sequence == 11 && entry.bytes == 4096);
    CHECK(entry.state == RECORDER_ANNOUNCED && entry.waits_for == -1);
    CHECK(entry.start_ns >= page->opened_ns && entry.end_ns == 0 && !*sentence);

    recorder_phase(recorder, record, RECORDER_MOVING, 4);
    CHECK(find_tag(page, 7, &entry, sentence) >= 0);
    CHECK(entry.state == RECORDER_MOVING && entry.waits_for == 4 && entry.sequence == 11);

    memset(longer, 'x', sizeof longer);
    longer[sizeof longer - 1] = 0;
    recorder_end(recorder, record, EPIC_ETIMEOUT, longer);
    CHECK(find_tag(page, 7, &entry, sentence) >= 0);
    CHECK(entry.state == RECORDER_DONE && entry.result == EPIC_ETIMEOUT);
    CHECK(entry.end_ns >= entry.start_ns && strlen(sentence) == RECORDER_SENTENCE - 1);

    /* Late updates of a finished record are ignored. */
    recorder_phase(recorder, record, RECORDER_MOVING, 1);
    recorder_end(recorder, record, EPIC_OK, NULL);
    CHECK(find_tag(page, 7, &entry, sentence) >= 0 && entry.result == EPIC_ETIMEOUT);

    recorder_close(recorder);
    CHECK(atomic_load(&page->closed) == 1);
    recorder_unmap(page);
    CHECK(find(getpid(), "epic:" GROUP ":3") < 0);
}

static void stuck_operation_stays(void)
{
    const int others = 3 * RECORDER_RECORDS + 5;
    epic_recorder *recorder;
    recorder_entry entry;
    CHECK(recorder_open(&recorder, GROUP, 1, 0, 1, "self", "") == EPIC_OK);
    const recorder_page *page = map(getpid(), "epic:" GROUP ":0");
    const uint64_t stuck = recorder_begin(recorder, EPIC_OP_COMBINE, 1, 0, 1);
    for (int i = 0; i < others; i++)
        recorder_end(recorder, recorder_begin(recorder, EPIC_OP_PLAN, 2, (uint64_t)i, 1),
                     EPIC_OK, NULL);
    CHECK(find_tag(page, 1, &entry, NULL) >= 0 && entry.end_ns == 0);

    int recent = 0;
    for (int i = 0; i < RECORDER_RECORDS; i++) {
        CHECK(recorder_read(page, i, &entry, NULL));
        if (entry.tag == 2 && entry.sequence + RECORDER_RECORDS >= (uint64_t)others) recent++;
    }
    CHECK(recent == RECORDER_RECORDS - 1);
    recorder_end(recorder, stuck, EPIC_OK, NULL);
    recorder_unmap(page);
    recorder_close(recorder);
}

static void more_than_records(void)
{
    uint64_t records[RECORDER_RECORDS + 1];
    epic_recorder *recorder;
    recorder_entry entry;
    CHECK(recorder_open(&recorder, GROUP, 1, 0, 1, "self", "") == EPIC_OK);
    const recorder_page *page = map(getpid(), "epic:" GROUP ":0");
    for (int i = 0; i <= RECORDER_RECORDS; i++)
        records[i] = recorder_begin(recorder, EPIC_OP_SUM, (uint64_t)i, 0, 1);
    CHECK(find_tag(page, RECORDER_RECORDS, &entry, NULL) < 0);
    for (int i = 0; i <= RECORDER_RECORDS; i++)
        recorder_end(recorder, records[i], EPIC_OK, NULL);
    for (int i = 0; i < RECORDER_RECORDS; i++) {
        CHECK(find_tag(page, (uint64_t)i, &entry, NULL) >= 0);
        CHECK(entry.state == RECORDER_DONE);
    }
    recorder_unmap(page);
    recorder_close(recorder);
}

/* ----------------------------------------------------------- many writers, one reader ---- */

#define WRITERS 4
#define OPERATIONS 50000

typedef struct writer {
    epic_recorder *recorder;
    uint64_t id;
} writer;

/* Every field of a record follows from its tag, so that a mixture of two records is detected.
 */
static void *write_many(void *argument)
{
    const writer *self = argument;
    char sentence[400];
    for (uint64_t i = 0; i < OPERATIONS; i++) {
        const uint64_t tag = self->id * OPERATIONS + i;
        const uint64_t record =
            recorder_begin(self->recorder, (uint32_t)tag % 7 + 1, tag, tag * 3, ~tag);
        recorder_phase(self->recorder, record, RECORDER_MOVING, (int32_t)(tag % 1000));
        memset(sentence, (int)('a' + tag % 26), sizeof sentence);
        sentence[100 + tag % 299] = 0;
        recorder_end(self->recorder, record, tag % 2 ? EPIC_EPEER : EPIC_OK, sentence);
    }
    return NULL;
}

static bool whole(const recorder_entry *entry, const char *sentence)
{
    const uint64_t tag = entry->tag;
    if (entry->sequence != tag * 3 || entry->bytes != ~tag) return false;
    if (entry->operation != tag % 7 + 1 || entry->start_ns <= 0) return false;
    if (entry->state == RECORDER_MOVING)
        return entry->waits_for == (int32_t)(tag % 1000) && entry->end_ns == 0;
    if (entry->waits_for != -1) return false;
    if (entry->state == RECORDER_ANNOUNCED) return entry->end_ns == 0 && !*sentence;
    if (entry->end_ns < entry->start_ns) return false;
    if (tag % 2 == 0) return entry->result == EPIC_OK && !*sentence;
    const char letter[2] = {(char)('a' + tag % 26), 0};
    return entry->result == EPIC_EPEER && strlen(sentence) == 100 + tag % 299 &&
           strspn(sentence, letter) == 100 + tag % 299;
}

/* The process that reads. It exits with 0 when the recorder is closed and no record was mixed.
 */
static void read_until_closed(int opened, int mapped)
{
    char byte;
    CHECK(read(opened, &byte, 1) == 1);
    const recorder_page *page = map(getppid(), "epic:" GROUP ":1");
    CHECK(page && write(mapped, "", 1) == 1);
    uint64_t num_read = 0;
    bool closed;
    do {
        closed = atomic_load(&page->closed);
        for (int i = 0; i < RECORDER_RECORDS; i++) {
            recorder_entry entry;
            char sentence[RECORDER_SENTENCE];
            if (!recorder_read(page, i, &entry, sentence)) continue;
            CHECK(whole(&entry, sentence));
            num_read++;
        }
    } while (!closed);
    CHECK(num_read >= RECORDER_RECORDS);
    _exit(0);
}

static void never_torn(void)
{
    char byte;
    int opened[2], mapped[2], status;
    CHECK(pipe(opened) == 0 && pipe(mapped) == 0);
    const pid_t reader = run_fork();
    CHECK(reader >= 0);
    if (reader == 0) read_until_closed(opened[0], mapped[1]);
    close(mapped[1]);

    writer writers[WRITERS];
    pthread_t threads[WRITERS];
    epic_recorder *recorder;
    CHECK(recorder_open(&recorder, GROUP, 1, 1, 2, "threads", "") == EPIC_OK);
    CHECK(write(opened[1], "", 1) == 1 && read(mapped[0], &byte, 1) == 1);
    for (int i = 0; i < WRITERS; i++) {
        writers[i] = (writer){recorder, (uint64_t)i};
        CHECK(pthread_create(&threads[i], NULL, write_many, &writers[i]) == 0);
    }
    for (int i = 0; i < WRITERS; i++) pthread_join(threads[i], NULL);
    recorder_close(recorder);
    CHECK(waitpid(reader, &status, 0) == reader && status == 0);
    close(opened[0]);
    close(opened[1]);
    close(mapped[0]);
}

/* ------------------------------------------------------------------------- strangers ---- */

static bool maps(int fd)
{
    const recorder_page *page = recorder_map(fd);
    const bool mapped = page != NULL;
    recorder_unmap(page);
    close(fd);
    return mapped;
}

static int memfd_of(off_t bytes, int seals)
{
    const int fd = memfd_create("epic:" GROUP ":9", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && ftruncate(fd, bytes) == 0);
    CHECK(fcntl(fd, F_ADD_SEALS, seals) == 0);
    return fd;
}

static void strangers_are_refused(void)
{
    const int64_t magic = RECORDER_MAGIC;
    CHECK(!maps(open("/proc/self/exe", O_RDONLY | O_CLOEXEC)));
    CHECK(!maps(memfd_of(0, F_SEAL_SHRINK)));
    CHECK(!maps(memfd_of(sizeof(recorder_page), F_SEAL_SHRINK)));
    const int shrinks = memfd_of(sizeof(recorder_page), F_SEAL_GROW);
    CHECK(pwrite(shrinks, &magic, sizeof magic, 0) == sizeof magic);
    CHECK(!maps(shrinks));
    const int version_0 = memfd_of(sizeof(recorder_page), F_SEAL_SHRINK);
    CHECK(pwrite(version_0, &magic, sizeof magic, 0) == sizeof magic);
    CHECK(!maps(version_0));
}

int main(void)
{
    use_no_recorder();
    one_operation();
    stuck_operation_stays();
    more_than_records();
    never_torn();
    strangers_are_refused();
    return 0;
}
