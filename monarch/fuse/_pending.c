/* Requests that are with Python: passed on, answered late, or let go when their caller is killed.
 */
#include "_datapath.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

/* -- answering the kernel ---------------------------------------------------------------------- */

int write_out(int device, uint64_t unique, int error, const void *data, size_t size) {
    struct out_header header = {(uint32_t)(sizeof header + size), -error, unique};
    struct iovec parts[] = {{&header, sizeof header}, {(void *)data, size}};
    return writev(device, parts, size ? 2 : 1) < 0 ? errno : 0;
}

int answer(struct thread *thread, const struct in_header *request, const void *data, size_t size) {
    return write_out(thread->device, request->unique, 0, data, size);
}

void refuse(struct thread *thread, const struct in_header *request, int error) {
    write_out(thread->device, request->unique, error, NULL, 0);
}

/* -- what is with Python ----------------------------------------------------------------------- */

/* The pending at ``index``; the lock is held. */
struct pending *pending_at(struct datapath *path, uint32_t index) {
    return &path->pending[index / PENDING_CHUNK][index % PENDING_CHUNK];
}

/* Even and not 0, as those of the kernel are. */
static uint64_t stand_in(uint32_t index, uint32_t generation) {
    return ((uint64_t)generation << 24 | (index + 1)) << 1;
}

/* Whether an interrupt of this request has come already; the lock is held. */
bool came_early(const struct datapath *path, uint64_t unique) {
    for (int i = 0; i < EARLY; i++)
        if (path->early[i] == unique)
            return true;
    return false;
}

/* A place for a request, and what stands for its ``unique``; NO_PENDING if there is none. */
static uint32_t pend(struct datapath *path, const struct pending *what, uint64_t *unique) {
    uint32_t index = NO_PENDING;
    pthread_mutex_lock(&path->pending_lock);
    if (path->pending_free != NO_PENDING) {
        index = path->pending_free;
        path->pending_free = pending_at(path, index)->next_free;
    } else if (path->pending_count < PENDING_CHUNK * PENDING_CHUNKS) {
        uint32_t chunk = path->pending_count / PENDING_CHUNK;
        if (!path->pending[chunk])
            path->pending[chunk] = calloc(PENDING_CHUNK, sizeof(struct pending));
        if (path->pending[chunk])
            index = path->pending_count++;
    }
    if (index != NO_PENDING) {
        struct pending *place = pending_at(path, index);
        uint32_t generation = place->generation + 1;
        *place = *what;
        place->generation = generation;
        place->used = true;
        if (came_early(path, place->unique)) {
            place->interrupted = true;
            path->pending_interrupted++;
        }
        *unique = stand_in(index, generation);
    }
    pthread_mutex_unlock(&path->pending_lock);
    return index;
}

/* Takes a pending out; false for an answer that nobody waits for. */
bool unpend(struct datapath *path, uint64_t unique, struct pending *what) {
    uint64_t index = (unique >> 1 & 0xffffff) - 1;
    pthread_mutex_lock(&path->pending_lock);
    bool known = index < path->pending_count;
    if (known) {
        struct pending *place = pending_at(path, (uint32_t)index);
        known = place->used && stand_in((uint32_t)index, place->generation) == unique;
        if (known) {
            *what = *place;
            place->used = false;
            place->next_free = path->pending_free;
            path->pending_free = (uint32_t)index;
            path->pending_interrupted -= place->interrupted;
        }
    }
    pthread_mutex_unlock(&path->pending_lock);
    return known;
}

void close_remains(struct datapath *path, const struct open_remains *remains) {
    if (remains->backing_id > 0) {
        uint32_t id = (uint32_t)remains->backing_id;
        ioctl(path->device, DEV_IOC_BACKING_CLOSE, &id);
        ADD(path->opens.backing_ids, -1);
    }
    if (remains->fd >= 0)
        close(remains->fd);
    content_release(remains->content);
    if (remains->written)
        opens_unuse(remains->written);
}

static void finish(struct datapath *path, uint64_t ino, const struct open_remains *remains) {
    close_remains(path, remains);
    if (remains->outdated)
        tell(path, ino, EVENT_RELEASED, NULL);
}

bool drop_open(struct datapath *path, uint64_t ino, bool plain) {
    struct open_remains remains;
    bool known = opens_drop(&path->opens, ino, plain, &remains);
    finish(path, ino, &remains);
    return known;
}

void release_written(struct datapath *path, uint64_t ino) {
    struct open_remains remains;
    opens_release_written(&path->opens, ino, &remains);
    finish(path, ino, &remains);
}

/* Pass a request on, whole. ``what`` tells what open it is about, which fails with it. */
static void pass(struct thread *thread, struct in_header *request, struct pending what) {
    struct datapath *path = thread->path;
    what.unique = request->unique;
    what.ino = request->nodeid;
    what.opcode = request->opcode;
    what.pid = request->pid;
    what.device = thread->device;
    uint64_t unique = request->unique;
    uint32_t index = pend(path, &what, &request->unique);
    if (index != NO_PENDING) {
        if (request->opcode == OP_READ) {
            struct read_in *in = (struct read_in *)(request + 1);
            in->fh = (uint64_t)(index + 1) << TOKEN_SHIFT | (request->nodeid & INO_MASK);
        }
        if (send(path->channel, request, request->len, MSG_NOSIGNAL) >= 0)
            return;
        unpend(path, request->unique, &what);
        request->unique = unique;
    }
    if (what.entry)
        drop_open(path, request->nodeid, false);
    refuse(thread, request, EIO);
}

void pass_on(struct thread *thread, struct in_header *request) {
    pass(thread, request, (struct pending){0});
}

void pass_open(struct thread *thread, struct in_header *request, struct open_inode *entry,
               bool writes) {
    pass(thread, request, (struct pending){.entry = entry, .writes = writes});
}

/* -- signals to those who wait ----------------------------------------------------------------- */

/* The signals of a line of /proc/PID/status, a bit each. */
static uint64_t signals(const char *text, const char *line) {
    const char *found = strstr(text, line);
    return found ? strtoull(found + strlen(line), NULL, 16) : 0;
}

#define SIGNAL(number) (1ull << ((number) - 1))

/* Whether a thread is to stop waiting. The kernel has decided to end it and only waits for our
 * answer; or it has a way of its own to end on Ctrl-C and the like. Other signals than these come
 * unasked (SIGCHLD, SIGPROF), and few programs expect that a read of a file fails for them. */
static bool is_wanted_back(uint32_t pid) {
    char name[32], text[4096];
    snprintf(name, sizeof name, "/proc/%u/status", pid);
    int fd = pid ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return false;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0)
        return false;
    text[size] = 0;
    uint64_t own = signals(text, "\nSigPnd:"), pending = own | signals(text, "\nShdPnd:");
    uint64_t ending = SIGNAL(SIGINT) | SIGNAL(SIGTERM) | SIGNAL(SIGHUP) | SIGNAL(SIGQUIT);
    uint64_t caught = signals(text, "\nSigCgt:") & ~signals(text, "\nSigBlk:");
    return own & SIGNAL(SIGKILL) || pending & caught & ending;
}

/* Lets callers go that are wanted back while they wait for Python or for the source, or that have
 * waited for the source longer than they should by ``now``, which does not count while the process
 * is stopped; 0: nobody has. Python looks after those that wait for it. */
void let_go(struct datapath *path, uint64_t now) {
    pthread_mutex_lock(&path->pending_lock);
    for (uint32_t index = 0; path->pending_interrupted && index < path->pending_count; index++) {
        struct pending *place = pending_at(path, index);
        if (!place->used || !place->interrupted || place->answered || !is_wanted_back(place->pid))
            continue;
        place->answered = true;
        write_out(place->device, place->unique, EINTR, NULL, 0);
    }
    pthread_mutex_unlock(&path->pending_lock);
    for (int i = 0; i < LOAD(path->thread_count); i++) {
        struct thread *thread = &path->threads[i];
        uint64_t unique = LOAD(thread->reading);
        if (unique == 0)
            continue;
        /* If it has answered meanwhile, the kernel knows the number no more. */
        if (LOAD(thread->interrupted) == unique && is_wanted_back(LOAD(thread->reading_pid))) {
            STORE(thread->interrupted, 0);
            write_out(LOAD(thread->device), unique, EINTR, NULL, 0);
        }
        uint64_t since = LOAD(thread->reading_since_ns);
        if (path->patience_ns && now > since && now - since > path->patience_ns &&
            LOAD(thread->let_go) != unique) {
            STORE(thread->let_go, unique);
            write_out(LOAD(thread->device), unique, ETIMEDOUT, NULL, 0);
            ADD(path->timed_out, 1);
            wake_python(path);
        }
    }
}

void interrupt(struct datapath *path, uint64_t unique) {
    bool found = false;
    pthread_mutex_lock(&path->pending_lock);
    for (uint32_t index = 0; index < path->pending_count; index++) {
        struct pending *place = pending_at(path, index);
        if (place->used && place->unique == unique) {
            path->pending_interrupted += !place->interrupted;
            place->interrupted = found = true;
        }
    }
    for (int i = 0; i < LOAD(path->thread_count); i++) {
        struct thread *thread = &path->threads[i];
        if (LOAD(thread->reading) == unique) {
            STORE(thread->interrupted, unique);
            found = true;
        }
    }
    if (!found)
        path->early[path->early_next++ % EARLY] = unique;
    pthread_mutex_unlock(&path->pending_lock);
    let_go(path, 0);
}
