/* Events for Python, one by one in their order, and counts of opens and reads. */
#include "_datapath.h"

#include <stdlib.h>
#include <unistd.h>

void wake_python(struct datapath *dp) {
    /* If this thread sees Python awake, Python must see the event or count that was stored before:
     * see datapath_events. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (LOAD(dp->awake) || __atomic_exchange_n(&dp->awake, 1, __ATOMIC_ACQ_REL))
        return;
    uint64_t one = 1;
    if (write(dp->wake, &one, sizeof one) < 0) {
        /* The counter is full, so Python is awake. */
    }
}

/* The session of a process; 0 if it is unknown. */
uint32_t session_of(uint32_t pid) {
    pid_t session = pid ? getsid((pid_t)pid) : 0;
    return session > 0 ? (uint32_t)session : 0;
}

/* An event of an ``open`` request; NULL for another event. The process still waits for the answer:
 * when Python takes the event, it may have ended. */
static struct event new_event(uint64_t ino, uint8_t what, struct content *content,
                              const struct in_header *open) {
    struct event event = {.what = (uint64_t)what << 56 | ino, .content = content};
    if (open) {
        event.pid = open->pid;
        event.session = session_of(open->pid);
        event.uid = open->uid;
    }
    return event;
}

/* Stores an event, as new_event makes it; false if there is no room: then Python must see the open
 * itself. */
bool put_event(struct datapath *dp, uint64_t ino, uint8_t what, struct content *content,
               const struct in_header *open) {
    struct event made = new_event(ino, what, content, open);
    uint64_t head = __atomic_load_n(&dp->event_head, __ATOMIC_RELAXED);
    if (LOAD(dp->overflow))
        return false;
    for (;;) {
        struct event *event = &dp->events[head % EVENTS];
        int64_t lag = (int64_t)(LOAD(event->turn) - head);
        if (lag < 0)
            return false;
        if (lag > 0) {
            head = __atomic_load_n(&dp->event_head, __ATOMIC_RELAXED);
        } else if (__atomic_compare_exchange_n(&dp->event_head, &head, head + 1, true,
                                               __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
            event->what = made.what;
            event->content = made.content;
            event->pid = made.pid;
            event->session = made.session;
            event->uid = made.uid;
            STORE(event->turn, head + 1);
            return true;
        }
    }
}

/* Takes the oldest event; false if there is none. Its ``content`` then belongs to the caller. */
bool next_event(struct datapath *dp, struct event *event) {
    struct event *place = &dp->events[dp->event_tail % EVENTS];
    if (LOAD(place->turn) == dp->event_tail + 1) {
        *event = *place;
        STORE(place->turn, dp->event_tail + EVENTS);
        dp->event_tail++;
        return true;
    }
    /* Events of the overflow are taken only when the ring is empty: a thread may be storing one
     * there. */
    if (!LOAD(dp->overflow) || __atomic_load_n(&dp->event_head, __ATOMIC_RELAXED) != dp->event_tail)
        return false;
    pthread_mutex_lock(&dp->overflow_lock);
    struct overflow *first = dp->overflow;
    if (!first->next)
        dp->overflow_end = &dp->overflow;
    STORE(dp->overflow, first->next);
    pthread_mutex_unlock(&dp->overflow_lock);
    *event = first->event;
    free(first);
    return true;
}

/* Stores the event of an open; waits until Python has made room. */
static bool has_room(struct datapath *dp, uint64_t ino, uint8_t tier,
                     const struct in_header *open) {
    bool is_stored = put_event(dp, ino, tier, NULL, open);
    for (int tries = 0; !is_stored && tries < 10000 && !LOAD(dp->stopping); tries++) {
        wake_python(dp);
        usleep(1000);
        is_stored = put_event(dp, ino, tier, NULL, open);
    }
    return is_stored;
}

/* Reports an event to Python. The event of an open waits for room. All others are never lost and do
 * not wait, since the thread of Python's answers and Python itself report them. */
void report_event(struct datapath *dp, uint64_t ino, uint8_t what, struct content *content,
                  const struct in_header *open) {
    bool is_stored =
        what < MAX_TIERS ? has_room(dp, ino, what, open) : put_event(dp, ino, what, content, open);
    struct overflow *more = is_stored ? NULL : malloc(sizeof *more);
    if (more) {
        more->next = NULL;
        more->event = new_event(ino, what, content, open);
        pthread_mutex_lock(&dp->overflow_lock);
        if (dp->overflow)
            *dp->overflow_end = more;
        else
            STORE(dp->overflow, more);
        dp->overflow_end = &more->next;
        pthread_mutex_unlock(&dp->overflow_lock);
    } else if (!is_stored) {
        content_release(content);
    }
    wake_python(dp);
}

/* Holds the bytes of an open inode, so that processes that open it next get them, too: until Python
 * takes the event that follows, or LAST_HELD more inodes are held. */
void hold_last(struct datapath *dp, struct open_inode *entry, uint64_t ino) {
    opens_hold(&dp->opens, entry);
    unsigned place = ADD(dp->last_held_count, 1) % LAST_HELD;
    uint64_t before = __atomic_exchange_n(&dp->last_held[place], ino, __ATOMIC_ACQ_REL);
    if (before)
        drop_open(dp, before, false);
}

void release_last(struct datapath *dp) {
    for (int i = 0; i < LAST_HELD; i++) {
        uint64_t ino = __atomic_exchange_n(&dp->last_held[i], 0, __ATOMIC_ACQ_REL);
        if (ino)
            drop_open(dp, ino, false);
    }
}

/* Records that bytes of an inode are kept for reads without an open, at most PARTLY_READ at once.
 */
void keep_partly_read(struct datapath *dp, uint64_t ino) {
    unsigned place = ADD(dp->partly_read_count, 1) % PARTLY_READ;
    uint64_t before = __atomic_exchange_n(&dp->partly_read[place], ino, __ATOMIC_ACQ_REL);
    if (before && before != ino)
        end_reading(dp, before, true);
}

/* Drops the bytes of which none were read since the last call: their reader may have ended. */
void look_after_partly_read(struct datapath *dp) {
    for (int i = 0; i < PARTLY_READ; i++) {
        uint64_t ino = LOAD(dp->partly_read[i]);
        if (ino && !end_reading(dp, ino, false))
            __atomic_compare_exchange_n(&dp->partly_read[i], &ino, 0, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED);
    }
}

static void observe(struct datapath *dp, struct histogram *histogram, uint64_t ns) {
    int bucket = 0;
    while (bucket < dp->bounds && dp->bounds_ns[bucket] < ns)
        bucket++;
    ADD(histogram->counts[bucket], 1);
    ADD(histogram->total_ns, ns);
}

struct tally *tally_of(struct thread *thread, uint8_t tier) {
    return &thread->dp->tallies[thread->shard][tier];
}

/* Counted before the answer is sent: a caller that asks then must find it counted. */
void count_open(struct thread *thread, uint8_t tier, uint64_t begin) {
    struct tally *tally = tally_of(thread, tier);
    ADD(tally->opens, 1);
    observe(thread->dp, &tally->open, now_ns() - begin);
    wake_python(thread->dp);
}

void count_read(struct thread *thread, uint8_t tier, size_t bytes, uint64_t begin) {
    struct tally *tally = tally_of(thread, tier);
    ADD(tally->reads, 1);
    ADD(tally->bytes, bytes);
    observe(thread->dp, &tally->read, now_ns() - begin);
    wake_python(thread->dp);
}
