/* SPDX-License-Identifier: Apache-2.0 */
/* Checks that the public headers compile in C11 without other headers, and that their version
 * is the library's. */
#include "epic/epic.h"
#include "epic/placement.h"

int main(void)
{
    const epic_config config = {.max_tokens = 1, .max_row_bytes = 16};
    const epic_layer layer = {.num_experts = 1, .top_k = 1};
    const epic_call call = {0};
    const int well = config.num_ranks == 0 && layer.leaves == 0 && call.tag == 0;
    epic_placement place;
    if (!epic_placement_read(&place, "/no/such")) return 1;
    return well && epic_version() == EPIC_VERSION ? 0 : 1;
}
