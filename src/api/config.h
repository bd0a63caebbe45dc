/* SPDX-License-Identifier: Apache-2.0 */
/* Reading an epic_config: defaults, environment, limits. */
#ifndef EPIC_CONFIG_H
#define EPIC_CONFIG_H

#include "backend/backend.h"

/* Fills in every default but num_ranks.  backend and name point to the caller's strings, to the
 * environment, or to constants; backend stays NULL if nobody chose. */
epic_result config_read(epic_config *out, const epic_config *config, size_t size);

/* For the size queries: num_ranks is needed too. */
epic_result config_read_sizes(epic_config *out, const epic_config *config, size_t size);

/* Reads for a memory query the configuration of ctx or, if ctx is NULL, the caller's config, and sets
 * *on_device to whether such a context computes in device memory.  num_ranks stays 0 if the caller's
 * config has none.  Loads no backend.  Errors: EPIC_EINVAL, EPIC_ECLOSED, a failure of ctx. */
epic_result config_of_query(epic_config *out, bool *on_device, epic_context *ctx,
                            const epic_config *config, size_t size);

/* EPIC_TRACE: the folder for traces; NULL: none. */
const char *config_trace(void);

/* Returns whether calls of a layer compare the weights that all ranks hold: EPIC_CHECK_WEIGHTS, or if
 * that is unset, whether this is a debug build (NDEBUG is not defined). */
bool config_checks_weights(void);

/* The name that stands for: "gpu" is one of two, by the hosts that the ranks are on.  NULL stays NULL. */
const char *backend_resolve_name(const char *name, int num_hosts);

/* Sets *on_device to whether contexts of that backend compute in device memory; NULL: they do not.
 * Loads nothing.  Errors: EPIC_EINVAL (no backend has that name). */
epic_result backend_place(bool *on_device, const char *name);

/* The backend of that name: built in, or loaded from its library.  Errors: EPIC_EINVAL (no
 * backend has that name), EPIC_ENOTSUP (its library cannot be loaded). */
epic_result backend_find(const epic_backend **out, const char *name);

/* Copies bytes to the host, from host memory or from that of a device whose backend has been
 * loaded.  False: the device refused. */
bool backend_fetch(void *to, const void *from, size_t bytes);

#endif
