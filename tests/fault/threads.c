/* SPDX-License-Identifier: Apache-2.0 */
/* Faults on backend threads. */
#include "faults.h"

int main(void)
{
    const faults_way way = {.backend = "threads"};
    return faults_main(&way, 300, 6);
}
