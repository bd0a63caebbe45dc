/* SPDX-License-Identifier: Apache-2.0 */
/* Fuzzes rank 1 of a TCP bootstrap: the input is what arrives from the address of rank 0. */
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fuzz/script.h"
#include "fuzz/world.h"

#define MOST_VISITS 64
#define BYTES 24

static script s;
static int visits[MOST_VISITS], num_visits;

/* Accepts a connection and sends the script's bytes. */
static int answer(void)
{
    const int visit = accept(script_listener(), NULL, NULL);
    if (visit < 0) return 0;
    if (num_visits == MOST_VISITS || s.left == 0) return close(visit), 1;
    visits[num_visits++] = visit;
    script_play(&s, visit);
    return 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    epic_bootstrap bootstrap;
    uint8_t mine[BYTES] = {1}, all[4 * BYTES];
    s = (script){.at = data, .left = size, .listener = true};
    const uint8_t flags = script_byte(&s);
    s.has_secret = flags & 1;
    s.num_ranks = 2 + (flags >> 1) % 3;
    const epic_tcp tcp = {.secret = s.has_secret ? SCRIPT_SECRET : NULL,
                          .rank = 1,
                          .num_ranks = s.num_ranks,
                          .port = 1,
                          .timeout_ms = SCRIPT_MS};
    fuzz_begin(4 * SCRIPT_MS + 100); /* for the bootstrap and three gathers */
    fuzz_turn = answer;
    epic_result result = epic_bootstrap_tcp(&bootstrap, &tcp);
    for (int i = 0; i < 3 && result == EPIC_OK; i++)
        result = bootstrap.gather(bootstrap.self, mine, all, sizeof mine);
    if (result < EPIC_OK || result > EPIC_EEVICTED) __builtin_trap();
    epic_bootstrap_close(&bootstrap);
    while (answer()) continue;
    while (num_visits > 0) close(visits[--num_visits]);
    return 0;
}
