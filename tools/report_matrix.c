/* SPDX-License-Identifier: Apache-2.0 */
/* Measures the bandwidth between the ranks of a group, for a report. In step s each rank r
 * sends to rank r + s, so all ranks send and receive at the same time. After each step the
 * ranks gather their times, so all of them stop after the same step. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "api/rank_info.h"
#include "info.h"
#include "report.h"

#define FIRST_BYTES \
    (256u << 10) /* size of a test transfer, by which the ranks choose the size of all steps */
#define LEAST_BYTES (16u << 10)
#define MOST_BYTES (8u << 20)
#define MOST_STEP_SECONDS 0.05
#define MOST_SWEEPS 5
#define NUM_LOWEST 5 /* number of the lowest rates to print */

/* The times of one rank, which the ranks gather after a step. */
typedef struct step_time {
    double seconds; /* duration of this rank's transfer; 0: it failed */
    double elapsed; /* time since the rank began */
} step_time;

typedef struct matrix {
    const epic_bootstrap *bootstrap;
    const report_way *way;
    void *open;
    int local_rank; /* index of this rank on its host */
    double begin;
    step_time *all; /* [num_ranks] */
    /* [num_ranks, num_ranks]: GB/s from the rank of the row to the rank of the column; 0: not
     * measured */
    float *rates;
    size_t bytes; /* size of each transfer */
} matrix;

static bool gather_all(const epic_bootstrap *bootstrap, const void *mine, void *all,
                       size_t bytes)
{
    return bootstrap->gather(bootstrap->self, mine, all, (int64_t)bytes) == EPIC_OK;
}

/* --------------------------------------------------------------------- the way to send ---- */

typedef struct way_vote {
    epic_peer peer;
    uint64_t has_net; /* 1: the net ucx is available on this rank */
} way_vote;

/* Chooses the net if the ranks are on several hosts and all of them have the net, and a group
 * of a host backend if not. Returns false if the gather fails. */
static bool choose_way(matrix *m)
{
    const epic_bootstrap *b = m->bootstrap;
    const epic_config config = {.max_tokens = 1, .max_row_bytes = 16, .name = "report"};
    rank_info info;
    way_vote mine = {.has_net = report_net_is_available()};
    way_vote *all = calloc((size_t)b->num_ranks, sizeof *all);
    if (rank_info_fill(&info, b, &config) == EPIC_OK) mine.peer = info.peer;
    bool several = false, has_net = true;
    const bool good = all && gather_all(b, &mine, all, sizeof mine);
    for (int r = 0; good && r < b->num_ranks; r++) {
        const size_t bytes = sizeof mine.peer.host;
        several |= memcmp(all[r].peer.host, all[0].peer.host, bytes) != 0;
        has_net &= all[r].has_net == 1;
        m->local_rank += r < b->rank && !memcmp(all[r].peer.host, mine.peer.host, bytes);
    }
    free(all);
    m->way = several && has_net ? &report_way_net : &report_way_group;
    return good;
}

/* --------------------------------------------------------------------------- measuring ---- */

/* Sends in one step, and gathers the times. Returns the time of the slowest rank, or 0 if the
 * transfer of a rank failed or the time limit has passed. */
static double run_step(matrix *m, int shift, size_t bytes)
{
    const int num = m->bootstrap->num_ranks;
    const double seconds = m->way->send(m->open, shift, bytes);
    const step_time mine = {seconds, report_now() - m->begin};
    if (!gather_all(m->bootstrap, &mine, m->all, sizeof mine)) return 0;
    double slowest = 0;
    for (int r = 0; r < num; r++) {
        if (m->all[r].seconds <= 0) return 0;
        if (m->all[r].seconds > slowest) slowest = m->all[r].seconds;
    }
    return m->all[0].elapsed < REPORT_SECONDS ? slowest : 0;
}

/* Stores the rates of a step if they are higher than those of earlier sweeps. The way measures
 * a transfer on its sender or on its receiver. */
static void store_rates(matrix *m, int shift)
{
    const int num = m->bootstrap->num_ranks;
    for (int r = 0; r < num; r++) {
        const int other =
            m->way->is_timed_by_sender ? (r + shift) % num : (r - shift + num) % num;
        const int from = m->way->is_timed_by_sender ? r : other;
        const int to = m->way->is_timed_by_sender ? other : r;
        const float rate = (float)((double)m->bytes / m->all[r].seconds * 1e-9);
        if (rate > m->rates[from * num + to]) m->rates[from * num + to] = rate;
    }
}

/* Returns the size of the transfers of all steps, so that a step takes at most
 * MOST_STEP_SECONDS, and a sweep about a third of the time limit. Returns 0 if the first step
 * failed. */
static size_t choose_bytes(matrix *m)
{
    const int num = m->bootstrap->num_ranks;
    /* the first transfer may be slower, because connections are opened */
    (void)run_step(m, 1, LEAST_BYTES);
    const double slowest = run_step(m, 1, FIRST_BYTES);
    double budget = REPORT_SECONDS * 0.3 / num;
    if (slowest <= 0) return 0;
    if (budget > MOST_STEP_SECONDS) budget = MOST_STEP_SECONDS;
    const double bytes = FIRST_BYTES * budget / slowest;
    if (bytes < LEAST_BYTES) return LEAST_BYTES;
    return bytes < MOST_BYTES ? (size_t)bytes / LEAST_BYTES * LEAST_BYTES : MOST_BYTES;
}

/* Measures each pair of ranks up to MOST_SWEEPS times. Begins another sweep only in the first
 * half of the time limit. */
static void measure_all(matrix *m)
{
    const int num = m->bootstrap->num_ranks;
    m->bytes = choose_bytes(m);
    if (m->bytes == 0) return;
    for (int i = 0; i < MOST_SWEEPS * num; i++) {
        if (i >= num && i % num == 0 && m->all[0].elapsed > REPORT_SECONDS * 0.5) return;
        if (run_step(m, i % num, m->bytes) <= 0) return;
        store_rates(m, i % num);
    }
}

/* ---------------------------------------------------------------------------- printing ---- */

static int compare_rates(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Returns the median of the measured rates from rank `from` to rank `to`, which are different.
 * -1 means all ranks. Returns 0 if nothing was measured. `sorted` has room for all rates. */
static float find_median(const matrix *m, int from, int to, float *sorted)
{
    const int num = m->bootstrap->num_ranks;
    size_t count = 0;
    for (int i = 0; i < num * num; i++)
        if (i / num != i % num && m->rates[i] > 0 && (from < 0 || i / num == from) &&
            (to < 0 || i % num == to))
            sorted[count++] = m->rates[i];
    qsort(sorted, count, sizeof *sorted, compare_rates);
    return count ? sorted[count / 2] : 0;
}

/* Prints the median, and the ranks that send or receive at less than half of it. */
static void print_medians(FILE *to, const matrix *m)
{
    const int num = m->bootstrap->num_ranks;
    float *sorted = calloc((size_t)num * (size_t)num, sizeof *sorted);
    const float median = sorted ? find_median(m, -1, -1, sorted) : 0;
    fprintf(to, "median: %.3f GB/s\n", (double)median);
    for (int r = 0; sorted && r < num; r++) {
        const float out = find_median(m, r, -1, sorted), in = find_median(m, -1, r, sorted);
        if (out < median / 2 || in < median / 2)
            fprintf(to,
                    "slow: rank %d sends %.3f GB/s and receives %.3f GB/s, by its medians\n", r,
                    (double)out, (double)in);
    }
    free(sorted);
}

/* Prints the lowest rates between different ranks, from low to high. */
static void print_lowest(FILE *to, const matrix *m)
{
    const int num = m->bootstrap->num_ranks;
    float above = 0;
    int left = NUM_LOWEST;
    while (left > 0) {
        int lowest = -1;
        for (int i = 0; i < num * num; i++)
            if (i / num != i % num && m->rates[i] > above &&
                (lowest < 0 || m->rates[i] < m->rates[lowest]))
                lowest = i;
        if (lowest < 0) return;
        above = m->rates[lowest];
        fprintf(to, "%s %.3f GB/s from rank %d to rank %d",
                left == NUM_LOWEST ? "lowest:" : ";", (double)above, lowest / num,
                lowest % num);
        left--;
    }
}

static void print_matrix(FILE *to, const matrix *m)
{
    const int num = m->bootstrap->num_ranks;
    char way[REPORT_WHY];
    m->way->describe(m->open, way);
    fprintf(to,
            "GB/s from the rank of the row to the rank of the column.  All ranks send and\n"
            "receive at once, %zu KiB each, in host memory; the best of up to 5 times; by ",
            m->bytes >> 10);
    info_text(to, way);
    fprintf(to, ".\nThe diagonal is a copy in the memory of a rank.  -: not measured\n%8s", "");
    for (int r = 0; r < num; r++) fprintf(to, " %7d", r);
    for (int i = 0; i < num * num; i++) {
        if (i % num == 0) fprintf(to, "\n%8d", i / num);
        if (m->rates[i] > 0)
            fprintf(to, " %7.3f", (double)m->rates[i]);
        else
            fprintf(to, " %7s", "-");
    }
    fprintf(to, "\n");
    print_medians(to, m);
    print_lowest(to, m);
    fprintf(to, "\nmeasured in %.1f s\n", report_now() - m->begin);
}

static void run_matrix(FILE *to, matrix *m)
{
    char why[REPORT_WHY] = "the ranks lost each other";
    if (!choose_way(m) ||
        !m->way->open(&m->open, m->bootstrap, m->local_rank, MOST_BYTES, why)) {
        if (!to) return;
        fprintf(to, "not measured: ");
        info_text(to, why);
        fprintf(to, "\n");
        return;
    }
    measure_all(m);
    if (to) print_matrix(to, m);
    m->way->close(m->open);
}

void report_matrix(FILE *to, const epic_bootstrap *bootstrap)
{
    const size_t num = (size_t)bootstrap->num_ranks;
    matrix m = {.bootstrap = bootstrap, .begin = report_now()};
    m.all = calloc(num, sizeof *m.all);
    m.rates = calloc(num * num, sizeof *m.rates);
    if (m.all && m.rates)
        run_matrix(to, &m);
    else if (to)
        fprintf(to, "not measured: no memory for %zu ranks\n", num);
    free(m.rates);
    free(m.all);
}
