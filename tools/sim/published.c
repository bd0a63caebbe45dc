/* SPDX-License-Identifier: Apache-2.0 */
/* Prints published measurements and those of EPIC next to the estimates of epic-sim. The
 * estimates do not include the time of instructions and switches, so they show what the best
 * implementation could reach. EPIC has not been measured between hosts. */
#include "sim.h"

/* One published measurement. */
typedef struct run {
    const char *system, *network;
    int ranks, ranks_per_host;
    int64_t tokens, experts;
    int top_k, groups, limit;
    double out_row, back_row; /* bytes of a row in dispatch, and in combine */
    double dispatch, combine; /* microseconds, including the plan, or GB/s */
    bool is_us;
    double nic; /* GB/s of the NIC in the measurement; 0: constants.nic */
} run;

#define FP8 7392 /* size of 7168 elements and their scales in bytes */
#define BF16 14336

static const run runs[] = {
    /* docs/lab/cuda.md, a rank alone, 132 SMs */
    {"EPIC p2p", "1x H200", 1, 8, 4096, 256, 8, 0, 0, BF16, BF16, 240, 139, true, 0},
    {"EPIC p2p", "1x H200", 1, 8, 4096, 128, 4, 0, 0, 5760, 5760, 70, 37, true, 0},
    /* docs/lab/cuda.md, 132 SMs; with few tokens 64 SMs */
    {"EPIC p2p", "2x H200", 2, 8, 4096, 256, 8, 0, 0, BF16, BF16, 250, 183, true, 0},
    {"EPIC p2p", "2x H200", 2, 8, 4096, 128, 8, 0, 0, 8192, 8192, 149, 112, true, 0},
    {"EPIC p2p", "2x H200", 2, 8, 4096, 128, 4, 0, 0, 5760, 5760, 91, 78, true, 0},
    {"EPIC p2p", "2x H200", 2, 8, 4096, 128, 1, 0, 0, 10240, 10240, 88, 78, true, 0},
    {"EPIC p2p", "2x H200", 2, 8, 128, 256, 8, 0, 0, BF16, BF16, 22.0, 22.4, true, 0},
    {"EPIC p2p", "2x H200", 2, 8, 1, 256, 8, 0, 0, BF16, BF16, 13.2, 11.9, true, 0},
    /* docs/lab/hosts.md: two ranks as hosts, the slowest of three states; copies of 16 rows
     * reach 79 GB/s */
    {"EPIC hosts", "2 H200, CE", 2, 1, 4096, 256, 8, 0, 0, BF16, BF16, 1179, 1149, true, 79},
    /* from their READMEs and docs; the expert groups are those of their tests */
    {"DeepEP V1", "CX7 400G", 16, 8, 4096, 256, 8, 8, 4, FP8, BF16, 43, 43, false, 0},
    {"DeepEP V1", "CX7 400G", 32, 8, 4096, 256, 8, 8, 4, FP8, BF16, 58, 57, false, 0},
    {"DeepEP V1", "CX7 400G", 64, 8, 4096, 256, 8, 8, 4, FP8, BF16, 51, 50, false, 0},
    /* README of DeepEP V2: logical bandwidth, which also includes rows to ranks of the own
     * host */
    {"DeepEP V2", "CX7 400G", 16, 8, 8192, 256, 8, 0, 0, FP8, BF16, 90, 81, false, 0},
    {"DeepEP V2", "CX7 400G", 32, 8, 8192, 256, 8, 0, 0, FP8, BF16, 61, 61, false, 0},
    /* docs/README_Hybrid-EP.md of DeepEP's branch hybrid-ep, H100: 16 SMs, times of the calls
     * of PyTorch. The page does not define which rows its algorithm bandwidth includes. */
    {"Hybrid-EP", "IB 400G", 16, 8, 4096, 128, 8, 0, 0, FP8, BF16, 48.3, 53.4, false, 0},
    {"Hybrid-EP", "IB 400G", 32, 8, 4096, 256, 8, 0, 0, FP8, BF16, 42.1, 52.5, false, 0},
    {"Hybrid-EP", "IB 400G", 64, 8, 4096, 512, 8, 0, 0, FP8, BF16, 35.0, 46.6, false, 0},
    /* README of nccl_ep in NVIDIA's repository nccl: low-latency mode, bf16 in both directions.
     * It publishes 76.7, 53.6 and 48.8 GB/s for dispatch, and 73.0, 50.0 and 43.8 GB/s for
     * combine. Its program ep_bench counts one row for each choice. So the times below are
     * those of 128 * 8 rows of 14,336 bytes at these speeds. */
    {"NCCL EP LL", "H100", 16, 8, 128, 256, 8, 0, 0, BF16, BF16, 191, 201, true, 0},
    {"NCCL EP LL", "H100", 32, 8, 128, 256, 8, 0, 0, BF16, BF16, 274, 294, true, 0},
    {"NCCL EP LL", "H100", 64, 8, 128, 256, 8, 0, 0, BF16, BF16, 301, 335, true, 0},
    {"UCCL-EP", "EFA 2x200G", 16, 8, 4096, 256, 8, 0, 0, FP8, BF16, 1200, 6380, true, 0},
    {"UCCL-EP", "EFA 2x200G", 32, 8, 4096, 256, 8, 0, 0, FP8, BF16, 2020, 4900, true, 0},
    {"DeepEP V1 LL", "CX7 400G", 16, 8, 128, 256, 8, 0, 0, FP8, BF16, 118, 195, true, 0},
    {"DeepEP V1 LL", "CX7 400G", 32, 8, 128, 256, 8, 0, 0, FP8, BF16, 155, 273, true, 0},
    {"DeepEP V1 LL", "CX7 400G", 64, 8, 128, 256, 8, 0, 0, FP8, BF16, 173, 314, true, 0},
    {"DeepEP V1 LL", "CX7 400G", 128, 8, 128, 256, 8, 0, 0, FP8, BF16, 192, 369, true, 0},
    {"DeepEP V1 LL", "CX7 400G", 256, 8, 128, 256, 8, 0, 0, FP8, BF16, 194, 360, true, 0},
    {"pplx", "CX7 400G", 16, 8, 128, 256, 8, 0, 0, FP8, BF16, 110, 186, true, 0},
    {"pplx", "CX7 400G", 32, 8, 128, 256, 8, 0, 0, FP8, BF16, 154, 266, true, 0},
    {"pplx", "CX7 400G", 64, 8, 128, 256, 8, 0, 0, FP8, BF16, 188, 309, true, 0},
    {"pplx", "EFA 400G", 64, 8, 128, 256, 8, 0, 0, FP8, BF16, 267, 391, true, 0},
};

/* Returns the estimate in the unit of the measurement, microseconds or GB/s. For GB/s, DeepEP's
 * tests count one row for each pair of a token and a host to which it is sent, including its
 * own host, so this function does the same. */
static double shown_value(const run *p, const cost *c, const traffic *t, double row_bytes)
{
    const double us = c->plan_us + c->rows_us;
    return p->is_us ? us : t->hosts * row_bytes / us / 1e3;
}

void print_published(const constants *k)
{
    printf("\n%-12s %-10s %5s %6s %5s %-4s  %8s %7s  %8s %7s\n", "measured", "on", "ranks",
           "tokens", "top-k", "unit", "dispatch", "model", "combine", "model");
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        const run *p = &runs[i];
        const routing r = {.experts = p->experts,
                           .top_k = p->top_k,
                           .groups = p->groups,
                           .limit = p->limit,
                           .seed = 1};
        const shape s = {
            .ranks = p->ranks, .ranks_per_host = p->ranks_per_host, .tokens = p->tokens};
        constants own = *k;
        traffic t;
        if (p->nic > 0) own.nic = p->nic;
        if (!traffic_count(&r, &s, &t)) return;
        const cost out = compute_cost(&own, &t, &s, &r, (bytes_of){p->out_row, 4});
        cost back = compute_cost(&own, &t, &s, &r, (bytes_of){p->back_row, 0});
        back.plan_us = 0;
        printf("%-12s %-10s %5d %6lld %5d %-4s  %8.0f %7.0f  %8.0f %7.0f\n", p->system,
               p->network, p->ranks, (long long)p->tokens, p->top_k, p->is_us ? "us" : "GB/s",
               p->dispatch, shown_value(p, &out, &t, p->out_row), p->combine,
               shown_value(p, &back, &t, p->back_row));
    }
}
