/* The rights of the process that waits for an answer, taken by one thread for a call.
 *
 * The kernel keeps the file system identity of each thread apart. libc's setgroups would change
 * that of all threads, so the system call is made directly.
 */
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

/* What a thread had before it took the rights of a caller. ``groups`` is on the heap. */
struct own_rights {
    uid_t uid;
    gid_t gid;
    int count;
    gid_t *groups;
};

/* The whole text of /proc/PID/status, which grows with the groups of the process; on the heap. NULL
 * if it cannot be read. */
char *status_of(uint32_t pid);

/* Fills ``caller`` with what the kernel tells of the sender of a request, and with the
 * supplementary groups that the process has at this moment. One that cannot be seen from here
 * (``pid`` is 0 in another pid namespace) has none, so it is never given more rights than it has.
 * False without memory. caller_free frees it. */
bool caller_of(uint32_t pid, uint32_t uid, uint32_t gid, struct caller *caller);
void caller_free(struct caller *caller);

/* Lets this thread act on files as ``caller`` until caller_end; false if the kernel refuses, and
 * then it has its own rights. A thread that cannot take its own back ends the process: it must not
 * go on as somebody else. */
bool caller_begin(const struct caller *caller, struct own_rights *own);
void caller_end(struct own_rights *own);

#endif
