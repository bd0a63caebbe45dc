/* SPDX-License-Identifier: Apache-2.0 */
/* Finds, reads and cuts the text. */
#include "text.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "file.h"
#include "group.h"

enum { IN_CHUNK = CHUNK - CONTEXT, EVERY = 10 };

#define MOST_BYTES (1ll << 30)

/* ---------------------------------------------------------------------------- reading ---- */

static bool read_file(text *t, const char *path)
{
    FILE *file = file_open(path);
    if (!file) return false;
    for (size_t got = 1; got > 0;) {
        unsigned char *grown = realloc(t->bytes, (size_t)t->num_bytes + CHUNK);
        if (!grown || t->num_bytes > MOST_BYTES) {
            fclose(file);
            return complain("%s: more text than the %lld bytes that are possible", path,
                            MOST_BYTES);
        }
        t->bytes = grown;
        got = fread(t->bytes + t->num_bytes, 1, CHUNK, file);
        t->num_bytes += (int64_t)got;
    }
    const bool good = !ferror(file);
    fclose(file);
    t->num_files++;
    return good || complain("%s: cannot be read", path);
}

static bool is_text(const char *name)
{
    static const char *const endings[] = {".md", ".txt", ".rst",  ".c",  ".h", ".cc",
                                          ".cu", ".cuh", ".html", ".py", ".sh"};
    const char *dot = strrchr(name, '.');
    for (size_t i = 0; dot && i < sizeof endings / sizeof *endings; i++)
        if (!strcmp(dot, endings[i])) return true;
    return false;
}

static int shown(const struct dirent *entry)
{
    return entry->d_name[0] != '.';
}

/* Compares names by bytes, unlike alphasort(), which depends on the locale. */
static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static bool read_folder(text *t, const char *path, int depth)
{
    struct dirent **entries;
    const int count = depth < 16 ? scandir(path, &entries, shown, by_name) : 0;
    if (count < 0) return complain("%s: %s", path, strerror(errno));
    bool good = true;
    for (int i = 0; i < count; i++) {
        char inner[PATH_MAX];
        struct stat info;
        const int length = snprintf(inner, sizeof inner, "%s/%s", path, entries[i]->d_name);
        if (good && length < (int)sizeof inner && !lstat(inner, &info)) {
            if (S_ISDIR(info.st_mode))
                good = read_folder(t, inner, depth + 1);
            else if (S_ISREG(info.st_mode) && is_text(inner))
                good = read_file(t, inner);
        }
        free(entries[i]);
    }
    if (depth < 16) free(entries);
    return good;
}

static bool read_path(text *t, const char *path)
{
    struct stat info;
    if (stat(path, &info)) return complain("%s: %s", path, strerror(errno));
    return S_ISDIR(info.st_mode) ? read_folder(t, path, 0) : read_file(t, path);
}

/* --------------------------------------------------------------- this repository's own ---- */

static bool is_repository(const char *folder)
{
    char path[PATH_MAX];
    struct stat info;
    snprintf(path, sizeof path, "%s/include/epic/epic.h", folder);
    return !stat(path, &info);
}

static bool read_own(text *t)
{
    static const char *const parts[] = {"README.md", "docs",  "include",  "src",   "kernels",
                                        "bindings",  "tests", "examples", "bench", "tools"};
    const char *root = is_repository(".") ? "." : TRAIN_TEXT_ROOT;
    if (!is_repository(root))
        return complain("this repository's text is neither here nor in %s: name files or "
                        "folders to learn from",
                        root);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        char path[PATH_MAX];
        struct stat info;
        snprintf(path, sizeof path, "%s/%s", root, parts[i]);
        if (!stat(path, &info) && !read_path(t, path)) return false;
    }
    return true;
}

/* ----------------------------------------------------------------------------- cutting ---- */

static bool cut(text *t)
{
    const int64_t chunks = t->num_bytes / CHUNK, held_out = chunks / EVERY;
    if (!held_out)
        return complain("the text has %lld bytes: %d are needed, so that a tenth can be held "
                        "out",
                        (long long)t->num_bytes, CHUNK * EVERY);
    t->num_held_out = held_out * IN_CHUNK;
    t->num_training = (chunks - held_out) * IN_CHUNK;
    t->fingerprint = 14695981039346656037u;
    for (int64_t i = 0; i < t->num_bytes; i++)
        t->fingerprint = (t->fingerprint ^ t->bytes[i]) * 1099511628211u;
    return true;
}

bool text_read(text *out, const char *const *paths, int num_paths)
{
    *out = (text){0};
    bool good = num_paths || read_own(out);
    for (int i = 0; good && i < num_paths; i++) good = read_path(out, paths[i]);
    good = good && cut(out);
    if (!good) text_free(out);
    return good;
}

void text_free(text *t)
{
    free(t->bytes);
    *t = (text){0};
}

static const unsigned char *at(const text *t, int64_t chunk, int64_t position)
{
    return t->bytes + chunk * CHUNK + CONTEXT + position % IN_CHUNK;
}

const unsigned char *text_training(const text *t, int64_t position)
{
    const int64_t n = position / IN_CHUNK;
    return at(t, n + n / (EVERY - 1), position);
}

const unsigned char *text_held_out(const text *t, int64_t position)
{
    const int64_t n = position / IN_CHUNK;
    return at(t, n * EVERY + EVERY - 1, position);
}
