/* The files that the kernel reports as opened by inotify (posix/inotify.py). */
#include "_python.h"

#include <string.h>
#include <sys/inotify.h>

/* The inode number of the file that an event names; 0 for an event that names no file of the
 * snapshot. */
static uint64_t file_of(const struct names *names, const struct inotify_event *event,
                        const char *name, const Py_buffer *directories) {
    uint32_t parent;
    size_t at = (size_t)event->wd * sizeof parent;
    if (event->len == 0 || event->mask & IN_ISDIR || event->wd < 0 ||
        at + sizeof parent > (size_t)directories->len)
        return 0;
    memcpy(&parent, (const char *)directories->buf + at, sizeof parent);
    return parent ? names_child(names, parent, name, strnlen(name, event->len)) : 0;
}

static bool append(PyObject *list, uint64_t ino) {
    PyObject *number = PyLong_FromUnsignedLongLong(ino);
    bool is_kept = number && PyList_Append(list, number) == 0;
    Py_XDECREF(number);
    return is_kept;
}

/* ``events`` as they were read, and the inode number of the directory of each watch, 32 bits by its
 * number. A list of inode numbers; 0 means that not all opens are reported. */
PyObject *datapath_opened(Datapath *self, PyObject *args) {
    Py_buffer events, directories;
    if (!PyArg_ParseTuple(args, "y*y*", &events, &directories))
        return NULL;
    PyObject *list = PyList_New(0);
    const char *at = events.buf, *end = at + events.len;
    struct inotify_event event;
    bool unmounted = false;
    while (list && (size_t)(end - at) >= sizeof event) {
        memcpy(&event, at, sizeof event);
        at += sizeof event;
        if (event.len > (size_t)(end - at))
            break;
        unmounted = unmounted || event.mask & IN_UNMOUNT;
        /* Events were lost, or a watch has ended before the mount. */
        bool ends = event.mask & IN_Q_OVERFLOW || (event.mask & IN_IGNORED && !unmounted);
        uint64_t ino = ends ? 0 : file_of(&self->dp->names, &event, at, &directories);
        if ((ends || ino) && !append(list, ino))
            Py_CLEAR(list);
        at += event.len;
    }
    PyBuffer_Release(&events);
    PyBuffer_Release(&directories);
    return list;
}
