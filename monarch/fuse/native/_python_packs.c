/* Methods of the datapath for a source that is a pack, and for bytes that Python gives. */
#include "_python.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

void *array_of(Datapath *self, PyObject *given, Py_ssize_t size, bool writable, Py_ssize_t *count) {
    PyObject *view = PyMemoryView_FromObject(given);
    if (!view)
        return NULL;
    Py_buffer *buffer = PyMemoryView_GET_BUFFER(view);
    bool kept = PyBuffer_IsContiguous(buffer, 'C') && buffer->itemsize == size &&
                !(writable && buffer->readonly) && PyList_Append(self->blocks, view) == 0;
    Py_DECREF(view);
    if (!kept)
        return PyErr_Occurred() ? NULL : value_error("not such an array");
    *count = buffer->len / size;
    return buffer->buf;
}

PyObject *datapath_set_pack(Datapath *self, PyObject *args) {
    struct datapath *dp = self->dp;
    PyObject *given[3];
    unsigned chunks;
    if (!PyArg_ParseTuple(args, "OOOI", &given[0], &given[1], &given[2], &chunks))
        return NULL;
    if (dp->started || dp->pack.records || dp->source >= 0)
        return value_error("cannot be set now");
    Py_ssize_t counts[3];
    const uint32_t *chunk = array_of(self, given[0], sizeof *chunk, false, &counts[0]);
    const uint64_t *offset =
        chunk ? array_of(self, given[1], sizeof *offset, false, &counts[1]) : NULL;
    const uint64_t *digest =
        offset ? array_of(self, given[2], sizeof *digest, false, &counts[2]) : NULL;
    if (!digest)
        return NULL;
    if (counts[0] != counts[1] || counts[0] != counts[2] || chunks > INT32_MAX)
        return value_error("the arrays do not agree");
    if (!pack_prepare(&dp->pack, (uint64_t)counts[0], chunks, chunk, offset, digest))
        return PyErr_NoMemory();
    dp->pack.close_later = close_later;
    dp->pack.dp = dp;
    Py_RETURN_NONE;
}

/* Lends a duplicate of a descriptor. */
PyObject *datapath_lend(Datapath *self, PyObject *args) {
    unsigned chunk;
    int fd, own, error = 0;
    if (!PyArg_ParseTuple(args, "Ii", &chunk, &fd))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0) {
        error = errno;
    } else if (!pack_lend(&self->dp->pack, chunk, own)) {
        error = ENOMEM;
        close(own);
    }
    Py_END_ALLOW_THREADS;
    if (error)
        return python_error(error);
    Py_RETURN_NONE;
}

PyObject *datapath_take_back(Datapath *self, PyObject *number) {
    unsigned long chunk = PyLong_AsUnsignedLong(number);
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    if (chunk < UINT32_MAX)
        pack_take_back(&self->dp->pack, (uint32_t)chunk);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/* Copies the bytes of files out of ``data``: ``wanted`` has for each its inode, and the begin and
 * the size of its bytes. Returns a list of views of the copies; None is a file that is open, or one
 * without memory for its copy. */
PyObject *datapath_keep(Datapath *self, PyObject *args) {
    struct datapath *dp = self->dp;
    Py_buffer wanted, data;
    if (!PyArg_ParseTuple(args, "y*y*", &wanted, &data))
        return NULL;
    const uint64_t (*files)[3] = wanted.buf;
    Py_ssize_t count = wanted.len / (Py_ssize_t)sizeof *files;
    struct content **contents = calloc((size_t)count + 1, sizeof(struct content *));
    PyObject *list = contents ? PyList_New(count) : PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; list && i < count; i++) {
        uint64_t ino = files[i][0], begin = files[i][1], size = files[i][2];
        bool known = ino >= 1 && ino <= dp->names.entries && begin <= (uint64_t)data.len &&
                     size <= (uint64_t)data.len - begin;
        struct content *content = known ? content_new(size, &dp->kept) : NULL;
        if (!content)
            continue;
        memcpy(content->bytes, (const uint8_t *)data.buf + begin, size);
        if (opens_keep(&dp->opens, ino, content, 0))
            contents[i] = content;
        else
            content_release(content);
    }
    Py_END_ALLOW_THREADS;
    for (Py_ssize_t i = 0; list && i < count; i++) {
        PyObject *view = view_of(self, contents[i]);
        if (view)
            PyList_SET_ITEM(list, i, view);
        else
            Py_CLEAR(list);
    }
    for (Py_ssize_t i = 0; contents && i < count; i++)
        content_release(contents[i]);
    free(contents);
    PyBuffer_Release(&wanted);
    PyBuffer_Release(&data);
    return list;
}

PyObject *datapath_unkeep(Datapath *self, PyObject *number) {
    uint64_t ino = PyLong_AsUnsignedLongLongMask(number);
    if (PyErr_Occurred())
        return NULL;
    struct open_remains to_close;
    opens_unkeep(&self->dp->opens, ino, &to_close);
    close_remains(self->dp, &to_close);
    Py_RETURN_NONE;
}
