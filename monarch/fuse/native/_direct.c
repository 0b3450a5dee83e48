/* The queue of requests that Python answers without pyfuse3. */
#include "_direct.h"

#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* The largest request that is taken: two names of 255 bytes, or an attribute's numbers. */
enum { MOST_BYTES = 1024 };

/* The largest request of a hint, and how many may be in the queue: Python handles one in about a
 * millisecond, and answers other requests after them. */
enum { HINT_BYTES = 40 + 32 + (1 << 14), MOST_HINTS = 32 };

bool direct_prepare(struct direct *direct) {
    direct->wake = -1;
    direct->end = &direct->first;
    return pthread_mutex_init(&direct->lock, NULL) == 0;
}

int direct_begin(struct direct *direct) {
    int wake = __atomic_load_n(&direct->wake, __ATOMIC_ACQUIRE);
    if (wake < 0) {
        wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        __atomic_store_n(&direct->wake, wake, __ATOMIC_RELEASE);
    }
    return wake;
}

/* How many bytes a request has before its names, and how many names; false if it is not one that is
 * taken. */
static bool shape_of(uint32_t opcode, size_t *fixed, int *names) {
    *fixed = 0;
    *names = 1;
    switch (opcode) {
    case OP_CREATE:
        *fixed = sizeof(struct create_in);
        return true;
    case OP_MKDIR:
        *fixed = sizeof(struct mkdir_in);
        return true;
    case OP_RENAME:
        *fixed = sizeof(struct rename_in);
        *names = 2;
        return true;
    case OP_RENAME2:
        *fixed = sizeof(struct rename2_in);
        *names = 2;
        return true;
    case OP_SETATTR:
        *fixed = sizeof(struct setattr_in);
        *names = 0;
        return true;
    case OP_IOCTL:
        *fixed = sizeof(struct ioctl_in);
        *names = 0;
        return true;
    case OP_GETATTR:
    case OP_RELEASE:
        *names = 0;
        return true;
    case OP_LOOKUP:
    case OP_UNLINK:
    case OP_RMDIR:
        return true;
    default:
        return false;
    }
}

/* Whether a request is one that is taken, and each of its names ends within it. */
static bool is_taken(const struct in_header *request) {
    size_t fixed, left = request->len - sizeof *request;
    int names;
    size_t most = request->opcode == OP_IOCTL ? HINT_BYTES : MOST_BYTES;
    if (request->len > most || !shape_of(request->opcode, &fixed, &names) || left < fixed)
        return false;
    const char *at = (const char *)(request + 1) + fixed;
    for (left -= fixed; names > 0; names--) {
        size_t length = strnlen(at, left);
        if (length == 0 || length == left)
            return false;
        at += length + 1;
        left -= length + 1;
    }
    return true;
}

bool direct_takes_hint(struct direct *direct, const struct in_header *request) {
    pthread_mutex_lock(&direct->lock);
    bool has_room = direct->hints < MOST_HINTS;
    if (!has_room) {
        direct->refused.count++;
        direct->refused.uid = request->uid;
        direct->refused.pid = request->pid;
    }
    pthread_mutex_unlock(&direct->lock);
    return has_room;
}

struct refused_hints direct_refused(struct direct *direct) {
    pthread_mutex_lock(&direct->lock);
    struct refused_hints refused = direct->refused;
    direct->refused.count = 0;
    pthread_mutex_unlock(&direct->lock);
    return refused;
}

bool direct_put(struct direct *direct, const struct in_header *request) {
    int wake = __atomic_load_n(&direct->wake, __ATOMIC_ACQUIRE);
    if (wake < 0 || !is_taken(request))
        return false;
    struct direct_request *kept =
        malloc(offsetof(struct direct_request, message) + request->len + 1);
    if (!kept)
        return false;
    kept->next = NULL;
    memcpy(kept->message.bytes, request, request->len);
    pthread_mutex_lock(&direct->lock);
    bool was_empty = !direct->first;
    *direct->end = kept;
    direct->end = &kept->next;
    direct->hints += request->opcode == OP_IOCTL;
    __atomic_add_fetch(&direct->count, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&direct->lock);
    uint64_t one = 1;
    if (was_empty && write(wake, &one, sizeof one) < 0) {
        /* The counter is full, so Python is awake. */
    }
    return true;
}

struct direct_request *direct_take(struct direct *direct) {
    uint64_t count;
    int wake = __atomic_load_n(&direct->wake, __ATOMIC_ACQUIRE);
    /* Before the queue is emptied: the next request writes to the eventfd again. */
    if (wake >= 0 && read(wake, &count, sizeof count) < 0) {
        /* No request has come. */
    }
    pthread_mutex_lock(&direct->lock);
    struct direct_request *first = direct->first;
    direct->first = NULL;
    direct->end = &direct->first;
    direct->hints = 0;
    pthread_mutex_unlock(&direct->lock);
    return first;
}

void direct_free(struct direct *direct) {
    for (struct direct_request *each = direct_take(direct), *next; each; each = next) {
        next = each->next;
        free(each);
    }
    if (direct->wake >= 0)
        close(direct->wake);
    direct->wake = -1;
}
