/* SPDX-License-Identifier: Apache-2.0 */
/* The reports of epic-info, and functions that print text from other processes safely. */
#ifndef EPIC_INFO_H
#define EPIC_INFO_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#define INFO_PATH 4352 /* size of the path of a plugin */

/* Prints what this build and this machine can do. `sysfs` is the folder of sysfs, from which it
 * reads GPUs and NICs. With `with_variables` also prints the variables of the backend hosts. */
void info_machine(FILE *to, const char *sysfs, bool with_variables);

/* Loads a plugin of EPIC, such as "libepic_ucx.so". Searches the folder of libepic.so (in a
 * build or an installation) first, then the search path of the system's loader. On an error
 * returns NULL and sets `path` to the file that could not be loaded (dlerror() returns the
 * reason), or to "" if there is no such file. */
void *info_open_plugin(char path[INFO_PATH], const char *library);

/* Writes a report on this process, its machine and its group to the file `path`, which a user
 * can send to the developers. Only rank 0 writes a file. Returns the exit status. */
int info_report(const char *path);

/* Formats of the report on a group: text, JSON, or the last operations of all ranks as a trace
 * for Perfetto and chrome://tracing. */
typedef enum info_form { INFO_TEXT, INFO_JSON, INFO_CHROME } info_form;
/* Prints what the ranks of a group on this host are doing. Returns the exit status: 1 if no
 * rank was found, and 0 if one was. */
int info_group(const char *group, info_form form);

/* Formats a duration, for example "1.5 ms". Returns `out`. */
const char *info_duration(int64_t ns, char out[32]);

/* Returns a thread id for a tag, because a trace shows each tag as a thread. Perfetto's thread
 * ids have 32 bits. */
static inline uint64_t info_thread(uint64_t tag)
{
    return tag % 1000003;
}

/* Returns the name of an epic_operation, for example "dispatch". */
const char *info_operation(uint32_t number);

/* Prints text from another process. Prints each unprintable byte as \xNN. */
void info_text(FILE *to, const char *text);

/* Prints text as a JSON string, including the quotes. */
void info_json(FILE *to, const char *text);

/* Prints text as the value of a Prometheus label, including the quotes. Prometheus does not
 * support \u. */
void info_label(FILE *to, const char *text);

#endif
