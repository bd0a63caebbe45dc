/* SPDX-License-Identifier: Apache-2.0 */
/* Backend mpi: ranks are processes of one MPI job and share nothing; everything is a message. */
#include "backend/mpi/group.h"
#include "base/error.h"

static const epic_transport transport = {
    .shares = false,
    .lane_bytes = mpi_lane_bytes,
    .claim = mpi_claim,
    .announce = mpi_announce,
    .note = mpi_note,
    .shape = mpi_shape,
    .room = mpi_room,
    .send = mpi_send,
    .entry = mpi_entry,
    .drop = mpi_drop,
    .finish = mpi_finish,
    .wait = mpi_wait,
    .look = mpi_look,
    .break_group = mpi_break_group,
    .failure = mpi_failure,
    .bytes_sent = mpi_bytes_sent,
};

extern EPIC_API const epic_backend epic_backend_mpi;
const epic_backend epic_backend_mpi = {
    .name = "mpi",
    .can_join = mpi_can_join,
    .join = mpi_join,
    .leave = mpi_leave,
    .memory = mpi_memory,
    .transport = &transport,
    .sentence = epic_sentence,
    .bootstrap = mpi_bootstrap,
};
