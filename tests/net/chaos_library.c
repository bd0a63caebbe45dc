/* SPDX-License-Identifier: Apache-2.0 */
/* libepic_chaos.so, for EPIC_NET=chaos. The net is strict. Environment variables choose the
 * rest: EPIC_CHAOS_SEED; EPIC_CHAOS_DAMAGE (a chaos_damage); EPIC_CHAOS_SLOW=1,
 * EPIC_CHAOS_LATE=1 and EPIC_CHAOS_LAST=1 (chaos.h); EPIC_CHAOS_OUT_OF_REACH (0 is the first
 * host); EPIC_CHAOS_CUT=A,B (puts of host A to host B are lost). EPIC_CHAOS_STRICT=0 is for
 * groups that are broken on purpose: warps of a kernel that has given up may continue with the
 * next round, whose rows no rank reads. */
#include <stdio.h>
#include <stdlib.h>

#include "net/chaos.h"

__attribute__((constructor)) static void read_environment(void)
{
    const char *seed = getenv("EPIC_CHAOS_SEED"), *damage = getenv("EPIC_CHAOS_DAMAGE");
    const char *strict = getenv("EPIC_CHAOS_STRICT"), *slow = getenv("EPIC_CHAOS_SLOW"),
               *late = getenv("EPIC_CHAOS_LATE"), *last = getenv("EPIC_CHAOS_LAST"),
               *out_of_reach = getenv("EPIC_CHAOS_OUT_OF_REACH"),
               *cut = getenv("EPIC_CHAOS_CUT");
    chaos_settings_now.strict = !strict || *strict != '0';
    chaos_settings_now.slow = slow && *slow == '1';
    chaos_settings_now.late = late && *late == '1';
    chaos_settings_now.last = last && *last == '1';
    chaos_settings_now.out_of_reach = out_of_reach ? atoi(out_of_reach) + 1 : 0;
    if (cut &&
        sscanf(cut, "%d,%d", &chaos_settings_now.cut_from, &chaos_settings_now.cut_to) == 2) {
        chaos_settings_now.cut_from++;
        chaos_settings_now.cut_to++;
    }
    if (seed) chaos_settings_now.seed = strtoull(seed, NULL, 10);
    if (damage) chaos_settings_now.damage = (chaos_damage)atoi(damage);
}
