/* SPDX-License-Identifier: Apache-2.0 */
/* Trains with all ranks and with one rank, and compares the results bit by bit. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train.h"

void outcome_free(outcome *out)
{
    free(out->losses);
    free(out->balances);
    free(out->dense);
    *out = (outcome){0};
}

static bool same(const float *a, const float *b, int64_t count)
{
    return !memcmp(a, b, (size_t)count * sizeof *a);
}

static int compare(const outcome *all, const outcome *alone, int num_ranks)
{
    int64_t num_equal = 0;
    char ranks[32];
    snprintf(ranks, sizeof ranks, "%d rank%s", num_ranks, num_ranks == 1 ? "" : "s");
    printf("loss of each step, in nats for each byte\n  step  %14s  %14s\n", ranks, "1 rank");
    for (int64_t s = 0; s < alone->num_steps; s++) {
        const bool equal =
            same(all->losses + s, alone->losses + s, 1) &&
            same(all->balances + s * LAYERS, alone->balances + s * LAYERS, LAYERS);
        num_equal += equal;
        printf("%6lld  %14.9g  %14.9g%s\n", (long long)s + 1, all->losses[s], alone->losses[s],
               equal ? "" : "   not equal, or the balance losses are not");
    }
    const bool dense = same(all->dense, alone->dense, alone->dense_count);
    printf("%lld of %lld steps are equal to the last bit; the %lld dense parameters after "
           "them are%s\n",
           (long long)num_equal, (long long)alone->num_steps, (long long)alone->dense_count,
           dense ? " too" : " not");
    return dense && num_equal == alone->num_steps ? EXIT_GOOD : EXIT_FAILED;
}

int check(const options *o, const text *t, const epic_bootstrap *bootstrap)
{
    outcome all = {0}, alone = {0};
    options single = *o;
    single.backend = "self";
    int status = train(o, t, bootstrap, &all);
    if (status == EXIT_GOOD && (!bootstrap || bootstrap->rank == 0)) {
        status = train(&single, t, NULL, &alone);
        if (status == EXIT_GOOD)
            status = compare(&all, &alone, bootstrap ? bootstrap->num_ranks : 1);
    }
    outcome_free(&all);
    outcome_free(&alone);
    return status;
}
