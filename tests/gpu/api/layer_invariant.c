/* SPDX-License-Identifier: Apache-2.0 */
/* Tests EPIC_INVARIANT on GPUs: the rows of a token in out and d_x have the same bits for every
 * number of tokens and of ranks (moe_selection.h), and for every number of SMs. Half of the
 * calls run in a captured graph. Odd seeds have sizes for tensor cores. Also tests that arrays
 * at other addresses, which would use other kernels, are refused.
 * usage: layer_invariant [cases] [p2p|hosts] [largest number of ranks] */
#define MOST_NUMBERS (1 << 10)
#include "layer_part.h"
#include "scaled_cases.h"
#include "unit/moe_selection.h"

static const char *backend = "p2p";
static uint32_t device_sms; /* SMs of a GPU */
static uint32_t runs;       /* number of groups that run() has opened */

/* Draws a number of SMs from 1 to `most`, or 0 for the default. */
static uint32_t draw_sms(source *s, uint32_t most)
{
    return below(s, most + 1);
}

/* Gives each call of a rank a number of SMs, which differs from those of other ranks. Values
 * above the context's number limit only the experts. */
static void draw_sms_of_calls(part *t)
{
    source s = source_of(9000000 + runs * MOST_RANKS + (uint32_t)t->rank);
    t->forward.call.max_sms = draw_sms(&s, device_sms);
    t->backward.call.max_sms = draw_sms(&s, device_sms);
}

static void run_rank(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const problem *p = what;
    device_part d = device_part_make(p, rank, config);
    draw_sms_of_calls(d.t);
    if (runs % 2)
        both_ways_captured(&d, ctx);
    else
        both_ways(d.t, ctx);
    must_succeed(cudaStreamSynchronize(d.stream), "the layer");
    CHECK(epic_check(ctx) == EPIC_OK, "%s: %s", p->name, epic_error(ctx));
    device_part_end(&d);
}

static void run(problem *p)
{
    source s = source_of(8000000 + ++runs);
    epic_config config = config_of(p);
    config.backend = backend;
    /* The ranks may share a GPU, and leave a quarter of its SMs free. */
    config.max_sms = draw_sms(&s, device_sms * 3 / 4 / (uint32_t)p->num_ranks);
    team_threads(run_rank, p, &config);
}

/* Passes rows at an address that tensor cores cannot read. */
static void run_unaligned(void *what, int rank, epic_context *ctx, const epic_config *config)
{
    const problem *p = what;
    device_part d = device_part_make(p, rank, config);
    epic_moe_args forward = d.t->forward;
    epic_moe_backward_args backward = d.t->backward;
    forward.x.data = (const char *)forward.x.data + 8;
    backward.d_x.data = (char *)backward.d_x.data + 8;
    CHECK(epic_moe_forward(ctx, &forward) == EPIC_EINVAL &&
              strstr(epic_error(ctx), "x is at") != NULL,
          "%s", epic_error(ctx));
    CHECK(epic_moe_backward(ctx, &backward) == EPIC_EINVAL &&
              strstr(epic_error(ctx), "d_x is at") != NULL,
          "%s", epic_error(ctx));
    device_part_end(&d);
}

static void test_unaligned(void)
{
    problem p = draw_of(1, 8);
    make_invariant(&p);
    draw_all_tokens(&p, 8, 1);
    set_capacity(&p, 0);
    make_results(&p);
    epic_config config = config_of(&p);
    config.backend = backend;
    team_threads(run_unaligned, &p, &config);
    free_results(&p);
    free_given(&p);
}

int main(int argc, char **argv)
{
    const uint32_t count = (uint32_t)scaled_cases(argc > 1 ? atoi(argv[1]) : 40);
    failures = share(sizeof *failures);
    if (argc > 2) backend = argv[2];
    const int most_ranks = argc > 3 ? atoi(argv[3]) : 4;
    int sms = 0;
    must_succeed(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "the SMs");
    device_sms = (uint32_t)sms;
    test_unaligned();
    for (uint32_t seed = 0; seed < count; seed++)
        test_selections(seed, seed % 2 ? 8 : 1, most_ranks);
    return atomic_load(failures) ? 1 : 0;
}
