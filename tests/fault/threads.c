/* SPDX-License-Identifier: Apache-2.0 */
/* Faults on backend threads. */
#include "faults.h"

int main(void)
{
    return faults_main(false, 300, 6);
}
