/* SPDX-License-Identifier: Apache-2.0 */
/* Fills in this rank's rank_info, for example the identity of its host and process. Compares
 * the rank_infos of all ranks. */
#include "api/rank_info.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"
#include "base/hash.h"

#define RANK_INFO_MAGIC 0x4f4c4c4548435045ull /* "EPCHELLO" */

/* Returns a random value from the kernel. If the kernel returns no random value, returns a hash
 * of the pid and the time. */
static uint64_t random_uint64(void)
{
    uint64_t word;
    if (getrandom(&word, sizeof word, 0) == sizeof word) return word;
    /* without random values, the time still makes the hashes of two groups differ */
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return hash_join((uint64_t)getpid(),
                     (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec);
}

static int64_t namespace_inode(const char *path)
{
    struct stat s;
    return stat(path, &s) == 0 ? (int64_t)s.st_ino : 0;
}

/* Reads a small kernel file (/proc) into a string. The string is empty if the file does not
 * exist. Returns EPIC_EDEVICE if the process is out of descriptors or memory. */
static epic_result read_kernel_file(const char *path, char *text, size_t size)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    text[0] = 0;
    if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM))
        return epic_fail(EPIC_EDEVICE, "%s: %s%s", path, strerror(errno), epic_remedy(errno));
    if (fd < 0) return EPIC_OK;
    const ssize_t n = read(fd, text, size - 1);
    text[n > 0 ? n : 0] = 0;
    close(fd);
    return EPIC_OK;
}

/* Sets host[] to hashes of `name`, the value of EPIC_HOST. Before hashing, replaces "%r" by the
 * rank. If a number follows, as in "%r/4", replaces "%r/4" by the rank divided by 4, so that
 * four ranks count as one host. */
static void hash_host_name(uint64_t host[2], const char *name, int rank)
{
    char number[16];
    const char *percent = strstr(name, "%r"), *rest = percent ? percent + 2 : "";
    const size_t before = percent ? (size_t)(percent - name) : strlen(name);
    char *end = NULL;
    const long ranks = *rest == '/' ? strtol(rest + 1, &end, 10) : 0;
    if (ranks > 0) rest = end;
    snprintf(number, sizeof number, "%d", ranks > 0 ? (int)(rank / ranks) : rank);
    host[0] = hash_bytes(name, before);
    if (percent) {
        host[0] = hash_join(host[0], hash_bytes(number, strlen(number)));
        host[0] = hash_join(host[0], hash_bytes(rest, strlen(rest)));
    }
    host[1] = hash_join(host[0], 1);
}

/* Computes two hashes that identify the host. host[0] identifies the running kernel, by its
 * boot id. host[1] also depends on the PID namespace. A pid is valid only in its namespace, so
 * two namespaces on one machine count as two hosts. If EPIC_HOST is set, both hashes are
 * computed from its value instead. */
static epic_result identify_host(uint64_t host[2], int rank)
{
    char text[64] = {0};
    const char *name = getenv("EPIC_HOST");
    if (name && *name) {
        hash_host_name(host, name, rank);
        return EPIC_OK;
    }
    TRY(read_kernel_file("/proc/sys/kernel/random/boot_id", text, sizeof text));
    if (!text[0]) gethostname(text, sizeof text - 1);
    host[0] = hash_bytes(text, strlen(text));
    host[1] = hash_join(host[0], (uint64_t)namespace_inode("/proc/self/ns/pid"));
    return EPIC_OK;
}

/* Reads the start time of this process in clock ticks: word 22 of /proc/self/stat. The search
 * begins after the last ')', because the program's name in parentheses may contain spaces. */
static epic_result read_process_start(uint64_t *start)
{
    char text[1024];
    TRY(read_kernel_file("/proc/self/stat", text, sizeof text));
    const char *word = strrchr(text, ')');
    for (int i = 0; word && i < 20; i++) word = strchr(word + 1, ' ');
    *start = word ? strtoull(word, NULL, 10) : 0;
    return EPIC_OK;
}

/* Identifies the process by its pid and its start time. The pid alone is not enough, because
 * the kernel reuses pids. */
static epic_result identify_process(uint64_t process[2], const uint64_t host[2])
{
    process[0] = hash_join(host[1], (uint64_t)getpid());
    return read_process_start(&process[1]);
}

/* Returns a random value that identifies this copy of libepic. A process may load two copies,
 * for example from two Python wheels, and one copy cannot read the other's global tables. */
static uint64_t identify_library(void)
{
    static _Atomic uint64_t library;
    uint64_t current = atomic_load(&library), chosen = random_uint64() | 1;
    if (!current && atomic_compare_exchange_strong(&library, &current, chosen)) return chosen;
    return current;
}

epic_result rank_info_fill(rank_info *mine, const epic_bootstrap *bootstrap,
                           const epic_config *config)
{
    memset(mine, 0, sizeof *mine);
    mine->magic = RANK_INFO_MAGIC;
    mine->version = EPIC_VERSION;
    mine->bytes = sizeof *mine;
    mine->rank = bootstrap->rank;
    mine->num_ranks = bootstrap->num_ranks;
    mine->max_tokens = config->max_tokens;
    mine->max_row_bytes = config->max_row_bytes;
    mine->staging_bytes = config->staging_bytes;
    mine->timeout_ms = config->timeout_ms;
    mine->max_in_flight = config->max_in_flight;
    mine->max_sms = config->max_sms;
    mine->max_top_k = config->max_top_k;
    mine->flags = config->flags;
    snprintf(mine->backend, sizeof mine->backend, "%s", config->backend ? config->backend : "");
    snprintf(mine->name, sizeof mine->name, "%s", config->name);
    mine->random = random_uint64();
    mine->peer.pid = getpid();
    mine->peer.uid = getuid();
    mine->peer.network_ns = namespace_inode("/proc/self/ns/net");
    mine->peer.library = identify_library();
    TRY(identify_host(mine->peer.host, bootstrap->rank));
    return identify_process(mine->peer.process, mine->peer.host);
}

static epic_result fail_mismatch(const char *field, int64_t first, int rank, int64_t other)
{
    return epic_fail(EPIC_EMISMATCH,
                     "open: rank 0 has %s %lld, rank %d has %lld; set the same on every rank",
                     field, (long long)first, rank, (long long)other);
}

static epic_result fail_mismatch_text(const char *field, const char *first, int rank,
                                      const char *other)
{
    return epic_fail(EPIC_EMISMATCH,
                     "open: rank 0 has %s \"%.63s\", rank %d has \"%.63s\"; set the same on "
                     "every rank",
                     field, first, rank, other);
}

static epic_result compare_rank_infos(const rank_info *a, const rank_info *b, int rank)
{
    if (b->magic != RANK_INFO_MAGIC || b->version != a->version || b->bytes != a->bytes)
        return epic_fail(EPIC_EMISMATCH,
                         "open: rank 0 is EPIC version %u, rank %d is version %u; install the "
                         "same on every rank",
                         a->version, rank, b->magic == RANK_INFO_MAGIC ? b->version : 0);
    if (b->rank != rank)
        return epic_fail(EPIC_EMISMATCH,
                         "open: the bootstrap has rank %lld in the place of rank %d",
                         (long long)b->rank, rank);
    const struct {
        const char *name;
        int64_t first, other;
    } fields[] = {
        {"num_ranks", a->num_ranks, b->num_ranks},
        {"config.max_tokens", a->max_tokens, b->max_tokens},
        {"config.max_row_bytes", a->max_row_bytes, b->max_row_bytes},
        {"config.staging_bytes", a->staging_bytes, b->staging_bytes},
        {"config.timeout_ms", a->timeout_ms, b->timeout_ms},
        {"config.max_in_flight", a->max_in_flight, b->max_in_flight},
        {"config.max_sms", a->max_sms, b->max_sms},
        {"config.max_top_k", a->max_top_k, b->max_top_k},
        {"config.flags", a->flags, b->flags},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].first != fields[i].other)
            return fail_mismatch(fields[i].name, fields[i].first, rank, fields[i].other);
    if (strncmp(a->backend, b->backend, sizeof a->backend))
        return fail_mismatch_text("config.backend", a->backend, rank, b->backend);
    if (strncmp(a->name, b->name, sizeof a->name))
        return fail_mismatch_text("config.name", a->name, rank, b->name);
    return EPIC_OK;
}

static bool is_terminated(const char *text, size_t size)
{
    return memchr(text, 0, size) != NULL;
}

/* Returns true if a rank with this version of EPIC wrote the rank_info. If another version
 * wrote it, the fields after `bytes` are undefined, and compare_rank_infos() returns the
 * error. */
static bool is_same_version(const rank_info *info)
{
    return info->magic == RANK_INFO_MAGIC && info->version == EPIC_VERSION;
}

/* Checks the result and the texts of a rank_info. They may be invalid, because any program that
 * can connect to the bootstrap may have written the rank_info. */
static epic_result check_texts(const rank_info *info, int rank)
{
    const char *what = !epic_is_result(info->refused)                          ? "result"
                       : !is_terminated(info->backend, sizeof info->backend)   ? "backend"
                       : !is_terminated(info->name, sizeof info->name)         ? "name"
                       : !is_terminated(info->sentence, sizeof info->sentence) ? "sentence"
                                                                               : NULL;
    if (!what) return EPIC_OK;
    return epic_fail(EPIC_EPEER,
                     "open: EPIC did not write what the bootstrap received from rank %d (its "
                     "%s): if others can reach the bootstrap, set a secret (EPIC_SECRET)",
                     rank, what);
}

/* Returns true if `refused` is an error that another rank caused, for example a timeout. In
 * this case the error of that other rank is reported instead, because it has more detail. */
static bool is_second_hand(int64_t refused)
{
    return refused == EPIC_EPEER || refused == EPIC_ETIMEOUT;
}

/* Returns the rank_info of the lowest rank that has an error for which is_second_hand() returns
 * `second_hand`. Returns NULL if there is no such rank. */
static const rank_info *find_refusal(const rank_info *all, int num_ranks, bool second_hand)
{
    for (const rank_info *info = all; info < all + num_ranks; info++)
        if (is_same_version(info) && info->refused &&
            is_second_hand(info->refused) == second_hand)
            return info;
    return NULL;
}

/* Returns true if an error text begins with "rank N: ". If joining fails on GPUs, every rank
 * already has the error text of the failed rank with this prefix. */
static bool begins_with_rank(const char *sentence)
{
    int rank, end = 0;
    return sscanf(sentence, "rank %d: %n", &rank, &end) == 1 && end > 0;
}

/* Returns the error with which rank `rank` failed, and sets the error text of this call to the
 * text of that error. */
static epic_result report_refusal(const rank_info *refusal, int rank)
{
    const epic_result result = (epic_result)refusal->refused;
    if (begins_with_rank(refusal->sentence))
        return epic_fail(result, "open: %s", refusal->sentence);
    return epic_fail(result, "open: rank %d: %s", rank, refusal->sentence);
}

epic_result rank_info_compare(rank_info *all, int num_ranks)
{
    for (int r = 0; r < num_ranks; r++)
        if (is_same_version(&all[r])) TRY(check_texts(&all[r], r));
    const rank_info *refusal = find_refusal(all, num_ranks, false);
    if (!refusal) refusal = find_refusal(all, num_ranks, true);
    if (refusal) return report_refusal(refusal, (int)(refusal - all));
    for (int r = 0; r < num_ranks; r++) TRY(compare_rank_infos(&all[0], &all[r], r));
    return EPIC_OK;
}
