/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that the process of all ranks is stopped, on backend threads. */
#include "stops.h"

int main(void)
{
    const stops_way way = {.backend = "threads", .groups = 28, .width = 7};
    return stops_main(&way);
}
