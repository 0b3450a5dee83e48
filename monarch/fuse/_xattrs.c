/* One extended attribute of many files of a directory, for the scan of the source. */
#define PY_SSIZE_T_CLEAN
#include "_xattrs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

/* One number on every architecture that Linux numbers alike (all but alpha); since Linux 6.13. */
#define CALL_GETXATTRAT 464
enum { VALUE_BYTES = 64 * 1024 }; /* XATTR_SIZE_MAX */

struct getxattrat_args {
    uint64_t value;
    uint32_t size, flags;
};

struct found {
    int error;
    size_t size;
    uint8_t *value;
};

/* As lgetxattr of an entry of ``directory``. ``*can_at``: whether the kernel has getxattrat;
 * without it the name is resolved by way of /proc, which takes twice as long. */
static ssize_t get(int directory, const char *name, const char *attribute, uint8_t *value,
                   bool *can_at) {
    if (*can_at) {
        struct getxattrat_args out = {(uintptr_t)value, VALUE_BYTES, 0};
        long size = syscall(CALL_GETXATTRAT, directory, name, AT_SYMLINK_NOFOLLOW, attribute, &out,
                            sizeof out);
        /* EPERM is what some sandboxes answer to a call that they do not know. */
        if (size >= 0 || (errno != ENOSYS && errno != EPERM))
            return size;
        *can_at = false;
    }
    char path[64 + 256];
    if (snprintf(path, sizeof path, "/proc/self/fd/%d/%s", directory, name) >= (int)sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    return lgetxattr(path, attribute, value, VALUE_BYTES);
}

static void get_all(int directory, const char **names, size_t count, const char *attribute,
                    uint8_t *value, struct found *found) {
    bool can_at = true;
    for (size_t i = 0; i < count; i++) {
        ssize_t size = get(directory, names[i], attribute, value, &can_at);
        if (size < 0) {
            bool none = errno == ENODATA || errno == EOPNOTSUPP;
            found[i].error = none ? 0 : errno;
            continue;
        }
        found[i].value = malloc((size_t)size + 1);
        if (!found[i].value) {
            found[i].error = ENOMEM;
            continue;
        }
        memcpy(found[i].value, value, (size_t)size);
        found[i].size = (size_t)size;
    }
}

PyObject *read_xattrs(PyObject *Py_UNUSED(module), PyObject *args) {
    int directory;
    PyObject *given;
    const char *attribute;
    if (!PyArg_ParseTuple(args, "iO!y", &directory, &PyTuple_Type, &given, &attribute))
        return NULL;
    size_t count = (size_t)PyTuple_GET_SIZE(given);
    const char **names = calloc(count + 1, sizeof *names);
    struct found *found = calloc(count + 1, sizeof *found);
    uint8_t *value = malloc(VALUE_BYTES);
    PyObject *list = names && found && value ? PyList_New(0) : PyErr_NoMemory();
    for (size_t i = 0; list && i < count; i++)
        if (!(names[i] = PyBytes_AsString(PyTuple_GET_ITEM(given, i))))
            Py_CLEAR(list);
    if (list) {
        /* The tuple keeps the names, and nobody can change it. */
        Py_BEGIN_ALLOW_THREADS;
        get_all(directory, names, count, attribute, value, found);
        Py_END_ALLOW_THREADS;
    }
    for (size_t i = 0; found && i < count; i++) {
        if (list && (found[i].value || found[i].error)) {
            PyObject *item = found[i].value ? Py_BuildValue("(ny#)", (Py_ssize_t)i, found[i].value,
                                                            (Py_ssize_t)found[i].size)
                                            : Py_BuildValue("(ni)", (Py_ssize_t)i, found[i].error);
            if (!item || PyList_Append(list, item))
                Py_CLEAR(list);
            Py_XDECREF(item);
        }
        free(found[i].value);
    }
    free(names);
    free(found);
    free(value);
    return list;
}
