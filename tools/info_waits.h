/* SPDX-License-Identifier: Apache-2.0 */
/* Prints how long ranks have waited for each other, from their flight recorders. */
#ifndef EPIC_INFO_WAITS_H
#define EPIC_INFO_WAITS_H

#include "recordings.h"

/* Prints the peers for which a rank has waited longest. Prints nothing if it has not waited. */
void waits_print(const recording *s);

/* Prints all waiting times of a rank, as a member "waits" of a JSON object. */
void waits_print_json(const recording *s);

/* Prints the ranks for which the `num` ranks in the list have waited longest: the slow ranks of
 * the group. Prints nothing if no rank has waited. */
void waits_print_group(const recording *list, int num);

#endif
