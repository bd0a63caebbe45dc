/* SPDX-License-Identifier: Apache-2.0 */
/* Which context a device has in a group of a given name.  Programs know the name alone; it is
 * looked up at every call, so a group may be closed and opened again under a compiled program. */
#ifndef EPIC_JAX_SEATS_H
#define EPIC_JAX_SEATS_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"

enum { SEATS_NAME = 64, SEATS_DEVICES = 256 };

typedef struct seat seat;

typedef struct seat_device {
    bool is_gpu;
    int32_t ordinal; /* as XLA counts them */
} seat_device;

/* An operation on a seat, from seat_enter to seat_leave. */
typedef struct seat_use {
    seat *seat;
    epic_context *ctx;
    uint64_t tag;
    struct seat_use *next; /* the seats' */
} seat_use;

typedef enum seat_answer {
    SEAT_OK,
    SEAT_NONE,          /* no such group on this device of that platform */
    SEAT_OTHER_DEVICES, /* the group of that name was opened with other devices */
    SEAT_OTHER_RANK,    /* the program's mesh has this device at another rank */
    SEAT_TAG_BUSY       /* the tag has an operation in flight here (on the host only) */
} seat_answer;

/* What a program takes for granted, or what a seat has: the devices of the group as epic.jax
 * writes them, "" if they are unknown, and the rank of this device, -1 if it is. */
typedef struct seat_place {
    char devices[SEATS_DEVICES];
    int32_t rank;
} seat_place;

/* Begins an operation of use->tag.  After SEAT_OTHER_DEVICES and SEAT_OTHER_RANK `place` is what
 * the seat has.  All ranks get the first of these, as their program is the same.  After the
 * second and SEAT_TAG_BUSY, which only some may get, the peers have been told that this operation
 * will not come. */
seat_answer seat_enter(seat_use *use, const char *name, seat_device device, seat_place *place);
void seat_leave(seat_use *use);

/* The same for work that is no operation of the group: on any seat of the device. */
seat_answer seat_borrow(seat_use *use, seat_device device);

/* For Python.  0: done; 1: the name is taken on that device, or a text is too long; 2: no memory. */
int epic_jax_seat_add(const char *name, int is_gpu, int32_t ordinal, const char *devices,
                      int32_t rank, epic_context *ctx);

/* Takes the seat away, waits for its operations to end and returns its context; NULL: there was
 * none. */
epic_context *epic_jax_seat_remove(const char *name, int is_gpu, int32_t ordinal);

#endif
