/* SPDX-License-Identifier: Apache-2.0 */
/* Finds flight recorders of this user's processes on this host, under /proc/PID/fd. */
#include "recordings.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LINK_START "/memfd:epic:"

static bool is_number(const char *text)
{
    return *text && strspn(text, "0123456789") == strlen(text);
}

/* Returns true if this file was already found through another descriptor. If process `holder`
 * created the recorder, also stores it as the holder. */
static bool is_known(recordings *all, const struct stat *file, int holder)
{
    for (int i = 0; i < all->num; i++) {
        recording *s = &all->list[i];
        if (s->device != file->st_dev || s->file != file->st_ino) continue;
        if (s->page->pid == holder) s->holder = holder;
        return true;
    }
    return false;
}

/* Adds the flight recorder to which a descriptor of process `holder` refers, unless the
 * recorder is closed or already in the list. */
static void add_file(recordings *all, const char *path, int holder)
{
    struct stat file;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    if (fstat(fd, &file) == 0 && file.st_uid == geteuid() && !is_known(all, &file, holder) &&
        all->num < MAX_RECORDINGS) {
        const recorder_page *page = recorder_map(fd);
        if (page && !atomic_load(&page->closed))
            all->list[all->num++] =
                (recording){page, file.st_dev, file.st_ino, holder, page->num_ranks};
        else
            recorder_unmap(page);
    }
    close(fd);
}

/* Adds the flight recorders that a process has open. */
static void add_process(recordings *all, const char *pid)
{
    char folder[64], path[512], link[512];
    snprintf(folder, sizeof folder, "/proc/%.20s/fd", pid);
    DIR *files = opendir(folder);
    if (!files) return; /* the process has exited, or belongs to another user */
    for (struct dirent *file; (file = readdir(files));) {
        snprintf(path, sizeof path, "%s/%.255s", folder, file->d_name);
        const ssize_t length = readlink(path, link, sizeof link - 1);
        if (length < 0) continue;
        link[length] = 0;
        if (!strncmp(link, LINK_START, strlen(LINK_START))) add_file(all, path, atoi(pid));
    }
    closedir(files);
}

static int compare_ranks(const void *a, const void *b)
{
    const recorder_page *p = ((const recording *)a)->page, *q = ((const recording *)b)->page;
    if (p->group_id != q->group_id) return p->group_id < q->group_id ? -1 : 1;
    if (p->rank != q->rank) return p->rank < q->rank ? -1 : 1;
    return (p->opened_ns > q->opened_ns) - (p->opened_ns < q->opened_ns);
}

void recordings_find(recordings *out)
{
    DIR *processes = opendir("/proc");
    if (!processes) return;
    for (struct dirent *process; (process = readdir(processes));)
        if (is_number(process->d_name)) add_process(out, process->d_name);
    closedir(processes);
    qsort(out->list, (size_t)out->num, sizeof *out->list, compare_ranks);
}
