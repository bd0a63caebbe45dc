/* SPDX-License-Identifier: Apache-2.0 */
/* Tracks how many SMs of each GPU the contexts of this process use. Kernels of ranks that wait
 * for each other must run at the same time, or they deadlock. So the contexts on a GPU,
 * including contexts of different groups, must not use more SMs together than the GPU has. */
#include <string.h>

#include "backend/p2p/p2p.h"
#include "base/error.h"

#define SMALL_TOKENS 32
/* P2P_SMALL_SMS is used only if all ranks together send at most this many bytes to one rank. */
#define SMALL_BYTES (512 << 10)

int p2p_budget_taken(const epic_group *g)
{
    epic_sm_budget *budget = g->sm_budget;
    if (g->device >= EPIC_MAX_DEVICES) return 0;
    pthread_mutex_lock(&budget->mutex);
    const int sms = budget->taken[g->device];
    pthread_mutex_unlock(&budget->mutex);
    return sms;
}

/* Reserves `sms` SMs of the group's device and returns true. If this would make more than `most`
 * SMs of the device used, reserves none and returns false. Sets *others to the number of SMs in
 * use before the call. */
static bool budget_add(const epic_group *g, int sms, int most, int *others)
{
    epic_sm_budget *budget = g->sm_budget;
    pthread_mutex_lock(&budget->mutex);
    *others = budget->taken[g->device];
    const bool fits = *others + sms <= most;
    if (fits) budget->taken[g->device] += sms;
    pthread_mutex_unlock(&budget->mutex);
    return fits;
}

/* Reserves `sms` SMs of the group's device, which has device_sms SMs. Returns EPIC_EINVAL if
 * other contexts of this process leave too few. */
static epic_result budget_take(epic_group *g, int sms, int device_sms)
{
    int others;
    if (g->device >= EPIC_MAX_DEVICES)
        return epic_fail(EPIC_ENOTSUP, "device is %d: must be below %d in backend p2p",
                         g->device, EPIC_MAX_DEVICES);
    if (!budget_add(g, sms, device_sms, &others))
        return epic_fail(
            EPIC_EINVAL,
            "config.max_sms: %d SMs of device %d are needed, other contexts of this "
            "process have taken %d of its %d; set a smaller config.max_sms for "
            "each context, or close one",
            sms, g->device, others, device_sms);
    g->num_sms = sms;
    return EPIC_OK;
}

/* Returns the number of SMs that an operation uses if the config does not set max_sms. A small
 * group uses P2P_SMALL_SMS, because more would not be faster. A group is small if each rank has
 * at most SMALL_TOKENS tokens, and at most SMALL_BYTES bytes of rows go to one rank. */
static int default_sms(const epic_group *g)
{
    const epic_config *config = &g->config;
    const int64_t senders = g->num_ranks > 2 ? g->num_ranks : 2;
    const bool few = config->max_tokens <= SMALL_TOKENS &&
                     config->max_row_bytes <= SMALL_BYTES / senders / config->max_tokens;
    return few ? P2P_SMALL_SMS : P2P_DEFAULT_SMS;
}

/* Reserves SMs of this rank's GPU. Ranks that share a GPU get the same number of SMs, so that
 * all their kernels can run at the same time. All ranks compute the same number, because `gpus`
 * has the data of all ranks. */
epic_result p2p_budget_share(epic_group *g, const p2p_gpu *gpus)
{
    const p2p_gpu *mine = &gpus[g->rank];
    int taken = mine->taken_sms;
    g->ranks_here = 0;
    for (int q = 0; q < g->num_ranks; q++) {
        if (memcmp(gpus[q].device, mine->device, sizeof mine->device) != 0) continue;
        g->ranks_here++;
        if (gpus[q].taken_sms > taken) taken = gpus[q].taken_sms;
    }
    const int spare = g->ranks_here > 1 ? P2P_SPARE_SMS : 0;
    int sms = (mine->device_sms - spare - taken) / g->ranks_here;
    if (sms > default_sms(g)) sms = default_sms(g);
    if (g->config.max_sms) sms = (int)g->config.max_sms;
    if (sms < 1 || sms * g->ranks_here > mine->device_sms)
        return epic_fail(EPIC_EINVAL,
                         "config.max_sms is %u: ranks of this group on device %d: %d, SMs that "
                         "other contexts of this process have taken: %d of %d; set a smaller "
                         "config.max_sms for each context, or close one",
                         g->config.max_sms, g->device, g->ranks_here, taken, mine->device_sms);
    return budget_take(g, sms, mine->device_sms);
}

void p2p_budget_give_back(epic_group *g)
{
    if (!g->num_sms) return;
    pthread_mutex_lock(&g->sm_budget->mutex);
    g->sm_budget->taken[g->device] -= g->num_sms;
    pthread_mutex_unlock(&g->sm_budget->mutex);
    g->num_sms = 0;
}
