/* SPDX-License-Identifier: Apache-2.0 */
/* Prints the memory that epic_memory computes for groups of 8, 64, 72 and 256 ranks with 256
 * and 2,048 experts: nothing is opened.
 *
 *     build/bench/memory [--tokens 4096] [--row-bytes 14336] [--top-k 8] [--staging MIB]
 *                        [BACKEND ...]
 *
 * Backends are shm, threads, mpi, p2p and hosts; default: shm. "other" is what a rank needs
 * in addition to staging and plans: announcements, counts, tables of peers and the flight
 * recorder. "group" is the sum over all ranks. A size that grows by a factor of 4 from 64 to
 * 256 ranks is linear in the number of ranks, and one that grows by 16 is quadratic. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "epic/epic.h"

#define MIB(bytes) ((double)(bytes) / (1 << 20))

static int64_t tokens = 4096, row_bytes = 14336, staging_mib;
static uint32_t top_k = 8;

static const uint32_t ranks[] = {8, 64, 72, 256};

static int print_line(const char *backend, uint32_t num_ranks)
{
    epic_memory_info info[2];
    static const uint32_t experts[] = {256, 2048};
    const epic_config config = {.max_tokens = tokens,
                                .max_row_bytes = row_bytes,
                                .staging_bytes = staging_mib << 20,
                                .max_top_k = top_k,
                                .num_ranks = num_ranks,
                                .backend = backend};
    for (int i = 0; i < 2; i++) {
        const epic_layer layer = {.num_experts = experts[i], .top_k = top_k};
        if (epic_memory(&config, &layer, &info[i]) == EPIC_OK) continue;
        printf("%-8s %5u  %s\n", backend, num_ranks, epic_error(NULL));
        return 1;
    }
    const int64_t all = info->host_bytes + info->shared_bytes + info->device_bytes;
    printf("%-8s %5u %9.1f %9.2f %9.1f %10.2f %11.2f\n", backend, num_ranks,
           MIB(info->staging_bytes), MIB(all - info->staging_bytes), MIB(all) * num_ranks,
           MIB(info[0].plan_bytes), MIB(info[1].plan_bytes));
    return 0;
}

int main(int argc, char **argv)
{
    const char *backends[8] = {"shm"};
    int num = 0, failed = 0;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "0";
        if (!strcmp(argv[i], "--tokens"))
            tokens = atol(value), i++;
        else if (!strcmp(argv[i], "--row-bytes"))
            row_bytes = atol(value), i++;
        else if (!strcmp(argv[i], "--top-k"))
            top_k = (uint32_t)atoi(value), i++;
        else if (!strcmp(argv[i], "--staging"))
            staging_mib = atol(value), i++;
        else if (num < 8)
            backends[num++] = argv[i];
    }
    printf("%lld tokens of %lld bytes, top_k %u, staging_bytes %lld MiB; MiB per rank\n",
           (long long)tokens, (long long)row_bytes, top_k, (long long)staging_mib);
    printf("%-8s %5s %9s %9s %9s %10s %11s\n", "backend", "ranks", "staging", "other", "group",
           "plan, E 256", "plan, E 2048");
    for (int b = 0; b < (num ? num : 1); b++)
        for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++)
            failed |= print_line(backends[b], ranks[i]);
    return failed;
}
