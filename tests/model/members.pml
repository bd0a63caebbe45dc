/* SPDX-License-Identifier: Apache-2.0 */
/* The decision on the next generation of a group (src/context/members.c) as a model for Spin: N seats, any
 * order of steps, at most DEATHS deaths at any moment. docs/internals/members.md describes the
 * protocol.
 *
 * A message is a variable that the sender writes and the receiver reads at any later moment. A
 * death is proven as soon as it happens. A seat that is stopped is one that others may give up at
 * any moment, and that may give up others: SLOW is such a seat. FOCUS cuts seat 0 off from seats
 * 3 and 4. AUTHORITY is a set of seats that an authority names at any moment.
 *
 * Two things are checked. No two living seats enter different sets; with AUTHORITY, no two living
 * seats of its set. And if no seat is given up, all living seats enter. */
#ifndef N
#define N 4
#endif
#ifndef DEATHS
#define DEATHS 2
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef SLOW
#define SLOW 255
#endif
#ifndef AUTHORITY
#define AUTHORITY 0
#endif
#define BY_AUTHORITY 64 /* ballots of the authority are above all others */
#define bit(i) (1 << (i))
#define all (bit(N) - 1)
#define has(set, i) (((set) >> (i)) & 1)
#define alive(i) (!has(dead, i))
#ifdef FOCUS
#define FOCUSED 1
#define cut(m, i) (((m) == 0 && (i) >= 3) || ((m) >= 3 && (i) == 0))
#define gives_up(m, i) cut(m, i)
#else
#define FOCUSED 0
#define cut(m, i) false
#define gives_up(m, i) ((i) == SLOW || (m) == SLOW)
#endif

byte dead, deaths;
bool named; /* the authority has named its set */
/* for each seat: the ballot that it has promised, and the last that it has accepted with its set */
byte promised[N], accepted_ballot[N], accepted[N];
/* for each seat: the last request for a promise, proposal and decision that was sent to it */
byte asked[N], proposed_ballot[N], proposed[N], decided_ballot[N], decided[N], decided_by[N];
byte entered[N], entered_ballot[N]; /* the set that a seat has entered; 0: none */
bool over[N];                       /* the seat does not lead any more */

/* With an authority, only the seats that it names are compared: seats outside may have entered an
 * earlier decision, which needs the named seats and so cannot go on. */
#define compared(i) (alive(i) && has(entered[i], i) && (!AUTHORITY || has(AUTHORITY, i)))
#define obeys(m) (named && has(AUTHORITY, m))
#define may_follow(m, b) ((b) >= promised[m] && (!obeys(m) || (b) >= BY_AUTHORITY))
/* a decision from before the authority counts only if a named seat has entered it */
#ifdef MUTANT_EARLIER_ENTERED
#define may_enter(m) true
#else
#define may_enter(m) (decided_ballot[m] >= BY_AUTHORITY || promised[m] < BY_AUTHORITY || \
                      has(AUTHORITY, decided_by[m]))
#endif

inline count(set, n)
{
    n = 0;
    k = 0;
    do
    :: k < N -> n = n + has(set, k); k++
    :: else -> break
    od;
    k = 0
}

proctype Acceptor(byte m)
{
    byte j;
end:
    do
    :: atomic { alive(m) && !entered[m] && asked[m] > promised[m] && may_follow(m, asked[m]) ->
           promised[m] = asked[m] }
    :: atomic { alive(m) && !entered[m] && proposed_ballot[m] > accepted_ballot[m] &&
           may_follow(m, proposed_ballot[m]) ->
           promised[m] = proposed_ballot[m];
           accepted_ballot[m] = proposed_ballot[m];
           accepted[m] = proposed[m] }
    :: atomic { alive(m) && decided[m] && !entered[m] && may_enter(m) ->
           entered[m] = decided[m];
           entered_ballot[m] = decided_ballot[m];
           do
           :: j < N -> assert(!compared(m) || !compared(j) || entered[j] == entered[m]); j++
           :: else -> break
           od;
           j = 0 }
    od
}

proctype Leader(byte m)
{
    byte r, b, i, heard, best, set, n, acks, k;
    (!FOCUSED || m == 0 || deaths == DEATHS);
    do
    :: r < ROUNDS && alive(m) ->
        /* wait until all lower seats are dead or given up */
        i = 0;
        do
        :: i < m ->
            if
            :: atomic { !alive(i) -> i++ }
            :: gives_up(m, i) || (FOCUSED && (i == 1 || i == 2)) -> i++
            :: obeys(m) && !has(AUTHORITY, i) -> i++
            :: !alive(m) -> goto done
            :: atomic { entered[m] && over[i] && alive(i) -> goto done } /* seat i has informed all */
            fi
        :: else -> break
        od;
#ifndef MUTANT_SILENT
        /* a seat that has entered passes the decision on: the seat that sent it may be dead */
        if
        :: atomic { entered[m] -> set = entered[m]; b = entered_ballot[m]; i = 0 }; goto publish
        :: else
        fi;
#else
        if :: entered[m] -> goto done :: else fi;
#endif
        atomic {
            b = r * N + m + 1 + (obeys(m) -> BY_AUTHORITY : 0);
            r++; heard = 0; best = 0; set = 0; acks = 0; i = 0 }
        if
        :: atomic { alive(m) ->
               do
               :: i < N -> if :: asked[i] < b && !cut(m, i) -> asked[i] = b :: else fi; i++
               :: else -> break
               od;
               i = 0 }
        :: !alive(m) -> goto done
        fi;
        do
        :: i < N ->
            if
            :: atomic { promised[i] == b && !entered[i] && !cut(m, i) ->
                   heard = heard | bit(i);
                   if
                   :: accepted_ballot[i] > best &&
                      (b < BY_AUTHORITY || accepted_ballot[i] >= BY_AUTHORITY) ->
                          best = accepted_ballot[i]; set = accepted[i]
                   :: else
                   fi;
                   i++ }
            /* a seat that has entered replies with its decision */
            :: atomic { entered[i] && !cut(m, i) && (b < BY_AUTHORITY || has(AUTHORITY, i)) ->
                   set = entered[i]; b = (entered_ballot[i] > b -> entered_ballot[i] : b);
                   i = 0 }; goto publish
            :: promised[i] > b && !cut(m, i) -> goto next
            :: atomic { !alive(i) && i != m -> i++ }
            :: gives_up(m, i) && i != m -> i++
            :: b >= BY_AUTHORITY && !has(AUTHORITY, i) -> i++
            :: obeys(m) && b < BY_AUTHORITY -> goto next
            :: b < BY_AUTHORITY && obeys(i) -> goto next /* seat i follows the authority alone */
            :: !alive(m) -> goto done
            fi
        :: else -> break
        od;
        atomic {
#ifdef MUTANT_FORGETS
            set = heard;
#else
            if :: best == 0 -> set = heard :: else fi;
#endif
            if :: b >= BY_AUTHORITY -> set = AUTHORITY :: else fi;
            i = 0; best = 0 }
        do
        :: atomic { i < N && alive(m) ->
               if
               :: has(heard, i) && proposed_ballot[i] < b ->
                      proposed_ballot[i] = b; proposed[i] = set
               :: else
               fi;
               i++ }
        :: i == N -> break
        :: !alive(m) -> goto done
        od;
        i = 0;
#ifndef MUTANT_HASTY
        do
        :: i < N ->
            if
            :: !has(heard, i) -> i++
            :: atomic { accepted_ballot[i] == b -> acks = acks | bit(i); i++ }
            :: promised[i] > b -> goto next
            :: atomic { entered[i] && accepted_ballot[i] != b && b < BY_AUTHORITY ->
                   set = entered[i]; b = (entered_ballot[i] > b -> entered_ballot[i] : b);
                   i = 0 }; goto publish
            :: entered[i] && accepted_ballot[i] != b && b >= BY_AUTHORITY -> goto next
            :: atomic { !alive(i) && i != m -> i++ }
            :: gives_up(m, i) && i != m -> i++
            :: obeys(i) && b < BY_AUTHORITY -> goto next
            :: !alive(m) -> goto done
            fi
        :: else -> break
        od;
        /* The authority's set needs its seats. Otherwise all who live must have accepted, or more
         * than half of all seats, the dead counted. */
        atomic {
            if
            :: b >= BY_AUTHORITY ->
                if :: (acks & AUTHORITY) == AUTHORITY -> skip :: else -> goto next fi
            :: else ->
#ifdef MUTANT_LIVING
                count(acks & ~dead, n); i = n; count(all & ~dead, n);
                if :: 2 * i > n -> skip :: else -> goto next fi
#else
                count(acks, n);
                if
                :: ((acks | dead) & all) == all || 2 * n > N -> skip
                :: else -> goto next
                fi
#endif
            fi;
            i = 0; n = 0 }
#endif
publish:
        i = 0;
        do
        :: atomic { i < N && alive(m) && !cut(m, i) ->
               if
               :: decided_ballot[i] < b && !entered[i] ->
                      decided[i] = set; decided_ballot[i] = b; decided_by[i] = m
               :: else
               fi;
               i++ }
        :: atomic { i < N && i != m && gives_up(m, i) -> i++ } /* seat i does not hear it */
        :: i == N -> break
        :: !alive(m) -> goto done
        od;
        goto done;
next:   atomic { i = 0; heard = 0; best = 0; set = 0; acks = 0; n = 0 }
    :: else -> break
    od;
done:
    over[m] = true
}

proctype Fate()
{
    byte i;
    do
    :: deaths < DEATHS && (!FOCUSED || entered[0]) ->
        atomic {
            deaths++;
            if
#ifdef FOCUS
            :: i = 1
            :: i = 2
#else
            :: i = 0
            :: i = 1
            :: i = 2
            :: i = N - 1
#endif
            fi;
            dead = dead | bit(i);
            i = 0 }
    :: atomic { AUTHORITY && !named -> named = true }
    :: break
    od
}

init
{
    byte i;
    atomic {
        do
        :: i < N ->
            run Acceptor(i);
            if
            :: !FOCUSED || i == 0 || i == 3 -> run Leader(i) /* with FOCUS two seats lead */
            :: else
            fi;
            i++
        :: else -> break
        od;
        run Fate();
        i = 0
    }
#if SLOW == 255 && AUTHORITY == 0
    timeout ->
        do
        :: i < N -> assert(!alive(i) || entered[i] || FOCUSED); i++
        :: else -> break
        od
#endif
}
