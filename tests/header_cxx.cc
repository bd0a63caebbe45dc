/* SPDX-License-Identifier: Apache-2.0 */
/* Checks that the public headers compile in C++17 without other headers and can be included
 * twice, and that their functions have C names. */
#include "epic/epic.h"
#include "epic/placement.h"

int main()
{
    const epic_config config{};
    epic_plan_args plan{};
    plan.call.tag = 1;
    const bool well = config.backend == nullptr && plan.capacity == EPIC_CAPACITY_EXACT;
    epic_placement place;
    if (epic_placement_read(&place, "/no/such") == nullptr) return 1;
    return well && epic_version() == EPIC_VERSION ? 0 : 1;
}
