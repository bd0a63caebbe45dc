/* SPDX-License-Identifier: Apache-2.0 */
/* One failure style: return an epic_result, leave the sentence with the thread. */
#ifndef EPIC_ERROR_H
#define EPIC_ERROR_H

#include "epic/epic.h"

/* Leaves the sentence for epic_error of this thread and returns `result`.  One that is longer than
 * 511 bytes loses its middle.  Controls and bytes that are no UTF-8 become '?' (base/text.h). */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
epic_result
epic_fail(epic_result result, const char *format, ...);

/* The sentence of this thread's last failure. */
const char *epic_sentence(void);

/* Copies a sentence to a place of `size` bytes.  Where it does not fit it loses its middle: what
 * is wrong stands at the beginning, the way out at the end, and a caller's long word between.  No
 * character of UTF-8 is cut. */
void epic_fit_text(char *out, size_t size, const char *sentence);

/* The way out of an error of the system, to end a sentence with; "" if there is none to name. */
const char *epic_remedy(int error);

#define TRY(call)                                     \
    do {                                              \
        const epic_result try_result = (call);        \
        if (try_result != EPIC_OK) return try_result; \
    } while (0)

#endif
