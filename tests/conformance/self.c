/* SPDX-License-Identifier: Apache-2.0 */
/* The suite on backend self. */
#include "suite.h"

int main(int argc, char **argv)
{
    return suite_main("self", (const int[]){1, 0}, argc, argv);
}
