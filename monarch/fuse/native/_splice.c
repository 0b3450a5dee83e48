/* Answers to reads that go from the page cache of a tier's file to the kernel through a pipe: one
 * copy of the bytes, where a read into memory and a write to the device make two. */
#include "_requests.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* The least and the largest answer that goes through a pipe. A small one costs less in two copies
 * than in three system calls. The largest is about twice the readahead of the kernel. */
enum { LEAST = 16 << 10, LARGEST = 248 << 10 };

/* The kernel limits the places of all pipes of a user (/proc/sys/fs/pipe-user-pages-soft, usually
 * 16,384), and the pipes of the user's other programs get two places then. So only the first
 * threads have a pipe: the others are those that wait for disks and for the source. */
enum { MOST_PIPES = 64 };

/* The answers that a thread gives without a pipe before it tries again to use one. A thread that
 * begins in the place of another one goes on with its number: threads end and begin often. */
enum { WITHOUT = 1000 };

void splice_close(struct thread *thread) {
    if (!thread->has_pipe)
        return;
    close(thread->pipe[0]);
    close(thread->pipe[1]);
    thread->has_pipe = false;
}

/* Closes the pipe, which cannot be had or used now. */
static void give_up(struct thread *thread) {
    splice_close(thread);
    thread->without_pipe = WITHOUT;
}

/* Whether the thread has a pipe; it gets one if there are descriptors and places for it. Each page
 * of an answer takes one place, and the header another. */
static bool has_pipe(struct thread *thread) {
    if (thread->has_pipe)
        return true;
    if (thread - thread->dp->threads >= MOST_PIPES)
        return false;
    if (thread->without_pipe) {
        thread->without_pipe--;
        return false;
    }
    int size = LARGEST + 2 * (int)sysconf(_SC_PAGESIZE);
    thread->has_pipe = pipe2(thread->pipe, O_CLOEXEC | O_NONBLOCK) == 0;
    if (thread->has_pipe && !is_scarce(thread->pipe[1]) &&
        fcntl(thread->pipe[1], F_SETPIPE_SZ, size) >= size)
        return true;
    give_up(thread);
    return false;
}

/* Takes the answer to a read, ``size`` bytes of a file, into the pipe; false if it must be read in
 * another way. Otherwise splice_answer or splice_close must follow. */
bool splice_take(struct thread *thread, const struct in_header *request, int fd, size_t size,
                 uint64_t offset) {
    if (!thread->dp->takes_pages || size < LEAST || size > LARGEST || !has_pipe(thread))
        return false;
    struct out_header header = {(uint32_t)(sizeof header + size), 0, request->unique};
    bool taken = write(thread->pipe[1], &header, sizeof header) == sizeof header;
    loff_t at = (loff_t)offset;
    for (size_t left = size; taken && left;) {
        ssize_t n = splice(fd, &at, thread->pipe[1], NULL, left, 0);
        if (n < 0 && errno == EINTR)
            continue;
        /* Also at the end of a file that has become shorter. */
        taken = n > 0;
        left -= taken ? (size_t)n : 0;
    }
    if (!taken)
        give_up(thread);
    return taken;
}

/* Sends the answer of ``size`` bytes that splice_take has taken. */
void splice_answer(struct thread *thread, const struct in_header *request, size_t size) {
    size_t whole = sizeof(struct out_header) + size;
    if (splice(thread->pipe[0], NULL, thread->device, NULL, whole, 0) == (ssize_t)whole)
        return;
    /* The request was interrupted, or the kernel lacks memory. */
    splice_close(thread);
    refuse(thread, request, EIO);
}
