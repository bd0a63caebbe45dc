/* SPDX-License-Identifier: Apache-2.0 */
/* Fuzzes the decision on the next generation (src/context/members.c). The first byte chooses
 * the number of seats and whether the input forges messages. Each following pair of bytes is an
 * event of the simulated group. Without forged messages, no two living seats may ever be in the
 * same generation with different members. With them, nothing may crash. */
#include "unit/members.h"

typedef struct input {
    const uint8_t *data;
    size_t left;
} input;

static unsigned take_byte(input *in)
{
    if (in->left == 0) return 0;
    in->left--;
    return *in->data++;
}

/* Delivers a message whose bytes come from the input, after a valid beginning. */
static void forge_message(sim *s, int from, int to, input *in)
{
    members_message message = {
        .kind = take_byte(in) % 10,
        .flags = take_byte(in),
        .generation = SIM_GENERATION - 1 + take_byte(in) % 4,
        .ballot = {take_byte(in) % 3, take_byte(in), take_byte(in) % 9},
        .accepted = {take_byte(in) % 3, take_byte(in), take_byte(in) % 9}};
    message.proposal.members.words[take_byte(in) % 100 ? 0 : 3] = take_byte(in);
    message.proposal.group_id = take_byte(in);
    message.dead.words[0] = take_byte(in);
    if (!sim_is_in_call(s, to)) return;
    members_receive(&s->seats[to].machine, from, &message, s->now);
    sim_answer(s, to);
}

static void handle_event(sim *s, input *in, bool forges)
{
    const unsigned what = take_byte(in), who = take_byte(in);
    const int a = (int)(who & 15) % s->num_seats, b = (int)(who >> 4) % s->num_seats;
    sim_seat *seat = &s->seats[a];
    switch (what % 16) {
    case 0:
        sim_report(s, a, b);
        return;
    case 1:
    case 2:
        sim_begin(s, a);
        return;
    case 3:
        sim_pass_time(s, (what >> 4) * SIM_PATIENCE / 16);
        return;
    case 4:
        if (seat->sends_left < 0) seat->sends_left = (int)(what >> 4);
        return;
    case 5:
        seat->is_stopped = !seat->is_stopped;
        return;
    case 6:
        seat->call.leaving = !seat->call.leaving;
        return;
    case 7:
        seat->refuses = !seat->refuses;
        return;
    case 8:
        if (forges) forge_message(s, a, b, in);
        return;
    default:
        sim_deliver(s, a, b);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    const unsigned first = take_byte(&in);
    const bool forges = first & 1;
    sim *s = sim_new(2 + (int)(first >> 1) % (SIM_SEATS - 1));
    while (in.left > 0) {
        handle_event(s, &in, forges);
        if (!forges && !sim_agrees(s)) abort();
    }
    free(s);
    return 0;
}
