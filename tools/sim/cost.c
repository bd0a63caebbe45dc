/* SPDX-License-Identifier: Apache-2.0 */
/* Computes times from numbers of rows. Transfers that run at the same time take as long as the
 * slowest of them. */
#include <math.h>

#include "sim.h"

#define LAG_ROWS 128 /* number of rows in flight before the first row is received */

static double larger_most(load out, load in)
{
    return out.most > in.most ? out.most : in.most;
}

static double transfer_us(double rows, double row_bytes, double gb_s)
{
    return rows * row_bytes / gb_s / 1e3;
}

/* If `time` is longer than c->rows_us, sets c->rows_us to it, and c->limit to `name`. */
static void raise_rows_us(cost *c, double time, const char *name)
{
    if (time <= c->rows_us) return;
    c->rows_us = time;
    c->limit = name;
}

/* Returns true if words go through relays: in groups of more than 32 ranks whose rows do, on hosts
 * of several ranks. */
static bool relays_words(const shape *s)
{
    return s->ranks > 32 && s->ranks_per_host > 1 && has_relays(s);
}

/* Returns the number of ranks' words (announcements, and also counts) that a rank sends to
 * other hosts: its own words to each rank there. Relays send the words of all ranks of their
 * host to a part of the hosts. */
static double num_shared_words(const shape *s)
{
    const int hosts = s->ranks / s->ranks_per_host;
    if (!relays_words(s)) return s->ranks - s->ranks_per_host;
    return hosts < 2 ? 0 : (double)((hosts - 1) / s->ranks_per_host + 1) * s->ranks_per_host;
}

#define PUT_WORDS 4096 /* largest number of words of a put, in groups of more than 32 ranks */

/* Sets the number of puts of a plan (plan_puts), and the time in which a rank sends the words
 * of the plan to other hosts (plan_us). The rank first sends announcements and counts of
 * choices (a choice is a token and one of its top_k experts), then records. Without relays,
 * each rank there gets a word for each choice. The proxy thread joins the words for a rank into
 * one put. With relays, each other host gets a list with two words for each choice that goes
 * there, and its receiver then stores at least one word for each token and rank of its host. */
static void compute_plan(cost *c, const constants *k, const shape *s, const routing *r)
{
    const double peers = s->ranks - s->ranks_per_host, shared = num_shared_words(s);
    const double experts = r->experts > s->ranks ? (double)r->experts : s->ranks;
    const double choices = (double)s->tokens * r->top_k;
    double words = peers * choices, puts = peers, expand = 0;
    if (relays_words(s)) {
        const double lists = s->ranks / s->ranks_per_host - 1;
        words = lists + 2 * choices * peers / s->ranks;
        puts = lists > 0 ? lists * ceil(words / lists / PUT_WORDS) : 0;
        expand = transfer_us(peers * (double)s->tokens, 8, k->nvlink);
    }
    const double net = transfer_us(shared * (4 + experts) + words, 8, k->nic);
    c->plan_puts = 2 * shared + puts;
    const double thread = c->plan_puts * k->put_us;
    c->plan_us = peers > 0 ? 2 * k->net_us + (net > thread ? net : thread) + expand : 0;
}

/* Computes the times of one operation. The time of the rows (rows_us) is the sum of three
 * times: that of a launch, that until the pipeline is full, and the longest of the times of
 * network, proxy thread, NVLink and memory, which work at the same time. */
cost compute_cost(const constants *k, const traffic *t, const shape *s, const routing *r,
                  bytes_of bytes)
{
    const int hosts = (s->ranks + s->ranks_per_host - 1) / s->ranks_per_host;
    const double row = bytes.row + r->top_k * bytes.extra, tokens = (double)s->tokens;
    const double net = larger_most(t->net_out, t->net_in), away = hosts - 1;
    const double inside = larger_most(t->inside_out, t->inside_in);
    const double begin = k->launch_us + (hosts > 1 ? k->net_us : 0);
    const double fill =
        hosts > 1 ? transfer_us(net < LAG_ROWS ? net : LAG_ROWS, row, k->nic) : 0;
    cost c = {.net_mb = net * row / 1e6, .rows_puts = t->puts.most, .limit = "launch"};
    compute_plan(&c, k, s, r);
    raise_rows_us(&c, transfer_us(net, row, k->nic), "net");
    raise_rows_us(&c, t->puts.most * k->put_us, "thread");
    raise_rows_us(&c, transfer_us(inside, row, k->nvlink), "nvlink");
    raise_rows_us(&c, transfer_us(t->slots.most + 2 * inside, bytes.row, k->memory), "memory");
    c.rows_us += begin + fill;
    c.by_rank_us = begin + transfer_us(larger_most(t->by_rank_out, t->by_rank_in), row, k->nic);
    c.dense_us = begin + transfer_us(tokens * away, row, k->nic);
    return c;
}
