/* SPDX-License-Identifier: Apache-2.0 */
/* The protocol of backend hosts (docs/internals/hosts.md), for Spin to search: two hosts of two
 * ranks, three epochs, as memory is used again two epochs later, each a dispatch or a combine of
 * one token.
 *
 *     dispatch   HOME -- net --> MATE -- NVLink --> OTHER
 *     combine    NEIGHBOR -- NVLink --> HOME;   OTHER -- NVLink --> MATE -- net --> HOME
 *
 * What may not be is asserted, and no rank may wait forever.  -DFAULTS=n: rank n dies, or (4) HOME
 * and MATE lose each other, at any moment of one epoch.  -DMUTANT_...: one rule is broken; run.sh
 * wants Spin to find it.
 *
 * An atomic step is what no other rank can see half of.  Left out: deadlines, aborts, rounds, close,
 * the ring's and the net's sizes, batches, weights and escapes, which travel as rows do, and
 * kernels of few tokens. */

#ifdef FAULTS
#define EPOCHS 1
#else
#define EPOCHS 3
#endif
#define HOME 0   /* the token's rank */
#define NEIGHBOR 1 /* on its host */
#define MATE 2   /* in HOME's place on the other host */
#define OTHER 3  /* on the host of MATE */
#define DISPATCH 0
#define COMBINE 1
#define POISON 0 /* no data is that */
#define TORN 255 /* half old, half new; nor that */

/* ---------------------------------------------------------------------------- memory ---- */

/* kernels/cuda/common/heap.h.  Of each epoch's parity, what is in the heap or the inbox of a rank. */
#ifdef MUTANT_ONE_PARITY
#define parity(e) 0
#else
#define parity(e) ((e) & 1)
#endif
#define said_to(at, by, e) said[parity(e) * 16 + (at) * 4 + (by)]
byte said[32];      /* stamped: the first word of an announcement */
#define ids_at(at, e) ids[parity(e) * 2 + (at) - MATE]
byte ids[4];        /* stamped: another word, of HOME's: does OTHER want its token? */
#define half(n, e) (parity(e) * 2 + (n))
byte row[4];        /* at MATE, words by net */
byte handed[2];     /* at OTHER, by NVLink */
short partial[2];   /* OTHER's, at MATE, */
short near[2];      /* and NEIGHBOR's, at HOME */
short node[2];      /* the other host's sum, at HOME, by net */

/* Outboxes; what of them is given to the net and not yet read; what was read and is on its way. */
byte row_out[4];
short node_out[2];
bit row_given[4], node_given[2];
byte ids_flies[4], row_flies[4];
short node_flies[2];

#define of_sender(r, e) [(r) / 2 * 2 + parity(e)] /* HOME's and MATE's */
byte reads[4];    /* an epoch whose sources the engine reads again and again; 0: none */
byte holds[4];    /* the same, as kernels see it */
byte ended[4];    /* epochs of each rank */
byte restores[4]; /* poison that a rank has stored and others may not see yet: bits */

bit operation[EPOCHS + 1]; /* of an epoch, all ranks' */

#define stamp(e, value) ((e) * 2 + (value))
#define epoch_of(word) ((word) / 2)
#define value_of(word) ((word) & 1)
#define bit_of(kind, p) (1 << (2 * (p) + (kind)))
#define bits_of(p) (3 << 2 * (p))

/* Partials and sums: a + b is b + a, but (a + b) + c is not a + (b + c). */
#define leaf(r, e) (4 * (e) + (r))
#define add(a, b) ((a) < (b) -> 16 * (a) + (b) : 16 * (b) + (a))

/* ---------------------------------------------------------------------------- faults ---- */

#ifdef FAULTS
byte dead;      /* the rank that has died, from 1; 0: none */
bit cut;        /* between HOME and MATE */
byte broken[4]; /* a rank's status: the culprit, from 1; 0: the group is whole */
bit reports[4]; /* this rank has found out */

#define is_dead(r) (dead == (r) + 1)
#define till_death(then) unless then
#define is_cut(a, b) (cut && (a) % 2 == 0 && (b) % 2 == 0 && (a) != (b))
#define is_lost(from, to) (is_dead(from) || is_dead(to) || is_cut(from, to))

/* src/backend/hosts/proxy.c, which may inform kernels at any time, so they test whether it could have.
 * bury(): each rank has a line to each other one. */
#ifdef MUTANT_DEAD_UNSEEN
#define buries(q) false
#else
#define buries(q) (is_dead(q) || is_cut(r, q))
#endif
/* report_to_peers(): the word `broken`. */
#ifdef MUTANT_BROKEN_UNSENT
#define is_reported_by(q) false
#else
#define is_reported_by(q) (reports[q] && !is_lost(q, r))
#endif

/* common/wait.cuh: a spin ends when what it waits for has come, or find_failure() has found something. */
inline await(what)
{
    if
    :: what
    :: buries(HOME) || buries(NEIGHBOR) || buries(MATE) || buries(OTHER) -> goto breaks
    :: is_reported_by(HOME) || is_reported_by(NEIGHBOR) -> goto breaks
    :: is_reported_by(MATE) || is_reported_by(OTHER) -> goto breaks
    fi
}

/* report_aborted_wait() and report_failure(). All ranks can find out about a death themselves. A rank
 * that gets a report acts like one that found out. */
inline find_out(q)
{
    buries(q) -> broken[r] = q + 1; reports[r] = cut
}

inline hear_of(q)
{
    is_reported_by(q) -> broken[r] = broken[q]
}
#else
#define is_lost(from, to) false
#define till_death(then)
inline await(what)
{
    what
}
#endif

/* ------------------------------------------------------------------------------ waits ---- */

/* kernels/cuda/common/wait.cuh, net/net.cuh.  Here and below `r` is the kernel's rank and `e` its epoch. */

/* What a rank has restored must be seen before its announcement of the next epoch is: after that
 * peers store there.  Without the fence it may be seen whenever it likes. */
inline settle(r, p)
{
    if
    :: r == MATE && restores[r] & bit_of(DISPATCH, p) -> row[p * 2] = POISON; row[p * 2 + 1] = POISON
    :: r == OTHER && restores[r] & bit_of(DISPATCH, p) -> handed[p] = POISON
    :: else
    fi;
    if
    :: r == MATE && restores[r] & bit_of(COMBINE, p) -> partial[p] = POISON
    :: r == HOME && restores[r] & bit_of(COMBINE, p) -> near[p] = POISON; node[p] = POISON
    :: else
    fi;
    restores[r] = restores[r] & ~bits_of(p)
}

inline fence()
{
#ifdef MUTANT_POISON_KEPT
    restores[r] = 0;
#endif
#ifndef MUTANT_EARLY_ANNOUNCE
    settle(r, 0);
    settle(r, 1);
#endif
    skip
}

/* The net's delay of an announcement is that of its reader, who looks for all in one place. */
inline say(to)
{
    assert(said_to(to, r, e) < e);
    if
    :: said_to(to, r, e) = e
#ifdef FAULTS
    :: is_lost(r, to)
#endif
    fi
}

inline say_ids(to)
{
    assert(ids_flies[parity(e) * 2 + to - MATE] == 0);
    ids_flies[parity(e) * 2 + to - MATE] = stamp(e, wanted)
}

/* begin(): HOME's token is for OTHER or for no rank. */
#ifdef MUTANT_OUTBOX_UNASKED
#define outbox_is_free true
#else
#define outbox_is_free (r == NEIGHBOR || r == OTHER || holds of_sender(r, e) == 0)
#endif

inline begin()
{
    await(outbox_is_free);
    fence();
    say((r + 1) % 4);
    say((r + 2) % 4);
    say((r + 3) % 4);
    if
    :: r == HOME && operation[e] == DISPATCH -> wanted = 1
#ifdef FAULTS
    :: operation[e] == COMBINE || r != HOME -> wanted = 0
#else
    :: wanted = 0
#endif
    fi;
    if
    :: r == HOME -> say_ids(MATE); say_ids(OTHER)
    :: else
    fi
}

/* hear() and finish(): all that was said in this epoch is taken in it. */
#ifdef MUTANT_HALF_HEARD
#define is_whole true
#else
#define is_whole (r == HOME || r == NEIGHBOR || epoch_of(ids_at(r, e)) == e)
#endif
#ifdef MUTANT_NOT_AWAITED
#define has_said(q) true
#else
#define has_said(q) (q == r || said_to(r, q, e) == e)
#endif

inline hear()
{
    await((has_said(HOME) && has_said(NEIGHBOR) && has_said(MATE) && has_said(OTHER) && is_whole));
    ended[r] = e;
    wanted = 0;
    e++
}

/* -------------------------------------------------------------------------- dispatch ---- */

inline give_row(n)
{
    assert(!row_given[half(n, e)] && row_flies[half(n, e)] == 0);
    row_given[half(n, e)] = 1
}

/* In one epoch, where there are faults, nothing is used again. */
inline keep_sources(sender)
{
#ifndef FAULTS
    reads of_sender(sender, e) = e;
    holds of_sender(sender, e) = e
#else
    skip
#endif
}

inline ship_row()
{
    give_row(0);
    give_row(1);
    keep_sources(HOME)
}

/* dispatch/dispatch.cuh; post_put_when_complete() of net/net.cuh: of the warps that store a row, the last ships it. */
inline send()
{
    assert(reads of_sender(HOME, e) == 0);
    row_out[half(0, e)] = e;
#ifndef MUTANT_EARLY_ROW
    row_out[half(1, e)] = e;
#endif
    ship_row()
}

inline send_late()
{
    if
    :: r == HOME && wanted -> row_out[half(1, e)] = e
    :: else
    fi
}

/* net/relay.cuh: wait_wants(), and where a plan takes records. */
inline take_ids()
{
#ifndef MUTANT_STALE_IDS
    await(epoch_of(ids_at(r, e)) == e);
#endif
    wanted = value_of(ids_at(r, e))
}

/* dispatch/relay.cuh: forward_unit(). */
inline forward_unit()
{
    take_ids();
    if
    :: wanted ->
        await((row[half(0, e)] != POISON && row[half(1, e)] != POISON));
        assert(row[half(0, e)] == e && row[half(1, e)] == e);
        restores[r] = restores[r] | bit_of(DISPATCH, parity(e));
        assert(handed[parity(e)] == POISON);
        handed[parity(e)] = e
    :: else
    fi
}

inline receive()
{
    take_ids();
    if
    :: wanted ->
        await((handed[parity(e)] != POISON));
        assert(handed[parity(e)] == e);
        restores[r] = restores[r] | bit_of(DISPATCH, parity(e))
    :: else
    fi
}

/* --------------------------------------------------------------------------- combine ---- */

/* combine/relay.cuh: send_node().  On HOME's host partials go straight. */
inline give(box)
{
    assert(box == POISON);
    box = leaf(r, e)
}

/* add_partials_of_host(), and what is shipped then. */
inline add_host()
{
    await((partial[parity(e)] != POISON));
    assert(reads of_sender(MATE, e) == 0);
    node_out[parity(e)] = add(leaf(r, e), partial[parity(e)]);
    restores[r] = restores[r] | bit_of(COMBINE, parity(e));
    assert(!node_given[parity(e)] && node_flies[parity(e)] == 0);
    node_given[parity(e)] = 1;
    keep_sources(MATE)
}

inline take(box)
{
    await((box != POISON));
    sum = add(sum, box)
}

/* combine/combine.cuh: the tree, whoever comes first. */
inline add_all()
{
    sum = leaf(r, e);
#ifdef MUTANT_ORDER_OF_ARRIVAL
    if
    :: near[parity(e)] != POISON -> take(near[parity(e)]); take(node[parity(e)])
    :: node[parity(e)] != POISON -> take(node[parity(e)]); take(near[parity(e)])
    fi;
#else
    take(near[parity(e)]);
    take(node[parity(e)]);
#endif
    assert(sum == add(add(leaf(HOME, e), leaf(NEIGHBOR, e)), add(leaf(MATE, e), leaf(OTHER, e))));
    sum = 0;
    restores[r] = restores[r] | bit_of(COMBINE, parity(e))
}

/* --------------------------------------------------------------------------- kernels ---- */

/* What is done between waits is one step, because no other rank could notice.  A rank's operations. */
proctype kernel(byte r)
{
    byte e = 1, wanted;
    short sum;
    {
        do
        :: atomic {
               e <= EPOCHS -> begin();
               if
               :: r == HOME && wanted -> send()
               :: else
               fi
           };
#ifdef MUTANT_EARLY_ROW
           send_late();
#endif
           atomic {
               if
               :: r == MATE && operation[e] == DISPATCH -> forward_unit()
               :: r == OTHER && operation[e] == DISPATCH -> receive()
               :: r == HOME && operation[e] == COMBINE -> add_all()
               :: r == NEIGHBOR && operation[e] == COMBINE -> give(near[parity(e)])
               :: r == MATE && operation[e] == COMBINE -> add_host()
               :: r == OTHER && operation[e] == COMBINE -> give(partial[parity(e)])
               :: else
               fi
           };
           atomic { hear() }
        :: e > EPOCHS -> goto over
        od;
    breaks:
#ifdef FAULTS
        atomic {
            if
            :: find_out(HOME)
            :: find_out(NEIGHBOR)
            :: find_out(MATE)
            :: find_out(OTHER)
            :: hear_of(HOME)
            :: hear_of(NEIGHBOR)
            :: hear_of(MATE)
            :: hear_of(OTHER)
            fi;
            assert(is_dead(broken[r] - 1) || (cut && (broken[r] - 1) % 2 == 0));
            restores[r] = 0;
            e = 0;
            wanted = 0;
            sum = 0
        }
#endif
    over:
        skip
    } till_death({ atomic { is_dead(r) -> e = 0; wanted = 0; sum = 0; restores[r] = 0 } })
}

/* -------------------------------------------------------------------------- the thread ---- */

/* src/backend/hosts/proxy.c: free_epochs(). */
inline free_epoch(r, e)
{
    d_step {
        (r == HOME || r == MATE) && holds of_sender(r, e) != 0 &&
#ifndef MUTANT_FREED_EARLY
            reads of_sender(r, e) == 0 &&
#endif
            holds of_sender(r, e) <= ended[r] -> holds of_sender(r, e) = 0
    }
}

/* What kernels ship is given to the net in the same step: its delay is the net's. */
proctype thread(byte r)
{
end:
    do
    :: free_epoch(r, 0)
    :: free_epoch(r, 1)
    od till_death({ is_dead(r) })
}

/* -------------------------------------------------------------------------------- net ---- */

/* src/net/net.h: words of a put are read and land one by one, in any order, each once;
 * what has not landed when a rank is gone is lost. */
inline read(given, source, flies)
{
    d_step { given -> flies = source; given = 0 }
}

inline land_stamped(flies, place, lost)
{
    d_step {
#ifdef MUTANT_HALF_STAMPED
        if
        :: flies != 0 && epoch_of(place) != epoch_of(flies) ->
            place = stamp(epoch_of(flies), value_of(place))
        :: flies != 0 && epoch_of(place) == epoch_of(flies) -> place = flies; flies = 0
        fi
#else
        flies != 0 && !(lost) -> assert(place < flies); place = flies; flies = 0
#endif
    }
}

inline land(flies, place, lost)
{
    d_step {
#ifdef MUTANT_HALF_WORDS
        if
        :: flies != 0 && place == POISON -> place = TORN
        :: flies != 0 && place == TORN -> place = flies; flies = 0
        fi
#else
        flies != 0 && !(lost) -> assert(place == POISON); place = flies; flies = 0
#endif
    }
}

/* done(): the engine reads no more of an epoch, which it may long after all has landed. */
inline finish_reading(r, given)
{
    d_step { reads of_sender(r, p) != 0 && !(given) -> reads of_sender(r, p) = 0 }
}

proctype net(byte p)
{
end:
    do
    :: land_stamped(ids_flies[p * 2], ids[p * 2], is_lost(HOME, MATE))
    :: land_stamped(ids_flies[p * 2 + 1], ids[p * 2 + 1], is_lost(HOME, OTHER))
    :: read(row_given[p * 2], row_out[p * 2], row_flies[p * 2])
    :: read(row_given[p * 2 + 1], row_out[p * 2 + 1], row_flies[p * 2 + 1])
    :: read(node_given[p], node_out[p], node_flies[p])
    :: land(row_flies[p * 2], row[p * 2], is_lost(HOME, MATE))
    :: land(row_flies[p * 2 + 1], row[p * 2 + 1], is_lost(HOME, MATE))
    :: land(node_flies[p], node[p], is_lost(MATE, HOME))
    :: finish_reading(HOME, row_given[p * 2] || row_given[p * 2 + 1])
    :: finish_reading(MATE, node_given[p])
    od
}

/* --------------------------------------------------------------------- what else happens ---- */

#ifdef MUTANT_EARLY_ANNOUNCE
proctype memory(byte r)
{
end:
    do
    :: d_step { restores[r] & bits_of(0) -> settle(r, 0) }
    :: d_step { restores[r] & bits_of(1) -> settle(r, 1) }
    od
}
#endif

#ifdef FAULTS
/* Words of announcements that had not landed. */
inline lose_said(at, by)
{
    if
    :: is_lost(by, at) -> said_to(at, by, 0) = 0
    :: is_lost(by, at) -> said_to(at, by, 1) = 0
    :: true
    fi
}

proctype fault()
{
    atomic {
        if
        :: FAULTS == 4 -> cut = 1
        :: FAULTS != 4 -> dead = FAULTS + 1
        fi;
        lose_said(HOME, MATE);
        lose_said(HOME, OTHER);
        lose_said(NEIGHBOR, MATE);
        lose_said(NEIGHBOR, OTHER);
        lose_said(MATE, HOME);
        lose_said(MATE, NEIGHBOR);
        lose_said(OTHER, HOME);
        lose_said(OTHER, NEIGHBOR)
    }
}
#endif

init
{
    byte i = 1;
    atomic {
        do
        :: i <= EPOCHS -> operation[i] = DISPATCH; i++
        :: i <= EPOCHS -> operation[i] = COMBINE; i++
        :: i > EPOCHS -> break
        od;
        run net(0);
        run net(1);
        for (i : HOME .. OTHER) {
            run thread(i);
            run kernel(i);
#ifdef MUTANT_EARLY_ANNOUNCE
            run memory(i)
#endif
        }
#ifdef FAULTS
        run fault()
#endif
    }
}
