/* Requests that wait, without a thread, for the source or for another request; and waiting callers
 * that are killed or have waited too long.
 *
 * A request that calls the source takes one of ``source_max`` slots. When all are taken it is put
 * in a queue, and so is a request that waits for another one to settle its entry. Each thread that
 * has answered a request then continues one of these. So a hung source occupies as many threads as
 * there are slots, however many readers wait for it. */
#include "_requests.h"

#include "_caller.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -- the source's slots ------------------------------------------------------------------------ */

static struct pending waiting(struct thread *thread, const struct in_header *request,
                              struct open_inode *entry, bool fresh, uint64_t begin) {
    return (struct pending){
        .unique = request->unique,
        .ino = request->nodeid,
        .opcode = request->opcode,
        .pid = request->pid,
        .device = thread->device,
        .entry = entry,
        .fresh = fresh,
        .begin_ns = begin,
    };
}

static void take_slot(struct datapath *dp, struct thread *thread) {
    ADD(dp->at_source, 1);
    STORE(thread->source_since_ns, now_ns() - LOAD(dp->stopped_ns));
}

static void give_slot(struct datapath *dp, struct thread *thread) {
    int64_t waited =
        (int64_t)(now_ns() - LOAD(dp->stopped_ns)) - (int64_t)LOAD(thread->source_since_ns);
    ADD(dp->source_waited_ns, waited > 0 ? (uint64_t)waited : 0);
    STORE(thread->source_since_ns, 0);
    STORE(thread->asks_peer, 0);
    ADD(dp->at_source, -1);
}

/* Surrounds a call of the source, which may hang. ``entry`` is settled (``fresh``) or used by the
 * request; it is dropped if the caller stops waiting. */
enum turn begin_source_call(struct thread *thread, const struct in_header *request,
                            struct open_inode *entry, bool fresh, uint64_t begin) {
    struct datapath *dp = thread->dp;
    if (thread->place)
        return TURN_NOW;
    struct pending what = waiting(thread, request, entry, fresh, begin);
    enum turn turn = TURN_NEVER;
    pthread_mutex_lock(&dp->pending_lock);
    struct pending *place = pend(dp, &what);
    if (place && LOAD(dp->at_source) < dp->source_max && !dp->for_source.first) {
        turn = TURN_NOW;
        take_slot(dp, thread);
        place->waits = AT_SOURCE;
        thread->place = place;
    } else if (place) {
        turn = TURN_LATER;
        place->waits = FOR_SOURCE;
        keep_request(place, request);
        list_append(&dp->for_source, place, QUEUE);
        ADD(dp->for_source_count, 1);
    }
    pthread_mutex_unlock(&dp->pending_lock);
    return turn;
}

/* The call that has begun is of another node. Its waits have limits of their own, and are none for
 * the source. */
void ask_peer(struct thread *thread) {
    struct datapath *dp = thread->dp;
    pthread_mutex_lock(&dp->pending_lock);
    thread->place->waits = AT_PEER;
    pthread_mutex_unlock(&dp->pending_lock);
    STORE(thread->asks_peer, 1);
}

void end_source_call(struct thread *thread) {
    struct datapath *dp = thread->dp;
    if (!thread->place)
        return;
    pthread_mutex_lock(&dp->pending_lock);
    if (thread->place->interrupted)
        dp->early[dp->early_next++ % EARLY] = thread->place->unique;
    unpend(dp, thread->place);
    thread->place = NULL;
    give_slot(dp, thread);
    pthread_mutex_unlock(&dp->pending_lock);
}

/* Lets a thread close a descriptor of the source. */
void close_later(struct datapath *dp, int fd) {
    struct closing *closing = malloc(sizeof *closing);
    if (!closing) {
        close(fd);
        return;
    }
    *closing = (struct closing){.fd = fd};
    pthread_mutex_lock(&dp->pending_lock);
    *dp->closing_end = closing;
    dp->closing_end = &closing->next;
    ADD(dp->for_source_count, 1);
    pthread_mutex_unlock(&dp->pending_lock);
    spawn_for_work(dp);
}

/* -- requests that wait for another ------------------------------------------------------------ */

/* TURN_NOW if the entry is settled. The request that settles it may wait for the source. */
enum turn wait_for_entry(struct thread *thread, const struct in_header *request,
                         struct open_inode *entry, uint64_t begin) {
    struct datapath *dp = thread->dp;
    if (LOAD(entry->kind) != OPEN_SETTLING)
        return TURN_NOW;
    struct pending what = waiting(thread, request, entry, false, begin);
    enum turn turn = TURN_NOW;
    pthread_mutex_lock(&dp->pending_lock);
    /* The entry is settled before waiting requests are woken, and they are woken under the lock. */
    if (LOAD(entry->kind) == OPEN_SETTLING) {
        struct pending *place = pend(dp, &what);
        turn = place ? TURN_LATER : TURN_NEVER;
        if (place) {
            place->waits = FOR_ENTRY;
            keep_request(place, request);
            list_append(&entry->waiters, place, QUEUE);
        }
    }
    pthread_mutex_unlock(&dp->pending_lock);
    return turn;
}

/* The entry is settled: lets threads continue the requests that wait for that. */
void wake_waiters(struct datapath *dp, struct open_inode *entry) {
    bool woken = false;
    pthread_mutex_lock(&dp->pending_lock);
    struct pending *place;
    while ((place = entry->waiters.first)) {
        list_remove(place, QUEUE);
        place->waits = SETTLED;
        list_append(&dp->settled, place, QUEUE);
        ADD(dp->settled_count, 1);
        woken = true;
    }
    pthread_mutex_unlock(&dp->pending_lock);
    if (woken)
        spawn_for_work(dp);
}

/* -- going on ---------------------------------------------------------------------------------- */

static bool has_work(struct datapath *dp) {
    return LOAD(dp->settled_count) > 0 ||
           (LOAD(dp->for_source_count) > 0 && LOAD(dp->at_source) < dp->source_max);
}

/* Takes the next request to continue, or descriptor to close, with a slot if it needs one; false if
 * there is none. */
static bool next_work(struct thread *thread, struct pending *what, struct closing **closing) {
    struct datapath *dp = thread->dp;
    bool found = true;
    *closing = NULL;
    pthread_mutex_lock(&dp->pending_lock);
    bool slot = LOAD(dp->at_source) < dp->source_max;
    struct pending *place = dp->settled.first;
    if (place) {
        list_remove(place, QUEUE);
        ADD(dp->settled_count, -1);
        *what = *place;
        /* The request may have to wait again, and the kernel does not repeat the interrupt. */
        if (place->interrupted)
            dp->early[dp->early_next++ % EARLY] = place->unique;
        unpend(dp, place);
    } else if (slot && dp->closing) {
        *closing = dp->closing;
        dp->closing = (*closing)->next;
        if (!dp->closing)
            dp->closing_end = &dp->closing;
        ADD(dp->for_source_count, -1);
        take_slot(dp, thread);
    } else if (slot && (place = dp->for_source.first)) {
        list_remove(place, QUEUE);
        ADD(dp->for_source_count, -1);
        place->waits = AT_SOURCE;
        thread->place = place;
        *what = *place;
        take_slot(dp, thread);
    } else {
        found = false;
    }
    pthread_mutex_unlock(&dp->pending_lock);
    return found;
}

/* Continues all requests that can continue now. */
void resume_waiting(struct thread *thread) {
    struct datapath *dp = thread->dp;
    struct pending what;
    struct closing *closing;
    int device = thread->device;
    while (has_work(dp) && !LOAD(dp->stopping) && next_work(thread, &what, &closing)) {
        if (closing) {
            close(closing->fd);
            free(closing);
            give_slot(dp, thread);
            continue;
        }
        struct in_header *request = (struct in_header *)thread->message;
        memcpy(request, &what.request, sizeof what.request);
        STORE(thread->begin_ns, what.begin_ns);
        /* The answer must be written to the descriptor from which the request was read. */
        thread->device = what.device;
        go_on(thread, request, &what);
        thread->device = device;
        end_source_call(thread);
        STORE(thread->begin_ns, 0);
    }
}

/* -- callers that are killed, or have waited too long ------------------------------------------ */

#define SIGNAL(number) (1ull << ((number) - 1))

/* The signals in a line of /proc/PID/status, one bit each; ``name`` is the begin of the line. */
static uint64_t signals(const char *text, const char *name) {
    const char *at = strstr(text, name);
    return at ? strtoull(at + strlen(name), NULL, 16) : 0;
}

/* Whether a request changes something, unless it is an open. Python makes the change in any case,
 * so a program that gets EINTR and repeats the request, as Python's own open() does, would meet its
 * own file or find nothing to remove. */
static bool is_change(uint32_t opcode) {
    switch (opcode) {
    case OP_SETATTR:
    case OP_SYMLINK:
    case OP_MKNOD:
    case OP_MKDIR:
    case OP_UNLINK:
    case OP_RMDIR:
    case OP_RENAME:
    case OP_LINK:
    case OP_WRITE:
    case OP_SETXATTR:
    case OP_REMOVEXATTR:
    case OP_CREATE:
    case OP_FALLOCATE:
    case OP_RENAME2:
        return true;
    default:
        return false;
    }
}

/* Whether a waiting thread must get its answer now. Either the kernel has decided to kill it and
 * waits for the answer; or it handles Ctrl-C or a similar signal, and its request changes nothing.
 * Other signals (SIGCHLD, SIGPROF) arrive without a user's request, and few programs expect that a
 * read of a file fails for them. */
static bool is_wanted_back(uint32_t pid, uint32_t opcode) {
    char *text = pid ? status_of(pid) : NULL;
    if (!text)
        return false;
    uint64_t own = signals(text, "\nSigPnd:"), shared = signals(text, "\nShdPnd:"),
             blocked = signals(text, "\nSigBlk:"), handled = signals(text, "\nSigCgt:");
    free(text);
    uint64_t ending = SIGNAL(SIGINT) | SIGNAL(SIGTERM) | SIGNAL(SIGHUP) | SIGNAL(SIGQUIT);
    if (own & SIGNAL(SIGKILL))
        return true;
    return !is_change(opcode) && (own | shared) & handled & ~blocked & ending;
}

/* Answers a waiting request with ``error`` and removes it from the lists; false if it does not wait
 * any more. */
static bool dismiss(struct datapath *dp, uint64_t unique, int error) {
    struct pending what = {0};
    pthread_mutex_lock(&dp->pending_lock);
    struct pending *place = pending_find(dp, unique);
    bool waits = place && !place->answered;
    bool gone = waits && place->links[QUEUE].list;
    if (waits) {
        mark_answered(dp, place);
        what = *place;
    }
    if (gone) {
        ADD(dp->for_source_count, -(place->waits == FOR_SOURCE));
        ADD(dp->settled_count, -(place->waits == SETTLED));
        list_remove(place, QUEUE);
        unpend(dp, place);
    }
    pthread_mutex_unlock(&dp->pending_lock);
    if (!waits)
        return false;
    /* If the request was answered meanwhile, the kernel ignores the number. */
    write_out(what.device, unique, error, NULL, 0);
    if (gone && what.entry) {
        /* Other requests may wait for this one to settle the entry. */
        if (what.fresh)
            opening_settle(dp, what.entry, OPEN_PYTHON, -1, 0, 0, 0);
        drop_open(dp, what.ino, false);
    }
    return true;
}

/* Whether the wait of a request ends if the source does not answer. Python limits the time of calls
 * that it makes itself. Another node is asked for a short time only, and what waits for that
 * request goes on with it. */
static bool is_for_source(const struct datapath *dp, const struct pending *place) {
    if (place->waits == AT_PYTHON)
        return place->queued;
    return place->waits != AT_PEER && !(dp->peers.entries && place->waits == FOR_ENTRY);
}

/* How long the caller of a change is kept although it was killed, in nanoseconds: longer than a
 * change takes if no disk is full or hangs. Python makes the change in any case. If the caller
 * ended first, the change would come after those of a process that waits for its end. */
#define CHANGE_NS 5000000000

/* Whether a caller must wait for its change at the time ``now``, even if it was sent a signal. */
static bool must_wait(const struct pending *place, uint64_t now) {
    return (place->truncates || is_change(place->opcode)) && now < place->since_ns + CHANGE_NS;
}

enum { LOOK = 256 };

/* Answers the callers that must not wait any longer, and those that have waited too long for the
 * source at the time ``now``, which stands still while the process is stopped. */
void look_after_callers(struct datapath *dp, uint64_t now) {
    struct found {
        uint64_t unique;
        uint32_t pid, opcode;
        bool late;
    } found[LOOK];
    int count = 0;
    pthread_mutex_lock(&dp->pending_lock);
    struct pending *place = dp->patience_ns ? dp->unanswered.first : NULL;
    for (; place && count < LOOK; place = place->links[BY_AGE].next) {
        if (now <= place->since_ns || now - place->since_ns <= dp->patience_ns)
            break;
        if (is_for_source(dp, place))
            found[count++] = (struct found){place->unique, place->pid, place->opcode, true};
    }
    /* In rotation, so that each is checked. */
    for (int left = dp->interrupted_count; left > 0 && count < LOOK; left--) {
        place = dp->interrupted.first;
        list_remove(place, BY_SIGNAL);
        list_append(&dp->interrupted, place, BY_SIGNAL);
        if (!must_wait(place, now))
            found[count++] = (struct found){place->unique, place->pid, place->opcode, false};
    }
    pthread_mutex_unlock(&dp->pending_lock);
    for (int i = 0; i < count; i++) {
        if (found[i].late) {
            if (dismiss(dp, found[i].unique, ETIMEDOUT)) {
                ADD(dp->timed_out, 1);
                wake_python(dp);
            }
        } else if (is_wanted_back(found[i].pid, found[i].opcode)) {
            dismiss(dp, found[i].unique, EINTR);
        }
    }
    pass_queued(dp);
}

/* Handles the kernel's message that the caller of a request was sent a signal. */
void interrupt(struct datapath *dp, uint64_t unique) {
    pthread_mutex_lock(&dp->pending_lock);
    struct pending *place = pending_find(dp, unique);
    uint32_t pid = 0, opcode = 0;
    if (place) {
        if (!must_wait(place, now_ns() - LOAD(dp->stopped_ns))) {
            pid = place->pid;
            opcode = place->opcode;
        }
        mark_interrupted(dp, place);
    } else {
        dp->early[dp->early_next++ % EARLY] = unique;
    }
    pthread_mutex_unlock(&dp->pending_lock);
    if (pid && is_wanted_back(pid, opcode))
        dismiss(dp, unique, EINTR);
}
