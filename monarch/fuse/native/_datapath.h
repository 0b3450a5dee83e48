/* The datapath: answers the kernel for what is known, without the interpreter.
 *
 *      kernel  <-- device (and its clones) -->  readers  -- what Python must decide -->  pyfuse3
 *                                                  |                                        |
 *                      pread + write, or a         |                                        |
 *                      backing file's number       '-- snapshot blocks, residency table     |
 *              <-----------------------------------  replier  <-------- its answers --------'
 *
 * Readers take requests from the device. What they can answer they answer: names and attributes
 * from the snapshot's mapped blocks (_names.c), opens and reads of resident files from the tiers'
 * directories (_opens.c). All else goes whole, as one message, over a socket pair to pyfuse3, whose
 * end libfuse takes for the device itself; the replier carries its answers back. An answer must be
 * written to the very descriptor that its request was read from, so what was passed on is kept in a
 * table (struct pending), and its number there stands in for the kernel's ``unique`` on the way.
 *
 * Waiting: a reader waits for the tiers' disks and, in at most ``source_max`` threads, for the
 * source. When no reader is idle, another one is started, so none of them holds up the rest. A
 * request that needs the source when ``source_max`` calls are under way, or that is about a file
 * that another request is opening, waits in a list (struct pending) and takes no thread.
 *
 * Memory shared with Python: the residency table and the marks, a byte for each inode, written
 * under the interpreter's lock and read here; no reader takes that lock. A read takes no lock at
 * all, but of a file that is written, and allocates nothing. All lengths and numbers from the
 * kernel are checked before use.
 *
 *   _datapath.c  the threads: readers and the replier, their beginning and end
 *   _requests.c  what a reader answers: opens, reads, writes, names
 *   _pending.c   the table of requests that wait, what is with Python, answers to the kernel
 *   _waiting.c   requests that wait for the source or for another request, and their callers
 *   _events.c    what was served, for Python to hear of
 *   _names.c, _opens.c, _fetch.c, _absorbed.c, _missing.c: each knows its own subject and nothing
 * of the rest _python.c    what Python sees of all this
 */
#ifndef MONARCH_DATAPATH_H
#define MONARCH_DATAPATH_H

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "_absorbed.h"
#include "_fetch.h"
#include "_missing.h"
#include "_names.h"
#include "_opens.h"
#include "_wire.h"

#define KIB 1024
#define MIB (1024 * KIB)

enum {
    MAX_TIERS = 17, /* the source is 0 */
    MAX_THREADS = 512,
    MAX_ERROR = 511, /* that the kernel takes */
    MAX_CLONES = 8,
    BUCKETS = 32,
    SHARDS = 16,
    EVENTS = 1 << 16,
    PENDING_CHUNK = 1024,
    PENDING_CHUNKS = 256,
    PENDING_BUCKETS = 4096,
    PYTHON_MAX = 256, /* requests with Python that may need the source; others wait here */
    EARLY = 64,
    LISTING_BYTES = 64 * KIB, /* of a listing that Python answers: it goes through the socket */
    MAX_FETCH = 256 * MIB,    /* the largest file that is fetched whole */
    DATA_BYTES = MIB,         /* the largest read of the kernel */
    MESSAGE_BYTES = MIB + 64 * KIB, /* the largest request */
    REPLY_BYTES = 256 * KIB,        /* the largest answer of Python's, but for the data of reads */
    WAKE_SIGNAL = SIGURG,           /* ignored unless somebody asks for it, so it harms nobody */
};

/* File handles that are ours: pyfuse3's are inode numbers. */
#define HANDLE_FAST (1ull << 63)
#define HANDLE_BOUND (1ull << 62)
/* Writes of it do not go through the kernel's pages, so the kernel sends no FSYNC after them. */
#define HANDLE_DIRECT (1ull << 61)
/* In the handle of a write that Python gets: it is to be safe when it is answered. */
#define WRITE_SYNC (1ull << 60)
/* Where a read that Python answers has its place in the table of the pending, behind the inode. */
#define TOKEN_SHIFT 40
#define INO_MASK ((1ull << TOKEN_SHIFT) - 1)

struct histogram {
    uint64_t counts[BUCKETS], total_ns;
};

struct tally {
    uint64_t opens, reads, bytes;
    struct histogram open, read;
};

/* What a request waits for. */
enum waits_for {
    AT_PYTHON,  /* Python has it */
    FOR_PYTHON, /* its turn to be passed on: Python has PYTHON_MAX that may need the source */
    AT_SOURCE,  /* a thread calls the source for it */
    FOR_SOURCE, /* its turn to call the source */
    FOR_ENTRY,  /* another request finds out what its file is bound to */
    SETTLED,    /* a thread to go on with it: that has been found out */
};

/* The lists that a request may be in: of those that wait for the same, of all that are not answered
 * (the first has waited longest), and of those whose caller was sent a signal. */
enum chain { QUEUE, BY_AGE, BY_SIGNAL, CHAINS };

struct link {
    struct waiters *list; /* NULL: in none */
    struct pending *next, *previous;
};

/* A request that waits; ``request`` holds it whole, but for one that only Python or a thread has.
 */
struct pending {
    struct {
        struct in_header header;
        union {
            struct open_in open;
            struct read_in read;
        };
    } request;
    uint64_t unique, ino;
    uint64_t since_ns; /* when it began to wait, the time that the process was stopped left out */
    uint64_t begin_ns; /* when it came */
    struct open_inode *entry; /* of an open, or of a read that stands for one */
    struct link links[CHAINS];
    struct pending *hashed; /* the next with the same hash */
    uint32_t opcode, pid, index, generation, next_free;
    int device;
    uint8_t waits; /* enum waits_for */
    bool used, answered;
    bool interrupted; /* somebody sent its caller a signal */
    bool writes;      /* an open, to write */
    bool fresh;       /* it is the one to settle the entry */
    bool limited;     /* one of PYTHON_MAX */
    bool queued;      /* it was FOR_PYTHON */
};

/* A descriptor of the source that is to be closed. */
struct closing {
    struct closing *next;
    int fd;
};

/* In the place of a tier: an open that Python has answered did not come about; a file was fetched
 * from the source; the last open of an outdated copy was released. */
enum { EVENT_ABANDONED = 0xfd, EVENT_FETCHED = 0xfe, EVENT_RELEASED = 0xff };

struct event {
    uint64_t turn; /* atomic: whose turn the place is, see put_event */
    uint64_t what;
    struct content *content; /* what was fetched, of which the event is a user */
};

struct overflow {
    struct overflow *next;
    struct event event;
};

struct tier {
    int directory;
    bool seals;  /* its file system keeps times of modification as they were set */
    int refuses; /* passthrough; atomic */
    int shunned; /* Python looks at every open; atomic */
};

enum thread_state { THREAD_NONE, THREAD_RUNS, THREAD_ENDED };

struct thread {
    struct datapath *dp;
    pthread_t id;
    int state; /* atomic */
    int device;
    unsigned shard;
    struct pending *place;    /* of the request for which the source may be called, with a slot */
    uint64_t source_since_ns; /* when a call of the source began, 0 if none is made; atomic */
    uint64_t begin_ns;        /* when the request came that is being answered, 0: none; atomic */
    uint8_t *message, *data;
};

struct datapath {
    /* As it was made. */
    struct names names;
    const uint8_t *residency, *marks;
    uint8_t unusable; /* marks of an inode whose copy Python must look at first */
    uint8_t copying;  /* the mark of an inode of which a copy is under way */
    int source;       /* its directory; -1: Python fetches */
    int as_caller;    /* fetch with the rights of the process that opens; atomic */
    uint64_t fetch_max;
    int64_t hold_max;
    int source_max;       /* calls of the source at once */
    uint64_t patience_ns; /* how long a caller may wait for the source; 0: for ever */
    uint64_t stopped_ns;  /* how long the process was stopped, and nobody waited; atomic */
    struct tier tiers[MAX_TIERS];
    uint64_t bounds_ns[BUCKETS];
    int bounds;

    /* As it was started. */
    int device, channel, wake, nothing;
    int clones[MAX_CLONES], clone_count;
    bool no_open, cache_listings, decide_opens, want_passthrough;
    int idle_target;

    /* As the kernel has agreed. */
    int serving, passthrough, no_open_agreed, no_opendir_agreed; /* atomic */

    uint8_t *given; /* a bit for each inode of which bytes were given without an open; atomic */
    struct opens opens;
    struct absorbed absorbed;
    struct missing missing;
    struct tally (*tallies)[MAX_TIERS];                /* SHARDS of them, atomic */
    uint64_t source_opens, source_reads, source_bytes; /* atomic */
    uint64_t source_waited_ns;                         /* of calls that are over; atomic */
    int64_t held;                                      /* atomic */
    int64_t timed_out; /* callers that have waited too long for the source; atomic */

    struct event *events;
    uint64_t event_head, event_tail; /* head: atomic */
    /* What found no room in the ring, in its order; then nothing goes there before it. */
    pthread_mutex_t overflow_lock;
    struct overflow *overflow, **overflow_end; /* the first: atomic */
    int awake, ended, stopping;                /* atomic */
    int refusal;                               /* errno of a refused passthrough; atomic */

    pthread_mutex_t pending_lock;
    struct pending *pending[PENDING_CHUNKS];
    uint32_t pending_count, pending_free;
    struct waiters unanswered, interrupted;
    int unanswered_count, interrupted_count;
    struct pending *by_unique[PENDING_BUCKETS];
    struct waiters for_source, for_python, settled;
    struct closing *closing, **closing_end;
    /* Calls of the source under way; requests and descriptors whose turn has not come; of those
     * that a thread may go on with. All atomic, so that they can be looked at without the lock. */
    int at_source, for_source_count, settled_count;
    int python_limited; /* with Python, of PYTHON_MAX */
    /* Interrupts that came before what they are about was seen to wait, the last of them. */
    uint64_t early[EARLY];
    unsigned early_next;

    pthread_mutex_t threads_lock;
    struct thread threads[MAX_THREADS];
    int thread_count, idle; /* atomic */
    pthread_t replier;
    bool started;
};

/* The end of the list of free places in the table of the pending. */
#define NO_PENDING UINT32_MAX

#define LOAD(x) __atomic_load_n(&(x), __ATOMIC_ACQUIRE)
#define STORE(x, v) __atomic_store_n(&(x), (v), __ATOMIC_RELEASE)
#define ADD(x, v) __atomic_add_fetch(&(x), (v), __ATOMIC_RELAXED)

static inline uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

/* -- _events.c --------------------------------------------------------------------------------- */

void wake_python(struct datapath *dp);
bool put_event(struct datapath *dp, uint64_t ino, uint8_t tier, struct content *content);
bool next_event(struct datapath *dp, struct event *event);
void tell(struct datapath *dp, uint64_t ino, uint8_t what, struct content *content);
struct tally *tally_of(struct thread *thread, uint8_t tier);
void count_open(struct thread *thread, uint8_t tier, uint64_t begin);
void count_read(struct thread *thread, uint8_t tier, size_t bytes, uint64_t begin);

/* -- _pending.c -------------------------------------------------------------------------------- */

int write_out(int device, uint64_t unique, int error, const void *data, size_t size);
int answer(struct thread *thread, const struct in_header *request, const void *data, size_t size);
void refuse(struct thread *thread, const struct in_header *request, int error);
struct pending *pending_at(struct datapath *dp, uint32_t index);
struct pending *pending_find(struct datapath *dp, uint64_t unique);
struct pending *pend(struct datapath *dp, const struct pending *what);
void keep_request(struct pending *place, const struct in_header *request);
void unpend(struct datapath *dp, struct pending *place);
bool take_pending(struct datapath *dp, uint64_t unique, struct pending *what);
void list_append(struct waiters *list, struct pending *place, enum chain chain);
void list_remove(struct pending *place, enum chain chain);
void mark_answered(struct datapath *dp, struct pending *place);
void mark_interrupted(struct datapath *dp, struct pending *place);
void close_remains(struct datapath *dp, const struct open_remains *to_close);
bool drop_open(struct datapath *dp, uint64_t ino, bool by_python);
void release_written(struct datapath *dp, uint64_t ino);
void pass_on(struct thread *thread, struct in_header *request);
void pass_open(struct thread *thread, struct in_header *request, struct open_inode *entry,
               bool writes);
void pass_queued(struct datapath *dp);

/* -- _waiting.c -------------------------------------------------------------------------------- */

/* Whether a request can go on now, later (it was put in a list, and is no more the caller's), or
 * cannot wait. */
enum turn { TURN_NOW, TURN_LATER, TURN_NEVER };

enum turn begin_source_call(struct thread *thread, const struct in_header *request,
                            struct open_inode *entry, bool fresh, uint64_t begin);
void end_source_call(struct thread *thread);
enum turn wait_for_entry(struct thread *thread, const struct in_header *request,
                         struct open_inode *entry, uint64_t begin);
void wake_waiters(struct datapath *dp, struct open_inode *entry);
void close_later(struct datapath *dp, int fd);
void resume_waiting(struct thread *thread);
void look_after_callers(struct datapath *dp, uint64_t now);
void interrupt(struct datapath *dp, uint64_t unique);

/* -- _requests.c ------------------------------------------------------------------------------- */

int32_t register_backing(struct datapath *dp, int fd, uint8_t tier);
bool is_scarce(int fd);
bool store_pages(struct datapath *dp, uint64_t ino, const void *data, size_t size);
struct open_out handle_of(const struct open_inode *entry, bool bound, uint32_t wanted);
void dispatch(struct thread *thread, struct in_header *request, uint64_t begin);
bool settle(struct datapath *dp, struct open_inode *entry, enum open_kind kind, int fd,
            int32_t backing_id, uint8_t tier, uint64_t size);
void go_on(struct thread *thread, struct in_header *request, const struct pending *place);

/* -- _datapath.c ------------------------------------------------------------------------------- */

void spawn_if_none_is_idle(struct datapath *dp);
/* One more thread, unless the caller is one that looks for work itself when it has done this. */
void spawn_for_work(struct datapath *dp);
/* Talk with the kernel over ``device`` and with pyfuse3 over ``channel``: 0, or an errno. */
int start(struct datapath *dp, int device, int channel, int threads);
void stop(struct datapath *dp);
bool still_runs(struct datapath *dp);
/* Those that hung when they were told to stop, and have come back. */
void join_ended(struct datapath *dp);
void close_all(struct datapath *dp);

#endif
