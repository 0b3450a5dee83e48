#include "_caller.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* On 32-bit machines the older call has groups of 16 bits. */
#ifdef SYS_setgroups32
enum { SET_GROUPS = SYS_setgroups32 };
#else
enum { SET_GROUPS = SYS_setgroups };
#endif

/* The most supplementary groups that a process has: NGROUPS_MAX of linux/limits.h. */
enum { MOST_GROUPS = 65536, FIRST_BYTES = 8192, MOST_BYTES = 1 << 20 };

/* -- finding out ------------------------------------------------------------------------------- */

char *status_of(uint32_t pid) {
    char name[32];
    snprintf(name, sizeof name, "/proc/%u/status", pid);
    int fd = open(name, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    size_t size = 0, room = FIRST_BYTES;
    char *text = malloc(room);
    while (text) {
        ssize_t got = read(fd, text + size, room - size - 1);
        if (got <= 0)
            break;
        size += (size_t)got;
        if (size + 1 < room)
            continue;
        char *more = room < MOST_BYTES ? realloc(text, room *= 4) : NULL;
        if (!more)
            break;
        text = more;
    }
    close(fd);
    if (text)
        text[size] = 0;
    return text;
}

/* The numbers of a line that begins with ``key``, at most ``most``; -1 if there is no such line. */
static int numbers(const char *text, const char *key, gid_t *found, int most) {
    const char *at = strstr(text, key);
    if (!at)
        return -1;
    at += strlen(key);
    const char *end = strchr(at, '\n');
    int count = 0;
    while (end && count < most) {
        char *next;
        unsigned long number = strtoul(at, &next, 10);
        if (next == at || next > end)
            break;
        found[count++] = (gid_t)number;
        at = next;
    }
    return count;
}

bool caller_of(uint32_t pid, uint32_t uid, uint32_t gid, struct caller *caller) {
    *caller = (struct caller){.uid = uid, .gid = gid};
    char *text = pid ? status_of(pid) : NULL;
    if (!text)
        return true;
    gid_t ids[4];
    bool same = numbers(text, "\nUid:", ids, 4) == 4 && ids[3] == uid;
    if (same) {
        caller->groups = malloc(MOST_GROUPS * sizeof *caller->groups);
        if (caller->groups)
            caller->count = numbers(text, "\nGroups:", caller->groups, MOST_GROUPS);
        if (caller->count < 0)
            caller->count = 0;
    }
    free(text);
    return !same || caller->groups;
}

void caller_free(struct caller *caller) {
    free(caller->groups);
    caller->groups = NULL;
}

/* -- taking, and taking back ------------------------------------------------------------------- */

/* These two calls do not report a refusal: they return the former id. */
static bool set_user(uid_t uid) {
    setfsuid(uid);
    return (uid_t)setfsuid((uid_t)-1) == uid;
}

static bool set_group(gid_t gid) {
    setfsgid(gid);
    return (gid_t)setfsgid((gid_t)-1) == gid;
}

static bool set_groups(int count, const gid_t *groups) {
    return syscall(SET_GROUPS, (size_t)count, groups) == 0;
}

bool caller_begin(const struct caller *caller, struct own_rights *own) {
    *own = (struct own_rights){.uid = geteuid(), .gid = getegid(), .count = getgroups(0, NULL)};
    if (own->count < 0)
        return false;
    own->groups = malloc(((size_t)own->count + 1) * sizeof *own->groups);
    if (!own->groups || getgroups(own->count, own->groups) != own->count) {
        free(own->groups);
        return false;
    }
    /* If the groups are refused, nothing has changed and nothing has to be undone. */
    if (!set_groups(caller->count, caller->groups)) {
        free(own->groups);
        return false;
    }
    /* The user is set last: afterwards the thread may not change the groups. */
    if (set_group(caller->gid) && set_user(caller->uid))
        return true;
    caller_end(own);
    return false;
}

bool writer_begin(uid_t user) { return user != 0 && geteuid() == 0 && set_user(user); }

void writer_end(void) {
    if (!set_user(0))
        abort();
}

void caller_end(struct own_rights *own) {
    bool back = set_user(own->uid);
    back = set_group(own->gid) && back;
    back = set_groups(own->count, own->groups) && back;
    free(own->groups);
    if (!back)
        abort();
}
