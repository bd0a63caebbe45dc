/* SPDX-License-Identifier: Apache-2.0 */
/* Errors: a function returns an epic_result and keeps a sentence for the calling thread. */
#ifndef EPIC_ERROR_H
#define EPIC_ERROR_H

#include "epic/epic.h"

/* Formats the sentence that epic_error() of this thread returns, and returns `result`.  A
 * sentence of more than 511 bytes loses its middle.  Control characters and bytes that are not
 * UTF-8 become '?' (base/text.h). */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
epic_result
epic_fail(epic_result result, const char *format, ...);

/* Returns the sentence of this thread's last failure. */
const char *epic_sentence(void);

/* Copies a sentence to `out`, which has `size` bytes.  A sentence that does not fit loses its
 * middle: the error is at the beginning, the remedy at the end, and a long value of the caller
 * between them.  No UTF-8 character is cut. */
void epic_fit_text(char *out, size_t size, const char *sentence);

/* Returns the remedy for an errno, to end a sentence with; "" if there is none. */
const char *epic_remedy(int error);

/* Returns from the calling function if `call` does not return EPIC_OK. */
#define TRY(call)                                     \
    do {                                              \
        const epic_result try_result = (call);        \
        if (try_result != EPIC_OK) return try_result; \
    } while (0)

#endif
