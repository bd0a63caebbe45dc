/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of records, for the libraries for many ranks of the backend `hosts`, in groups whose
 * words go through relays (relays_words()). A rank sends the records of its tokens for all ranks
 * of another host in one list to its mate there (the rank with the same index in its host). The
 * mate writes the records to the heaps of the ranks of its host, at the place at which the
 * token's rank would store them. It writes no words after the last word of a record, because
 * the net does not deliver these words (store_records()).
 *
 *   planner CTAs     add an entry for each choice to the list for the choice's host, in the
 *                    outbox. Then each CTA counts itself as done
 *   last CTA done    writes the sizes of the lists, and posts one put per list to each mate
 *   planner CTAs     (of the mate) wait for size and entries in the net inbox. A CTA handles
 *                    one list and one rank of its host at a time: it stores the entries for this
 *                    rank, and RECORD_ABSENT for the tokens that are not in the list
 *
 * A list consists of stamped words: its size (number of entries), then two words per entry:
 *
 *   place   index of the token in the round, index of the rank in its host, position of the
 *           word in the record
 *   value   the word that the mate stores there
 *
 * In FLAT layers there is a second list per host, whose entries are row words (plan/flat.cuh).
 * The order of the entries differs from run to run, but not what the mate writes. If a rank has
 * no tokens in a round, it sends no list.
 *
 * No rank waits in a circle: a rank posts its lists before it waits for lists of other ranks,
 * and a list waits for nothing. docs/internals/many-ranks.md explains why the words of a list
 * can be used again after two epochs. */
#ifndef EPIC_RECORD_LISTS_CUH
#define EPIC_RECORD_LISTS_CUH

#include "cuda/plan/flat.cuh"
#include "cuda/plan/planner_state.cuh"

/* The destination of the choice that this lane handles. */
struct PlacedChoice {
    /* rank: the rank to which `slot` is sent; -1: nothing is sent. slot: the choice's slot on
     * that rank. If the plan is invalid, `slot` is RECORD_DISCARD. */
    int32_t rank;
    uint32_t slot;
};

struct FlatChoice { /* A choice that this lane handles, and where it goes. */
    /* token * top_k + k; -1: the lane has no choice */
    int64_t choice;
    /* the rank of the choice's expert; -1: the choice has no expert or is dropped */
    int32_t owner;
    int32_t local; /* index of the choice's expert among the experts of rank `owner` */
    /* Index of the token's row on the rank `owner`. At first, only the lane with the token's
     * first choice for this rank has the index; the token's other lanes have -1.
     * send_row_words() sets it in all of them. */
    int32_t row;
    int32_t fate; /* if owner is -1: the reason (EPIC_FATE_*) */
};

/* False while the plan is made, if the records are sent later in rounds
 * (plan/record_rounds.cuh). A macro, so that the kernels for few ranks keep their machine
 * code. */
#define SENDS_RECORDS(op) (!MANY_RANKS || *(op).record_begin >= 0)

enum ListKind { LIST_RECORDS = 0, LIST_ROWS = 1 };

/* The bits of a place: position, rank, token. */
#define LIST_POSITION_BITS 6 /* top_k is at most 64 */
#define LIST_RANK_BITS 5     /* a host has at most 31 ranks (P2P_MAX_RELAYS) */
static_assert(LIST_POSITION_BITS + LIST_RANK_BITS + P2P_LIST_TOKEN_BITS == 32 &&
                  DEVICE_MAX_TOP_K <= 1 << LIST_POSITION_BITS &&
                  P2P_MAX_RELAYS < 1 << LIST_RANK_BITS,
              "a place must fit into the low half of a stamped word");

__device__ __forceinline__ p2p_list_control *list_control(const OpState &op)
{
    return control_of(op)->net->lists;
}

/* Returns the address in `memory` (outbox or net inbox) of the list that rank `by` sends to its
 * mate `to`. As in source_number(), the index depends on both hosts, because the outbox has a
 * list for each host, and the inbox a list of each host. */
__device__ __forceinline__ uint64_t *list_address(const p2p_self &self, const OpState &op,
                                                  ListKind kind, uint8_t *memory, int to,
                                                  int by)
{
    const int64_t words = kind == LIST_ROWS ? p2p_flat_row_words(&self.at, self.max_tokens)
                                            : p2p_record_words(&self.at);
    const int local = ranks_per_host(self);
    const int index = wrap_rank(by / local + num_hosts(self) - to / local - 1, num_hosts(self));
    return (uint64_t *)(memory + (kind == LIST_ROWS ? self.at.flat_rows : self.at.records)) +
           ((int64_t)epoch_parity(op) * self.num_ranks + index * local) * words;
}

/* ------------------------------------------------------------------------ making lists ---- */

/* Bit masks of the lanes whose choices of one token go to the same rank. `second`: the lanes'
 * second choices (chunk 1), if tokens have more than 32 choices. */
struct RankLanes {
    uint32_t first, second;
};

/* Returns the lanes whose choices have the same token and go to the same rank as this lane's
 * choice in `chunk`. first_rank, second_rank: the ranks of this lane's choices, or -1. Called by
 * a whole warp. */
__device__ __forceinline__ RankLanes find_rank_lanes(const TokenLanes &lanes,
                                                     int32_t first_rank, int32_t second_rank,
                                                     int chunk)
{
    if (lanes.num_chunks == 1)
        return {__match_any_sync(ALL_LANES, first_rank) & lanes.token_lanes, 0};
    const int32_t rank = chunk ? second_rank : first_rank;
    RankLanes found = {0, 0};
#pragma unroll 1
    for (int lane = 0; lane < WARP; lane++) {
        found.first |= (uint32_t)(__shfl_sync(ALL_LANES, first_rank, lane) == rank) << lane;
        found.second |= (uint32_t)(__shfl_sync(ALL_LANES, second_rank, lane) == rank) << lane;
    }
    return found;
}

/* Adds an entry for each lane whose `rank` is on another host to the list for this host.
 * `token`: the lane's token. `position`: position of the word in the record. `value`: the word,
 * without stamp. Called by a whole warp. */
__device__ __forceinline__ void add_entries(const OpState &op, ListKind kind, int32_t rank,
                                            int32_t token, int position, uint32_t value)
{
    const p2p_self &self = *op.self;
    const bool adds = rank >= 0 && is_remote(self, rank);
    const int local = ranks_per_host(self), host = adds ? rank / local : -1;
    const uint32_t same_host = __match_any_sync(ALL_LANES, host);
    const int leader = __ffs(same_host) - 1;
    uint32_t begin = 0;
    if (adds && lane_id() == leader)
        begin = atomicAdd(&list_control(op)->sizes[kind][host], (uint32_t)__popc(same_host));
    begin = __shfl_sync(ALL_LANES, begin, leader);
    if (!adds) return;
    uint64_t *entry = list_address(self, op, kind, outbox_base(self),
                                   mate_of(self, self.rank, rank), self.rank) +
                      1 + 2 * ((int64_t)begin + __popc(same_host & lanes_below()));
    const uint32_t place =
        ((uint32_t)RECORD_INDEX(op, token) << LIST_RANK_BITS | (uint32_t)(rank % local))
            << LIST_POSITION_BITS |
        (uint32_t)position;
    store_relaxed(entry, stamp_word(op, place));
    store_relaxed(entry + 1, stamp_word(op, value));
}

/* Adds a word of a record to the list for its host. `same`: find_rank_lanes() of this lane's
 * choice in `chunk`. `rank`: the rank of this choice, or -1. Returns the position of the word in
 * the record. Called by a whole warp. */
__device__ __forceinline__ int add_record_word(const OpState &op, const RankLanes &same,
                                               int chunk, int32_t rank, int32_t token,
                                               uint32_t value)
{
    const uint32_t above = ~lanes_below() << 1;
    const int position = chunk ? __popc(same.first) + __popc(same.second & lanes_below())
                               : __popc(same.first & lanes_below());
    const bool last = chunk ? !(same.second & above) : !(same.first & above) && !same.second;
    add_entries(op, LIST_RECORDS, rank, token, position, value | (last ? RECORD_LAST : 0));
    return position;
}

/* Adds the choices of this warp's lanes that go to other hosts to the lists. The arguments are
 * those of send_records(). Called by a whole warp. */
__device__ __forceinline__ void list_choices(const OpState &op, const TokenLanes &lanes,
                                             int32_t token, const PlacedChoice (&c)[2])
{
    for (int h = 0; h < lanes.num_chunks; h++) {
        const RankLanes same = find_rank_lanes(lanes, c[0].rank, c[1].rank, h);
        (void)add_record_word(op, same, h, c[h].rank, token, c[h].slot);
    }
}

/* Like list_choices(), for layout FLAT. Also adds a row word for each token and rank. For the
 * choices that go to other hosts, sets c[].row as send_row_words() does. If SENDS_RECORDS() is
 * false, does only this. The arguments are those of send_row_words(). Called by a whole warp. */
__device__ __forceinline__ void list_flat_choices(const OpState &op, const TokenLanes &lanes,
                                                  int32_t token, bool bad, FlatChoice (&c)[2])
{
    for (int h = 0; h < lanes.num_chunks; h++) {
        const RankLanes same = find_rank_lanes(lanes, c[0].owner, c[1].owner, h);
        /* the row is in the lane of the token's first choice for this rank */
        const int32_t first_row =
            __shfl_sync(ALL_LANES, c[0].row, same.first ? __ffs(same.first) - 1 : 0);
        const int32_t second_row =
            __shfl_sync(ALL_LANES, c[1].row, same.second ? __ffs(same.second) - 1 : 0);
        if (c[h].owner >= 0 && is_remote(*op.self, c[h].owner))
            c[h].row = same.first ? first_row : second_row;
        if (!SENDS_RECORDS(op)) continue;
        const int position =
            add_record_word(op, same, h, c[h].owner, token, (uint32_t)c[h].local);
        add_entries(op, LIST_ROWS, position == 0 ? c[h].owner : -1, token, 0,
                    bad ? RECORD_DISCARD : (uint32_t)c[h].row);
    }
}

/* Writes the size of the list of one kind for the mate `to`, and posts the list. If `sends` is
 * false, only sets its size to 0 for the next round. Called by one thread. */
__device__ __forceinline__ void post_list(const OpState &op, ListKind kind, int to, bool sends)
{
    const p2p_self &self = *op.self;
    uint32_t *size = &list_control(op)->sizes[kind][to / ranks_per_host(self)];
    const uint32_t entries = load_relaxed(size);
    store_relaxed(size, 0u);
    if (!sends) return;
    uint64_t *list = list_address(self, op, kind, outbox_base(self), to, self.rank);
    store_relaxed(list, stamp_word(op, entries));
    post_put_words(op, to, list, 1 + 2 * (int64_t)entries);
}

/* Called by all threads of each planner CTA after the CTA has added its entries. The CTA that
 * calls it last posts the lists. `flat`: true with layout FLAT. */
static __device__ __noinline__ void post_lists(const p2p_plan_job &job, const OpState &op,
                                               bool flat)
{
    const p2p_self &self = job.self;
    p2p_list_control *lists = list_control(op);
    bool is_last = false;
    __syncthreads();
    if (threadIdx.x == 0) {
        /* With these fences, the CTA that is done last sees the entries of all CTAs. */
        __threadfence();
        is_last = atomicAdd(&lists->done, 1u) == (uint32_t)job.planners - 1;
        __threadfence();
    }
    if (__syncthreads_and(!is_last)) return;
    const int local = ranks_per_host(self), hosts = num_hosts(self);
    const bool has_tokens = job.num_tokens > *op.record_begin;
    for (int i = 1 + (int)threadIdx.x; i < hosts; i += (int)blockDim.x) {
        const int to =
            mate_of(self, self.rank, wrap_rank(self.rank / local + i, hosts) * local);
        post_list(op, LIST_RECORDS, to, has_tokens);
        if (flat) post_list(op, LIST_ROWS, to, has_tokens);
    }
    if (threadIdx.x == 0) store_relaxed(&lists->done, 0u);
}

/* --------------------------------------------------------------------- expanding lists ---- */

/* The list that a CTA expands, and the words that it writes. */
struct ListUnit {
    int source;     /* the rank that has sent the list */
    int to;         /* the rank for which the CTA stores words */
    int32_t tokens; /* number of tokens of rank `source` in this round */
    const uint64_t *list;
    /* address in the heap of rank `to` of the first word of the round's first token */
    uint64_t *words;
    int stride;      /* number of words per token */
    uint32_t absent; /* the word of a token that is not in the list */
};

/* Stores the words of the list for the tokens [first, first + LISTED_TOKENS), and marks these
 * tokens in listed.bits. Waits for every entry of the list. Called by all threads of the CTA.
 * Returns false if this thread has found that the group has failed. */
__device__ __forceinline__ bool store_listed(const OpState &op, const ListUnit &u,
                                             ListedTokens &listed, int32_t first)
{
    const uint32_t index = (uint32_t)(u.to % ranks_per_host(*op.self));
    for (uint32_t i = threadIdx.x; i < listed.size; i += blockDim.x) {
        const uint64_t *entry = u.list + 1 + 2 * (int64_t)i;
        uint64_t place = 0, value = 0;
        if (!wait_thread(op, u.source, P2P_PHASE_RECORD, [&] {
                place = load_relaxed(entry);
                value = load_relaxed(entry + 1);
                return is_stamped(op, place) && is_stamped(op, value);
            }))
            return false;
        const int position = (int)((uint32_t)place & ((1u << LIST_POSITION_BITS) - 1));
        const uint32_t rank =
            (uint32_t)place >> LIST_POSITION_BITS & ((1u << LIST_RANK_BITS) - 1);
        const int32_t token =
            (int32_t)((uint32_t)place >> (LIST_POSITION_BITS + LIST_RANK_BITS));
        const int32_t bit = token - first;
        if (rank != index || bit < 0 || bit >= LISTED_TOKENS) continue;
        store_relaxed(u.words + (int64_t)token * u.stride + position, value);
        atomicOr(&listed.bits[bit / 32], 1u << bit % 32);
    }
    return true;
}

/* Expands a list for one rank. Called by all threads of the CTA. Returns false, in all threads,
 * if the group has failed. */
static __device__ __noinline__ bool expand_list(const OpState &op, const ListUnit &u,
                                                ListedTokens &listed)
{
    bool ok = true;
    if (threadIdx.x == 0) {
        uint64_t word = 0;
        ok = wait_thread(op, u.source, P2P_PHASE_RECORD, [&] {
            word = load_relaxed(u.list);
            return is_stamped(op, word);
        });
        listed.size = (uint32_t)word;
    }
    if (!__syncthreads_and(ok)) return false;
    for (int32_t first = 0; first < u.tokens; first += LISTED_TOKENS) {
        for (int i = (int)threadIdx.x; i < LISTED_TOKENS / 32; i += (int)blockDim.x)
            listed.bits[i] = 0;
        __syncthreads();
        ok = store_listed(op, u, listed, first);
        if (!__syncthreads_and(ok)) return false;
        const int32_t end = min(u.tokens, first + LISTED_TOKENS);
        for (int32_t t = first + (int32_t)threadIdx.x; t < end; t += (int32_t)blockDim.x)
            if (!(listed.bits[(t - first) / 32] >> (t - first) % 32 & 1))
                store_relaxed(u.words + (int64_t)t * u.stride, stamp_word(op, u.absent));
        __syncthreads();
    }
    return true;
}

/* Returns the address in the heap of rank `to` of the first word of the round of rank `source`
 * in the array `records` or `flat_rows`. */
__device__ __forceinline__ uint64_t *round_words(const p2p_self &self, const OpState &op,
                                                 ListKind kind, int to, int source)
{
    const int number = source_number(self, to, source);
    if (kind == LIST_ROWS)
        return row_word_address(self, op, self.heap[to], number, *op.record_begin);
    return (uint64_t *)(self.heap[to] + self.at.records) +
           ((int64_t)epoch_parity(op) * self.num_ranks + number) * p2p_index_choices(&self.at);
}

/* Expands the lists that this rank's mates send in this round. The planner CTAs share the work.
 * Called by all threads of the planner CTAs, after post_lists(). Does nothing in groups without
 * lists. Returns false, in all threads, if the group has failed. */
template <bool FLAT>
__device__ __forceinline__ bool expand_lists(Planner &p, const p2p_plan_job &job,
                                             const OpState &op)
{
    const p2p_self &self = job.self;
    if (!relays_words(self)) return true;
    const int local = ranks_per_host(self), hosts = num_hosts(self);
    for (int i = (int)blockIdx.x; i < (hosts - 1) * local; i += job.planners) {
        const int host = wrap_rank(self.rank / local + 1 + i / local, hosts);
        const int source = mate_of(self, self.rank, host * local);
        const int to = mate_of(self, self.rank % local + i % local, self.rank);
        const int32_t tokens = min(p.header.tokens_of[source] - *op.record_begin,
                                   (int32_t)p2p_index_tokens(&self.at, self.max_tokens));
        for (int k = LIST_RECORDS; k <= (FLAT ? LIST_ROWS : LIST_RECORDS) && tokens > 0; k++) {
            const ListKind kind = (ListKind)k;
            const ListUnit unit = {
                source,
                to,
                tokens,
                list_address(self, op, kind, net_inbox(self), self.rank, source),
                round_words(self, op, kind, to, source),
                kind == LIST_ROWS ? 1 : (int)job.layer.top_k,
                kind == LIST_ROWS ? RECORD_ABSENT : RECORD_ABSENT | RECORD_LAST};
            if (!expand_list(op, unit, *p.listed)) return false;
        }
    }
    return true;
}

#endif
