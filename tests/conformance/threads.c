/* SPDX-License-Identifier: Apache-2.0 */
/* The suite on the backend threads. */
#include "suite.h"

int main(int argc, char **argv)
{
    return suite_main("threads", (const int[]){1, 2, 3, 4, 8, 0}, argc, argv);
}
