/* SPDX-License-Identifier: Apache-2.0 */
/* How announcements and counts travel through relays (kernels/cuda/net/relay_words.cuh), for Spin
 * to search: two hosts of two ranks, three epochs, because memory is used again two epochs later.
 * Ranks 1 and 3 are the relays of their hosts:
 *
 *     rank 0 -- NVLink --> rank 1 -- net --> rank 3 -- NVLink --> rank 2
 *
 * Words are stamped with their epoch. Spin checks that each rank receives the right words, that no
 * word replaces a newer one, that no relay writes an outbox that the net may still read, and that
 * no rank waits forever.
 *
 * Announcements go through relays. With -DCOUNTS, only counts do: each rank sends a count, whose
 * value ranks 0 and 2 choose, and announcements are seen at once. -DMUTANT_...: one rule is broken,
 * and run.sh requires that Spin finds it. Left out: rows, records, deadlines, and ranks that die. */

#define EPOCHS 3
#define RANKS 4
#define parity(e) ((e) & 1)
#define near(r, i) ((r) / 2 * 2 + (i))    /* rank i of the host of rank r */
#define far(r, i) (2 - (r) / 2 * 2 + (i)) /* rank i of the other host */
#define is_relay(r) ((r) % 2)
#define stamp(e, value) ((e) * 2 + (value))
#define epoch_of(word) ((word) / 2)
#define value_of(word) ((word) & 1)

/* Words in the heap of rank `at`, written for rank `by`. */
#define heap(at, by, e) (parity(e) * 16 + (at) * 4 + (by))
byte announced[32], counts[32];

/* Relayed words of rank i of the host of rank r: in the outbox of the relay, posted to the net, read
 * by the net and on their way, and in the inbox of the other relay. */
#define box(r, i, e) (parity(e) * 4 + (r) / 2 * 2 + (i))
#define other_box(b) ((b) / 4 * 4 + ((b) + 2) % 4)
byte outbox[8], flies[8], inbox[8];
bit posted[8];

/* The epoch whose words in the outbox of relay r the net may still read; 0: none. */
#define reads_of(r, e) reads[(r) / 2 * 2 + parity(e)]
byte reads[4];

bit chosen[4];     /* the counts that ranks 0 and 2 choose, by parity */
byte begun[RANKS]; /* the epoch that a rank has begun */
byte relayed[RANKS], ended[RANKS]; /* the epochs that its relay work and its kernel have ended */

#define store(place, word)    \
    assert((place) < (word)); \
    place = word

/* Of the words of rank i of this host: copies them to the outbox, and posts them. */
inline copy_to_outbox(i, word)
{
    assert(reads_of(r, e) == 0 || reads_of(r, e) == e);
    outbox[box(r, i, e)] = word
}

inline post(i)
{
    assert(!posted[box(r, i, e)]);
    posted[box(r, i, e)] = 1;
    reads_of(r, e) = e
}

#ifdef COUNTS
/* ------------------------------------------------------------------------------- counts ---- */

#define has_count(at, by) (epoch_of(counts[heap(at, by, e)]) == e)
#define has_words(at) \
    (has_count(at, 0) && has_count(at, 1) && has_count(at, 2) && has_count(at, 3))
#define own_count (is_relay(r) -> 0 : chosen[r + parity(e)])
#define is_right(q) (value_of(counts[heap(r, q, e)]) == chosen[(q) + parity(e)])

/* collect_words() */
inline collect(i)
{
    d_step {
#ifndef MUTANT_STALE_COLLECTED
        has_count(r, near(r, i)) ->
#endif
        copy_to_outbox(i, counts[heap(r, near(r, i), e)])
    }
}

/* post_words() */
inline post_counts()
{
    d_step { post(0); post(1) }
}

/* distribute_words() */
inline distribute(i)
{
    d_step {
#ifndef MUTANT_STALE_DISTRIBUTED
        epoch_of(inbox[box(r, i, e)]) == e ->
#endif
        store(counts[heap(near(r, 0), far(r, i), e)], inbox[box(r, i, e)]);
        store(counts[heap(near(r, 1), far(r, i), e)], inbox[box(r, i, e)])
    }
}

/* Planner CTA 0 of a relay. */
proctype relay(byte r)
{
    byte e;
    for (e : 1 .. EPOCHS) {
        begun[r] >= e;
#ifdef MUTANT_READ_FIRST
        has_words(r);
#endif
#ifdef MUTANT_POSTED_EARLY
        post_counts();
#endif
        collect(0);
        collect(1);
#ifndef MUTANT_POSTED_EARLY
        post_counts();
#endif
        distribute(0);
        distribute(1);
        relayed[r] = e
    }
}

inline send_words()
{
    if
    :: true
    :: !is_relay(r) -> chosen[r + parity(e)] = 1 - chosen[r + parity(e)]
    fi;
    store(counts[heap(near(r, 0), r, e)], stamp(e, own_count));
    store(counts[heap(near(r, 1), r, e)], stamp(e, own_count));
    store(announced[heap(far(r, 0), r, e)], e);
    store(announced[heap(far(r, 1), r, e)], e)
}
#else
/* ------------------------------------------------------------------------ announcements ---- */

#define has_words(at) true
#define is_right(q) true

inline send_on(i)
{
    copy_to_outbox(i, announced[heap(r, near(r, i), e)]);
    post(i);
#ifdef MUTANT_WHOLE_HOST
    if /* the slots of both ranks, whether their words have arrived or not */
    :: todo & (2 - (i)) -> copy_to_outbox(1 - (i), announced[heap(r, near(r, 1 - (i)), e)]);
                           post(1 - (i))
    :: else
    fi;
#endif
    todo = todo - (1 << (i))
}

inline distribute(i)
{
    store(announced[heap(near(r, 0), far(r, i), e)], inbox[box(r, i, e)]);
    store(announced[heap(near(r, 1), far(r, i), e)], inbox[box(r, i, e)]);
    todo = todo - (4 << (i))
}

/* relay_announcements(), in both directions. */
proctype relay(byte r)
{
    byte e, todo; /* bits 0 and 1: ranks of this host; bits 2 and 3: ranks of the other host */
    for (e : 1 .. EPOCHS) {
        begun[r] >= e;
        todo = 15;
        do
        :: d_step { todo & 1 && announced[heap(r, near(r, 0), e)] == e -> send_on(0) }
        :: d_step { todo & 2 && announced[heap(r, near(r, 1), e)] == e -> send_on(1) }
#ifdef MUTANT_STALE_DISTRIBUTED
        :: d_step { todo & 4 && inbox[box(r, 0, e)] != 0 -> distribute(0) }
#else
        :: d_step { todo & 4 && inbox[box(r, 0, e)] == e -> distribute(0) }
#endif
        :: d_step { todo & 8 && inbox[box(r, 1, e)] == e -> distribute(1) }
        :: todo == 0 -> break
        od;
        relayed[r] = e
    }
}

inline send_words()
{
    skip
}
#endif

/* ------------------------------------------------------------------------------- kernel ---- */

/* The rest of a kernel: begins an epoch, sends the rank's own words to its host, and ends the epoch
 * when all words have arrived and, on a relay, are relayed. */
proctype kernel(byte r)
{
    byte e;
    for (e : 1 .. EPOCHS) {
        atomic {
#ifndef MUTANT_OUTBOX_UNASKED
            !is_relay(r) || reads_of(r, e) == 0;
#endif
            store(announced[heap(near(r, 0), r, e)], e);
            store(announced[heap(near(r, 1), r, e)], e);
            send_words();
            begun[r] = e
        }
        d_step {
            announced[heap(r, 0, e)] == e && announced[heap(r, 1, e)] == e &&
            announced[heap(r, 2, e)] == e && announced[heap(r, 3, e)] == e && has_words(r) &&
            (!is_relay(r) || relayed[r] == e) -> assert(is_right(0) && is_right(2));
            ended[r] = e
        }
    }
}

/* ---------------------------------------------------------------------------------- net ---- */

/* Words of a put are read and land one by one, in any order, each once. */
proctype net(byte b)
{
end:
    do
    :: d_step { posted[b] -> assert(flies[b] == 0); flies[b] = outbox[b]; posted[b] = 0 }
    :: d_step { flies[b] != 0 -> store(inbox[other_box(b)], flies[b]); flies[b] = 0 }
    od
}

/* src/backend/hosts/proxy.c, free_epochs(): the engine may read sources long after all words have
 * landed, and the proxy reports the end only after the rank has ended the epoch. */
proctype proxy(byte r; byte p)
{
end:
    do
    :: d_step {
           reads_of(r, p) != 0 && reads_of(r, p) <= ended[r] && !posted[box(r, 0, p)] &&
           !posted[box(r, 1, p)] -> reads_of(r, p) = 0
       }
    od
}

init
{
    byte i;
    atomic {
        for (i : 0 .. 7) {
            run net(i)
        }
        for (i : 0 .. RANKS - 1) {
            run kernel(i);
            if
            :: is_relay(i) -> run relay(i); run proxy(i, 0); run proxy(i, 1)
            :: else
            fi
        }
    }
}
