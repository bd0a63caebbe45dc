/* SPDX-License-Identifier: Apache-2.0 */
/* Reads and checks an epic_config, and fills in defaults, some of them from environment
 * variables. Finds backends by name. */
#ifndef EPIC_CONFIG_H
#define EPIC_CONFIG_H

#include "backend/backend.h"

/* Reads a caller's config, checks it, and fills in every default except num_ranks. Copies no
 * strings: out->backend and out->name point to the caller's strings, to the environment, or to
 * constants. out->backend stays NULL if neither the caller nor EPIC_BACKEND chose a backend.
 * Errors: EPIC_EINVAL. */
epic_result config_read(epic_config *out, const epic_config *config, size_t size);

/* Like config_read(), for a size query. Returns EPIC_EINVAL if config->num_ranks is 0,
 * because a size query has no bootstrap from which to read the number of ranks. */
epic_result config_read_sizes(epic_config *out, const epic_config *config, size_t size);

/* Writes the config for a size query to *out: the config of ctx, or the caller's config if ctx
 * is NULL. Sets *on_device to true if a context with this config computes in device memory. If
 * the caller's num_ranks is 0, out->num_ranks stays 0. Loads no plugin. Errors: EPIC_EINVAL,
 * EPIC_ECLOSED and, if the group of ctx has failed, the error with which it failed. */
epic_result config_of_query(epic_config *out, bool *on_device, epic_context *ctx,
                            const epic_config *config, size_t size);

/* Returns the folder for traces (EPIC_TRACE), or NULL if traces are not enabled. */
const char *config_trace(void);

/* Returns true if the environment variable EPIC_CHECK_WEIGHTS is set. If it is set, the calls
 * of a layer compare checksums of the weights that must be equal on all ranks. */
bool config_checks_weights(void);

/* Replaces "gpu" by "p2p" if is_near is true, and by "hosts" otherwise. is_near: true if all
 * ranks are on one host or in one NVLink domain. Returns other names and NULL unchanged. */
const char *backend_resolve_name(const char *name, bool is_near);

/* Sets *on_device to true if contexts of backend `name` compute in device memory. Sets it to
 * false if they compute in host memory, or if `name` is NULL. Loads no plugin. Returns
 * EPIC_EINVAL if no backend has that name. */
epic_result backend_place(bool *on_device, const char *name);

/* Finds the backend with this name for a group of num_ranks ranks with these flags
 * (epic_config.flags), and loads its plugin if it has one. The number of ranks and the flags
 * select the plugin, for example libepic_cuda.so, libepic_cuda_regroup.so or
 * libepic_cuda_many.so. Returns EPIC_EINVAL if no backend has that name, and EPIC_ENOTSUP if the
 * backend does not support the flags or its plugin cannot be loaded. Any thread may call this
 * function. */
epic_result backend_find(const epic_backend **out, const char *name, int num_ranks,
                         uint32_t flags);

/* Returns whether a backend in libepic.so (epic_backends) supports epic_config.flags. */
bool backend_supports(const epic_backend *backend, uint32_t flags);

/* Copies bytes to host memory. Requires that `from` points to host memory, or to device memory
 * of a backend whose plugin is loaded. Waits for the device. Returns false if the copy
 * failed. */
bool backend_fetch(void *to, const void *from, size_t bytes);

#endif
