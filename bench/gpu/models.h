/* SPDX-License-Identifier: Apache-2.0 */
/* Shapes of Mixture-of-Experts layers of published models. */
#ifndef EPIC_BENCH_MODELS_H
#define EPIC_BENCH_MODELS_H

struct Model {
    const char *name;
    int hidden, top_k, experts;
};

static const Model models[] = {
    {"deepseek-v3", 7168, 8, 256},     {"kimi-k2", 7168, 8, 384},
    {"qwen3-235b", 4096, 8, 128},      {"gpt-oss-120b", 2880, 4, 128},
    {"llama4-maverick", 5120, 1, 128}, {"qwen3-30b", 2048, 8, 128},
    {"qwen3-next", 2048, 10, 512},     {"dbrx", 6144, 4, 16},
    {"mixtral-8x7b", 4096, 2, 8},
};

#endif
