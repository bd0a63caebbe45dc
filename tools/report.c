/* SPDX-License-Identifier: Apache-2.0 */
/* Writes the report of epic-info: a file that a user sends when something fails. */
#include "report.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "info.h"

#define BOOTSTRAP_MS "30000" /* deadline of the report's bootstrap, unless the user sets one */

/* ---------------------------------------------------------------------------- the file ---- */

/* A report. Its text is collected in memory and written after each section, so that a crash
 * loses at most one section. */
typedef struct report {
    FILE *file; /* NULL on ranks other than 0, which write nothing */
    FILE *section;
    char *text;
    size_t size;
} report;

/* Opens a regular file, makes it readable by its owner only, and empties it. Emptying is the
 * last step, so that a file keeps its contents if an earlier step fails. Does not
 * follow a link, because a link in a folder that others may write could lead to another file of
 * the user. Returns -1 with errno on an error. */
static int open_private(const char *path)
{
    struct stat about;
    const int flags = O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    const int fd = open(path, flags, 0600);
    if (fd < 0) return -1;
    const bool is_file = fstat(fd, &about) == 0 && S_ISREG(about.st_mode);
    if (is_file && fchmod(fd, 0600) == 0 && ftruncate(fd, 0) == 0) return fd;
    const int error = is_file ? errno : EINVAL;
    close(fd);
    errno = error;
    return -1;
}

static bool is_stdout(const char *path)
{
    return !strcmp(path, "-");
}

static FILE *open_file(const char *path)
{
    const int fd = is_stdout(path) ? dup(STDOUT_FILENO) : open_private(path);
    FILE *file = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (file) return file;
    fprintf(stderr, "epic-info: the report cannot be written to \"");
    info_text(stderr, path);
    fprintf(stderr,
            "\": %s; pass the path of a file in a folder that you may write: --report FILE\n",
            strerror(errno));
    if (fd >= 0) close(fd);
    return NULL;
}

/* Returns the stream for a section, or NULL on ranks other than 0. */
static FILE *begin_section(report *r, const char *title)
{
    if (!r->file) return NULL;
    r->section = open_memstream(&r->text, &r->size);
    if (r->section && *title) fprintf(r->section, "\n== %s\n", title);
    return r->section;
}

/* Writes the section to the file, after hiding secrets. */
static void end_section(report *r)
{
    if (!r->section) return;
    fclose(r->section);
    r->section = NULL;
    report_hide_secrets(r->text);
    fputs(r->text, r->file);
    fflush(r->file);
    free(r->text);
    r->text = NULL;
}

/* --------------------------------------------------------------------------- the group ---- */

static void print_bytes(FILE *to, unsigned long long bytes)
{
    if (bytes == ~0ull)
        fprintf(to, "unlimited");
    else
        fprintf(to, "%llu MiB", bytes >> 20);
}

static void print_rank(FILE *to, int rank, report_rank *r)
{
    r->host[sizeof r->host - 1] = r->kernel[sizeof r->kernel - 1] = 0;
    r->ucx[sizeof r->ucx - 1] = 0;
    fprintf(to, "rank %-4d host ", rank);
    info_text(to, r->host);
    fprintf(to, ", EPIC %u.%u.%u, kernel ", r->version / 10000, r->version / 100 % 100,
            r->version % 100);
    info_text(to, r->kernel);
    fprintf(to, ", UCX ");
    info_text(to, r->ucx);
    fprintf(to, ", %d cores, locked memory ", r->cores);
    print_bytes(to, r->memlock);
    fprintf(to, ", free in /dev/shm ");
    print_bytes(to, r->shm);
    fprintf(to, "\n");
}

/* Gathers the facts that the ranks report about themselves, and prints them on rank 0. Returns
 * false if the gather fails. */
static bool report_ranks(FILE *to, const epic_bootstrap *bootstrap)
{
    report_rank mine, *all = calloc((size_t)bootstrap->num_ranks, sizeof *all);
    report_fill_rank(&mine);
    const bool good =
        all && bootstrap->gather(bootstrap->self, &mine, all, sizeof mine) == EPIC_OK;
    for (int r = 0; to && good && r < bootstrap->num_ranks; r++) print_rank(to, r, &all[r]);
    if (to && !good) fprintf(to, "the ranks lost each other: %s\n", epic_error(NULL));
    free(all);
    return good;
}

/* Prints why there is no group. Ranks other than 0 print this to stderr. */
static void print_no_group(FILE *to)
{
    if (to)
        fprintf(to, "no group: ");
    else
        fprintf(stderr,
                "epic-info: no report, because this is not rank 0 and there is no group: ");
    info_text(to ? to : stderr, epic_error(NULL));
    fprintf(to ? to : stderr, "\n");
}

/* Reports on the ranks that the launcher has started. Returns false if they did not find each
 * other. */
static bool report_group(report *r)
{
    epic_bootstrap bootstrap;
    FILE *to = begin_section(r, "Ranks");
    setenv("EPIC_TIMEOUT_MS", BOOTSTRAP_MS, 0);
    if (epic_bootstrap_env(&bootstrap) != EPIC_OK) {
        print_no_group(to);
        end_section(r);
        return false;
    }
    const bool several = bootstrap.num_ranks > 1;
    if (to && !several) fprintf(to, "one rank: no launcher has started several\n");
    const bool good = several && report_ranks(to, &bootstrap);
    end_section(r);
    if (good) {
        report_matrix(begin_section(r, "Bandwidth"), &bootstrap);
        end_section(r);
    }
    epic_bootstrap_close(&bootstrap);
    return good || !several;
}

/* --------------------------------------------------------------------------- all of it ---- */

static void report_process(report *r)
{
    FILE *to = begin_section(r, "");
    if (!to) return;
    fprintf(to,
            "Report of epic-info.  It contains no values of variables that may hold a secret.\n"
            "Read it before you send it: it names hosts, networks and folders.\n\n");
    report_machine(to);
    end_section(r);
    to = begin_section(r, "Variables");
    if (to) report_variables(to);
    end_section(r);
}

int info_report(const char *path)
{
    report r = {0};
    const bool writes = report_rank_of_launcher() == 0;
    if (writes && !(r.file = open_file(path))) return 1;
    report_process(&r);
    const bool found = report_group(&r);
    if (!writes) return found ? 0 : 1;
    const bool failed = ferror(r.file) != 0;
    if (fclose(r.file) != 0 || failed) {
        fprintf(stderr, "epic-info: the report could not be written completely: %s\n",
                strerror(errno));
        return 1;
    }
    if (is_stdout(path)) return 0;
    printf("epic-info: the report is in ");
    info_text(stdout, path);
    printf("; read it before you send it\n");
    return 0;
}
