/* The threads: readers take requests from the device, the replier carries Python's answers back. */
#include "_requests.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

/* -- the readers ------------------------------------------------------------------------------- */

static void end_session(struct datapath *dp, int error) {
    STORE(dp->ended, error);
    STORE(dp->awake, 0);
    wake_python(dp);
}

/* Whether this thread takes waiting requests itself when it has answered one. The variable lies in
 * the static block of a thread, because ThreadSanitizer may take the bytes before a block that is
 * allocated at the first use for a header (sanitizer_tls_get_addr.cpp) and then end the process. */
static _Thread_local bool is_reader __attribute__((tls_model("initial-exec")));

static bool spawn(struct datapath *dp);

static void *reader_main(void *argument) {
    struct thread *thread = argument;
    struct datapath *dp = thread->dp;
    is_reader = true;
    resume_waiting(thread);
    while (!LOAD(dp->stopping)) {
        if (ADD(dp->idle, 1) > dp->idle_target) {
            /* More idle threads than are useful, since fewer now wait for disks and for the source.
             * Any other idle thread will take work that was queued meanwhile. */
            ADD(dp->idle, -1);
            break;
        }
        ssize_t size = read(thread->device, thread->message, MESSAGE_BYTES);
        int error = errno;
        ADD(dp->idle, -1);
        if (size < 0 && (error == EINTR || error == EAGAIN || error == ENOENT))
            continue;
        struct in_header *request = (struct in_header *)thread->message;
        if (size <= 0) {
            end_session(dp, size == 0 ? ENODEV : error);
            break;
        }
        if ((size_t)size < sizeof *request || request->len != (size_t)size)
            continue;
        uint64_t begin = now_ns();
        /* Strings end within the message, whatever the kernel says. */
        thread->message[size] = 0;
        if (__atomic_load_n(&dp->idle, __ATOMIC_RELAXED) <= 0)
            spawn(dp);
        STORE(thread->begin_ns, begin);
        dispatch(thread, request, begin);
        STORE(thread->begin_ns, 0);
        resume_waiting(thread);
    }
    free(thread->message);
    free(thread->data);
    splice_close(thread);
    STORE(thread->state, THREAD_ENDED);
    return NULL;
}

/* Signals are for the interpreter's threads; ours take only the one that wakes them to end. */
static int start_thread(pthread_t *id, void *(*function)(void *), void *argument) {
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, WAKE_SIGNAL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(id, NULL, function, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

static void join_if_ended(struct thread *thread) {
    if (LOAD(thread->state) == THREAD_ENDED) {
        pthread_join(thread->id, NULL);
        STORE(thread->state, THREAD_NONE);
    }
}

/* Starts one more reader; false if that is not possible. */
static bool spawn(struct datapath *dp) {
    bool started = false;
    pthread_mutex_lock(&dp->threads_lock);
    int place = 0;
    while (place < MAX_THREADS && LOAD(dp->threads[place].state) == THREAD_RUNS)
        place++;
    if (place < MAX_THREADS && !LOAD(dp->stopping)) {
        struct thread *thread = &dp->threads[place];
        join_if_ended(thread);
        thread->dp = dp;
        thread->device = dp->clones[place % dp->clone_count];
        thread->shard = (unsigned)place % SHARDS;
        STORE(thread->source_since_ns, 0);
        STORE(thread->asks_peer, 0);
        STORE(thread->begin_ns, 0);
        thread->place = NULL;
        thread->message = malloc(MESSAGE_BYTES + 1);
        thread->data = malloc(DATA_BYTES);
        STORE(thread->state, THREAD_RUNS);
        started =
            thread->message && thread->data && start_thread(&thread->id, reader_main, thread) == 0;
        if (!started) {
            free(thread->message);
            free(thread->data);
            STORE(thread->state, THREAD_NONE);
        } else if (place >= LOAD(dp->thread_count)) {
            STORE(dp->thread_count, place + 1);
        }
    }
    pthread_mutex_unlock(&dp->threads_lock);
    return started;
}

void spawn_for_work(struct datapath *dp) {
    /* Threads that wait for a request do not notice other work. If no thread can be started, the
     * thread of the next request takes the work. */
    if (!is_reader)
        spawn(dp);
}

/* -- the replier ------------------------------------------------------------------------------- */

/* Sets the options that libfuse does not know, or sets for small machines. */
static void agree_on_answers(struct datapath *dp, struct out_header *header) {
    struct init_out *out = (struct init_out *)(header + 1);
    if (header->error || header->len < sizeof *header + sizeof *out)
        return;
    /* Without PARALLEL_DIROPS, lookups in one directory wait for each other. The kernel ignores
     * unknown flags. */
    out->flags |= INIT_PARALLEL_DIROPS | INIT_CACHE_SYMLINKS;
    /* In a directory with a default access control list the umask does not count: Python applies
     * it. */
    if (dp->names.acl_count)
        out->flags |= INIT_DONT_MASK;
    /* Without these flags the kernel removes set-ID bits with a SETATTR, which Python sees. */
    out->flags &= ~(uint32_t)(INIT_HANDLE_KILLPRIV | INIT_HANDLE_KILLPRIV_V2);
    /* A message must fit into our buffers, and into the socket to Python, which only root may
     * enlarge. */
    int room = 0;
    socklen_t size = sizeof room;
    getsockopt(dp->channel, SOL_SOCKET, SO_SNDBUF, &room, &size);
    uint32_t page = (uint32_t)sysconf(_SC_PAGESIZE), most = DATA_BYTES;
    if (room > 0 && (uint32_t)room < most + page)
        most = (uint32_t)room > 2 * page ? (uint32_t)room - page : page;
    if (out->max_write > most)
        out->max_write = most / page * page;
    if (out->max_pages > DATA_BYTES / page)
        out->max_pages = (uint16_t)(DATA_BYTES / page);
    /* Readahead counts as background requests of all readers together. The limit is the highest,
     * since readers that wait for the source keep their requests. The kernel lowers it for an
     * ordinary user. */
    out->max_background = UINT16_MAX;
    out->congestion_threshold = UINT16_MAX / 4 * 3;
    if (LOAD(dp->passthrough)) {
        out->flags |= INIT_EXT;
        out->flags2 |= INIT2_PASSTHROUGH;
        out->max_stack_depth = 1;
    }
}

/* Passes on Python's answer to a request that opens nothing. */
static void carry_error(const struct pending *what, struct out_header *header) {
    header->unique = what->unique;
    if (!what->answered && write(what->device, header, header->len) < 0) {
        /* The caller is gone: the error has no consequence. */
    }
}

/* Passes on the answer to an open of ``ino``, which counts as a user of ``entry``. ``out`` is the
 * part of the answer with the handle. */
static void give_handle(struct datapath *dp, const struct pending *what, uint64_t ino,
                        struct open_inode *entry, bool writes, struct out_header *header,
                        struct open_out *out) {
    bool bound = false, gone = what->answered;
    if (!gone) {
        bound = opens_answered(&dp->opens, entry, writes);
        if (bound)
            *out = opening_handle(entry, true, out->open_flags);
        header->unique = what->unique;
        gone = write(what->device, header, header->len) < 0;
    }
    if (gone) {
        drop_open(dp, ino, !what->answered && !bound);
        report_event(dp, ino, EVENT_ABANDONED, NULL, NULL);
    }
}

/* Python's answer to an open: return a handle of the binding that Python has made. */
static void answer_open(struct datapath *dp, const struct pending *what,
                        struct out_header *header) {
    struct open_out *out = (struct open_out *)(header + 1);
    if (what->writes)
        opens_ask(&dp->opens, what->entry, -1);
    if (header->error || header->len < sizeof *header + sizeof *out) {
        drop_open(dp, what->ino, false);
        carry_error(what, header);
        return;
    }
    give_handle(dp, what, what->ino, what->entry, what->writes, header, out);
}

/* Python's answer to a creation; its inode number was not known before. */
static void answer_create(struct datapath *dp, const struct pending *what,
                          struct out_header *header) {
    struct entry_out *made = (struct entry_out *)(header + 1);
    struct open_out *out = (struct open_out *)(made + 1);
    if (header->error || header->len < sizeof *header + sizeof *made + sizeof *out ||
        made->nodeid < 1 || made->nodeid > INO_MASK) {
        carry_error(what, header);
        return;
    }
    uint64_t ino = made->nodeid;
    struct open_inode *entry = opens_created(&dp->opens, ino);
    if (!entry) {
        bool fresh;
        entry = opens_take(&dp->opens, ino, &fresh);
        if (!entry) {
            *header = (struct out_header){sizeof *header, -ENFILE, header->unique};
            carry_error(what, header);
            report_event(dp, ino, EVENT_ABANDONED, NULL, NULL);
            return;
        }
        if (fresh)
            opening_settle(dp, entry, OPEN_PYTHON, -1, 0, 0, 0);
    }
    give_handle(dp, what, ino, entry, true, header, out);
}

void carry_back(struct datapath *dp, struct out_header *header) {
    struct pending what;
    if (header->unique == 0) {
        if (write(dp->device, header, header->len) < 0) {
            /* The kernel does not know the inode of this notification any more. */
        }
        return;
    }
    if (!take_pending(dp, header->unique, &what))
        return;
    if (what.limited)
        pass_queued(dp);
    if (what.opcode == OP_OPEN) {
        answer_open(dp, &what, header);
        return;
    }
    if (what.opcode == OP_CREATE) {
        answer_create(dp, &what, header);
        return;
    }
    if (what.answered)
        return;
    if (what.opcode == OP_INIT) {
        agree_on_answers(dp, header);
        STORE(dp->serving, 1);
    }
    header->unique = what.unique;
    if (write(what.device, header, header->len) < 0) {
        /* ENOENT: the request was answered before. EINVAL: the kernel refuses the answer as
         * invalid. */
        if (errno != ENOENT && header->error == 0)
            write_out(what.device, what.unique, EIO, NULL, 0);
    }
}

/* The interval of checks of waiting callers, in nanoseconds. */
#define LOOK_NS 1000000000

static void *replier_main(void *argument) {
    struct datapath *dp = argument;
    uint8_t *reply = malloc(REPLY_BYTES);
    uint64_t looked = 0;
    while (reply) {
        ssize_t size = recv(dp->channel, reply, REPLY_BYTES, MSG_TRUNC);
        bool nothing = size < 0 && (errno == EAGAIN || errno == EINTR);
        if (size <= 0 && !nothing)
            break;
        /* Once a second: a process that was sent a signal may have been killed since. */
        uint64_t now = now_ns();
        if (now - looked > LOOK_NS) {
            /* A receive ends within half the interval. After twice the interval the process was
             * stopped. */
            if (looked && now - looked > 2 * LOOK_NS)
                ADD(dp->stopped_ns, now - looked - LOOK_NS);
            looked = now;
            look_after_callers(dp, now - LOAD(dp->stopped_ns));
            look_after_partly_read(dp);
        }
        struct out_header *header = (struct out_header *)reply;
        if (nothing || (size_t)size < sizeof *header)
            continue;
        /* The kernel would refuse such an answer, and its caller would wait without end. */
        if (size > REPLY_BYTES || header->len != (size_t)size ||
            (header->unique != 0 && (header->error > 0 || header->error < -MAX_ERROR))) {
            if (header->unique == 0)
                continue;
            *header = (struct out_header){sizeof *header, -EIO, header->unique};
        }
        carry_back(dp, header);
    }
    free(reply);
    return NULL;
}

/* -- beginning and end ------------------------------------------------------------------------- */

static void on_wake_signal(int number) { (void)number; }

/* Opens further descriptors of the device, so that readers do not wait for each other. */
static void open_clones(struct datapath *dp, int count) {
    while (dp->clone_count < count && dp->clone_count < MAX_CLONES) {
        int clone = open("/dev/fuse", O_RDWR | O_CLOEXEC);
        uint32_t original = (uint32_t)dp->clones[0];
        if (clone < 0 || ioctl(clone, DEV_IOC_CLONE, &original)) {
            /* The readers share the descriptors that could be opened. */
            if (clone >= 0)
                close(clone);
            return;
        }
        dp->clones[dp->clone_count++] = clone;
    }
}

int start(struct datapath *dp, int device, int channel, int threads) {
    struct sigaction action = {.sa_handler = on_wake_signal};
    struct timeval half = {.tv_usec = LOOK_NS / 2 / 1000};
    if (sigaction(WAKE_SIGNAL, &action, NULL) ||
        setsockopt(channel, SOL_SOCKET, SO_RCVTIMEO, &half, sizeof half))
        return errno;
    /* Reserved for close_all, when no descriptor may be free. */
    dp->nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (dp->nothing < 0)
        return errno;
    dp->idle_target = threads;
    dp->clones[0] = device;
    dp->clone_count = 1;
    open_clones(dp, threads);
    dp->device = device;
    struct stat status;
    dp->takes_pages = fstat(device, &status) == 0 && S_ISCHR(status.st_mode);
    dp->channel = channel;
    int error = start_thread(&dp->replier, replier_main, dp);
    dp->started = error == 0;
    for (int i = 0; i < threads && !error; i++)
        if (!spawn(dp) && i == 0)
            error = EAGAIN;
    if (error) {
        /* ``device`` and ``channel`` still belong to the caller. */
        while (dp->clone_count > 1)
            close(dp->clones[--dp->clone_count]);
        if (dp->started)
            stop(dp);
        dp->started = false;
        close(dp->nothing);
        dp->device = dp->channel = dp->nothing = -1;
    }
    return error;
}

void stop(struct datapath *dp) {
    /* A thread is started with this lock held: so the loop below sees all threads. */
    pthread_mutex_lock(&dp->threads_lock);
    STORE(dp->stopping, 1);
    pthread_mutex_unlock(&dp->threads_lock);
    /* The limit counts for all threads together: if a tier hangs, many may hang in it. */
    int tries = 0;
    for (int i = 0; i < LOAD(dp->thread_count); i++) {
        struct thread *thread = &dp->threads[i];
        /* A signal just before the thread begins to wait is lost, so it is repeated until the
         * thread has ended. A thread that hangs in the source is not waited for: it ends with the
         * process. */
        for (; LOAD(thread->state) == THREAD_RUNS && !LOAD(thread->source_since_ns) && tries < 5000;
             tries++) {
            pthread_kill(thread->id, WAKE_SIGNAL);
            usleep(tries < 10 ? 100 : 1000);
        }
        join_if_ended(thread);
    }
    shutdown(dp->channel, SHUT_RDWR);
    pthread_join(dp->replier, NULL);
}

bool still_runs(struct datapath *dp) {
    for (int i = 0; i < dp->thread_count; i++)
        if (LOAD(dp->threads[i].state) == THREAD_RUNS)
            return true;
    return false;
}

void join_ended(struct datapath *dp) {
    for (int i = 0; i < dp->thread_count; i++)
        join_if_ended(&dp->threads[i]);
}

/* Closes the remaining descriptors. Closing a file of the source waits for the source. */
static void close_rest(struct datapath *dp) {
    struct open_remains to_close;
    while (opens_pop(&dp->opens, &to_close))
        close_remains(dp, &to_close);
    while (dp->closing) {
        struct closing *closing = dp->closing;
        dp->closing = closing->next;
        close(closing->fd);
        free(closing);
    }
    dp->closing_end = &dp->closing;
}

/* Closes the device first, so that the kernel answers all waiting callers, and then everything
 * else. */
void close_all(struct datapath *dp) {
    bool hangs = still_runs(dp);
    for (int i = 0; i < dp->clone_count; i++) {
        /* A thread that hangs in the source will write its answer to this descriptor number. */
        if (hangs)
            dup2(dp->nothing, dp->clones[i]);
        else
            close(dp->clones[i]);
    }
    close(dp->nothing);
    dp->nothing = -1;
    if (dp->channel >= 0)
        close(dp->channel);
    dp->channel = -1;
    if (!hangs) {
        dp->device = -1;
        dp->clone_count = 0;
        close_rest(dp);
    }
}
