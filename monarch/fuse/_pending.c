/* The table of requests that wait; those that are with Python: passed on, answered late. */
#include "_datapath.h"

#include <errno.h>
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

/* -- the table of requests that wait ----------------------------------------------------------- */

void list_append(struct waiters *list, struct pending *place, enum chain chain) {
    place->links[chain] = (struct link){.list = list, .previous = list->last};
    if (list->last)
        list->last->links[chain].next = place;
    else
        list->first = place;
    list->last = place;
}

void list_remove(struct pending *place, enum chain chain) {
    struct link *link = &place->links[chain];
    if (link->previous)
        link->previous->links[chain].next = link->next;
    else
        link->list->first = link->next;
    if (link->next)
        link->next->links[chain].previous = link->previous;
    else
        link->list->last = link->previous;
    link->list = NULL;
}

/* The pending at ``index``; the lock is held. */
struct pending *pending_at(struct datapath *path, uint32_t index) {
    return &path->pending[index / PENDING_CHUNK][index % PENDING_CHUNK];
}

/* The kernel's numbers are even and go up. */
static struct pending **bucket_of(struct datapath *path, uint64_t unique) {
    return &path->by_unique[unique / 2 % PENDING_BUCKETS];
}

/* The request of that number, if it waits; the lock is held. */
struct pending *pending_find(struct datapath *path, uint64_t unique) {
    struct pending *place = *bucket_of(path, unique);
    while (place && place->unique != unique)
        place = place->hashed;
    return place;
}

/* Even and not 0, as those of the kernel are. */
static uint64_t stand_in(const struct pending *place) {
    return ((uint64_t)place->generation << 24 | (place->index + 1)) << 1;
}

/* Whether an interrupt of this request has come already; the lock is held. */
static bool came_early(const struct datapath *path, uint64_t unique) {
    for (int i = 0; i < EARLY; i++)
        if (path->early[i] == unique)
            return true;
    return false;
}

/* Its caller was sent a signal; the lock is held. */
void mark_interrupted(struct datapath *path, struct pending *place) {
    if (place->interrupted)
        return;
    place->interrupted = true;
    if (place->answered)
        return;
    list_append(&path->interrupted, place, BY_SIGNAL);
    path->interrupted_count++;
}

/* Nobody waits for it any more; the lock is held. */
void mark_answered(struct datapath *path, struct pending *place) {
    place->answered = true;
    if (place->links[BY_AGE].list) {
        list_remove(place, BY_AGE);
        path->unanswered_count--;
    }
    if (place->links[BY_SIGNAL].list) {
        list_remove(place, BY_SIGNAL);
        path->interrupted_count--;
    }
}

/* A place for a request that waits from now on; NULL if there is none. The lock is held. */
struct pending *pend(struct datapath *path, const struct pending *what) {
    uint32_t index = NO_PENDING;
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
    if (index == NO_PENDING)
        return NULL;
    struct pending *place = pending_at(path, index), **bucket = bucket_of(path, what->unique);
    uint32_t generation = place->generation + 1;
    *place = *what;
    place->index = index;
    place->generation = generation;
    place->used = true;
    place->since_ns = now_ns() - LOAD(path->stopped_ns);
    list_append(&path->unanswered, place, BY_AGE);
    path->unanswered_count++;
    if (came_early(path, place->unique))
        mark_interrupted(path, place);
    place->hashed = *bucket;
    *bucket = place;
    return place;
}

/* Have the place hold the request whole, so that its thread can take another one. */
void keep_request(struct pending *place, const struct in_header *request) {
    size_t size = request->len < sizeof place->request ? request->len : sizeof place->request;
    memcpy(&place->request, request, size);
    place->request.header.len = (uint32_t)size;
}

/* Gives the place back; the lock is held. */
void unpend(struct datapath *path, struct pending *place) {
    struct pending **link = bucket_of(path, place->unique);
    while (*link != place)
        link = &(*link)->hashed;
    *link = place->hashed;
    mark_answered(path, place);
    path->python_limited -= place->limited && place->waits == AT_PYTHON;
    place->used = false;
    place->next_free = path->pending_free;
    path->pending_free = place->index;
}

/* Takes out a request that is with Python; false for an answer that nobody waits for. */
bool take_pending(struct datapath *path, uint64_t unique, struct pending *what) {
    uint64_t index = (unique >> 1 & 0xffffff) - 1;
    pthread_mutex_lock(&path->pending_lock);
    bool known = index < path->pending_count;
    if (known) {
        struct pending *place = pending_at(path, (uint32_t)index);
        known = place->used && place->waits == AT_PYTHON && stand_in(place) == unique;
        if (known) {
            *what = *place;
            unpend(path, place);
        }
    }
    pthread_mutex_unlock(&path->pending_lock);
    return known;
}

/* -- what is with Python ----------------------------------------------------------------------- */

void close_remains(struct datapath *path, const struct open_remains *remains) {
    if (remains->backing_id > 0) {
        uint32_t id = (uint32_t)remains->backing_id;
        ioctl(path->device, DEV_IOC_BACKING_CLOSE, &id);
        ADD(path->opens.backing_ids, -1);
    }
    if (remains->fd >= 0 && remains->tier == 0)
        close_later(path, remains->fd);
    else if (remains->fd >= 0)
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

/* Whether Python may have to ask the source about a request: then only so many go there at once,
 * and the rest waits here, where it takes no task. */
static bool may_need_source(const struct datapath *path, const struct in_header *request,
                            bool writes) {
    uint64_t ino = request->nodeid;
    return (request->opcode == OP_OPEN || request->opcode == OP_READ) && !writes && ino >= 1 &&
           ino <= path->names.entries && !LOAD(path->residency[ino]) &&
           !(LOAD(path->marks[ino]) & path->names.differs);
}

/* The numbers that a message to Python bears. */
static void address(const struct pending *place, struct in_header *request) {
    request->unique = stand_in(place);
    if (request->opcode == OP_READ) {
        struct read_in *in = (struct read_in *)(request + 1);
        in->fh = (uint64_t)(place->index + 1) << TOKEN_SHIFT | (request->nodeid & INO_MASK);
    }
}

/* Pass on those that wait for their turn. */
void pass_queued(struct datapath *path) {
    pthread_mutex_lock(&path->pending_lock);
    struct pending *place;
    while (path->python_limited < PYTHON_MAX && (place = path->for_python.first)) {
        union {
            struct in_header header;
            uint8_t bytes[sizeof place->request];
        } message;
        memcpy(&message, &place->request, sizeof message);
        address(place, &message.header);
        /* The thread that takes Python's answers must not wait for Python. If there is no room, the
         * next answer, or the next look, makes another attempt. */
        if (send(path->channel, &message, message.header.len, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
            break;
        list_remove(place, QUEUE);
        place->waits = AT_PYTHON;
        path->python_limited++;
    }
    pthread_mutex_unlock(&path->pending_lock);
}

/* Pass a request on, whole. ``what`` tells what open it is about, which fails with it. */
static void pass(struct thread *thread, struct in_header *request, struct pending what) {
    struct datapath *path = thread->path;
    uint64_t unique = what.unique = request->unique;
    what.ino = request->nodeid;
    what.opcode = request->opcode;
    what.pid = request->pid;
    what.device = thread->device;
    what.limited = may_need_source(path, request, what.writes);
    what.waits = AT_PYTHON;
    pthread_mutex_lock(&path->pending_lock);
    struct pending *place = pend(path, &what);
    bool later = place && what.limited && path->python_limited >= PYTHON_MAX;
    if (later) {
        place->waits = FOR_PYTHON;
        place->queued = true;
        keep_request(place, request);
        list_append(&path->for_python, place, QUEUE);
    } else if (place) {
        path->python_limited += what.limited;
        address(place, request);
    }
    pthread_mutex_unlock(&path->pending_lock);
    if (later)
        return;
    if (place) {
        if (send(path->channel, request, request->len, MSG_NOSIGNAL) >= 0)
            return;
        take_pending(path, request->unique, &what);
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
