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

/* After the last file: no inode has these numbers. */
enum { LOST = 0 };
static const uint32_t unmounted = UINT32_MAX;

/* Writes the inode numbers of the events from ``at`` on to ``found``; returns their number. It ends
 * with LOST after the loss of a report, and with ``unmounted`` at the end of the file system. */
static size_t find_files(const struct names *names, const char *at, const char *end,
                         const Py_buffer *directories, uint32_t *found) {
    struct inotify_event event;
    size_t count = 0;
    while ((size_t)(end - at) >= sizeof event) {
        memcpy(&event, at, sizeof event);
        at += sizeof event;
        if (event.len > (size_t)(end - at))
            break;
        /* All watches end now; a later read of the queue may have what remains of them. */
        if (event.mask & IN_UNMOUNT) {
            found[count++] = unmounted;
            break;
        }
        /* Events were lost, or a watch has ended before the mount. */
        if (event.mask & (IN_Q_OVERFLOW | IN_IGNORED)) {
            found[count++] = LOST;
            break;
        }
        uint64_t ino = file_of(names, &event, at, directories);
        if (ino)
            found[count++] = (uint32_t)ino;
        at += event.len;
    }
    return count;
}

/* ``events`` as they were read, and the inode number of the directory of each watch, 32 bits by its
 * number. The bytes of inode numbers of 32 bits, as find_files writes them. */
PyObject *datapath_opened(Datapath *self, PyObject *args) {
    Py_buffer events, directories;
    if (!PyArg_ParseTuple(args, "y*y*", &events, &directories))
        return NULL;
    size_t most = (size_t)events.len / sizeof(struct inotify_event), count = 0;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(most * sizeof(uint32_t)));
    if (bytes) {
        uint32_t *found = (uint32_t *)(void *)PyBytes_AS_STRING(bytes);
        const char *at = events.buf;
        Py_BEGIN_ALLOW_THREADS;
        count = find_files(&self->dp->names, at, at + events.len, &directories, found);
        Py_END_ALLOW_THREADS;
        _PyBytes_Resize(&bytes, (Py_ssize_t)(count * sizeof(uint32_t)));
    }
    PyBuffer_Release(&events);
    PyBuffer_Release(&directories);
    return bytes;
}
