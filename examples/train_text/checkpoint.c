/* SPDX-License-Identifier: Apache-2.0 */
/* Writing and reading checkpoints. */
#include "checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { VERSION = 1, ORDER = 0x01020304, MOMENTS = 3 /* value, first, second */ };

static const char magic[8] = "EPICTEXT";

typedef struct record {
    char name[32];
    int64_t count;
    uint32_t data_sum; /* CRC-32 of the floats that follow */
    uint32_t sum;      /* CRC-32 of all before */
} record;

static uint32_t crc32(const void *data, size_t bytes)
{
    static const uint32_t nibbles[16] = {0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac,
                                         0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
                                         0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
                                         0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
    uint32_t crc = ~0u;
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++) {
        crc = nibbles[(crc ^ at[i]) & 15] ^ (crc >> 4);
        crc = nibbles[(crc ^ (at[i] >> 4)) & 15] ^ (crc >> 4);
    }
    return ~crc;
}

static int64_t file_bytes(const model *m)
{
    int64_t bytes = sizeof(checkpoint_header);
    for (int n = 0; n < NUM_PARAMETERS; n++)
        bytes += (int64_t)sizeof(record) + m->parameters[n].count * MOMENTS * 4;
    return bytes;
}

/* ----------------------------------------------------------------------------- reading ---- */

static bool read_header(FILE *file, const char *path, checkpoint_header *h)
{
    if (fread(h, sizeof *h, 1, file) != 1 || memcmp(h->magic, magic, sizeof magic))
        return complain("%s is not a checkpoint of train_text", path);
    if (h->version != VERSION || h->byte_order != ORDER)
        return complain("%s has version %u and byte order %08x: %d and %08x are read here",
                        path, h->version, h->byte_order, VERSION, ORDER);
    if (crc32(h, offsetof(checkpoint_header, sum)) != h->sum)
        return complain("%s: the checksum of the header is wrong: the file is damaged", path);
    fseeko(file, 0, SEEK_END);
    const int64_t length = ftello(file);
    fseeko(file, sizeof *h, SEEK_SET);
    if (length != h->num_bytes)
        return complain("%s is %lld bytes long, and was %lld when it was written: the file is "
                        "damaged",
                        path, (long long)length, (long long)h->num_bytes);
    return true;
}

/* The next parameter; its floats are to be freed. */
static float *read_record(FILE *file, const char *path, int64_t most, record *r)
{
    float *data = NULL;
    if (fread(r, sizeof *r, 1, file) != 1 || crc32(r, offsetof(record, sum)) != r->sum ||
        r->count < 0 || r->count > most / (MOMENTS * 4)) {
        complain("%s: a parameter's header is wrong: the file is damaged", path);
        return NULL;
    }
    const size_t bytes = (size_t)r->count * MOMENTS * 4;
    data = memory((int64_t)bytes);
    if (fread(data, 1, bytes, file) == bytes && crc32(data, bytes) == r->data_sum) return data;
    complain("%s: the checksum of %.32s is wrong: the file is damaged", path, r->name);
    free(data);
    return NULL;
}

static bool take(model *m, int number, const record *r, const float *data, const char *path)
{
    const parameter *p = &m->parameters[number];
    if (strncmp(p->name, r->name, sizeof r->name) || p->count != r->count)
        return complain("%s: %.32s of %lld values is where %s of %lld belongs", path, r->name,
                        (long long)r->count, p->name, (long long)p->count);
    if (p->offset < 0) return true;
    float *const arrays[MOMENTS] = {m->value, m->first, m->second};
    for (int i = 0; i < MOMENTS; i++)
        memcpy(arrays[i] + p->offset, data + i * p->count, (size_t)p->count * sizeof *data);
    return true;
}

/* m NULL: only verifies. */
static bool read_all(const char *path, checkpoint_header *h, model *m)
{
    FILE *file = fopen(path, "rb");
    if (!file) return complain("%s: %s", path, strerror(errno));
    bool good = read_header(file, path, h);
    for (int n = 0; good && n < NUM_PARAMETERS; n++) {
        record r;
        float *data = read_record(file, path, h->num_bytes, &r);
        good = data && (!m || take(m, n, &r, data, path));
        free(data);
    }
    fclose(file);
    return good;
}

bool checkpoint_look(const char *path, checkpoint_header *out)
{
    return read_all(path, out, NULL);
}

bool checkpoint_load(const char *path, model *m)
{
    checkpoint_header h;
    return all_good(&m->seat, read_all(path, &h, m));
}

/* ----------------------------------------------------------------------------- writing ---- */

static void temporary(char out[PATH_MAX], const char *path)
{
    snprintf(out, PATH_MAX, "%.*s.new", PATH_MAX - 8, path);
}

bool checkpoint_test(const char *path, const seat *s)
{
    char name[PATH_MAX];
    bool good = true;
    temporary(name, path);
    if (s->rank == 0) {
        const int fd = open(name, O_WRONLY | O_CREAT, 0666);
        good = fd >= 0 || complain("--save: %s: %s", name, strerror(errno));
        if (fd >= 0) {
            close(fd);
            unlink(name);
        }
    }
    return all_good(s, good);
}

/* Value and moments of a parameter, on every rank: the owner's, and -0 of the others, which adds
 * nothing to any number, -0 included. */
static bool gather(model *m, int number, float *out)
{
    const parameter *p = &m->parameters[number];
    float *const arrays[MOMENTS] = {m->value, m->first, m->second};
    for (int i = 0; i < MOMENTS; i++)
        for (int64_t j = 0; j < p->count; j++)
            out[i * p->count + j] = p->offset >= 0 ? arrays[i][p->offset + j] : -0.0f;
    return model_owner(m, number) < 0 || sum_over_ranks(&m->seat, out, p->count * MOMENTS);
}

static void write_record(FILE *file, const parameter *p, const float *data)
{
    const size_t bytes = (size_t)p->count * MOMENTS * 4;
    record r = {.count = p->count, .data_sum = crc32(data, bytes)};
    memcpy(r.name, p->name, sizeof r.name);
    r.sum = crc32(&r, offsetof(record, sum));
    fwrite(&r, sizeof r, 1, file);
    fwrite(data, 1, bytes, file);
}

/* All parameters; file NULL: only helps rank 0 to. */
static bool write_parameters(FILE *file, model *m)
{
    float *data = memory(m->parameters[EMBED].count * MOMENTS * 4 +
                         m->parameters[UP].count * MOMENTS * 4);
    bool good = true;
    for (int n = 0; good && n < NUM_PARAMETERS; n++) {
        good = gather(m, n, data);
        if (good && file) write_record(file, &m->parameters[n], data);
    }
    free(data);
    return good;
}

/* A new name lasts when its folder is written. */
static void write_folder(const char *path)
{
    char copy[PATH_MAX];
    snprintf(copy, sizeof copy, "%s", path);
    const int fd = open(dirname(copy), O_RDONLY | O_DIRECTORY);
    if (fd < 0) return;
    fsync(fd);
    close(fd);
}

static bool finish(FILE *file, const char *name, const char *path)
{
    bool good = !ferror(file) && !fflush(file) && !fsync(fileno(file));
    good = !fclose(file) && good && !rename(name, path);
    if (good) {
        write_folder(path);
        return true;
    }
    complain("%s: %s: no checkpoint was written", path, strerror(errno));
    unlink(name);
    return false;
}

bool checkpoint_save(const char *path, model *m, checkpoint_header header)
{
    char name[PATH_MAX];
    FILE *file = NULL;
    bool good = true;
    temporary(name, path);
    if (m->seat.rank == 0) {
        file = fopen(name, "wb");
        good = file || complain("%s: %s: no checkpoint was written", name, strerror(errno));
    }
    if (file) {
        memcpy(header.magic, magic, sizeof magic);
        header.version = VERSION;
        header.byte_order = ORDER;
        header.num_bytes = file_bytes(m);
        header.sum = crc32(&header, offsetof(checkpoint_header, sum));
        fwrite(&header, sizeof header, 1, file);
    }
    if (!write_parameters(file, m)) { /* a peer is lost */
        if (file) {
            fclose(file);
            unlink(name);
        }
        return false;
    }
    if (file) good = finish(file, name, path);
    return all_good(&m->seat, good);
}
