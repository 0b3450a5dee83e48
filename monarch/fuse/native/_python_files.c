/* What Python says of single files: their objects, names, attributes and bindings. */
#include "_python.h"

#include <errno.h>
#include <fcntl.h>

PyObject *datapath_set_objects(Datapath *self, PyObject *args) {
    int tier, directory;
    if (!PyArg_ParseTuple(args, "O&i", to_tier, &tier, &directory))
        return NULL;
    struct absorbed *absorbed = &self->dp->absorbed;
    if (absorbed->directory >= 0 || self->dp->started)
        return value_error("cannot be set now");
    absorbed->directory = fcntl(directory, F_DUPFD_CLOEXEC, 0);
    if (absorbed->directory < 0)
        return python_error(errno);
    absorbed->tier = (uint8_t)tier;
    Py_RETURN_NONE;
}

PyObject *datapath_know_object(Datapath *self, PyObject *args) {
    unsigned long long ino, object;
    if (!PyArg_ParseTuple(args, "KK", &ino, &object))
        return NULL;
    bool kept = ino > 1 && ino <= INO_MASK && object && self->dp->absorbed.directory >= 0 &&
                absorbed_put(&self->dp->absorbed, ino, object);
    return PyBool_FromLong(kept);
}

/* Calls ``report`` with the directory and the name in the arguments. */
static PyObject *report_name(Datapath *self, PyObject *args,
                             void (*report)(struct missing *, uint64_t, const char *, size_t)) {
    unsigned long long parent;
    const char *name;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "Ky#", &parent, &name, &length))
        return NULL;
    report(&self->dp->missing, parent, name, (size_t)length);
    Py_RETURN_NONE;
}

PyObject *datapath_name_given(Datapath *self, PyObject *args) {
    return report_name(self, args, missing_given);
}

PyObject *datapath_name_taken(Datapath *self, PyObject *args) {
    return report_name(self, args, missing_taken);
}

PyObject *datapath_serve_missing(Datapath *self, PyObject *args) {
    unsigned long long directory, for_ns;
    unsigned valid_s;
    if (!PyArg_ParseTuple(args, "KIK", &directory, &valid_s, &for_ns))
        return NULL;
    uint64_t now = now_ns();
    if (for_ns)
        missing_open(&self->dp->missing, directory, valid_s, now, now + for_ns);
    else
        missing_close(&self->dp->missing, directory);
    Py_RETURN_NONE;
}

PyObject *datapath_serve_attributes(Datapath *self, PyObject *attributes) {
    struct attr attr;
    if (!to_attr(attributes, &attr))
        return NULL;
    missing_set_attributes(&self->dp->missing, &attr);
    Py_RETURN_NONE;
}

PyObject *datapath_bind(Datapath *self, PyObject *args) {
    struct datapath *dp = self->dp;
    unsigned long long ino, size;
    int fd, tier, backing_id;
    if (!PyArg_ParseTuple(args, "KiO&Ki", &ino, &fd, to_place, &tier, &size, &backing_id))
        return NULL;
    /* Files of the source are relayed: so their reads are counted, and copies can follow the
     * readers. Without a descriptor all reads go to Python, but for those of a partial copy. */
    int own = -1;
    bool resized = dp->started && opens_resize(&dp->opens, ino, size), bound = false;
    if (dp->started && !resized && opens_can_bind(&dp->opens, ino)) {
        own = backing_id || fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
        bound = backing_id || fd < 0 || own >= 0;
        /* Python has the file open already: the last descriptors are kept for calls without one. */
        if (bound && tier == 0 && is_scarce(own))
            bound = false;
    }
    if (bound)
        bound = opens_bind(&dp->opens, ino, backing_id ? OPEN_PASSTHROUGH : OPEN_RELAY, own,
                           backing_id, (uint8_t)tier, size);
    if (!bound) {
        struct open_remains to_close = {.fd = own, .tier = (uint8_t)tier, .backing_id = backing_id};
        close_remains(dp, &to_close);
    }
    return PyBool_FromLong(resized || bound);
}

/* Closes a duplicate that was not used. */
static void close_of_tier(struct datapath *dp, int fd, uint8_t tier) {
    struct open_remains to_close = {.fd = fd, .tier = tier};
    close_remains(dp, &to_close);
}

PyObject *datapath_bind_part(Datapath *self, PyObject *args) {
    struct datapath *dp = self->dp;
    unsigned long long ino, size;
    int fd, tier;
    if (!PyArg_ParseTuple(args, "KiO&K", &ino, &fd, to_tier, &tier, &size))
        return NULL;
    int own = dp->started ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
    bool spare = false, bound = own >= 0 && !is_scarce(own) &&
                                opens_bind_part(&dp->opens, ino, own, (uint8_t)tier, size, &spare);
    if (own >= 0 && (!bound || spare))
        close_of_tier(dp, own, (uint8_t)tier);
    return PyBool_FromLong(bound);
}

PyObject *datapath_drop_part(Datapath *self, PyObject *arg) {
    unsigned long long ino = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred())
        return NULL;
    opens_drop_part(&self->dp->opens, ino);
    Py_RETURN_NONE;
}

PyObject *datapath_end_binding(Datapath *self, PyObject *arg) {
    unsigned long long ino = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred())
        return NULL;
    end_binding(self->dp, ino);
    Py_RETURN_NONE;
}

PyObject *datapath_watch(Datapath *self, PyObject *args) {
    unsigned long long ino, offset;
    if (!PyArg_ParseTuple(args, "KK", &ino, &offset))
        return NULL;
    opens_watch(&self->dp->opens, ino, offset);
    Py_RETURN_NONE;
}

PyObject *datapath_bind_written(Datapath *self, PyObject *args) {
    struct datapath *dp = self->dp;
    unsigned long long ino;
    int fd, tier, create;
    unsigned int writer;
    if (!PyArg_ParseTuple(args, "KiO&pI", &ino, &fd, to_place, &tier, &create, &writer))
        return NULL;
    if (ino < 1 || ino > INO_MASK)
        return value_error("no such inode");
    int own = dp->started ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
    struct open_inode *bound =
        own >= 0 ? opens_bind_written(&dp->opens, ino, own, (uint8_t)tier, create, writer) : NULL;
    if (bound)
        wake_waiters(dp, bound);
    else if (own >= 0)
        close_of_tier(dp, own, (uint8_t)tier);
    return PyBool_FromLong(bound != NULL);
}

PyObject *datapath_unbind(Datapath *self, PyObject *args) {
    struct datapath *dp = self->dp;
    unsigned long long ino;
    if (!PyArg_ParseTuple(args, "K", &ino))
        return NULL;
    bool bound;
    Py_BEGIN_ALLOW_THREADS;
    bound = opens_unbind(&dp->opens, ino);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(bound);
}

PyObject *datapath_rebind(Datapath *self, PyObject *args) {
    unsigned long long ino;
    int fd, tier;
    if (!PyArg_ParseTuple(args, "KiO&", &ino, &fd, to_place, &tier))
        return NULL;
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    bool bound = own >= 0 && opens_rebind(&self->dp->opens, ino, own, (uint8_t)tier);
    if (own >= 0 && !bound)
        close_of_tier(self->dp, own, (uint8_t)tier);
    return PyBool_FromLong(bound);
}

PyObject *datapath_release_written(Datapath *self, PyObject *args) {
    unsigned long long ino;
    if (!PyArg_ParseTuple(args, "K", &ino))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    release_written(self->dp, ino);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject *datapath_know_set_id(Datapath *self, PyObject *args) {
    unsigned long long ino;
    int has_set_id;
    if (!PyArg_ParseTuple(args, "Kp", &ino, &has_set_id))
        return NULL;
    opens_know_set_id(&self->dp->opens, ino, has_set_id);
    Py_RETURN_NONE;
}

PyObject *datapath_lowest(Datapath *self, PyObject *args) {
    unsigned long long ino;
    int forget;
    if (!PyArg_ParseTuple(args, "Kp", &ino, &forget))
        return NULL;
    return PyLong_FromUnsignedLongLong(opens_lowest(&self->dp->opens, ino, forget));
}

PyObject *datapath_answer(Datapath *self, PyObject *args) {
    struct datapath *dp = self->dp;
    unsigned long long token;
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "Ky*", &token, &data))
        return NULL;
    int device = -1;
    uint64_t unique = 0;
    Py_BEGIN_ALLOW_THREADS;
    pthread_mutex_lock(&dp->pending_lock);
    if (dp->started && token >= 1 && token <= dp->pending_count) {
        struct pending *place = pending_at(dp, (uint32_t)token - 1);
        if (place->used && !place->answered && place->waits == AT_PYTHON &&
            place->opcode == OP_READ) {
            mark_answered(dp, place);
            device = place->device;
            unique = place->unique;
        }
    }
    pthread_mutex_unlock(&dp->pending_lock);
    if (device >= 0) {
        int error = write_out(device, unique, 0, data.buf, (size_t)data.len);
        if (error && error != ENOENT)
            write_out(device, unique, EIO, NULL, 0);
    }
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&data);
    Py_RETURN_NONE;
}

/* (process, user, group) that has sent a read which Python answers; None if it waits no more. */
PyObject *datapath_reader(Datapath *self, PyObject *args) {
    struct datapath *dp = self->dp;
    unsigned long long token;
    if (!PyArg_ParseTuple(args, "K", &token))
        return NULL;
    struct pending found = {0};
    pthread_mutex_lock(&dp->pending_lock);
    if (dp->started && token >= 1 && token <= dp->pending_count) {
        const struct pending *place = pending_at(dp, (uint32_t)token - 1);
        if (place->used && place->waits == AT_PYTHON && place->opcode == OP_READ)
            found = *place;
    }
    pthread_mutex_unlock(&dp->pending_lock);
    if (!found.used)
        Py_RETURN_NONE;
    return Py_BuildValue("(III)", found.pid, found.uid, found.gid);
}

PyObject *datapath_store(Datapath *self, PyObject *args) {
    unsigned long long ino;
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "Ky*", &ino, &data))
        return NULL;
    bool stored;
    Py_BEGIN_ALLOW_THREADS;
    stored = store_pages(self->dp, ino, data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&data);
    return PyBool_FromLong(stored);
}

/* Keeps the bytes of a file for reads without an open that still come: ``unread`` bytes. False if
 * Python must answer them. */
PyObject *datapath_keep_unread(Datapath *self, PyObject *args) {
    struct datapath *dp = self->dp;
    unsigned long long ino, unread;
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "Ky*K", &ino, &data, &unread))
        return NULL;
    uint64_t size = (uint64_t)data.len;
    bool can = LOAD(dp->no_open_agreed) && ino >= 1 && ino <= dp->names.entries && unread &&
               !(LOAD(dp->marks[ino]) & dp->unusable) &&
               LOAD(dp->held) + (int64_t)size <= dp->hold_max;
    struct content *content = can ? content_new(size, &dp->held) : NULL;
    if (content) {
        memcpy(content->bytes, data.buf, size);
        can = opens_keep(&dp->opens, ino, content, unread);
        if (can)
            keep_partly_read(dp, ino);
        content_release(content);
    }
    PyBuffer_Release(&data);
    return PyBool_FromLong(content && can);
}

/* -- methods with an inode number alone -------------------------------------------------------- */

/* ``result`` is evaluated for ``dp`` and ``ino``. */
#define INODE_METHOD(name, result)                                                                 \
    PyObject *datapath_##name(Datapath *self, PyObject *number) {                                  \
        struct datapath *dp = self->dp;                                                            \
        uint64_t ino = PyLong_AsUnsignedLongLongMask(number);                                      \
        return PyErr_Occurred() ? NULL : (result);                                                 \
    }

INODE_METHOD(forget_object, (absorbed_forget(&dp->absorbed, ino), Py_NewRef(Py_None)))
INODE_METHOD(forget_attributes, (missing_changed(&dp->missing, ino), Py_NewRef(Py_None)))
/* Python has got the fetched bytes with the event. */
INODE_METHOD(taken, (drop_open(dp, ino, false), Py_NewRef(Py_None)))
INODE_METHOD(written, PyLong_FromUnsignedLongLong(opens_changes(&dp->opens, ino)))
INODE_METHOD(reached, PyLong_FromLongLong(opens_reached(&dp->opens, ino)))
INODE_METHOD(is_open, PyBool_FromLong(opens_is_open(&dp->opens, ino)))
INODE_METHOD(is_passed, PyBool_FromLong(opens_is_passed(&dp->opens, ino)))
INODE_METHOD(outdate, PyBool_FromLong(opens_outdate(&dp->opens, ino)))
INODE_METHOD(was_given, PyBool_FromLong(ino <= dp->names.entries &&
                                        LOAD(dp->given[ino >> 3]) >> (ino & 7) & 1))
