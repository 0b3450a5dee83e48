/* Answers to reads that go from the page cache of a tier's file to the kernel through a pipe: one
 * copy of the bytes, where a read into memory and a write to the device make two. */
#include "_requests.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* Twice the readahead of the kernel. The pages of all pipes of a user are limited
 * (/proc/sys/fs/pipe-user-pages-soft). Each page of an answer takes one place, and the header
 * another. A small answer costs less in two copies than in three system calls. */
enum { PIPE_BYTES = 256 << 10, PAGE_BYTES = 4096, SPLICE_LEAST = 16 << 10 };

void splice_close(struct thread *thread) {
    if (!thread->has_pipe)
        return;
    close(thread->pipe[0]);
    close(thread->pipe[1]);
    thread->has_pipe = false;
}

/* Whether the thread has a pipe; it gets one if there are descriptors for it. */
static bool has_pipe(struct thread *thread) {
    if (thread->has_pipe)
        return true;
    if (pipe2(thread->pipe, O_CLOEXEC | O_NONBLOCK) < 0)
        return false;
    thread->has_pipe = true;
    if (!is_scarce(thread->pipe[1]) &&
        fcntl(thread->pipe[1], F_SETPIPE_SZ, PIPE_BYTES) >= PIPE_BYTES)
        return true;
    splice_close(thread);
    return false;
}

/* Takes the answer to a read, ``size`` bytes of a file, into the pipe; false if it must be read in
 * another way. Otherwise splice_answer or splice_close must follow. */
bool splice_take(struct thread *thread, const struct in_header *request, int fd, size_t size,
                 uint64_t offset) {
    if (!thread->dp->takes_pages || size < SPLICE_LEAST || size > PIPE_BYTES - 2 * PAGE_BYTES ||
        !has_pipe(thread))
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
        splice_close(thread);
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
