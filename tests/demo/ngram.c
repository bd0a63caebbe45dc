/* SPDX-License-Identifier: Apache-2.0 */
/* Compares the n-gram model of examples/train_text with counts by hand: for every held-out
 * position, each context is counted in all training positions. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../examples/train_text/ngram.h"
#include "../../examples/train_text/random.h"

enum { CHUNKS = 20, STEP = 97 };

static unsigned char bytes[CHUNKS * CHUNK];

/* Returns p(c | the `length` bytes before it), computed from the probability with the shorter
 * context. */
static double next(const text *t, const unsigned char *at, int length, double shorter)
{
    bool seen[256] = {false};
    double times = 0, both = 0, kinds = 0;
    for (int64_t n = 0; n < t->num_training; n++) {
        const unsigned char *here = text_training(t, n);
        if (memcmp(here - length, at - length, (size_t)length)) continue;
        times++;
        both += *here == *at;
        kinds += !seen[*here];
        seen[*here] = true;
    }
    return times > 0 ? (both + kinds * shorter) / (times + kinds) : shorter;
}

int main(void)
{
    text t;
    ngram g;
    char path[] = "/tmp/ngram.XXXXXX";
    const int fd = mkstemp(path);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "wb");
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)("abcd \n\377"[random_at(1, 1, i / 3) % 7] + i % 2);
    if (!file || fwrite(bytes, 1, sizeof bytes, file) != sizeof bytes || fclose(file)) return 1;
    const char *const paths[] = {path};
    if (!text_read(&t, paths, 1)) return 1;
    remove(path);
    ngram_open(&g, &t);
    int num_bad = g.num_trained != t.num_training;
    for (int64_t n = 0; n < t.num_held_out; n += STEP) {
        const unsigned char *at = text_held_out(&t, n);
        double p = 1.0 / 256;
        for (int length = 0; length < NGRAM_ORDER; length++) p = next(&t, at, length, p);
        if (fabs(ngram_bits(&g, at) + log2(p)) > 1e-9) {
            printf("position %lld: %.12g bits, by hand %.12g\n", (long long)n,
                   ngram_bits(&g, at), -log2(p));
            num_bad++;
        }
    }
    /* The probabilities of all bytes at a position must add up to 1. */
    unsigned char *at = (unsigned char *)(uintptr_t)text_held_out(&t, 0);
    double sum = 0;
    for (int c = 0; c < 256; c++) {
        *at = (unsigned char)c;
        sum += exp2(-ngram_bits(&g, at));
    }
    if (fabs(sum - 1) > 1e-9) {
        printf("the probabilities add up to %.12g\n", sum);
        num_bad++;
    }
    ngram_close(&g);
    text_free(&t);
    printf("%d failed\n", num_bad);
    return num_bad > 0;
}
