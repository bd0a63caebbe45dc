/* SPDX-License-Identifier: Apache-2.0 */
/* Prints the sizes of the arrays in the heap of a GPU rank, in groups of 8, 64, 72 and 256
 * ranks, as Markdown. Built as heap_p2p and heap_hosts, for the libraries for many ranks of
 * these backends.
 *
 *     build/bench/heap_hosts [--tokens 4096] [--row-bytes 14336] [--top-k 8]
 *                            [--staging 1024] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/common/heap.h"

enum { NUM_GROUPS = 4, MIB = 1 << 20 };

static const int64_t ranks[NUM_GROUPS] = {8, 64, 72, 256};
static p2p_heap heaps[NUM_GROUPS];

/* Prints the sizes of one array, in MiB. */
static void print_array(const char *name, const int64_t bytes[NUM_GROUPS])
{
    printf("| %s |", name);
    for (int i = 0; i < NUM_GROUPS; i++) printf(" %.2f |", (double)bytes[i] / MIB);
    printf("\n");
}

/* An array lies between two offsets of the heap. */
#define PRINT_ARRAY(name, begin, end)                                       \
    do {                                                                    \
        int64_t sizes[NUM_GROUPS];                                          \
        for (int i = 0; i < NUM_GROUPS; i++)                                \
            sizes[i] = (int64_t)(heaps[i].end) - (int64_t)(heaps[i].begin); \
        print_array(name, sizes);                                           \
    } while (0)

static int64_t read_option(int argc, char **argv, const char *name, int64_t otherwise)
{
    for (int i = 1; i + 1 < argc; i += 2)
        if (!strcmp(argv[i], name)) return atol(argv[i + 1]);
    return otherwise;
}

static void print_parts(void)
{
    int64_t sizes[NUM_GROUPS];
    for (int i = 0; i < NUM_GROUPS; i++) sizes[i] = ranks[i] * heaps[i].part_words * 4;
    print_array("dot products", sizes);
}

int main(int argc, char **argv)
{
    const int64_t tokens = read_option(argc, argv, "--tokens", 4096);
    const int64_t row_bytes = read_option(argc, argv, "--row-bytes", 14336);
    const int64_t top_k = read_option(argc, argv, "--top-k", 8);
    const int64_t staging = read_option(argc, argv, "--staging", 1024);
    for (int i = 0; i < NUM_GROUPS; i++)
        heaps[i] = p2p_heap_of(ranks[i], tokens, row_bytes, staging * MIB, top_k);
    printf("| MiB | 8 ranks | 64 ranks | 72 ranks | 256 ranks |\n"
           "| --- | --- | --- | --- | --- |\n");
    PRINT_ARRAY("announcements, failures", announce, counts);
    PRINT_ARRAY("counts", counts, searches);
    PRINT_ARRAY("searches for keep limits", searches, logical_counts);
    PRINT_ARRAY("counts of logical experts", logical_counts, tallies);
    PRINT_ARRAY("records", records, flat_rows);
    PRINT_ARRAY("rows of FLAT layers", flat_rows, ids);
    PRINT_ARRAY("ids, and what relays need", ids, escapes);
    PRINT_ARRAY("escape words", escapes, floats);
    PRINT_ARRAY("weights", floats, parts);
    print_parts();
    PRINT_ARRAY("staging", staging, bytes);
    return 0;
}
