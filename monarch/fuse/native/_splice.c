/* Answers to reads that go from the page cache of a tier's file to the kernel through a pipe: one
 * copy of the bytes, where a read into memory and a write to the device make two. */
#include "_requests.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* The least and the largest answer that goes through a pipe. A small one costs less in two copies
 * than in three system calls. The largest is about twice the readahead of the kernel. */
enum { LEAST = 16 << 10, LARGEST = 248 << 10 };

/* The answers that are given without a pipe before it is tried again to open it. */
enum { WITHOUT = 1000 };

/* Takes a pipe; false if another thread has it. */
static bool take(struct pipe *pipe) {
    int is_taken = 0;
    return __atomic_compare_exchange_n(&pipe->is_taken, &is_taken, 1, false, __ATOMIC_ACQUIRE,
                                       __ATOMIC_RELAXED);
}

static void give_back(struct pipe *pipe) { STORE(pipe->is_taken, 0); }

static void close_ends(struct pipe *pipe) {
    if (!pipe->is_open)
        return;
    close(pipe->ends[0]);
    close(pipe->ends[1]);
    pipe->is_open = false;
}

/* Closes a pipe that cannot be opened or used now. */
static void give_up(struct pipe *pipe) {
    close_ends(pipe);
    pipe->without = WITHOUT;
}

/* Whether a pipe is open; it is opened if there are descriptors and places for it. Each page of an
 * answer takes one place, and the header another. */
static bool is_usable(struct pipe *pipe) {
    if (pipe->is_open)
        return true;
    if (pipe->without) {
        pipe->without--;
        return false;
    }
    int size = LARGEST + 2 * (int)sysconf(_SC_PAGESIZE);
    pipe->is_open = pipe2(pipe->ends, O_CLOEXEC | O_NONBLOCK) == 0;
    if (pipe->is_open && !is_scarce(pipe->ends[1]) &&
        fcntl(pipe->ends[1], F_SETPIPE_SZ, size) >= size)
        return true;
    give_up(pipe);
    return false;
}

static struct pipe *pipe_at(struct thread *thread, size_t distance) {
    size_t place = (size_t)(thread - thread->dp->threads);
    return &thread->dp->pipes[(place + distance) % MOST_PIPES];
}

/* A pipe for one answer: that of the thread's place, or the next one that no thread has. NULL if
 * there is none. */
static struct pipe *pipe_for(struct thread *thread) {
    for (size_t distance = 0; distance < MOST_PIPES; distance++) {
        struct pipe *pipe = pipe_at(thread, distance);
        if (!take(pipe))
            continue;
        if (is_usable(pipe))
            return pipe;
        give_back(pipe);
        break;
    }
    return NULL;
}

/* Call this at the end of a thread: pipes take descriptors, and threads begin and end often. */
void splice_close(struct thread *thread) {
    struct pipe *pipe = pipe_at(thread, 0);
    if (take(pipe)) {
        close_ends(pipe);
        give_back(pipe);
    }
}

/* Call this when no thread runs any more. */
void splice_free(struct datapath *dp) {
    for (size_t place = 0; place < MOST_PIPES; place++)
        close_ends(&dp->pipes[place]);
}

/* Takes the answer to a read, ``size`` bytes of a file, into a pipe; false if it must be read in
 * another way. Otherwise splice_answer or splice_drop must follow. */
bool splice_take(struct thread *thread, const struct in_header *request, int fd, size_t size,
                 uint64_t offset) {
    if (!thread->dp->takes_pages || size < LEAST || size > LARGEST)
        return false;
    struct pipe *pipe = pipe_for(thread);
    if (!pipe)
        return false;
    struct out_header header = {(uint32_t)(sizeof header + size), 0, request->unique};
    bool taken = write(pipe->ends[1], &header, sizeof header) == sizeof header;
    loff_t at = (loff_t)offset;
    for (size_t left = size; taken && left;) {
        ssize_t n = splice(fd, &at, pipe->ends[1], NULL, left, 0);
        if (n < 0 && errno == EINTR)
            continue;
        /* Also at the end of a file that has become shorter. */
        taken = n > 0;
        left -= taken ? (size_t)n : 0;
    }
    if (taken) {
        thread->pipe = pipe;
        return true;
    }
    give_up(pipe);
    give_back(pipe);
    return false;
}

/* Drops the answer that splice_take has taken. */
void splice_drop(struct thread *thread) {
    close_ends(thread->pipe);
    give_back(thread->pipe);
}

/* Sends the answer of ``size`` bytes that splice_take has taken. */
void splice_answer(struct thread *thread, const struct in_header *request, size_t size) {
    size_t whole = sizeof(struct out_header) + size;
    if (splice(thread->pipe->ends[0], NULL, thread->device, NULL, whole, 0) == (ssize_t)whole) {
        give_back(thread->pipe);
        return;
    }
    /* The request was interrupted, or the kernel lacks memory. */
    splice_drop(thread);
    refuse(thread, request, EIO);
}
