/* SPDX-License-Identifier: Apache-2.0 */
/* Random routers, and numbers of any type for their arrays. */
#ifndef EPIC_TEST_ROUTER_DRAW_H
#define EPIC_TEST_ROUTER_DRAW_H

#include "epic/epic.h"

enum { ROUTER_MOST_TOKENS = 70 };

typedef struct problem {
    epic_router router;
    int64_t n, tokens, sequence, total;
    uint32_t type, grad_type, loss_type, flags, id_type;
    int has_bias, has_table, has_scores, has_d_loss, has_scale;
    double coeff;
} problem;

void router_seed(uint64_t seed);
uint32_t router_below(uint32_t n);
float router_normal(void);

/* Draws a router of at most `most` experts; every tenth is that of DeepSeek-V3. */
problem router_draw(uint32_t most);

/* Returns a logit of one of eight kinds, such as ties, large, special and ordinary ones. */
float router_logit(int kind);

int64_t router_type_bytes(uint32_t type);
/* Stores a number, truncated to the type, because any value will do. */
void router_put(void *to, uint32_t type, int64_t i, float x);
double router_get(const void *from, uint32_t type, int64_t i);

#endif
