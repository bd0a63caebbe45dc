/* SPDX-License-Identifier: Apache-2.0 */
/* Faults on backend shm. */
#include "faults.h"

int main(void)
{
    return faults_main(true, 300, 6);
}
