/* SPDX-License-Identifier: Apache-2.0 */
/* Times the experts on one GPU. A burst is 15 ms of rest, one warm-up call and three timed
 * calls. Candidates run in turn, and the result is the median of ROUNDS x 3. Prints the
 * products in TFLOP/s of all slab rows, then the whole MLP, forward and with backward. Then it
 * prints decoding, with few rows per expert, as a percentage of the rate at which the weights
 * alone can be read.
 *   gpu_layer [rounds=4] [only=products|e4m3|experts|decode] */
#include <string.h>

#include "burst.cuh"

static std::string only;

/* ---------------------------------------------------------------------------- products ---- */

/* Returns a bf16 product over these slabs. */
static p2p_gemm product_over(Arrays &a, const Slabs &s, int64_t k, int64_t n,
                             cudaStream_t stream)
{
    p2p_gemm g = {};
    g.slabs = device_slabs(a, s, stream);
    g.k = k;
    g.n = n;
    g.row_type = g.weight_type = EPIC_BF16;
    g.sms = num_sms();
    return g;
}

static void time_products(const Slabs &s, int64_t k, int64_t n, cudaStream_t stream)
{
    Arrays a;
    const int64_t experts = (int64_t)s.rows.size();
    const p2p_gemm base = product_over(a, s, k, n, stream);
    const void *x = a.rows(s.slots * k, 1), *d = a.rows(s.slots * n, 1);
    const void *w = a.rows(experts * k * n, 0.02f);
    void *rows = a.bytes((size_t)(s.slots * std::max(k, n) * 2));
    void *weights = a.bytes((size_t)(experts * k * n * 4));
    std::vector<Candidate> all;
    const struct {
        const char *name;
        uint32_t pass, out_type;
        int accumulate;
    } passes[] = {{"forward", EPIC_GEMM_FORWARD, EPIC_BF16, 0},
                  {"input", EPIC_GEMM_INPUT, EPIC_BF16, 0},
                  {"weight, bf16", EPIC_GEMM_WEIGHT, EPIC_BF16, 0},
                  {"weight, float32", EPIC_GEMM_WEIGHT, EPIC_F32, 0},
                  {"weight, float32 added", EPIC_GEMM_WEIGHT, EPIC_F32, 1}};
    for (const auto &pass : passes)
        for (int group : {0, 2, 4, 8}) { /* 0: the library chooses */
            p2p_gemm g = base;
            g.pass = pass.pass;
            g.out_type = pass.out_type;
            g.accumulate = pass.accumulate;
            g.group = group;
            g.a = pass.pass == EPIC_GEMM_INPUT ? d : x;
            g.b = pass.pass == EPIC_GEMM_WEIGHT ? d : w;
            g.out = pass.pass == EPIC_GEMM_WEIGHT ? weights : rows;
            if (p2p_gemm_is_slow(&g)) continue;
            all.push_back({pass.name, [=] { CHECK_CUDA(p2p_launch_gemm(&g, stream)); }, {}});
        }
    time_all(all, stream);
    const double flop = 2.0 * (double)s.slots * (double)k * (double)n;
    double best[3] = {1e30, 1e30, 1e30}, chosen[3] = {0};
    printf("\nproducts, %s rows, k %lld, n %lld, TFLOP/s, groups as chosen; of 2, 4, 8\n",
           s.name.c_str(), (long long)k, (long long)n);
    for (size_t i = 0; i < all.size(); i++) {
        const double us = median(all[i].us);
        if (i % 4 == 0) printf("  %-22s", all[i].name.c_str());
        printf(" %6.0f", flop / us / 1e6);
        if (i % 4 == 3) printf("\n");
        if (i / 4 < 3 && i % 4 == 0) chosen[i / 4] = us;
        if (i / 4 < 3) best[i / 4] = std::min(best[i / 4], us);
    }
    printf("  forward %.0f, three passes (bf16 gradients) %.0f as chosen; best group of each "
           "%.0f, "
           "%.0f\n",
           flop / chosen[0] / 1e6, 3 * flop / (chosen[0] + chosen[1] + chosen[2]) / 1e6,
           flop / best[0] / 1e6, 3 * flop / (best[0] + best[1] + best[2]) / 1e6);
}

/* -------------------------------------------------------------------------------- e4m3 ---- */

static int64_t blocks(int64_t numbers)
{
    return (numbers + 127) / 128;
}

/* Returns a product with e4m3 operands, of either pass, that sums over `depth`. */
static p2p_gemm scaled_job(Arrays &a, p2p_gemm g, int64_t experts, int64_t depth,
                           int64_t columns)
{
    const int64_t slots = g.slabs.num_slots;
    g.row_type = g.weight_type = EPIC_E4M3;
    g.y_type = EPIC_BF16;
    g.a = a.filled<uint8_t>(slots * depth, 448);
    g.b = a.filled<uint8_t>(experts * depth * columns, 448);
    g.a_scales = a.filled<float>(slots * blocks(depth), 1.0f / 448);
    g.b_scales = a.filled<float>(experts * blocks(depth) * blocks(columns), 0.02f / 448);
    return g;
}

/* Times e4m3 and bf16 in turn. */
static void time_scaled(const Slabs &s, int64_t k, int64_t n, cudaStream_t stream)
{
    Arrays a;
    const int64_t experts = (int64_t)s.rows.size();
    p2p_gemm wide = product_over(a, s, k, n, stream);
    wide.a = a.rows(s.slots * std::max(k, n), 1);
    wide.b = a.rows(experts * k * n, 0.02f);
    wide.out = a.bytes((size_t)(s.slots * std::max(k, n) * 2));
    p2p_gemm wide_input = wide;
    wide_input.pass = EPIC_GEMM_INPUT;
    const p2p_gemm jobs[] = {wide, scaled_job(a, wide, experts, k, n), wide_input,
                             scaled_job(a, wide_input, experts, n, k)};
    std::vector<Candidate> all;
    for (const p2p_gemm &job : jobs)
        for (int group : {0, 1, 4}) {
            p2p_gemm g = job;
            g.group = group;
            all.push_back({"", [=] { CHECK_CUDA(p2p_launch_gemm(&g, stream)); }, {}});
        }
    time_all(all, stream);
    double chosen[4], best[4] = {1e30, 1e30, 1e30, 1e30};
    for (size_t i = 0; i < all.size(); i++) {
        const double us = median(all[i].us);
        if (i % 3 == 0) chosen[i / 3] = us;
        best[i / 3] = std::min(best[i / 3], us);
    }
    const double flop = 2.0 * (double)s.slots * (double)k * (double)n / 1e6;
    printf("e4m3, %s rows, k %lld, n %lld, TFLOP/s:\n", s.name.c_str(), (long long)k,
           (long long)n);
    for (const double *us : {chosen, best})
        printf("  %s: forward bf16 %.0f, e4m3 %.0f (%.2f times); input bf16 %.0f, e4m3 %.0f "
               "(%.2f)\n",
               us == chosen ? "groups as chosen" : "best of it, 1 and 4", flop / us[0],
               flop / us[1], us[0] / us[1], flop / us[2], flop / us[3], us[2] / us[3]);
}

/* ----------------------------------------------------------------------------- experts ---- */

struct Model {
    const char *name;
    uint32_t experts, hidden, inner, activation;
    int each; /* rows per expert */
    bool biased;
};

/* Returns the arguments of backward for a forward call. */
static epic_experts_backward_args backward_of(const epic_experts_args &f)
{
    epic_experts_backward_args b = {};
    b.call = f.call;
    b.experts = f.experts;
    b.x = f.x;
    b.num_slots = f.num_slots;
    b.expert_rows = b.expert_tokens = f.expert_rows;
    b.w_gate_up = f.w_gate_up;
    b.w_down = f.w_down;
    b.b_gate_up = f.b_gate_up;
    b.b_down = f.b_down;
    b.saved = f.saved;
    b.saved_bytes = f.saved_bytes;
    b.workspace = f.workspace;
    b.workspace_bytes = f.workspace_bytes;
    return b;
}

static void time_experts(team_rank *me, const Model &m)
{
    Arrays a;
    const Slabs s = even((int)m.experts, m.each);
    epic_experts ex = {};
    ex.num_local_experts = m.experts;
    ex.hidden = m.hidden;
    ex.inner = m.inner;
    ex.activation = m.activation;
    ex.row_type = ex.weight_type = EPIC_BF16;
    ex.limit = 7;
    ex.alpha = 1.702f;
    const int64_t first = (int64_t)m.experts * m.hidden * 2 * m.inner;
    const experts_layout at = experts_layout_of(&ex, s.slots, true);
    epic_experts_args f = {};
    f.call.stream = me->stream;
    f.experts = &ex;
    f.x = a.rows(s.slots * m.hidden, 1);
    f.num_slots = s.slots;
    f.expert_rows = f.expert_tokens = a.counts(s.rows);
    f.w_gate_up = a.rows(first, 0.02f);
    f.w_down = a.rows(first / 2, 0.02f);
    if (m.biased) {
        f.b_gate_up = a.rows((int64_t)m.experts * 2 * m.inner, 0.1f);
        f.b_down = a.rows((int64_t)m.experts * m.hidden, 0.1f);
    }
    f.saved = a.bytes((size_t)at.saved_bytes);
    f.saved_bytes = at.saved_bytes;
    f.workspace = a.bytes((size_t)at.bytes);
    f.workspace_bytes = at.bytes;
    f.y = a.bytes((size_t)(s.slots * m.hidden * 2));
    epic_experts_backward_args b = backward_of(f);
    b.d_y = a.rows(s.slots * m.hidden, 1);
    b.d_x = a.bytes((size_t)(s.slots * m.hidden * 2));
    b.d_w_gate_up = a.bytes((size_t)first * 4);
    b.d_w_down = a.bytes((size_t)first * 2);
    if (m.biased) {
        b.d_b_gate_up = a.bytes((size_t)m.experts * 2 * m.inner * 4);
        b.d_b_down = a.bytes((size_t)m.experts * m.hidden * 4);
    }
    b.grad_type = EPIC_BF16;
    epic_experts_backward_args wide = b;
    wide.grad_type = EPIC_F32;
    const auto run = [=](const epic_experts_args *f_args,
                         const epic_experts_backward_args *b_args) {
        const bool good = (!f_args || p2p_ops.experts_forward(me->group, f_args) == EPIC_OK) &&
                          (!b_args || p2p_ops.experts_backward(me->group, b_args) == EPIC_OK);
        if (!good) {
            fprintf(stderr, "gpu_layer: %s\n", epic_error(NULL));
            exit(1);
        }
    };
    epic_experts scaled = ex;
    epic_experts_args e = f;
    scaled.weight_type = EPIC_E4M3;
    e.experts = &scaled;
    e.x = a.filled<uint8_t>(s.slots * m.hidden, 448);
    e.x_scales = a.filled<float>(s.slots * blocks(m.hidden), 1.0f / 448);
    e.w_gate_up = a.filled<uint8_t>(first, 448);
    e.w_down = a.filled<uint8_t>(first / 2, 448);
    e.w_gate_up_scales =
        a.filled<float>(m.experts * blocks(m.hidden) * blocks(2 * m.inner), 0.02f / 448);
    e.w_down_scales =
        a.filled<float>(m.experts * blocks(m.hidden) * blocks(m.inner), 0.02f / 448);
    epic_experts_backward_args d = b;
    const experts_layout with = experts_layout_of(&scaled, s.slots, true);
    d.experts = &scaled;
    d.w_gate_up = e.w_gate_up;
    d.w_down = e.w_down;
    d.w_gate_up_scales = e.w_gate_up_scales;
    d.w_down_scales = e.w_down_scales;
    d.workspace = a.bytes((size_t)with.bytes);
    d.workspace_bytes = with.bytes;
    std::vector<Candidate> all = {{"forward", [&] { run(&f, NULL); }, {}},
                                  {"e4m3", [&] { run(&e, NULL); }, {}},
                                  {"both", [&] { run(&f, &b); }, {}},
                                  {"wide", [&] { run(&f, &wide); }, {}},
                                  {"e4m3 both", [&] { run(&e, &d); }, {}}};
    time_all(all, me->stream);
    printf(
        "experts, %-28s forward %7.3f ms, e4m3 %7.3f, with backward %7.3f, e4m3 %7.3f, float32 "
        "gradients %7.3f\n",
        m.name, median(all[0].us) / 1000, median(all[1].us) / 1000, median(all[2].us) / 1000,
        median(all[4].us) / 1000, median(all[3].us) / 1000);
}

/* ------------------------------------------------------------------------------ decode ---- */

static void time_decode(int each, int64_t k, int64_t n, bool scaled, cudaStream_t stream)
{
    Arrays a;
    const Slabs s = even(64, each);
    p2p_gemm g = product_over(a, s, k, n, stream);
    g.pass = EPIC_GEMM_FORWARD;
    if (scaled) {
        g = scaled_job(a, g, 64, k, n);
    } else {
        g.a = a.rows(s.slots * k, 1);
        g.b = a.rows(64 * k * n, 0.02f);
    }
    g.out = a.bytes((size_t)(s.slots * n * 2));
    uint32_t *sum = (uint32_t *)a.bytes(4);
    p2p_gemm alone = g;
    alone.no_clusters = 1;
    const int64_t vectors = 64 * k * n / (scaled ? 16 : 8);
    const uint4 *w = (const uint4 *)g.b;
    std::vector<Candidate> all = {
        {"pairs", [&] { CHECK_CUDA(p2p_launch_gemm(&g, stream)); }, {}},
        {"alone", [&] { CHECK_CUDA(p2p_launch_gemm(&alone, stream)); }, {}},
        {"read", [&] { read_kernel<<<num_sms() * 8, 256, 0, stream>>>(w, vectors, sum); }, {}}};
    time_all(all, stream);
    const double read = median(all[2].us);
    printf("decode, %s, 64 x %d rows, k %lld, n %lld: one read of the weights %.0f us (%.2f "
           "TB/s), "
           "pairs %.0f us (%.0f %%), alone %.0f us (%.0f %%)\n",
           scaled ? "e4m3" : "bf16", each, (long long)k, (long long)n, read,
           (double)vectors * 16 / read / 1e6, median(all[0].us), 100 * read / median(all[0].us),
           median(all[1].us), 100 * read / median(all[1].us));
}

static int work(team_rank *me)
{
    const Model models[] = {
        {"64 x 512, 7168, inner 2048", 64, 7168, 2048, EPIC_SILU, 512, false},
        {"gpt-oss, 128 x 128, biased", 128, 2880, 2880, EPIC_CLAMPED_SWIGLU, 128, true},
        {"Qwen3-30B, 128 x 256", 128, 2048, 768, EPIC_SILU, 256, false}};
    p2p_gemm probe = {};
    probe.row_type = probe.weight_type = EPIC_BF16;
    probe.slabs.num_slots = 128;
    printf("tensor cores: %s\n", p2p_gemm_is_slow(&probe) ? p2p_gemm_is_slow(&probe) : "used");
    if (only.empty() || only == "products") {
        time_products(even(64, 512), 7168, 4096, me->stream);
        time_products(even(64, 512), 2048, 7168, me->stream);
        time_products(skewed(), 7168, 4096, me->stream);
        time_products(even(4, 8192), 7168, 4096, me->stream);
    }
    if (only.empty() || only == "e4m3") {
        time_scaled(even(64, 512), 7168, 4096, me->stream);
        time_scaled(even(64, 512), 2048, 7168, me->stream);
        time_scaled(skewed(), 7168, 4096, me->stream);
        time_scaled(even(4, 8192), 7168, 4096, me->stream);
    }
    if (only.empty() || only == "experts")
        for (const Model &m : models) time_experts(me, m);
    if (only.empty() || only == "decode")
        for (int each : {1, 4, 16})
            for (bool scaled : {false, true}) {
                time_decode(each, 7168, 4096, scaled, me->stream);
                time_decode(each, 2048, 7168, scaled, me->stream);
            }
    return 0;
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "rounds=", 7)) rounds = atoi(argv[i] + 7);
        if (!strncmp(argv[i], "only=", 5)) only = argv[i] + 5;
    }
    team t = {};
    t.num_ranks = t.num_gpus = 1;
    t.max_tokens = 16;
    t.max_row_bytes = 64;
    t.timeout_ms = 20000;
    t.work = work;
    return team_run(&t) != 0;
}
