/* SPDX-License-Identifier: Apache-2.0 */
/* Runs epic-trace and epic-place in a folder of the test. */
#ifndef UNIT_TOOLS_H
#define UNIT_TOOLS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static char programs[4096]; /* the folder build/bin, found from build/tests/unit/NAME */
static char folder[64];
static char output[1 << 20];

static inline void tools_begin(void)
{
    const ssize_t length = readlink("/proc/self/exe", programs, sizeof programs - 64);
    CHECK(length > 0);
    programs[length < 0 ? 0 : length] = 0;
    for (int up = 0; up < 3; up++) *strrchr(programs, '/') = 0;
    strcat(programs, "/bin");
    snprintf(folder, sizeof folder, "/tmp/epic-tools-XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
}

static inline void tools_end(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    CHECK_EQ(system(command), 0);
}

/* Runs a tool in the folder of the test and stores its output in `output`. Returns its status,
 * or -1 if a signal ended it. */
static inline int tool(const char *name, const char *arguments)
{
    char command[8192];
    snprintf(command, sizeof command, "cd '%s' && exec '%s/%s' %s 2>&1", folder, programs, name,
             arguments);
    FILE *pipe = popen(command, "r");
    if (!CHECK(pipe != NULL)) return -1;
    const size_t length = fread(output, 1, sizeof output - 1, pipe);
    output[length] = 0;
    const int status = pclose(pipe);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static inline bool says(const char *words)
{
    if (strstr(output, words)) return true;
    fprintf(stderr, "\"%s\" is not in:\n%.4000s", words, output);
    return false;
}

/* Returns the number after these words in the output. */
static inline long long number(const char *words)
{
    const char *at = strstr(output, words);
    return at ? atoll(at + strlen(words)) : -1;
}

static inline FILE *create(const char *name)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return fopen(path, "wb");
}

static inline size_t bytes_of(const char *name, unsigned char *out, size_t size)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *in = fopen(path, "rb");
    const size_t length = in ? fread(out, 1, size, in) : 0;
    if (in) fclose(in);
    return length;
}

#endif
