/* SPDX-License-Identifier: Apache-2.0 */
/* Faults on backend threads, in groups of 2 to 4 ranks, or of RANKS ranks.
 *   threads [RANKS] */
#include <stdlib.h>

#include "faults.h"

int main(int argc, char **argv)
{
    const int num_ranks = argc > 1 ? atoi(argv[1]) : 0;
    const faults_way way = {.backend = "threads", .num_ranks = num_ranks};
    return num_ranks ? faults_main(&way, 30, 1) : faults_main(&way, 300, 6);
}
