/* SPDX-License-Identifier: Apache-2.0 */
/* The forms of a step that are compared. */
#ifndef BENCH_WAYS_H
#define BENCH_WAYS_H

#include "epic/epic.h"
#include "forms.h"

void must(const epic_context *ctx, epic_result result, const char *what);

/* A context of EPIC over the processes of the job, on one backend. */
typedef struct epic_way {
    epic_context *ctx;
    epic_layer layer;
    void *plan;
    int64_t plan_bytes, slots;
} epic_way;

epic_way *epic_way_new(const job *j, const epic_layer *layer, const char *backend);
void epic_way_free(epic_way *w);
/* returns the number of slots on this rank */
int64_t epic_way_slots(epic_way *w, const job *j);
void epic_way_dispatch(epic_way *w, const job *j);
void epic_way_combine(epic_way *w, const job *j);
void epic_way_gradients(epic_way *w, const job *j);

/* The experts' MLP, equal in all forms: computes d_slabs from slabs. */
typedef struct mlp {
    epic_experts experts;
    bf16 *up, *down;
    void *saved, *workspace;
    int64_t saved_bytes, workspace_bytes, slots;
} mlp;

mlp *mlp_new(const job *j, int inner, int64_t slots);
void mlp_free(mlp *m);
void mlp_run(const mlp *m, const job *j);

#endif
