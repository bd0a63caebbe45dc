/* SPDX-License-Identifier: Apache-2.0 */
/* Faults on backend shm. */
#include "faults.h"

int main(void)
{
    const faults_way way = {.backend = "shm", .processes = true, .deaths = true};
    return faults_main(&way, 300, 6);
}
