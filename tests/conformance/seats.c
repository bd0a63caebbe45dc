/* SPDX-License-Identifier: Apache-2.0 */
/* The suite in groups with vacant seats, on the backends threads and shm. The oracle knows only
 * the members. So the results must be those of a group that has only the members. */
#include "context/context.h"

#include <stdio.h>

#include "check.h"
#include "suite.h"

static void set_members(epic_context *ctx, const world_seats *seats)
{
    seat_set members = {{0}};
    for (int m = 0; m < seats->num_members; m++) seat_set_add(&members, seats->of[m]);
    CHECK_SAY(context_set_members(ctx, &members) == EPIC_OK, "%s", epic_error(ctx));
}

int main(void)
{
    static const world_seats groups[] = {
        {3, 1, {1}}, {3, 2, {0, 2}}, {4, 3, {1, 2, 3}}, {8, 4, {1, 2, 3, 6}}};
    check_begin();
    printf("seed %llu\n", (unsigned long long)run_seed());
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
        suite_run_vacant("threads", &groups[g], set_members);
        suite_run_vacant("shm", &groups[g], set_members);
    }
    return check_end();
}
