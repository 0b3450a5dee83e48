/* Reads the attributes of a directory's entries for the scan of a source, without the
 * interpreter. */
#define PY_SSIZE_T_CLEAN
#include "_look.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#include "_record.h"

/* The number of getxattrat, the same on all architectures but alpha; since Linux 6.13. */
#define CALL_GETXATTRAT 464
#define SECOND_NS 1000000000LL
/* The kernel clears as much memory as the buffer has, which takes longer than finding no list: so a
 * small buffer is tried first. The second size is XATTR_SIZE_MAX. */
enum { FEW_BYTES = 256, MOST_BYTES = 64 * 1024 };
enum { SIGNALS_EVERY_NS = 100 * 1000 * 1000 };

struct getxattrat_args {
    uint64_t value;
    uint32_t size, flags;
};

struct list {
    int error;
    size_t size;
    uint8_t *bytes;
};

struct seen {
    int error;
    bool plain; /* a file with one name and no list */
    dev_t device;
    struct list access, inherited;
};

struct looking {
    int directory;
    uint32_t parent;
    dev_t without;
    bool cannot_at; /* the kernel has no getxattrat */
};

/* As lgetxattr of an entry. Without getxattrat the name is resolved by way of /proc, which takes
 * twice as long. */
static ssize_t get(struct looking *looking, const char *name, const char *attribute, void *value,
                   size_t room) {
    if (!looking->cannot_at) {
        struct getxattrat_args out = {(uintptr_t)value, (uint32_t)room, 0};
        long size = syscall(CALL_GETXATTRAT, looking->directory, name, AT_SYMLINK_NOFOLLOW,
                            attribute, &out, sizeof out);
        /* Some sandboxes answer EPERM to an unknown system call. */
        if (size >= 0 || (errno != ENOSYS && errno != EPERM))
            return size;
        looking->cannot_at = true;
    }
    char path[64 + PATH_MAX];
    if (snprintf(path, sizeof path, "/proc/self/fd/%d/%s", looking->directory, name) >=
        (int)sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    return lgetxattr(path, attribute, value, room);
}

static struct list get_list(struct looking *looking, const char *name, const char *attribute) {
    uint8_t few[FEW_BYTES], *many = NULL;
    ssize_t size = get(looking, name, attribute, few, sizeof few);
    if (size < 0 && errno == ERANGE) {
        if (!(many = malloc(MOST_BYTES)))
            return (struct list){.error = ENOMEM};
        size = get(looking, name, attribute, many, MOST_BYTES);
    }
    struct list list = {0};
    if (size < 0)
        list.error = errno == ENODATA || errno == EOPNOTSUPP ? 0 : errno;
    else if (size > 0) {
        list.size = (size_t)size;
        if ((list.bytes = malloc(list.size)))
            memcpy(list.bytes, many ? many : few, list.size);
        else
            list.error = ENOMEM;
    }
    free(many);
    return list;
}

static uint64_t ns_of(struct timespec time) {
    return htole64((uint64_t)kept_ns(time.tv_sec, time.tv_nsec));
}

static void look_at(struct looking *looking, const char *name, uint8_t *into, struct seen *seen) {
    struct stat status;
    if (fstatat(looking->directory, name, &status, AT_SYMLINK_NOFOLLOW) < 0) {
        seen->error = errno;
        return;
    }
    mode_t mode = status.st_mode;
    uint64_t extra = 0;
    if (S_ISREG(mode))
        extra = (uint64_t)status.st_blocks;
    else if (S_ISCHR(mode) || S_ISBLK(mode))
        extra = status.st_rdev;
    struct record record = {
        .parent = htole32(looking->parent),
        .mode = htole32(mode),
        .uid = htole32(status.st_uid),
        .gid = htole32(status.st_gid),
        .nlink = htole32((uint32_t)status.st_nlink),
        .size = htole64((uint64_t)status.st_size),
        .mtime_ns = ns_of(status.st_mtim),
        .ctime_ns = ns_of(status.st_ctim),
        .source_ino = htole64(status.st_ino),
        .extra = htole64(extra),
    };
    memcpy(into, &record, sizeof record);
    seen->device = status.st_dev;
    /* A symbolic link has no list on any file system. */
    if (status.st_dev != looking->without && !S_ISLNK(mode)) {
        seen->access = get_list(looking, name, "system.posix_acl_access");
        if (S_ISDIR(mode))
            seen->inherited = get_list(looking, name, "system.posix_acl_default");
    }
    seen->plain =
        S_ISREG(mode) && status.st_nlink == 1 && !seen->access.error && !seen->access.bytes;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return now.tv_sec * SECOND_NS + now.tv_nsec;
}

/* False with an exception if a signal handler raised one. */
static bool look_at_all(struct looking *looking, const char **names, size_t count, uint8_t *records,
                        struct seen *seen) {
    PyThreadState *state = PyEval_SaveThread();
    int64_t looked_ns = now_ns();
    bool going = true;
    for (size_t i = 0; i < count && going; i++) {
        look_at(looking, names[i], records + i * RECORD_BYTES, seen + i);
        if (now_ns() - looked_ns > SIGNALS_EVERY_NS) {
            PyEval_RestoreThread(state);
            going = PyErr_CheckSignals() == 0;
            state = PyEval_SaveThread();
            looked_ns = now_ns();
        }
    }
    PyEval_RestoreThread(state);
    return going;
}

static bool append(PyObject *others, size_t index, const struct seen *seen) {
    PyObject *item = Py_BuildValue(
        "(niKiy#y#)", (Py_ssize_t)index, seen->error, (unsigned long long)seen->device,
        seen->access.error, seen->access.bytes ? (char *)seen->access.bytes : "",
        (Py_ssize_t)seen->access.size, seen->inherited.bytes ? (char *)seen->inherited.bytes : "",
        (Py_ssize_t)seen->inherited.size);
    bool done = item && PyList_Append(others, item) == 0;
    Py_XDECREF(item);
    return done;
}

PyObject *look(PyObject *Py_UNUSED(module), PyObject *args) {
    struct looking looking = {0};
    PyObject *given;
    unsigned int parent;
    unsigned long long without;
    if (!PyArg_ParseTuple(args, "iO!IK", &looking.directory, &PyTuple_Type, &given, &parent,
                          &without))
        return NULL;
    looking.parent = parent;
    looking.without = without;
    size_t count = (size_t)PyTuple_GET_SIZE(given);
    const char **names = calloc(count + 1, sizeof *names);
    struct seen *seen = calloc(count + 1, sizeof *seen);
    PyObject *records = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(count * RECORD_BYTES));
    PyObject *others = PyList_New(0);
    bool well = records && others;
    if (well && !(well = names && seen))
        PyErr_NoMemory();
    for (size_t i = 0; well && i < count; i++)
        well = (names[i] = PyBytes_AsString(PyTuple_GET_ITEM(given, i)));
    if (well) {
        /* The tuple keeps the names, and no other thread has the records. */
        uint8_t *into = (uint8_t *)PyByteArray_AS_STRING(records);
        memset(into, 0, count * RECORD_BYTES);
        well = look_at_all(&looking, names, count, into, seen);
    }
    for (size_t i = 0; seen && i < count; i++) {
        if (well && !seen[i].plain)
            well = append(others, i, seen + i);
        free(seen[i].access.bytes);
        free(seen[i].inherited.bytes);
    }
    PyObject *result = well ? PyTuple_Pack(2, records, others) : NULL;
    Py_XDECREF(records);
    Py_XDECREF(others);
    free(names);
    free(seen);
    return result;
}
