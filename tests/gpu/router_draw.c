/* SPDX-License-Identifier: Apache-2.0 */
/* Draws random routers. */
#include "router_draw.h"

#include <math.h>
#include <string.h>

enum { MOST_K = 64 };

static uint64_t state;

void router_seed(uint64_t seed)
{
    state = seed;
}

uint32_t router_below(uint32_t n)
{
    state += 0x9e3779b97f4a7c15ull;
    uint64_t x = state;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return (uint32_t)((x ^ x >> 31) >> 32) % n;
}

float router_normal(void)
{
    float sum = 0;
    for (int i = 0; i < 12; i++) sum += (float)router_below(1 << 20) / (1 << 20);
    return sum - 6;
}

static uint32_t pick_one(const uint32_t *from, uint32_t count)
{
    return from[router_below(count)];
}

static uint32_t min_of(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static void pick_groups(epic_router *r, uint32_t n)
{
    uint32_t groups = 1 + router_below(n < 64 ? n : router_below(4) ? 16 : 1024);
    while (n % groups || groups > 1024) groups--;
    r->num_groups = groups;
    const uint32_t each = n / groups;
    const uint32_t least = (r->top_k + each - 1) / each;
    r->topk_groups = least + router_below(groups - least + 1);
    r->group_score = router_below(2);
    r->group_others = router_below(2);
    r->group_best = 1 + router_below(min_of(each, router_below(2) ? 2 : 64));
}

static epic_router pick_router(uint32_t most)
{
    static const uint32_t sizes[] = {1,   2,   8,   31,  32,  33,  60,   64,   127,  128,
                                     160, 256, 257, 384, 512, 513, 1000, 1024, 2048, 4096};
    uint32_t n =
        router_below(3) ? pick_one(sizes, router_below(4) ? 15 : 20) : 1 + router_below(700);
    n = min_of(n, most);
    const uint32_t zero = n > 4 && router_below(5) == 0 ? 1 + router_below(n / 4) : 0;
    epic_router r = {.num_experts = n - zero,
                     .zero_experts = zero,
                     .top_k = router_below(6) ? 1 + router_below(min_of(8, n))
                                              : min_of(n, 1 + router_below(MOST_K)),
                     .score = router_below(4),
                     .weight_rule = router_below(3),
                     .normalize = router_below(3),
                     .eps = router_below(2) ? 1e-20 : 0,
                     .norm_min = router_below(2) ? 1e-6 : 0.7,
                     .scale = router_below(2) ? 2.5 : 0};
    if (router_below(8) == 0) r.top_k = min_of(n, MOST_K);
    if (router_below(2)) pick_groups(&r, n);
    return r;
}

problem router_draw(uint32_t most)
{
    static const uint32_t types[] = {EPIC_F32, EPIC_BF16, EPIC_F16};
    problem p = {.router = pick_router(most), .type = pick_one(types, 3)};
    if (most >= 256 && router_below(10) == 0)
        p.router = (epic_router){.num_experts = 256,
                                 .top_k = 8,
                                 .score = EPIC_SCORE_SIGMOID,
                                 .num_groups = 8,
                                 .topk_groups = 4,
                                 .group_score = EPIC_GROUP_SUM,
                                 .group_best = 2,
                                 .normalize = EPIC_NORMALIZE_SUM,
                                 .eps = 1e-20,
                                 .scale = 2.5};
    p.n = (int64_t)p.router.num_experts + p.router.zero_experts;
    p.tokens = router_below(12) ? 1 + router_below(p.n > 1000 ? 8 : ROUTER_MOST_TOKENS) : 0;
    p.sequence = router_below(2) && p.tokens ? 1 + router_below((uint32_t)p.tokens) : 0;
    while (p.sequence && p.tokens % p.sequence) p.sequence--;
    p.total = p.tokens + router_below(20);
    p.grad_type = router_below(2) ? EPIC_F32 : 0;
    p.loss_type = router_below(2) ? EPIC_F64 : EPIC_F32;
    p.flags = router_below(2) ? EPIC_ACCUMULATE : 0;
    p.id_type = router_below(2) ? EPIC_I64 : EPIC_I32;
    p.has_bias = router_below(3) != 0;
    p.has_table = router_below(8) == 0;
    p.has_scores = router_below(2);
    p.has_d_loss = router_below(2);
    p.coeff = router_below(2) ? 1 : 0.001;
    p.has_scale = router_below(3) == 0;
    return p;
}

float router_logit(int kind)
{
    static const float odd[] = {0.0f,  -0.0f,  INFINITY, -INFINITY, NAN,
                                1e30f, -1e30f, 1e-40f,   88.5f,     -103.5f};
    switch (kind) {
    case 0:
        return (float)router_below(5) - 2; /* ties */
    case 1:
        return 30 * router_normal();
    case 2:
        return router_below(4) ? router_normal() : odd[router_below(10)];
    case 3:
        return odd[router_below(4)];
    default:
        return router_normal();
    }
}

int64_t router_type_bytes(uint32_t type)
{
    return type == EPIC_F64 ? 8 : type == EPIC_F32 ? 4 : 2;
}

void router_put(void *to, uint32_t type, int64_t i, float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (type == EPIC_F32) memcpy((char *)to + 4 * i, &bits, 4);
    if (type == EPIC_BF16) ((uint16_t *)to)[i] = (uint16_t)(bits >> 16);
    if (type != EPIC_F16) return;
    const uint32_t e = bits >> 23 & 255, sign = bits >> 16 & 0x8000;
    const uint32_t size = e < 113   ? router_below(2)
                          : e > 142 ? 0x7c00 | (x != x)
                                    : (bits >> 13 & 0x3ffff) - (112 << 10);
    ((uint16_t *)to)[i] = (uint16_t)(sign | (size & 0x7fff));
}

double router_get(const void *from, uint32_t type, int64_t i)
{
    float x;
    double wide;
    uint32_t bits;
    if (type == EPIC_F64) return memcpy(&wide, (const char *)from + 8 * i, 8), wide;
    /* as integers in the order of the numbers, which is enough to compare them */
    if (type == EPIC_F16) {
        const uint16_t h = ((const uint16_t *)from)[i];
        if ((h & 0x7fff) > 0x7c00) return NAN;
        return h & 0x8000 ? -(double)(h & 0x7fff) : (double)h;
    }
    if (type == EPIC_BF16)
        bits = (uint32_t)((const uint16_t *)from)[i] << 16;
    else
        memcpy(&bits, (const char *)from + 4 * i, 4);
    memcpy(&x, &bits, 4);
    return x;
}
