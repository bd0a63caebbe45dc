/* SPDX-License-Identifier: Apache-2.0 */
/* Writes and reads checkpoints. checkpoint.h explains the format. */
#include "checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "file.h"

enum { VERSION = 1, ORDER = 0x01020304, MOMENTS = 3 /* value, first, second */ };

static const char magic[8] = "EPICTEXT";

typedef struct record {
    char name[32];
    int64_t count;
    uint32_t data_sum; /* CRC-32 of the floats that follow */
    uint32_t sum;      /* CRC-32 of the fields above */
} record;

/* Continues a CRC-32 over more data. crc: the CRC-32 so far, 0 at the beginning. */
static uint32_t crc32_add(uint32_t crc, const void *data, size_t bytes)
{
    static const uint32_t nibbles[16] = {0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac,
                                         0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
                                         0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
                                         0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
    const unsigned char *at = data;
    crc = ~crc;
    for (size_t i = 0; i < bytes; i++) {
        crc = nibbles[(crc ^ at[i]) & 15] ^ (crc >> 4);
        crc = nibbles[(crc ^ (at[i] >> 4)) & 15] ^ (crc >> 4);
    }
    return ~crc;
}

static uint32_t crc32(const void *data, size_t bytes)
{
    return crc32_add(0, data, bytes);
}

static int64_t file_bytes(int64_t hidden, int64_t inner)
{
    int64_t bytes = sizeof(checkpoint_header);
    for (int n = 0; n < NUM_PARAMETERS; n++) {
        parameter p;
        parameter_describe(&p, n, hidden, inner);
        bytes += (int64_t)sizeof(record) + p.count * MOMENTS * 4;
    }
    return bytes;
}

/* ----------------------------------------------------------------------------- reading ---- */

/* Checks the fields of a header. Anybody can make a header with a correct checksum, so every
 * field must be within the bounds of the command line's options. */
static bool check_fields(const checkpoint_header *h, const char *path)
{
    const struct {
        const char *name;
        int64_t value, least, most, unit;
    } fields[] = {{"hidden", h->hidden, LEAST_WIDTH, MOST_HIDDEN, LEAST_WIDTH},
                  {"inner", h->inner, LEAST_WIDTH, MOST_INNER, LEAST_WIDTH},
                  {"tokens", h->tokens, LEAVES, MOST_TOKENS, LEAVES},
                  {"seed", h->seed, 0, INT64_MAX, 1},
                  {"steps", h->steps, 1, MOST_STEPS, 1},
                  {"step", h->step, 0, h->steps, 1}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].value < fields[i].least || fields[i].value > fields[i].most ||
            fields[i].value % fields[i].unit)
            return complain("%s says that %s is %lld: multiples of %lld from %lld to %lld are "
                            "possible; the file is damaged or forged",
                            path, fields[i].name, (long long)fields[i].value,
                            (long long)fields[i].unit, (long long)fields[i].least,
                            (long long)fields[i].most);
    if (h->drawn != h->step * h->tokens)
        return complain("%s says that %lld positions were drawn: %lld steps draw %lld; the "
                        "file is damaged or forged",
                        path, (long long)h->drawn, (long long)h->step,
                        (long long)(h->step * h->tokens));
    if (!(h->rate > 0 && h->rate <= 1))
        return complain("%s says that the rate is %g: above 0 and at most 1 is possible; the "
                        "file is damaged or forged",
                        path, h->rate);
    return true;
}

static bool read_header(FILE *file, const char *path, checkpoint_header *h)
{
    if (fread(h, sizeof *h, 1, file) != 1 || memcmp(h->magic, magic, sizeof magic))
        return complain("%s is not a checkpoint of train_text", path);
    if (h->version != VERSION || h->byte_order != ORDER)
        return complain("%s has version %u and byte order %08x: %d and %08x are read here",
                        path, h->version, h->byte_order, VERSION, ORDER);
    if (crc32(h, offsetof(checkpoint_header, sum)) != h->sum)
        return complain("%s: the checksum of the header is wrong: the file is damaged", path);
    if (!check_fields(h, path)) return false;
    fseeko(file, 0, SEEK_END);
    const int64_t length = ftello(file), right = file_bytes(h->hidden, h->inner);
    fseeko(file, sizeof *h, SEEK_SET);
    if (length != right || h->num_bytes != right)
        return complain(
            "%s is %lld bytes long, and says %lld; a model of its sizes takes %lld: "
            "the file is damaged",
            path, (long long)length, (long long)h->num_bytes, (long long)right);
    return true;
}

/* Reads values and adds them to the checksum. If `to` is NULL, does not store the values. */
static bool read_values(FILE *file, float *to, int64_t count, uint32_t *sum)
{
    float piece[4096];
    const int64_t most = sizeof piece / sizeof *piece;
    for (int64_t done = 0; done < count; done += most) {
        const size_t n = (size_t)(count - done < most ? count - done : most);
        if (fread(piece, sizeof *piece, n, file) != n) return false;
        *sum = crc32_add(*sum, piece, n * sizeof *piece);
        if (to) memcpy(to + done, piece, n * sizeof *piece);
    }
    return true;
}

/* Reads the next parameter, which must be p. If m is NULL, only verifies it. */
static bool read_parameter(FILE *file, const char *path, const parameter *p, model *m)
{
    record r;
    uint32_t sum = 0;
    if (fread(&r, sizeof r, 1, file) != 1 || crc32(&r, offsetof(record, sum)) != r.sum)
        return complain("%s: the header of %s is wrong: the file is damaged", path, p->name);
    if (strncmp(p->name, r.name, sizeof r.name) || p->count != r.count)
        return complain("%s: %.32s of %lld values is where %s of %lld belongs: the file is "
                        "damaged",
                        path, r.name, (long long)r.count, p->name, (long long)p->count);
    float *const arrays[MOMENTS] = {m ? m->value : NULL, m ? m->first : NULL,
                                    m ? m->second : NULL};
    for (int i = 0; i < MOMENTS; i++) {
        const bool mine = m && p->offset >= 0;
        if (!read_values(file, mine ? arrays[i] + p->offset : NULL, p->count, &sum))
            return complain("%s ends inside %s: the file is damaged", path, p->name);
    }
    return sum == r.data_sum ||
           complain("%s: the checksum of %s is wrong: the file is damaged", path, p->name);
}

/* Reads the whole file. If m is NULL, only verifies it. */
static bool read_all(const char *path, checkpoint_header *h, model *m)
{
    FILE *file = file_open(path);
    if (!file) return false;
    bool good = read_header(file, path, h);
    for (int n = 0; good && n < NUM_PARAMETERS; n++) {
        parameter p;
        parameter_describe(&p, n, h->hidden, h->inner);
        good = read_parameter(file, path, m ? &m->parameters[n] : &p, m);
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
    return all_good(&m->group, read_all(path, &h, m));
}

/* ----------------------------------------------------------------------------- writing ---- */

static void temporary(char out[PATH_MAX], const char *path)
{
    snprintf(out, PATH_MAX, "%.*s.new", PATH_MAX - 8, path);
}

bool checkpoint_test(const char *path, const group *g)
{
    char name[PATH_MAX];
    bool good = true;
    temporary(name, path);
    if (g->rank == 0) {
        const int fd = open(name, O_WRONLY | O_CREAT, 0666);
        good = fd >= 0 || complain("--save: %s: %s", name, strerror(errno));
        if (fd >= 0) {
            close(fd);
            unlink(name);
        }
    }
    return all_good(g, good);
}

/* Collects value and moments of a parameter on every rank. Ranks that do not own it
 * contribute -0, which does not change any sum. */
static bool gather(model *m, int number, float *out)
{
    const parameter *p = &m->parameters[number];
    float *const arrays[MOMENTS] = {m->value, m->first, m->second};
    for (int i = 0; i < MOMENTS; i++)
        for (int64_t j = 0; j < p->count; j++)
            out[i * p->count + j] = p->offset >= 0 ? arrays[i][p->offset + j] : -0.0f;
    return model_owner(m, number) < 0 || sum_over_ranks(&m->group, out, p->count * MOMENTS);
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

/* Writes all parameters. If `file` is NULL, this rank only takes part in the sums. */
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

/* Writes the folder to disk, since only then a new name survives a power failure. */
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
    if (m->group.rank == 0) {
        file = fopen(name, "wb");
        good = file || complain("%s: %s: no checkpoint was written", name, strerror(errno));
    }
    if (file) {
        memcpy(header.magic, magic, sizeof magic);
        header.version = VERSION;
        header.byte_order = ORDER;
        header.num_bytes = file_bytes(m->hidden, m->inner);
        header.sum = crc32(&header, offsetof(checkpoint_header, sum));
        fwrite(&header, sizeof header, 1, file);
    }
    if (!write_parameters(file, m)) { /* a peer failed */
        if (file) {
            fclose(file);
            unlink(name);
        }
        return false;
    }
    if (file) good = finish(file, name, path);
    return all_good(&m->group, good);
}
