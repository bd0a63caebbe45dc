/* SPDX-License-Identifier: Apache-2.0 */
/* Opens files that the user names. */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "group.h"

static const char *kind_of(mode_t mode)
{
    if (S_ISDIR(mode)) return "a folder";
    if (S_ISFIFO(mode)) return "a pipe";
    if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
    return "no file";
}

FILE *file_open(const char *path)
{
    struct stat info;
    FILE *file = NULL;
    if (stat(path, &info)) {
        complain("%s: %s", path, strerror(errno));
        return NULL;
    }
    if (!S_ISREG(info.st_mode)) {
        complain("%s is %s: regular files are read; copy it into one", path,
                 kind_of(info.st_mode));
        return NULL;
    }
    /* O_NONBLOCK: a pipe may have replaced the file since, and opening it must not block */
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd >= 0) file = fdopen(fd, "rb");
    if (!file) {
        complain("%s: %s", path, strerror(errno));
        if (fd >= 0) close(fd);
    }
    return file;
}
