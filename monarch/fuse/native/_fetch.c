#include "_fetch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "_record.h"

/* From linux/openat2.h, which may be missing where this is compiled. */
struct how {
    uint64_t flags, mode, resolve;
};
enum { RESOLVE_NO_MAGICLINKS = 2, RESOLVE_NO_SYMLINKS = 4, RESOLVE_BENEATH = 8 };
#ifndef SYS_openat2
#define SYS_openat2 437
#endif

static int openat2_beneath(int root, const char *path, int flags) {
    struct how how = {
        .flags = (uint64_t)flags,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
    };
    long fd;
    do
        fd = syscall(SYS_openat2, root, path, &how, sizeof how);
    while (fd < 0 && errno == EINTR);
    return (int)fd;
}

/* Kernels before 5.6 lack openat2; old seccomp filters of containers answer EPERM to it. */
static bool has_openat2(int root) {
    static int known; /* whether openat2 works; atomic; 1: it does, 2: it does not */
    int now = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!now) {
        int fd = openat2_beneath(root, ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0 && errno != ENOSYS && errno != EPERM)
            return true; /* this is the source's own error, not one of openat2 */
        now = fd >= 0 ? 1 : 2;
        if (fd >= 0)
            close(fd);
        __atomic_store_n(&known, now, __ATOMIC_RELAXED);
    }
    return now == 1;
}

/* Emulates openat2, one component after another. The names in a snapshot are not trusted. */
static int open_stepwise(int root, const char *path, int flags) {
    int above = root;
    for (;;) {
        char name[256] = "";
        size_t length = strcspn(path, "/");
        bool last = path[length] == 0;
        int fd = -1;
        if (length < sizeof name)
            memcpy(name, path, length);
        errno = length < sizeof name ? EXDEV : ENAMETOOLONG;
        if (length && length < sizeof name && strcmp(name, "..")) {
            do
                fd = openat(above, name,
                            last ? flags : O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            while (fd < 0 && errno == EINTR);
        }
        int error = errno;
        if (above != root)
            close(above);
        errno = error;
        if (fd < 0 || last)
            return fd;
        above = fd;
        path += length + 1;
    }
}

/* Never follows a link, never leaves the source, and never waits for the writer of a fifo. */
static int open_beneath(int root, const char *path) {
    int flags = O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | O_NOFOLLOW;
    return has_openat2(root) ? openat2_beneath(root, path, flags)
                             : open_stepwise(root, path, flags);
}

/* As open_beneath, with the rights of ``caller`` unless it is NULL. */
static int open_as(int root, const char *path, const struct caller *caller) {
    if (!caller)
        return open_beneath(root, path);
    struct own_rights own;
    if (!caller_begin(caller, &own))
        return -1;
    int fd = open_beneath(root, path);
    caller_end(&own);
    return fd;
}

static int64_t nanoseconds(struct statx_timestamp time) {
    return kept_ns(time.tv_sec, time.tv_nsec);
}

/* Not fstat: it requests the access time, which a read has changed, and may cost a server call. */
static bool is_version(int fd, const struct identity *identity) {
    struct statx now;
    unsigned mask = STATX_MTIME | STATX_CTIME | STATX_INO | STATX_SIZE;
    return statx(fd, "", AT_EMPTY_PATH, mask, &now) == 0 && now.stx_size == identity->size &&
           nanoseconds(now.stx_mtime) == identity->mtime_ns &&
           nanoseconds(now.stx_ctime) == identity->ctime_ns && now.stx_ino == identity->source_ino;
}

bool content_read(struct content *content, int fd, uint64_t offset, struct fetch_cost *cost) {
    while (cost->bytes < content->size) {
        ssize_t got = pread(fd, content->bytes + cost->bytes, content->size - cost->bytes,
                            (off_t)(offset + cost->bytes));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        cost->reads++;
        cost->bytes += (uint64_t)got;
    }
    return true;
}

struct content *content_new(uint64_t size, int64_t *held) {
    struct content *content = malloc(sizeof *content + size);
    if (content) {
        *content = (struct content){.users = 1, .held = held, .size = size};
        __atomic_add_fetch(held, (int64_t)size, __ATOMIC_RELAXED);
    }
    return content;
}

struct content *fetch(int root, const char *path, const struct identity *identity, int64_t *held,
                      const struct caller *caller, struct fetch_cost *cost) {
    *cost = (struct fetch_cost){0};
    struct content *content = content_new(identity->size, held);
    if (!content)
        return NULL;
    int fd = open_as(root, path, caller);
    bool whole = false;
    if (fd >= 0) {
        cost->opens = 1;
        whole = content_read(content, fd, 0, cost) && is_version(fd, identity);
        close(fd);
    }
    if (whole)
        return content;
    content_release(content);
    return NULL;
}

struct content *content_retain(struct content *content) {
    __atomic_add_fetch(&content->users, 1, __ATOMIC_RELAXED);
    return content;
}

void content_release(struct content *content) {
    if (content && __atomic_sub_fetch(&content->users, 1, __ATOMIC_ACQ_REL) == 0) {
        __atomic_sub_fetch(content->held, (int64_t)content->size, __ATOMIC_RELAXED);
        free(content);
    }
}
