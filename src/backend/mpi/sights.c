/* SPDX-License-Identifier: Apache-2.0 */
/* Where peers are.  A rank that waits in vain asks the peers that it waits for, and those that
 * they wait for; who is itself in wait() answers.  So at its deadline it knows who is awake, and
 * names only those who are not. */
#include <string.h>

#include "backend/mpi/group.h"

#define MS 1000000ll
#define PATIENCE_NS (50 * MS) /* quiet for so long before the first question */
#define PACE_NS (10 * MS)     /* between two thoughts of asking */
#define AGAIN_NS (100 * MS)   /* after an answer */
#define SILENT_NS (5000 * MS) /* without one: what piles up at a stuck peer stays small */
#define FRESH_NS (500 * MS)
#define MOMENT_NS (100 * MS) /* between two calls of wait() it still counts as waiting */

static letter *free_letter(epic_group *group)
{
    for (int i = 0; i < NUM_LETTERS; i++) {
        int sent = 0;
        if (MPI_Test(&group->letters[i].request, &sent, MPI_STATUS_IGNORE) != MPI_SUCCESS)
            return NULL;
        if (sent) return &group->letters[i];
    }
    return NULL;
}

static bool is_fresh(const sight *s, int64_t now)
{
    return s->answered_ns && now - s->answered_ns <= FRESH_NS;
}

static void ask(epic_group *group, cell *c, int to, int64_t now)
{
    sight *s = &c->sights[to];
    if (to == group->rank || lives_is_gone(group, to) || is_broken(group)) return;
    if (s->asked && now - s->asked_ns < SILENT_NS) return;
    if (!s->asked && s->answered_ns && now - s->answered_ns < AGAIN_NS) return;
    letter *l = free_letter(group);
    if (!l) return;
    s->asked = true;
    s->asked_ns = now;
    l->text =
        (message){.kind = MESSAGE_ASK, .cell = c->index, .tag = c->tag, .place = c->place};
    control_isend(group, &l->text, to, &l->request);
}

/* Adds those that are waited for by those in `whom`, as far as answers tell. */
static void follow(epic_group *group, const cell *c, int64_t now, uint64_t *whom)
{
    uint64_t followed[RANK_WORDS] = {0};
    for (int r = 0; r < group->num_ranks; r++) {
        const sight *s = &c->sights[r];
        if (!has_rank(whom, r) || has_rank(followed, r)) continue;
        if (!is_fresh(s, now) || !s->answer.waiting) continue;
        followed[r / 64] |= 1ull << (r % 64);
        for (int w = 0; w < RANK_WORDS; w++) whom[w] |= s->answer.waits_for[w];
        r = -1; /* a lower rank may have been added */
    }
}

void sights_ask(epic_group *group, cell *c, int64_t now)
{
    if (now - c->waiting.quiet_ns < PATIENCE_NS) return;
    if (now - c->waiting.asked_ns < PACE_NS) return;
    c->waiting.asked_ns = now;
    uint64_t whom[RANK_WORDS];
    memcpy(whom, c->waiting.waits_for, sizeof whom);
    follow(group, c, now, whom);
    for (int r = 0; r < group->num_ranks; r++)
        if (has_rank(whom, r)) ask(group, c, r, now);
}

static void add_waiting(answer *out, const waiting *w, int64_t now)
{
    if (!w->now && now - w->last_ns > MOMENT_NS) return;
    out->waiting = 1;
    for (int i = 0; i < RANK_WORDS; i++) out->waits_for[i] |= w->waits_for[i];
}

/* In the exchange that is asked about, if this rank is there; else anywhere. */
static answer where_am_i(epic_group *group, uint64_t tag, uint64_t place)
{
    answer out = {.operation = group->last_operation,
                  .inside = cells_find(group, group->last_tag, group->last_place) != NULL,
                  .tag = group->last_tag,
                  .place = group->last_place};
    const int64_t now = clock_ns();
    const cell *here = cells_find(group, tag, place);
    if (here) {
        out.phase = here->waiting.phase;
        add_waiting(&out, &here->waiting, now);
        return out;
    }
    add_waiting(&out, &group->waiting, now);
    for (int i = 0; i < group->num_cells; i++)
        if (group->cells[i].state == CELL_OPEN)
            add_waiting(&out, &group->cells[i].waiting, now);
    return out;
}

void sights_answer(epic_group *group, const message *question, int from)
{
    letter *l = is_broken(group) ? NULL : free_letter(group);
    if (!l) return;
    l->text = (message){.kind = MESSAGE_ANSWER,
                        .cell = question->cell,
                        .tag = question->tag,
                        .place = question->place,
                        .answer = where_am_i(group, question->tag, question->place)};
    control_isend(group, &l->text, from, &l->request);
}

void sights_keep(epic_group *group, const message *reply, int from)
{
    cell *c = cells_find(group, reply->tag, reply->place);
    if (!c || c->index != reply->cell) return; /* that exchange is over */
    sight *s = &c->sights[from];
    s->asked = false;
    s->answered_ns = clock_ns();
    s->answer = reply->answer;
}

static bool has_come(epic_group *group, int from, const cell *c, uint64_t tag, uint64_t place)
{
    const peer *p = &group->peers[from];
    if (c && atomic_load_explicit(&c->came[from], memory_order_relaxed)) return true;
    if (p->operation && p->tag == tag && p->place >= place) return true;
    for (uint32_t i = 0; p->num_early && i < group->max_early; i++)
        if (p->early[i].full && p->early[i].tag == tag && p->early[i].place >= place)
            return true;
    return false;
}

static void tell_note(epic_group *group, int from, epic_sight *out)
{
    const peer *p = &group->peers[from];
    out->operation = p->operation;
    out->tag = p->tag;
    out->place = p->place;
    out->inside = p->operation && cells_find(group, p->tag, p->place);
}

static void tell_answer(const answer *a, bool fresh, epic_sight *out)
{
    out->phase = a->phase;
    if (!fresh) return;
    out->waiting = a->waiting;
    memcpy(out->waits_for, a->waits_for, sizeof out->waits_for);
    out->operation = a->operation;
    out->tag = a->tag;
    out->place = a->place;
    out->inside = a->inside;
}

void sights_look(epic_group *group, int from, uint64_t tag, uint64_t place, epic_sight *out)
{
    memset(out, 0, sizeof *out);
    const int64_t now = clock_ns();
    cell *c = cells_find(group, tag, place);
    out->came = has_come(group, from, c, tag, place);
    lives_look(group, now);
    out->closed = group->peers[from].closed;
    out->gone = lives_is_gone(group, from);
    tell_note(group, from, out);
    if (c && c->sights[from].answered_ns)
        tell_answer(&c->sights[from].answer, is_fresh(&c->sights[from], now), out);
    if (c && !out->gone) ask(group, c, from, now);
}
