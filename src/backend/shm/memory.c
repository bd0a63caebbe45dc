/* SPDX-License-Identifier: Apache-2.0 */
/* Creates and maps a group's shared memory. Each change of members starts a new generation,
 * which has memory of its own. */
#include "backend/shm/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/process.h"

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

static epic_result fail_with_memory(const shared_layout *l, const char *what)
{
    const char *way_out = epic_remedy(errno);
    return epic_fail(EPIC_ENOMEM,
                     "shm: %s of %lld bytes: %s%s%s lower config.max_in_flight or "
                     "config.staging_bytes",
                     what, (long long)l->segment_bytes, strerror(errno), way_out,
                     *way_out ? ", or" : ";");
}

static epic_result map_segment(const shared_layout *l, int fd, char **segment)
{
    void *at = mmap(NULL, (size_t)l->segment_bytes, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (at == MAP_FAILED) return fail_with_memory(l, "mapping the shared memory");
    *segment = at;
    return EPIC_OK;
}

epic_result shm_memory_create(const shared_layout *l, uint64_t group_id, int *fd,
                              char **segment)
{
    if (!process_may_create_file(l->segment_bytes)) {
        errno = EFBIG;
        return fail_with_memory(l, "making shared memory");
    }
    *fd = memfd_create("epic-shm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd < 0 || ftruncate(*fd, l->segment_bytes) != 0 || fcntl(*fd, F_ADD_SEALS, SEALS) != 0)
        return fail_with_memory(l, "making shared memory");
    TRY(map_segment(l, *fd, segment));
    shared_segment_init(*segment, l, group_id);
    return EPIC_OK;
}

epic_result shm_memory_open(const shared_layout *l, uint64_t group_id, int from, int fd,
                            char **segment)
{
    struct stat status;
    const int seals = fcntl(fd, F_GET_SEALS);
    if (fstat(fd, &status) != 0 || status.st_size != l->segment_bytes || seals < 0 ||
        (seals & SEALS) != SEALS)
        return epic_fail(EPIC_EDEVICE,
                         "shm: rank %d sent a descriptor that is not the shared memory", from);
    TRY(map_segment(l, fd, segment));
    if (shared_segment_is_of(*segment, l, group_id)) return EPIC_OK;
    return epic_fail(EPIC_EDEVICE, "shm: rank %d sent the memory of another group", from);
}
