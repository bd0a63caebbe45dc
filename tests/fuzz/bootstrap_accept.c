/* SPDX-License-Identifier: Apache-2.0 */
/* Fuzzes rank 0 of a TCP bootstrap: the input is what arrives on its connections. */
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "fuzz/script.h"
#include "fuzz/world.h"

#define MAX_JOINERS 8
#define BYTES 24

static script s;
static int joiners[MAX_JOINERS], num_joiners;

/* Opens the next connection of the script. */
static int come(void)
{
    epic_endpoints places;
    if (s.left == 0 || num_joiners == MAX_JOINERS) return 0;
    (void)epic_tcp_endpoints(&places, NULL, NULL);
    const int joiner = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(joiner, (struct sockaddr *)&places.at[0].address, places.at[0].bytes) != 0)
        return close(joiner), 0;
    joiners[num_joiners++] = joiner;
    script_play(&s, joiner);
    return 1;
}

/* Closes connections that were not accepted and still wait in the listener's queue. */
static void sweep(void)
{
    int late;
    while ((late = accept(script_listener(), NULL, NULL)) >= 0) close(late);
    while (num_joiners > 0) close(joiners[--num_joiners]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    epic_bootstrap bootstrap;
    uint8_t mine[BYTES] = {1}, all[4 * BYTES];
    s = (script){.at = data, .left = size};
    const uint8_t flags = script_byte(&s);
    s.has_secret = flags & 1;
    s.num_ranks = 2 + (flags >> 1) % 3;
    const epic_tcp tcp = {.secret = s.has_secret ? SCRIPT_SECRET : NULL,
                          .num_ranks = s.num_ranks,
                          .port = 1,
                          .timeout_ms = SCRIPT_MS};
    fuzz_begin(6 * SCRIPT_MS); /* for the bootstrap, three gathers, and closing */
    fuzz_turn = come;
    epic_result result = epic_bootstrap_tcp(&bootstrap, &tcp);
    for (int i = 0; i < 3 && result == EPIC_OK; i++) {
        result = bootstrap.gather(bootstrap.self, mine, all, sizeof mine);
        if (result == EPIC_OK && memcmp(all, mine, sizeof mine) != 0) __builtin_trap();
    }
    if (result < EPIC_OK || result > EPIC_EEVICTED) __builtin_trap();
    epic_bootstrap_close(&bootstrap);
    sweep();
    return 0;
}
