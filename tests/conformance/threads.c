/* SPDX-License-Identifier: Apache-2.0 */
/* The suite on the backend threads. */
#include "run.h"
#include "suite.h"

int main(int argc, char **argv)
{
    /* With a sanitizer 4 ranks take as long as 1 to 3, and 8 ranks run the same code. */
    static const int all[] = {1, 2, 3, 4, 8, 0}, fewer[] = {1, 2, 3, 8, 0};
    const bool few = run_is_sanitized() && run_scale() < 1;
    return suite_main("threads", few ? fewer : all, argc, argv);
}
