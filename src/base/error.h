/* SPDX-License-Identifier: Apache-2.0 */
/* A function that fails returns an epic_result and stores an error text for its thread. */
#ifndef EPIC_ERROR_H
#define EPIC_ERROR_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"

/* Stores a formatted error text, which epic_error() returns on this thread, and returns
 * `result`. If the text has more than 511 bytes, its middle is cut out. Control characters and
 * bytes that are not UTF-8 become '?' (base/text.h). */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
epic_result
epic_fail(epic_result result, const char *format, ...);

/* Returns the error text of this thread's last failure. The next failure overwrites the
 * text. */
const char *epic_sentence(void);

/* Returns whether `code` is a value of epic_result. */
static inline bool epic_is_result(int64_t code)
{
    return (uint64_t)code <= EPIC_EEVICTED;
}

/* Copies an error text to `out`, which has `size` bytes. If the text does not fit, " ... "
 * replaces its middle. The middle is cut out because the beginning of an error text contains
 * the field and the end contains the remedy, so the lost part usually is a long value of the
 * caller. No UTF-8 character is cut. */
void epic_fit_text(char *out, size_t size, const char *sentence);

/* Returns the end of an error text for this errno: "; " and a remedy, or "". */
const char *epic_remedy(int error);

/* If `call` does not return EPIC_OK, returns its result from the calling function. */
#define TRY(call)                                     \
    do {                                              \
        const epic_result try_result = (call);        \
        if (try_result != EPIC_OK) return try_result; \
    } while (0)

#endif
