/* The table of waiting requests, and the requests that were passed to Python. */
#include "_datapath.h"

#include <errno.h>
#include <fcntl.h>
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

/* The request at ``index``; the lock must be held. */
struct pending *pending_at(struct datapath *dp, uint32_t index) {
    return &dp->pending[index / PENDING_CHUNK][index % PENDING_CHUNK];
}

/* The kernel's numbers are even and ascending. */
static struct pending **bucket_of(struct datapath *dp, uint64_t unique) {
    return &dp->by_unique[unique / 2 % PENDING_BUCKETS];
}

/* The waiting request with that number; NULL if there is none. The lock must be held. */
struct pending *pending_find(struct datapath *dp, uint64_t unique) {
    struct pending *place = *bucket_of(dp, unique);
    while (place && place->unique != unique)
        place = place->hashed;
    return place;
}

/* Even and not 0, like those of the kernel. */
static uint64_t stand_in(const struct pending *place) {
    return ((uint64_t)place->generation << 24 | (place->index + 1)) << 1;
}

/* Whether an interrupt of this request has arrived already; the lock must be held. */
static bool came_early(const struct datapath *dp, uint64_t unique) {
    for (int i = 0; i < EARLY; i++)
        if (dp->early[i] == unique)
            return true;
    return false;
}

/* Marks that the caller was sent a signal; the lock must be held. */
void mark_interrupted(struct datapath *dp, struct pending *place) {
    if (place->interrupted)
        return;
    place->interrupted = true;
    if (place->answered)
        return;
    list_append(&dp->interrupted, place, BY_SIGNAL);
    dp->interrupted_count++;
}

/* Marks that the caller has its answer; the lock must be held. */
void mark_answered(struct datapath *dp, struct pending *place) {
    place->answered = true;
    if (place->links[BY_AGE].list) {
        list_remove(place, BY_AGE);
        dp->unanswered_count--;
    }
    if (place->links[BY_SIGNAL].list) {
        list_remove(place, BY_SIGNAL);
        dp->interrupted_count--;
    }
}

/* A place for a request that begins to wait; NULL if there is none. The lock must be held. */
struct pending *pend(struct datapath *dp, const struct pending *what) {
    uint32_t index = NO_PENDING;
    if (dp->pending_free != NO_PENDING) {
        index = dp->pending_free;
        dp->pending_free = pending_at(dp, index)->next_free;
    } else if (dp->pending_count < PENDING_CHUNK * PENDING_CHUNKS) {
        uint32_t chunk = dp->pending_count / PENDING_CHUNK;
        if (!dp->pending[chunk])
            dp->pending[chunk] = calloc(PENDING_CHUNK, sizeof(struct pending));
        if (dp->pending[chunk])
            index = dp->pending_count++;
    }
    if (index == NO_PENDING)
        return NULL;
    struct pending *place = pending_at(dp, index), **bucket = bucket_of(dp, what->unique);
    uint32_t generation = place->generation + 1;
    *place = *what;
    place->index = index;
    place->generation = generation;
    place->used = true;
    place->since_ns = now_ns() - LOAD(dp->stopped_ns);
    list_append(&dp->unanswered, place, BY_AGE);
    dp->unanswered_count++;
    if (came_early(dp, place->unique))
        mark_interrupted(dp, place);
    place->hashed = *bucket;
    *bucket = place;
    return place;
}

/* Copies the whole request into its place, so that its thread can take another one. */
void keep_request(struct pending *place, const struct in_header *request) {
    size_t size = request->len < sizeof place->request ? request->len : sizeof place->request;
    memcpy(&place->request, request, size);
    place->request.header.len = (uint32_t)size;
}

/* Frees a place; the lock must be held. */
void unpend(struct datapath *dp, struct pending *place) {
    struct pending **link = bucket_of(dp, place->unique);
    while (*link != place)
        link = &(*link)->hashed;
    *link = place->hashed;
    mark_answered(dp, place);
    dp->python_limited -= place->limited && place->waits == AT_PYTHON;
    place->used = false;
    place->next_free = dp->pending_free;
    dp->pending_free = place->index;
}

/* Removes a request that was passed to Python; false if the answer belongs to no request. */
bool take_pending(struct datapath *dp, uint64_t unique, struct pending *what) {
    uint64_t index = (unique >> 1 & 0xffffff) - 1;
    pthread_mutex_lock(&dp->pending_lock);
    bool known = index < dp->pending_count;
    if (known) {
        struct pending *place = pending_at(dp, (uint32_t)index);
        known = place->used && place->waits == AT_PYTHON && stand_in(place) == unique;
        if (known) {
            *what = *place;
            unpend(dp, place);
        }
    }
    pthread_mutex_unlock(&dp->pending_lock);
    return known;
}

/* -- what is with Python ----------------------------------------------------------------------- */

void close_remains(struct datapath *dp, const struct open_remains *to_close) {
    if (to_close->backing_id > 0) {
        uint32_t id = (uint32_t)to_close->backing_id;
        ioctl(dp->device, DEV_IOC_BACKING_CLOSE, &id);
        ADD(dp->opens.backing_ids, -1);
    }
    if (to_close->fd >= 0 && to_close->tier == 0)
        close_later(dp, to_close->fd);
    else if (to_close->fd >= 0)
        close(to_close->fd);
    if (to_close->part)
        close(to_close->part - 1);
    content_release(to_close->content);
    if (to_close->written)
        opens_unuse(to_close->written);
}

static void finish(struct datapath *dp, uint64_t ino, const struct open_remains *to_close) {
    close_remains(dp, to_close);
    if (to_close->outdated)
        report_event(dp, ino, EVENT_RELEASED, NULL, NULL);
}

bool drop_open(struct datapath *dp, uint64_t ino, bool by_python) {
    struct open_remains to_close;
    bool known = opens_drop(&dp->opens, ino, by_python, &to_close);
    finish(dp, ino, &to_close);
    return known;
}

/* As opens_end_reading. */
bool end_reading(struct datapath *dp, uint64_t ino, bool now) {
    struct open_remains to_close;
    bool goes_on = opens_end_reading(&dp->opens, ino, now, &to_close);
    finish(dp, ino, &to_close);
    return goes_on;
}

void end_binding(struct datapath *dp, uint64_t ino) {
    struct open_remains to_close;
    opens_end_binding(&dp->opens, ino, &to_close);
    close_remains(dp, &to_close);
}

void release_written(struct datapath *dp, uint64_t ino) {
    struct open_remains to_close;
    opens_release_written(&dp->opens, ino, &to_close);
    finish(dp, ino, &to_close);
}

/* Whether Python may have to call the source for a request. Only a limited number of these is
 * passed to Python; the others wait here, without occupying a task. */
static bool may_need_source(const struct datapath *dp, const struct in_header *request,
                            bool writes) {
    uint64_t ino = request->nodeid;
    return (request->opcode == OP_OPEN || request->opcode == OP_READ) && !writes && ino >= 1 &&
           ino <= dp->names.entries && !LOAD(dp->residency[ino]) &&
           !(LOAD(dp->marks[ino]) & dp->names.differs);
}

/* The numbers of a message to Python. */
static void address(const struct pending *place, struct in_header *request) {
    request->unique = stand_in(place);
    if (request->opcode == OP_READ) {
        struct read_in *in = (struct read_in *)(request + 1);
        in->fh = (uint64_t)(place->index + 1) << TOKEN_SHIFT | (request->nodeid & INO_MASK);
    }
}

/* Whether a request that may need the source must wait here; the lock must be held. Those that wait
 * for the limits of their jobs do not need it now, and must not delay other jobs. */
static bool python_is_full(const struct datapath *dp) {
    return dp->python_limited >= PYTHON_MAX + dp->python_throttled;
}

/* Passes queued requests to Python. */
void pass_queued(struct datapath *dp) {
    pthread_mutex_lock(&dp->pending_lock);
    struct pending *place;
    while (!python_is_full(dp) && (place = dp->for_python.first)) {
        union {
            struct in_header header;
            uint8_t bytes[sizeof place->request];
        } message;
        memcpy(&message, &place->request, sizeof message);
        address(place, &message.header);
        /* This may be the thread of Python's answers, which must not wait for Python. Without room
         * in the socket, the next answer or the next check tries again. */
        if (send(dp->channel, &message, message.header.len, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
            break;
        list_remove(place, QUEUE);
        place->waits = AT_PYTHON;
        dp->python_limited++;
    }
    pthread_mutex_unlock(&dp->pending_lock);
}

/* Passes a whole request to Python. ``what`` names the open that it makes, which fails with it. */
static void pass(struct thread *thread, struct in_header *request, struct pending what) {
    struct datapath *dp = thread->dp;
    uint64_t unique = what.unique = request->unique;
    what.ino = request->nodeid;
    what.opcode = request->opcode;
    what.pid = request->pid;
    what.uid = request->uid;
    what.gid = request->gid;
    what.device = thread->device;
    what.limited = may_need_source(dp, request, what.writes);
    what.waits = AT_PYTHON;
    pthread_mutex_lock(&dp->pending_lock);
    struct pending *place = pend(dp, &what);
    bool later = place && what.limited && python_is_full(dp);
    if (later) {
        place->waits = FOR_PYTHON;
        place->queued = true;
        keep_request(place, request);
        list_append(&dp->for_python, place, QUEUE);
    } else if (place) {
        dp->python_limited += what.limited;
        address(place, request);
    }
    pthread_mutex_unlock(&dp->pending_lock);
    if (later)
        return;
    if (place) {
        if (direct_put(&dp->direct, request))
            return;
        if (send(dp->channel, request, request->len, MSG_NOSIGNAL) >= 0)
            return;
        take_pending(dp, request->unique, &what);
        request->unique = unique;
    }
    if (what.writes)
        opens_ask(&dp->opens, what.entry, -1);
    if (what.entry)
        drop_open(dp, request->nodeid, false);
    refuse(thread, request, EIO);
}

void pass_on(struct thread *thread, struct in_header *request) {
    pass(thread, request, (struct pending){0});
}

void pass_open(struct thread *thread, struct in_header *request, struct open_inode *entry,
               bool writes) {
    const struct open_in *in = (const struct open_in *)(request + 1);
    if (writes)
        opens_ask(&thread->dp->opens, entry, 1);
    pass(thread, request,
         (struct pending){
             .entry = entry,
             .writes = writes,
             .truncates = writes && in->flags & O_TRUNC,
         });
}
