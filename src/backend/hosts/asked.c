/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/hosts/asked.h"

#include <stdlib.h>
#include <string.h>

#include "base/cores.h"
#include "base/error.h"

#define MOST_THREADS 7    /* of a rank's net beside its own; */
#define USUAL_THREADS 6   /* unless the user says, up to so many, */
#define FEWEST_THREADS 2  /* as one would only take what its own does, */
#define CORES_OF_THREAD 2 /* of so many cores each; as measured, docs/lab/hosts.md */

const net_engine *hosts_ask_engine(char *why)
{
    const char *name = getenv("EPIC_NET");
    return net_find(name && *name ? name : "ucx", why);
}

enum { SAYS_NO, SAYS_YES, SAYS_NOTHING };

static epic_result read_switch(const char *name, const char *without, int *says)
{
    const char *text = getenv(name);
    *says = !text || !*text ? SAYS_NOTHING : *text == '0' ? SAYS_NO : SAYS_YES;
    if (*says == SAYS_NOTHING || !strcmp(text, "0") || !strcmp(text, "1")) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "%s=%.32s: must be 0 or 1; without it %s", name, text,
                     without);
}

static epic_result read_puts(net_puts *puts)
{
    int says;
    TRY(read_switch("EPIC_NET_RDMA", "remote writes are taken where they keep words whole",
                    &says));
    *puts = says == SAYS_NOTHING ? NET_PUT_IF_WHOLE
            : says == SAYS_NO    ? NET_PUT_NEVER
                                 : NET_PUT_ALWAYS;
    return EPIC_OK;
}

static epic_result read_relays(bool *relays)
{
    int says;
    TRY(read_switch("EPIC_NET_RELAY", "rows go once to each host", &says));
    *relays = says != SAYS_NO;
    return EPIC_OK;
}

/* A number, 0 to `most`; -1: it is not set. */
static epic_result read_number(const char *name, const char *what, const char *without,
                               int32_t most, int32_t *out)
{
    const char *text = getenv(name);
    char *end;
    *out = -1;
    if (!text || !*text) return EPIC_OK;
    const long number = strtol(text, &end, 10);
    if (end == text || *end || number < 0 || number > most)
        return epic_fail(EPIC_EINVAL,
                         "%s=%.32s: must be the number of %s, 0 to %d; without it %s", name,
                         text, what, most, without);
    *out = (int32_t)number;
    return EPIC_OK;
}

/* Of most operations all tokens, as what lies there in large parcels goes fastest; measured,
 * docs/lab/hosts.md. */
static epic_result read_ahead(int32_t *ahead)
{
    TRY(read_number("EPIC_NET_WINDOW", "tokens that are sent before one is received", "8192",
                    INT32_MAX, ahead));
    if (*ahead < 0) *ahead = 8192;
    return EPIC_OK;
}

static epic_result read_threads(int32_t *threads)
{
    return read_number("EPIC_NET_THREADS", "threads of a rank's net beside the one it has",
                       "as many as there are cores for", MOST_THREADS, threads);
}

int32_t hosts_threads(const hosts_asked *asked, int ranks)
{
    const core_set cores = cores_mine();
    const int32_t some = cores_count(&cores) / ranks / CORES_OF_THREAD;
    if (asked->threads >= 0) return asked->threads;
    if (some < FEWEST_THREADS) return 0;
    return some < USUAL_THREADS ? some : USUAL_THREADS;
}

hosts_memory hosts_ask_memory(void)
{
    const char *text = getenv("EPIC_NET_MEMORY");
    if (!text) return HOSTS_MEMORY_ANY;
    return !strcmp(text, "gpu")    ? HOSTS_MEMORY_GPU
           : !strcmp(text, "host") ? HOSTS_MEMORY_HOST
                                   : HOSTS_MEMORY_ANY;
}

static epic_result read_memory(hosts_memory *memory)
{
    const char *text = getenv("EPIC_NET_MEMORY");
    *memory = hosts_ask_memory();
    if (!text || !*text || *memory != HOSTS_MEMORY_ANY) return EPIC_OK;
    return epic_fail(EPIC_EINVAL,
                     "EPIC_NET_MEMORY=%.32s: must be gpu or host; without it memory lies on "
                     "the GPU where all ranks can have it there",
                     text);
}

epic_result hosts_ask(hosts_asked *out)
{
    char why[NET_WHY];
    TRY(read_relays(&out->relays));
    TRY(read_puts(&out->puts));
    TRY(read_ahead(&out->ahead));
    TRY(read_threads(&out->threads));
    TRY(read_memory(&out->memory));
    out->engine = hosts_ask_engine(why);
    return out->engine ? EPIC_OK : epic_fail(EPIC_ENOTSUP, "%s", why);
}
