/* SPDX-License-Identifier: Apache-2.0 */
#include "base/alive.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/process.h"

void alive_create(alive *a, uint64_t group_id, int rank)
{
    *a = (alive){.fd = -1};
    if (!process_may_create_file(sizeof(alive_page))) return;
    a->fd = memfd_create("epic-alive", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (a->fd < 0) return;
    void *page = MAP_FAILED;
    if (ftruncate(a->fd, sizeof(alive_page)) == 0 &&
        fcntl(a->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        page = mmap(NULL, sizeof(alive_page), PROT_READ | PROT_WRITE, MAP_SHARED, a->fd, 0);
    if (page == MAP_FAILED) {
        close(a->fd);
        a->fd = -1;
        return;
    }
    a->page = page;
    a->page->group_id = group_id;
    a->page->rank = rank;
}

void alive_free(alive *a)
{
    if (a->page) munmap(a->page, sizeof *a->page);
    if (a->page) close(a->fd);
    *a = (alive){.fd = -1};
}

/* Linux has one list of robust futexes per thread. The GNU C library has registered a list of
 * robust mutexes. The calling thread uses none, so this function replaces the list. */
void alive_register(alive *a)
{
    if (!a->page) return;
    if (syscall(SYS_get_robust_list, 0, &a->list_before, &a->list_bytes) != 0) return;
    a->entry.next = &a->list.list;
    a->list.list.next = &a->entry;
    a->list.futex_offset = (long)((intptr_t)&a->page->word - (intptr_t)&a->entry);
    a->list.list_op_pending = NULL;
    if (syscall(SYS_set_robust_list, &a->list, sizeof a->list) != 0) return;
    __atomic_store_n(&a->page->word, (uint32_t)syscall(SYS_gettid), __ATOMIC_RELEASE);
}

void alive_unregister(alive *a)
{
    if (!a->page || !__atomic_load_n(&a->page->word, __ATOMIC_RELAXED)) return;
    __atomic_store_n(&a->page->word, 0, __ATOMIC_RELEASE);
    (void)syscall(SYS_set_robust_list, a->list_before, a->list_bytes);
}

/* Maps the memory of a file descriptor of another process. Returns NULL if this fails. */
static const alive_page *map_descriptor(int64_t pid, int fd)
{
    char path[64];
    struct stat info;
    void *page = MAP_FAILED;
    snprintf(path, sizeof path, "/proc/%lld/fd/%d", (long long)pid, fd);
    if (stat(path, &info) != 0 || !S_ISREG(info.st_mode)) return NULL;
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return NULL;
    /* If the file could shrink, reading the page could raise SIGBUS. */
    if (fstat(file, &info) == 0 && info.st_size == sizeof(alive_page) &&
        (fcntl(file, F_GET_SEALS) & F_SEAL_SHRINK) != 0)
        page = mmap(NULL, sizeof(alive_page), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    return page == MAP_FAILED ? NULL : page;
}

const alive_page *alive_map(int64_t pid, int fd, uint64_t group_id, int rank)
{
    if (pid <= 0 || fd < 0) return NULL;
    const alive_page *page = map_descriptor(pid, fd);
    if (page && (page->group_id != group_id || page->rank != rank)) {
        alive_unmap(page);
        return NULL;
    }
    return page;
}

void alive_unmap(const alive_page *page)
{
    if (page) munmap((void *)page, sizeof *page);
}

bool alive_is_dead(const alive_page *page)
{
    return page && (__atomic_load_n(&page->word, __ATOMIC_ACQUIRE) & FUTEX_OWNER_DIED) != 0;
}
