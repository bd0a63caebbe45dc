/* SPDX-License-Identifier: Apache-2.0 */
/* Tests forged and damaged checkpoints of examples/train_text. For any bytes, reading a file
 * must not allocate memory by sizes that only the file claims. A header that is accepted must
 * have fields that the program itself could have written. The forged headers have correct
 * checksums. */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../examples/train_text/checkpoint.h"
#include "../../examples/train_text/random.h"

enum { HIDDEN = 16, INNER = 32, TOKENS = 16, ROUNDS = 1000 };

/* The layout of the file, written down again for this test. */
enum { HEADER = sizeof(checkpoint_header), RECORD = 48, RECORD_SUM = 44, RECORD_COUNT = 32 };

static unsigned char *whole;
static size_t size;
static int num_bad;
static uint64_t num_drawn;

/* --------------------------------------------------------------------- what is watched ---- */

static int64_t num_allocated;

void *__real_memory(int64_t bytes);
void *__wrap_memory(int64_t bytes);
void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__real_realloc(void *old, size_t bytes);
void *__wrap_realloc(void *old, size_t bytes);

void *__wrap_memory(int64_t bytes)
{
    num_allocated++;
    return __real_memory(bytes);
}

void *__wrap_malloc(size_t bytes)
{
    num_allocated++;
    return __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    num_allocated++;
    return __real_calloc(count, bytes);
}

void *__wrap_realloc(void *old, size_t bytes)
{
    num_allocated++;
    return __real_realloc(old, bytes);
}

static void bad(const char *what, const char *detail, int64_t number)
{
    num_bad++;
    printf("%s: %s %" PRId64 "\n", what, detail, number);
}

/* ------------------------------------------------------------------------------- files ---- */

static uint32_t crc_of(const unsigned char *data, size_t bytes)
{
    uint32_t crc = ~0u;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int b = 0; b < 8; b++) crc = crc & 1 ? (crc >> 1) ^ 0xedb88320 : crc >> 1;
    }
    return ~crc;
}

static void write_file(const unsigned char *data, size_t bytes)
{
    FILE *file = fopen("forged", "wb");
    if (!file || fwrite(data, 1, bytes, file) != bytes || fclose(file)) {
        perror("forged");
        exit(1);
    }
}

/* Writes only the beginning of the file; the rest stays. */
static void write_headers(const unsigned char *data)
{
    FILE *file = fopen("forged", "r+b");
    if (!file || fwrite(data, 1, HEADER + RECORD, file) != HEADER + RECORD || fclose(file)) {
        perror("forged");
        exit(1);
    }
}

static bool look(checkpoint_header *h)
{
    num_allocated = 0;
    const bool good = checkpoint_look("forged", h);
    if (num_allocated) bad("look", "allocations:", num_allocated);
    return good;
}

static bool possible(const checkpoint_header *h)
{
    return h->hidden == HIDDEN && h->inner == INNER && h->tokens >= 8 && h->tokens <= 1 << 20 &&
           h->tokens % 8 == 0 && h->seed >= 0 && h->steps >= 1 && h->steps <= 1000000 &&
           h->step >= 0 && h->step <= h->steps && h->drawn == h->step * h->tokens &&
           h->rate > 0 && h->rate <= 1 && h->num_bytes == (int64_t)size;
}

static uint64_t draw(void)
{
    return random_at(1, 2, num_drawn++);
}

/* ------------------------------------------------------------------------------- cases ---- */

static void seal(unsigned char *data)
{
    const uint32_t sum = crc_of(data, offsetof(checkpoint_header, sum));
    memcpy(data + offsetof(checkpoint_header, sum), &sum, sizeof sum);
}

static const size_t places[] = {
    offsetof(checkpoint_header, hidden),   offsetof(checkpoint_header, inner),
    offsetof(checkpoint_header, tokens),   offsetof(checkpoint_header, seed),
    offsetof(checkpoint_header, steps),    offsetof(checkpoint_header, step),
    offsetof(checkpoint_header, drawn),    offsetof(checkpoint_header, rate),
    offsetof(checkpoint_header, num_bytes)};

static uint64_t extreme(uint64_t was)
{
    const uint64_t numbers[] = {0,
                                1,
                                was + 1,
                                was - 1,
                                was * 2,
                                -was,
                                16,
                                4096,
                                1u << 20,
                                1u << 31,
                                (1ull << 32) + was,
                                1ull << 62,
                                INT64_MAX,
                                1ull << 63,
                                UINT64_MAX,
                                0x7ff8000000000000,
                                0x7ff0000000000000,
                                draw()};
    return numbers[draw() % (sizeof numbers / sizeof *numbers)];
}

/* Makes the fields agree with each other, as an attacker would. */
static void make_consistent(unsigned char *data)
{
    checkpoint_header h;
    memcpy(&h, data, sizeof h);
    h.drawn = (int64_t)((uint64_t)h.step * (uint64_t)h.tokens);
    memcpy(data, &h, sizeof h);
}

/* Forges one to three fields, with a correct checksum. */
static void forge_fields(unsigned char *data)
{
    int64_t num_believed = 0;
    for (int round = 0; round < ROUNDS; round++) {
        checkpoint_header h;
        memcpy(data, whole, HEADER);
        for (uint64_t n = 1 + draw() % 3; n > 0; n--) {
            unsigned char *at = data + places[draw() % (sizeof places / sizeof *places)];
            uint64_t was;
            memcpy(&was, at, sizeof was);
            was = extreme(was);
            memcpy(at, &was, sizeof was);
        }
        if (round % 2) make_consistent(data);
        seal(data);
        write_headers(data);
        if (!look(&h)) continue;
        num_believed++;
        if (!possible(&h)) bad("a forged header", "was believed in round", round);
    }
    memcpy(data, whole, HEADER);
    if (!num_believed) bad("forged headers", "that are possible were refused:", ROUNDS);
}

/* Forges the size of a large model, in a sparse file of this length. */
static void forge_size(unsigned char *data)
{
    checkpoint_header h;
    memcpy(&h, whole, sizeof h);
    h.hidden = 4096;
    h.inner = 16384;
    h.num_bytes = HEADER;
    for (int n = 0; n < NUM_PARAMETERS; n++) {
        parameter p;
        parameter_describe(&p, n, h.hidden, h.inner);
        h.num_bytes += RECORD + p.count * 12;
    }
    memcpy(data, &h, sizeof h);
    seal(data);
    write_file(data, HEADER);
    if (truncate("forged", h.num_bytes) == 0 && look(&h))
        bad("an empty file", "of this length was believed:", h.num_bytes);
    write_file(data, HEADER);
    if (look(&h)) bad("a header alone", "was believed", 0);
    memcpy(data, whole, HEADER);
    write_file(data, size);
}

/* Forges the record of the first parameter, with a correct checksum. */
static void forge_record(unsigned char *data)
{
    for (int round = 0; round < ROUNDS / 10; round++) {
        checkpoint_header h;
        uint64_t count;
        memcpy(&count, whole + HEADER + RECORD_COUNT, sizeof count);
        const uint64_t other = extreme(count);
        memcpy(data + HEADER + RECORD_COUNT, &other, sizeof other);
        const uint32_t sum = crc_of(data + HEADER, RECORD_SUM);
        memcpy(data + HEADER + RECORD_SUM, &sum, sizeof sum);
        write_headers(data);
        if (look(&h) && other != count) bad("a forged record", "was believed:", (int64_t)other);
    }
    memcpy(data, whole, size);
}

/* Writes arbitrary bytes, with any length. */
static void damage(unsigned char *data)
{
    for (int round = 0; round < ROUNDS / 10; round++) {
        checkpoint_header h;
        size_t length = size;
        const size_t reach = draw() % 2 ? size : HEADER + RECORD;
        for (uint64_t n = 1 + draw() % 8; n > 0; n--)
            data[draw() % reach] ^= (unsigned char)(1u << draw() % 8);
        if (draw() % 4 == 0) length = draw() % size;
        if (length == size && !memcmp(data, whole, size)) continue;
        write_file(data, length);
        if (look(&h)) bad("a damaged file", "was believed in round", round);
        memcpy(data, whole, size);
    }
}

/* -------------------------------------------------------------------------------- main ---- */

static void make_whole(void)
{
    group s = {.num_ranks = 1};
    struct stat info;
    const epic_config config = model_config(1, HIDDEN, TOKENS);
    if (!works(&s, epic_open(&s.ctx, NULL, &config), "open")) exit(1);
    model *m = model_open(&s, HIDDEN, INNER, TOKENS, 1);
    const checkpoint_header h = {.hidden = HIDDEN,
                                 .inner = INNER,
                                 .tokens = TOKENS,
                                 .seed = 1,
                                 .steps = 10,
                                 .step = 4,
                                 .drawn = 4 * TOKENS,
                                 .rate = 0.003};
    if (!m || !checkpoint_save("whole", m, h) || !checkpoint_load("whole", m)) exit(1);
    model_close(m);
    epic_close(s.ctx);
    FILE *file = fopen("whole", "rb");
    if (!file || stat("whole", &info)) exit(1);
    size = (size_t)info.st_size;
    whole = malloc(size);
    if (!whole || fread(whole, 1, size, file) != size) exit(1);
    fclose(file);
}

int main(void)
{
    char folder[] = "/tmp/checkpoint.XXXXXX";
    checkpoint_header h;
    if (!mkdtemp(folder) || chdir(folder)) return 1;
    make_whole();
    unsigned char *data = malloc(size);
    if (!data) return 1;
    memcpy(data, whole, size);
    write_file(data, size);
    if (!look(&h) || !possible(&h)) bad("the file as it was", "is refused", 0);
    /* the program prints an error for each file */
    if (!freopen("/dev/null", "w", stderr)) return 1;
    forge_fields(data);
    forge_size(data);
    forge_record(data);
    damage(data);
    free(data);
    free(whole);
    unlink("whole");
    unlink("forged");
    rmdir(folder);
    printf("%d failed\n", num_bad);
    return num_bad > 0;
}
