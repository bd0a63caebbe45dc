/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that all processes of a group are stopped together, on backend shm. */
#include "stops.h"

int main(void)
{
    const stops_way way = {.backend = "shm", .processes = true, .groups = 28, .width = 7};
    return stops_main(&way);
}
