/* The datapath: answers requests of the kernel that need no decision, without the interpreter.
 *
 *      kernel  <-- device (and its clones) -->  readers  -- what Python must decide -->  pyfuse3
 *                                                  |                                        |
 *                      splice, or pread + write,   |                                        |
 *                      or a backing file's number  '-- snapshot blocks, residency table     |
 *              <-----------------------------------  replier  <-------- its answers --------'
 *
 * Readers take requests from the device. They answer names and attributes from the snapshot's
 * mapped blocks (_names.c), and opens and reads of resident files from the tiers' directories
 * (_opens.c). All other requests are passed to pyfuse3, each as one message over a socket pair;
 * libfuse takes its end of the pair for the device. The replier passes the answers back. An answer
 * must be written to the descriptor from which its request was read. So a table (struct pending)
 * keeps the requests that were passed on, and a number of that table replaces the kernel's
 * ``unique`` on the way. Requests that change names and attributes, and those that ask for them, go
 * to Python's event loop without pyfuse3: through a queue (_direct.c), from which Python takes all
 * that have come, and its answers are passed back in its own thread.
 *
 * Waiting: a reader waits for the tiers' disks and, in at most ``source_max`` threads, for the
 * source. When no reader is idle, another one is started, so a waiting reader delays no other
 * request. A request waits in a list (struct pending), without a thread, if it needs the source
 * while ``source_max`` calls are running, or if another request is opening its file.
 *
 * Memory shared with Python: the residency table and the marks, a byte for each inode. They are
 * written under the interpreter's lock and read here without it. A read allocates nothing and takes
 * no lock, unless the file is being written. All lengths and numbers from the kernel are checked
 * before use.
 *
 *   _datapath.c  the threads, readers and replier: their start, their loops and their end
 *   _requests.c  the requests that a reader answers: opens, reads, writes, names
 *   _pending.c   the table of waiting requests; requests passed to Python, and their answers
 *   _waiting.c   requests that wait for the source or for another request, and their callers
 *   _events.c    events and counts for Python
 *   _splice.c    answers that are not read into memory
 *   _names.c, _opens.c, _fetch.c, _pack.c, _peers.c, _absorbed.c, _missing.c, _direct.c: one
 *                subject each, without the others
 *   _python.c    the interface to Python, with _python_files.c, _python_direct.c, _python_packs.c,
 *                _python_peers.c and _python_watched.c
 */
#ifndef MONARCH_DATAPATH_H
#define MONARCH_DATAPATH_H

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "_absorbed.h"
#include "_direct.h"
#include "_fetch.h"
#include "_missing.h"
#include "_names.h"
#include "_opens.h"
#include "_pack.h"
#include "_peers.h"
#include "_wire.h"

#define KIB 1024
#define MIB (1024 * KIB)

enum {
    MAX_TIERS = 17, /* the source is 0 */
    MAX_MEASURED = 16,
    MAX_THREADS = 512,
    MAX_ERROR = 511, /* that the kernel takes */
    MAX_CLONES = 8,
    BUCKETS = 32,
    SHARDS = 16,
    EVENTS = 1 << 16,
    LAST_HELD = 4,
    PARTLY_READ = 64,
    PENDING_CHUNK = 1024,
    PENDING_CHUNKS = 256,
    PENDING_BUCKETS = 4096,
    PYTHON_MAX = 256, /* most requests with Python that may need the source; others wait here */
    EARLY = 64,
    LISTING_BYTES = 64 * KIB,       /* of a listing from Python, through the socket */
    MAX_FETCH = 256 * MIB,          /* the largest file that is fetched as a whole */
    DATA_BYTES = MIB,               /* the largest read request of the kernel */
    MESSAGE_BYTES = MIB + 64 * KIB, /* the largest request */
    REPLY_BYTES = 256 * KIB,        /* the largest answer of Python, without the data of reads */
    WAKE_SIGNAL = SIGURG,           /* ignored by default, so it cannot disturb another library */
};

/* Bits of file handles made here; those of pyfuse3 are inode numbers. */
#define HANDLE_FAST (1ull << 63)
#define HANDLE_BOUND (1ull << 62)
/* Writes through this handle bypass the page cache, so the kernel sends no FSYNC after them. */
#define HANDLE_DIRECT (1ull << 61)
/* Bit in the handle of a write that is passed to Python: it must be durable before its answer. */
#define WRITE_SYNC (1ull << 60)
/* Another bit there: the write removes the set-ID bits of the file. */
#define WRITE_REMOVES_SET_ID (1ull << 59)
/* The shift in a file handle, above the inode number, of the read's number in the pending table. */
#define TOKEN_SHIFT 40
#define INO_MASK ((1ull << TOKEN_SHIFT) - 1)

struct histogram {
    uint64_t counts[BUCKETS], total_ns;
};

struct tally {
    uint64_t opens, reads, bytes;
    struct histogram open, read;
};

/* The state of a waiting request. */
enum waits_for {
    AT_PYTHON,  /* Python has it */
    FOR_PYTHON, /* in a queue: Python already has PYTHON_MAX requests that may need the source */
    AT_SOURCE,  /* a thread calls the source for the request */
    AT_PEER,    /* a thread asks another node, in the place of a call of the source */
    FOR_SOURCE, /* in a queue for a call of the source */
    FOR_ENTRY,  /* another request settles the entry of its file */
    SETTLED,    /* its entry was settled; a thread must continue with the request */
};

/* The lists that may contain a request: of requests that wait for the same, of all unanswered
 * requests in the order of their age, and of requests with an interrupted caller. */
enum chain { QUEUE, BY_AGE, BY_SIGNAL, CHAINS };

struct link {
    struct waiters *list; /* NULL: in none */
    struct pending *next, *previous;
};

/* A waiting request. ``request`` is complete, except while only Python or a thread uses the
 * request. */
struct pending {
    struct {
        struct in_header header;
        union {
            struct open_in open;
            struct read_in read;
        };
    } request;
    uint64_t unique, ino;
    uint64_t since_ns;        /* begin of the wait, without time in which the process was stopped */
    uint64_t begin_ns;        /* when it came */
    struct open_inode *entry; /* of an open, or of a read without an open */
    struct link links[CHAINS];
    struct pending *hashed; /* the next with the same hash */
    uint32_t opcode, pid, uid, gid, index, generation, next_free;
    int device;
    uint8_t waits; /* enum waits_for */
    bool used, answered;
    bool interrupted; /* its caller was sent a signal */
    bool writes;      /* an open for writing */
    bool truncates;   /* an open that Python makes, and that empties the file */
    bool fresh;       /* this request settles the entry */
    bool limited;     /* one of PYTHON_MAX */
    bool queued;      /* it was FOR_PYTHON */
};

/* A descriptor of the source to be closed. */
struct closing {
    struct closing *next;
    int fd;
};

/* Values of an event instead of a tier: an open that Python has answered failed; a file was fetched
 * from the source; the last open of an outdated copy was released. */
enum { EVENT_ABANDONED = 0xfd, EVENT_FETCHED = 0xfe, EVENT_RELEASED = 0xff };

struct event {
    uint64_t turn; /* atomic: the position that may use this place next, see put_event */
    uint64_t what;
    struct content *content; /* the fetched bytes; the event counts as their user */
    uint32_t pid;            /* the process that has opened the file; 0: unknown, or no open */
    uint32_t session;        /* the session of that process; 0: unknown */
    uint32_t uid;            /* the user with whose rights it has opened the file */
};

struct overflow {
    struct overflow *next;
    struct event event;
};

struct tier {
    int directory;
    bool seals;  /* its file system keeps modification times exactly */
    int refuses; /* passthrough; atomic */
    int shunned; /* Python decides every open; atomic */
};

enum thread_state { THREAD_NONE, THREAD_RUNS, THREAD_ENDED };

struct thread {
    struct datapath *dp;
    pthread_t id;
    int state; /* atomic */
    int device;
    unsigned shard;
    struct pending *place;    /* of the request with a slot for a call of the source */
    uint64_t source_since_ns; /* the begin of the current call of the source, 0: none; atomic */
    int asks_peer;            /* that call is of another node; atomic */
    uint64_t begin_ns; /* the arrival of the request being answered, 0 if there is none; atomic */
    uint8_t *message, *data;
    struct pipe *pipe; /* of the answer that splice_take has taken */
};

/* The kernel limits the places of all pipes of a user (/proc/sys/fs/pipe-user-pages-soft, usually
 * 16,384), and the pipes of the user's other programs get two places then. So there are few pipes.
 * A thread has one only while it answers, so that threads which wait for the source take none
 * (_splice.c). All but the first field belong to the thread that has taken the pipe. */
enum { MOST_PIPES = 64 };

struct pipe {
    int is_taken; /* atomic */
    bool is_open;
    int ends[2];
    unsigned without; /* answers that are given without it before the next try to open it */
};

struct datapath {
    /* Set when the datapath is made. */
    struct names names;
    const uint8_t *residency, *marks;
    uint8_t unusable; /* marks of inodes whose copies Python must check first */
    uint8_t copying;  /* the mark of an inode with a copy under way */
    uint8_t forced;   /* the mark of an inode whose copy was requested by a user */
    int source;       /* the source's directory; -1: Python fetches, unless it is a pack, or other
                       * nodes have the file */
    struct pack pack;
    struct peers peers;
    int as_caller; /* fetch with the rights of the opening process; atomic */
    uint64_t fetch_max;
    int64_t hold_max;
    int source_max;       /* most concurrent calls of the source */
    uint64_t patience_ns; /* the most time that a caller waits for the source; 0: no limit */
    uint64_t stopped_ns;  /* the total time in which the process was stopped; atomic */
    struct tier tiers[MAX_TIERS];
    uint64_t bounds_ns[BUCKETS];
    int bounds;
    /* Sessions whose first opens of a file Python decides, and their number; atomic. */
    int32_t measured[MAX_MEASURED];
    int measured_count;

    /* Set when the datapath is started. */
    int device, channel, wake, nothing;
    int clones[MAX_CLONES], clone_count;
    int no_open, cache_listings, decide_opens, want_passthrough;
    int idle_target;
    bool takes_pages; /* splice sends one message to the device; to a socket it may send several */

    /* Set by the kernel's answer to INIT. */
    int serving, passthrough, no_open_agreed, no_opendir_agreed; /* atomic */

    uint8_t *given; /* a bit for each inode with bytes returned without an open; atomic */
    struct opens opens;
    struct absorbed absorbed;
    struct missing missing;
    struct direct direct;
    struct tally (*tallies)[MAX_TIERS];                /* SHARDS arrays, atomic */
    uint64_t source_opens, source_reads, source_bytes; /* atomic */
    /* Calls of the source, or of other nodes, that gave readers bytes, and the duration of all
     * completed ones; atomic. */
    uint64_t source_calls, source_waited_ns;
    int64_t held;      /* bytes that were fetched; atomic */
    int64_t kept;      /* bytes that Python has given; atomic */
    int64_t timed_out; /* callers that got a timeout of the source; atomic */

    struct event *events;
    uint64_t event_head, event_tail; /* head: atomic */
    /* Inodes that hold_last holds, 0: none, and the number of its calls; atomic. */
    uint64_t last_held[LAST_HELD];
    unsigned last_held_count;
    /* Inodes whose bytes are kept for reads without an open, 0: none, and their number so far;
     * atomic. */
    uint64_t partly_read[PARTLY_READ];
    unsigned partly_read_count;
    /* Events without a place in the ring, in their order. While there are any, new ones follow
     * here. */
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
    /* Running calls of the source; requests and descriptors that wait for such a call; requests
     * that a thread may continue. All are atomic, so they can be read without the lock. */
    int at_source, for_source_count, settled_count;
    int python_limited;   /* requests with Python that count for PYTHON_MAX */
    int python_throttled; /* requests with Python that wait for the limits of their jobs */
    /* The last interrupts that arrived before their request began to wait. */
    uint64_t early[EARLY];
    unsigned early_next;

    pthread_mutex_t threads_lock;
    struct thread threads[MAX_THREADS];
    struct pipe pipes[MOST_PIPES];
    int thread_count, idle; /* atomic */
    pthread_t replier;
    bool started;
};

/* The end of the list of free places in the pending table. */
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
bool put_event(struct datapath *dp, uint64_t ino, uint8_t what, struct content *content,
               const struct in_header *open);
bool next_event(struct datapath *dp, struct event *event);
void report_event(struct datapath *dp, uint64_t ino, uint8_t what, struct content *content,
                  const struct in_header *open);
void hold_last(struct datapath *dp, struct open_inode *entry, uint64_t ino);
void release_last(struct datapath *dp);
void keep_partly_read(struct datapath *dp, uint64_t ino);
void look_after_partly_read(struct datapath *dp);
struct tally *tally_of(struct thread *thread, uint8_t tier);
void count_open(struct thread *thread, uint8_t tier, uint64_t begin);
void count_read(struct thread *thread, uint8_t tier, size_t bytes, uint64_t begin);
uint32_t session_of(uint32_t pid);

/* -- _splice.c --------------------------------------------------------------------------------- */

void splice_close(struct thread *thread);
void splice_free(struct datapath *dp);

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
bool end_reading(struct datapath *dp, uint64_t ino, bool now);
void end_binding(struct datapath *dp, uint64_t ino);
void release_written(struct datapath *dp, uint64_t ino);
void pass_on(struct thread *thread, struct in_header *request);
void pass_open(struct thread *thread, struct in_header *request, struct open_inode *entry,
               bool writes);
void pass_queued(struct datapath *dp);

/* -- _waiting.c -------------------------------------------------------------------------------- */

/* Whether a request can continue now, continues later (it was put in a queue and does not belong to
 * the caller any more), or cannot wait. */
enum turn { TURN_NOW, TURN_LATER, TURN_NEVER };

enum turn begin_source_call(struct thread *thread, const struct in_header *request,
                            struct open_inode *entry, bool fresh, uint64_t begin);
void ask_peer(struct thread *thread);
void end_source_call(struct thread *thread);
enum turn wait_for_entry(struct thread *thread, const struct in_header *request,
                         struct open_inode *entry, uint64_t begin);
void wake_waiters(struct datapath *dp, struct open_inode *entry);
void close_later(struct datapath *dp, int fd);
void resume_waiting(struct thread *thread);
void look_after_callers(struct datapath *dp, uint64_t now);
void interrupt(struct datapath *dp, uint64_t unique);

/* -- _datapath.c ------------------------------------------------------------------------------- */

/* Passes Python's answer to the kernel. ``header->unique`` is a number of the pending table. */
void carry_back(struct datapath *dp, struct out_header *header);
/* Starts one more thread, unless the caller will take the work itself. */
void spawn_for_work(struct datapath *dp);
/* Begins to serve the kernel's ``device``, with pyfuse3 at ``channel``: returns 0 or an errno. */
int start(struct datapath *dp, int device, int channel, int threads);
void stop(struct datapath *dp);
bool still_runs(struct datapath *dp);
/* Joins threads that hung at the stop and have ended since. */
void join_ended(struct datapath *dp);
void close_all(struct datapath *dp);

#endif
