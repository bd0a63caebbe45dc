/* SPDX-License-Identifier: Apache-2.0 */
/* The protocol of windows (docs/internals/windows.md), for Spin to search. Two ranks make three
 * steps. In each step a rank runs one operation, in which it stores two rows directly into the
 * window of the other rank. Between the operations it reads its own window, as experts do. Each
 * kernel has two CTAs, and each CTA stores one row.
 *
 * A store into a window is seen by the other rank only after a moment, and in any order: it is
 * in `flying` until then. A fence waits for the stores of its CTA.
 *
 * At the end one rank closes while the other may still store, as after a failed call.
 *
 * -DMUTANT_...: one rule is broken, and run.sh requires that Spin finds it. Left out: staging,
 * deadlines, and ranks that die. */

#define STEPS 3
#define other(r) (1 - (r))
#define cell(rank, row) ((rank) * 2 + (row))

byte window[4];   /* by rank and row: the step whose row it contains */
byte flying[4];   /* a row that is on its way there; 0: none */
byte announced[2]; /* stamped: the operation that a rank has announced: its permission to store */
byte arrived[2];  /* stamped, at a rank: the operation of which all rows are there */
byte stored[2];   /* CTAs of a rank that have stored their rows in the running operation */
byte finished[2]; /* CTAs of a rank that have finished the operation */
byte started[2];  /* the operation that a rank's stream has started */

/* Memory: makes a store visible at any time. */
#define land(i) atomic { flying[i] -> window[i] = flying[i]; flying[i] = 0 }

active proctype memory()
{
end_of_stores:
    do
    :: land(0)
    :: land(1)
    :: land(2)
    :: land(3)
    od
}

/* One CTA of a rank's kernel. CTA 1 announces, CTA 0 waits for the rows of the other rank. */
proctype cta(byte r; byte c)
{
    byte e;
    bool last;
    for (e : 1 .. STEPS) {
        started[r] == e;
        if
        :: c == 1 -> announced[r] = e
        :: else
        fi;
#ifndef MUTANT_STORE_UNASKED
        announced[other(r)] == e;
#endif
        flying[cell(other(r), c)] = e;
#ifndef MUTANT_COUNT_UNFENCED
        flying[cell(other(r), c)] == 0;
#endif
        atomic { stored[r]++; last = stored[r] == 2 }
#ifdef MUTANT_COUNT_EARLY
        last = c == 1;
#endif
        if
        :: last -> stored[r] = 0; arrived[other(r)] = e
        :: else
        fi;
#ifdef MUTANT_COUNT_UNSTAMPED
        c == 1 || arrived[r] > 0;
#else
#ifndef MUTANT_END_NOT_AWAITED
        c == 1 || arrived[r] == e;
#endif
#endif
        finished[r]++
    }
}

/* The stream of a rank: a kernel, then experts that read the window twice. */
proctype stream(byte r)
{
    byte e;
    for (e : 1 .. STEPS) {
        started[r] = e;
        atomic { finished[r] == 2 -> finished[r] = 0 }
        assert(window[cell(r, 0)] == e && window[cell(r, 1)] == e);
        assert(window[cell(r, 0)] == e && window[cell(r, 1)] == e)
    }
}

/* ----------------------------------------------------------------------------- close ---- */

bool storing, closed, freed;

/* A rank whose call may still store, and a rank that closes. */
active proctype late_source()
{
#ifdef MUTANT_CLOSE_UNORDERED
    bool is_open = !closed;
    storing = true;
#else
    storing = true;
    bool is_open = !closed;
#endif
    if
    :: is_open -> assert(!freed)
    :: else
    fi;
    storing = false
}

active proctype closing_owner()
{
    closed = true;
#ifndef MUTANT_CLOSE_UNASKED
    !storing;
#endif
    freed = true
}

init
{
    atomic {
        run cta(0, 0);
        run cta(0, 1);
        run cta(1, 0);
        run cta(1, 1);
        run stream(0);
        run stream(1)
    }
}
