/* SPDX-License-Identifier: Apache-2.0 */
/* libepic_chaos.so, for EPIC_WIRE=chaos: strict, and with a seed (EPIC_CHAOS_SEED) and a damage
 * (EPIC_CHAOS_DAMAGE, a chaos_damage) that the environment chooses.  EPIC_CHAOS_STRICT=0 is for groups
 * that are broken on purpose: warps of a kernel that has given up may go on to the next round, whose
 * rows nobody reads. */
#include <stdlib.h>

#include "wire/chaos.h"

__attribute__((constructor)) static void read_environment(void)
{
    const char *seed = getenv("EPIC_CHAOS_SEED"), *damage = getenv("EPIC_CHAOS_DAMAGE");
    const char *strict = getenv("EPIC_CHAOS_STRICT");
    chaos_settings_now.strict = !strict || *strict != '0';
    if (seed) chaos_settings_now.seed = strtoull(seed, NULL, 10);
    if (damage) chaos_settings_now.damage = (chaos_damage)atoi(damage);
}
