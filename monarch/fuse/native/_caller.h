/* Lets a thread act with the rights of the process that waits for an answer. The kernel keeps the
 * file system identity of each thread. libc's setgroups would change the groups of all threads, so
 * the system call is made directly. */
#ifndef MONARCH_CALLER_H
#define MONARCH_CALLER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* A user, a group, and supplementary groups. ``groups`` is on the heap. */
struct caller {
    uid_t uid;
    gid_t gid;
    int count;
    gid_t *groups;
};

/* The identity of a thread before it took the rights of a caller. ``groups`` is on the heap. */
struct own_rights {
    uid_t uid;
    gid_t gid;
    int count;
    gid_t *groups;
};

/* The whole text of /proc/PID/status, which grows with the groups of the process; on the heap. NULL
 * if it cannot be read. */
char *status_of(uint32_t pid);

/* Fills ``caller`` with the user and group of a request's sender, and with the supplementary groups
 * that the process has now. A process that cannot be seen (``pid`` is 0 in another pid namespace)
 * gets no groups, so it never has more rights than its own. False without memory. Free it with
 * caller_free. */
bool caller_of(uint32_t pid, uint32_t uid, uint32_t gid, struct caller *caller);
void caller_free(struct caller *caller);

/* Lets this thread act on files as ``caller`` until caller_end; false if the kernel refuses, and
 * then the thread keeps its own rights. If a thread cannot restore its own rights, the process
 * ends: it must not continue with the rights of another user. */
bool caller_begin(const struct caller *caller, struct own_rights *own);
void caller_end(struct own_rights *own);

/* Lets this thread of root write to open files as ``user`` until writer_end, so that a file system
 * gives it no blocks that it keeps for root. False for root, if the process is not root, and if the
 * kernel refuses: then the thread keeps its own identity. */
bool writer_begin(uid_t user);
void writer_end(void);

#endif
