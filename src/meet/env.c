/* SPDX-License-Identifier: Apache-2.0 */
/* Meetings that the environment describes, as launchers set it. */
#include <stdlib.h>

#include "meet/meet.h"

typedef struct launcher {
    const char *rank;
    const char *num_ranks;
    bool needs_address; /* its own launcher sets MASTER_ADDR; else 127.0.0.1 is meant */
} launcher;

/* In the order in which they are looked for. */
static const launcher launchers[] = {
    {"RANK", "WORLD_SIZE", true},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", false},
    {"PMI_RANK", "PMI_SIZE", false},
};

/* The integer that a variable holds, if it is set: decimal digits and nothing else. */
static epic_result parse(const char *name, int64_t least, int64_t most, int64_t *out)
{
    const char *text = getenv(name);
    int64_t value = 0;
    if (text == NULL) return EPIC_OK;
    bool good = text[0] != '\0';
    for (const char *at = text; *at != '\0' && good; at++) {
        good = *at >= '0' && *at <= '9';
        if (good) value = value * 10 + (*at - '0');
        good = good && value <= most;
    }
    if (!good || value < least)
        return epic_fail(EPIC_EINVAL, "%s is \"%.64s\": an integer from %lld to %lld", name,
                         text, (long long)least, (long long)most);
    *out = value;
    return EPIC_OK;
}

static epic_result need(const char *name, const char *because)
{
    if (getenv(name) != NULL) return EPIC_OK;
    return epic_fail(EPIC_EINVAL, "%s is set and %s is not: set both", because, name);
}

static const launcher *find_launcher(void)
{
    for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++)
        if (getenv(launchers[i].rank) != NULL || getenv(launchers[i].num_ranks) != NULL)
            return &launchers[i];
    return NULL;
}

/* Where the ranks meet, if there are several. */
static epic_result check_master(const launcher *l, int64_t num_ranks)
{
    static const char *const names[] = {"MASTER_PORT", "MASTER_ADDR"};
    for (int i = 0; i < (l->needs_address ? 2 : 1) && num_ranks > 1; i++)
        if (getenv(names[i]) == NULL)
            return epic_fail(EPIC_EINVAL,
                             "%s is %lld and %s is not set: the ranks meet at MASTER_ADDR, the "
                             "host of rank 0, port MASTER_PORT, free there",
                             l->num_ranks, (long long)num_ranks, names[i]);
    return EPIC_OK;
}

static epic_result read_launcher(epic_tcp *tcp, const launcher *l)
{
    int64_t rank = 0, num_ranks = 0, port = 0, timeout_ms = 0;
    TRY(need(l->num_ranks, l->rank));
    TRY(need(l->rank, l->num_ranks));
    TRY(parse(l->num_ranks, 1, MEET_MAX_RANKS, &num_ranks));
    TRY(parse(l->rank, 0, num_ranks - 1, &rank));
    TRY(parse("MASTER_PORT", 1, 65535, &port));
    const char *patience = getenv("EPIC_TIMEOUT_MS"); /* empty is unset, as in epic_open */
    if (patience != NULL && patience[0] != '\0')
        TRY(parse("EPIC_TIMEOUT_MS", 1, UINT32_MAX, &timeout_ms));
    TRY(check_master(l, num_ranks));
    tcp->rank = (int32_t)rank;
    tcp->num_ranks = (int32_t)num_ranks;
    tcp->port = (uint32_t)port;
    tcp->timeout_ms = (uint32_t)timeout_ms;
    tcp->address = getenv("MASTER_ADDR");
    tcp->secret = getenv("EPIC_SECRET");
    return EPIC_OK;
}

/* No launcher: then half of what one would have set is a mistake. */
static epic_result check_alone(void)
{
    static const char *const names[] = {"MASTER_ADDR", "MASTER_PORT"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i]) != NULL)
            return epic_fail(
                EPIC_EINVAL,
                "%s is set, and RANK and WORLD_SIZE are not: set them, or unset it "
                "for a meeting of one rank",
                names[i]);
    return EPIC_OK;
}

epic_result epic_meet_env(epic_meet *out)
{
    epic_tcp tcp = {0};
    const launcher *l = find_launcher();
    if (out == NULL) return epic_fail(EPIC_EINVAL, "out is NULL: pass an epic_meet to fill in");
    *out = (epic_meet){0}; /* so that a failed meeting can be closed too */
    TRY(l != NULL ? read_launcher(&tcp, l) : check_alone());
    if (tcp.num_ranks > 1) return epic_meet_tcp(out, &tcp, sizeof tcp);
    epic_meet_alone(out);
    return EPIC_OK;
}
