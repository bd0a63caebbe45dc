/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the next generation of a group, also of a group that is broken
 * (docs/internals/members.md). This is the internal part of epic_regroup, which is not public
 * yet. */
#ifndef EPIC_REGROUP_H
#define EPIC_REGROUP_H

#include "context/context.h"

/* Arguments of regroup_run(). */
typedef struct regroup_args {
    uint32_t patience_ms; /* how long to wait for members that live and do not come; 0: the
                             timeout of the context */
    uint32_t min_members; /* with fewer nothing changes: EPIC_EPEER; 0: 1 */
    bool is_leaving;      /* true: this rank leaves the group */
    int64_t step;         /* the last finished step of this rank */
} regroup_args;

/* The members after a call of regroup_run(). */
typedef struct regroup_info {
    uint64_t generation; /* 0 after epic_open */
    uint64_t group_id;
    seat_set members;
    int64_t least_step, greatest_step; /* of the steps that the members passed */
} regroup_info;

/* Makes the next generation. All members that live call it, and no other call may be running on
 * ctx. After EPIC_OK the group works again, with the members in *out; every tag begins anew, and
 * plans of before are refused. If this rank leaves, it may only close the context.
 * Errors: (a) EPIC_EINVAL, EPIC_ENOTSUP, EPIC_ENOMEM: nothing has changed; EPIC_EPEER (too few
 * members came), EPIC_ETIMEOUT: the call may be repeated; EPIC_EPEER (the others went on without
 * this rank): only epic_close is possible. */
epic_result regroup_run(epic_context *ctx, const regroup_args *args, regroup_info *out);

#endif
