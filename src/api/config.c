/* SPDX-License-Identifier: Apache-2.0 */
/* Reads configurations. This file reads all environment variables of libepic.so except
 * EPIC_HOST (rank_info.c) and the variables of bootstraps (src/bootstrap). Plugins read their
 * own variables. */
#include "api/config.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/sized.h"
#include "plan/plan.h"

#define DEFAULT_TIMEOUT_MS 300000u
#define MOST_ROW_BYTES (1ll << 30)

static epic_result config_error(const char *field, int64_t value, const char *rule)
{
    return epic_fail(EPIC_EINVAL, "config.%s is %lld: %s", field, (long long)value, rule);
}

static epic_result read_timeout_env(uint32_t *timeout_ms)
{
    const char *text = getenv("EPIC_TIMEOUT_MS");
    *timeout_ms = DEFAULT_TIMEOUT_MS;
    if (!text || !*text) return EPIC_OK;
    uint64_t value = 0;
    bool is_number = true;
    /* this loop rejects texts such as " -1", which strtoul() accepts */
    for (const char *at = text; *at && is_number; at++) {
        is_number = *at >= '0' && *at <= '9' && value <= UINT32_MAX;
        if (is_number) value = value * 10 + (uint64_t)(*at - '0');
    }
    if (!is_number || value < 1 || value > UINT32_MAX)
        return epic_fail(EPIC_EINVAL,
                         "EPIC_TIMEOUT_MS is \"%.80s\": a number of milliseconds from 1 to "
                         "4294967295 is needed; correct or unset it",
                         text);
    *timeout_ms = (uint32_t)value;
    return EPIC_OK;
}

/* Checks the value of EPIC_EARLY_START. The code that launches kernels reads the variable again
 * (kernels/cuda/common/launch.cuh). */
static epic_result check_early_start_env(void)
{
    const char *text = getenv("EPIC_EARLY_START");
    if (!text || !*text || !strcmp(text, "0") || !strcmp(text, "1")) return EPIC_OK;
    return epic_fail(EPIC_EINVAL,
                     "EPIC_EARLY_START is \"%.80s\": it must be 0 or 1; correct "
                     "or unset it",
                     text);
}

const char *config_trace(void)
{
    const char *folder = getenv("EPIC_TRACE");
    return folder && *folder ? folder : NULL;
}

bool config_checks_weights(void)
{
    const char *text = getenv("EPIC_CHECK_WEIGHTS");
    return text && *text && strcmp(text, "0") != 0;
}

epic_result config_read(epic_config *out, const epic_config *config, size_t size)
{
    TRY(READ_SIZED(out, config, size, "config"));
    if (out->max_tokens < 1 || out->max_tokens > INT32_MAX)
        return config_error("max_tokens", out->max_tokens, "must be 1 to 2147483647");
    if (out->max_row_bytes < 1 || out->max_row_bytes > MOST_ROW_BYTES)
        return config_error("max_row_bytes", out->max_row_bytes, "must be 1 to 1073741824");
    if (out->staging_bytes < EPIC_LEAST_STAGING)
        return config_error("staging_bytes", out->staging_bytes,
                            "a size, 0 for full speed, or -1 for the least that works");
    if (out->max_in_flight > EPIC_MAX_OP_SLOTS)
        return config_error("max_in_flight", out->max_in_flight, "at most 64, or 0 for 64");
    if (out->max_top_k > MAX_TOP_K)
        return config_error("max_top_k", out->max_top_k, "at most 64, or 0 for 64");
    if (out->flags & ~(uint32_t)EPIC_CAN_REGROUP)
        return config_error("flags", out->flags, "must be 0 or EPIC_CAN_REGROUP (4096)");
    if (!out->timeout_ms) TRY(read_timeout_env(&out->timeout_ms));
    TRY(check_early_start_env());
    if (!out->max_in_flight) out->max_in_flight = EPIC_MAX_OP_SLOTS;
    if (!out->max_top_k) out->max_top_k = MAX_TOP_K;
    if (!out->name) out->name = "epic";
    if (strlen(out->name) > 63)
        return epic_fail(EPIC_EINVAL, "config.name is \"%.80s\": must have at most 63 bytes",
                         out->name);
    if (!out->backend) out->backend = getenv("EPIC_BACKEND");
    if (out->backend && !*out->backend) out->backend = NULL;
    if (out->backend && strlen(out->backend) > 15)
        return epic_fail(EPIC_EINVAL, "config.backend is \"%.80s\": no backend has that name",
                         out->backend);
    return EPIC_OK;
}

epic_result config_read_sizes(epic_config *out, const epic_config *config, size_t size)
{
    TRY(config_read(out, config, size));
    if (out->num_ranks < 1 || out->num_ranks > EPIC_MAX_RANKS)
        return config_error("num_ranks", out->num_ranks, "sizes need it: 1 to 1024");
    return EPIC_OK;
}
