/* SPDX-License-Identifier: Apache-2.0 */
/* Structs that travel with their size: shorter, equal, longer with a zero tail and without. */
#include "core/sized.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

typedef struct ours {
    uint32_t a, b, c, d;
} ours;

static int failures;

static void check(size_t size, unsigned char tail, epic_result expected, size_t copied)
{
    unsigned char theirs[40];
    unsigned char got[sizeof(ours)];
    memset(theirs, 0x11, sizeof(ours));
    memset(theirs + sizeof(ours), 0, sizeof theirs - sizeof(ours));
    if (size > sizeof(ours)) theirs[size - 1] = tail;
    memset(got, 0xee, sizeof got);
    const epic_result result = epic_sized(got, sizeof got, theirs, size, "epic_thing");
    bool good = result == expected;
    for (size_t i = 0; i < sizeof got && good; i++)
        good = got[i] == (expected != EPIC_OK ? 0xee : i < copied ? 0x11 : 0);
    if (good && expected != EPIC_OK) good = strstr(epic_error(NULL), "epic_thing") != NULL;
    if (good) return;
    printf("size %zu, tail %d: %s: %s\n", size, tail, epic_result_name(result),
           epic_error(NULL));
    failures++;
}

int main(void)
{
    ours got;
    for (size_t size = 1; size <= sizeof got; size++) check(size, 0, EPIC_OK, size);
    for (size_t size = sizeof got + 1; size <= 40; size++) {
        check(size, 0, EPIC_OK, sizeof got);
        check(size, 1, EPIC_EINVAL, 0);
    }
    check(0, 0, EPIC_EINVAL, 0);
    failures += epic_sized(&got, sizeof got, NULL, sizeof got, "epic_thing") != EPIC_EINVAL;
    return failures == 0 ? 0 : 1;
}
