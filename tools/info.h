/* SPDX-License-Identifier: Apache-2.0 */
/* The two things that epic-info tells; each returns the program's exit status. */
#ifndef EPIC_INFO_H
#define EPIC_INFO_H

#include <stdint.h>
#include <stdio.h>

/* What this build and this machine can do. */
int info_machine(void);

/* What the ranks of a group on this host are doing: as text or JSON; or the last operations of
 * all ranks on one clock, as Perfetto and chrome://tracing read them.  1: no rank was found. */
typedef enum info_form { INFO_TEXT, INFO_JSON, INFO_CHROME } info_form;
int info_group(const char *group, info_form form);

/* A number for a tag among the threads of Perfetto, which have 32 bits. */
static inline uint64_t info_thread(uint64_t tag)
{
    return tag % 1000003;
}

/* "dispatch", of an epic_operation. */
const char *info_operation(uint32_t number);

/* Prints what others have written: what is not printable becomes \xNN. */
void info_text(FILE *to, const char *text);

/* The same as a string of JSON, with its quotes. */
void info_json(FILE *to, const char *text);

/* The same as a label's value of Prometheus, which knows no \u. */
void info_label(FILE *to, const char *text);

#endif
