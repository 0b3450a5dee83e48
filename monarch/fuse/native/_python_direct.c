/* The methods of the datapath with which Python takes requests and answers them itself. */
#include "_python.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

PyObject *datapath_take_over(Datapath *self, PyObject *Py_UNUSED(ignored)) {
    int wake = direct_begin(&self->dp->direct);
    return wake < 0 ? python_error(errno) : PyLong_FromLong(wake);
}

/* The part of a request that depends on its kind, as a tuple. */
static PyObject *details_of(const struct in_header *request) {
    const void *body = request + 1;
    const char *name = body;
    switch (request->opcode) {
    case OP_CREATE: {
        const struct create_in *in = body;
        return Py_BuildValue("(yIII)", (const char *)(in + 1), in->mode, in->umask, in->flags);
    }
    case OP_MKDIR: {
        const struct mkdir_in *in = body;
        return Py_BuildValue("(yII)", (const char *)(in + 1), in->mode, in->umask);
    }
    case OP_RENAME: {
        const struct rename_in *in = body;
        name = (const char *)(in + 1);
        return Py_BuildValue("(yKyI)", name, (unsigned long long)in->newdir,
                             name + strlen(name) + 1, 0u);
    }
    case OP_RENAME2: {
        const struct rename2_in *in = body;
        name = (const char *)(in + 1);
        return Py_BuildValue("(yKyI)", name, (unsigned long long)in->newdir,
                             name + strlen(name) + 1, in->flags);
    }
    case OP_SETATTR: {
        const struct setattr_in *in = body;
        return Py_BuildValue("(IKLILIIII)", in->valid, (unsigned long long)in->size,
                             (long long)in->atime, in->atimensec, (long long)in->mtime,
                             in->mtimensec, in->mode, in->uid, in->gid);
    }
    case OP_IOCTL: {
        const struct ioctl_in *in = body;
        return Py_BuildValue("(y#)", (const char *)(in + 1), (Py_ssize_t)in->in_size);
    }
    case OP_LOOKUP:
    case OP_UNLINK:
    case OP_RMDIR:
        return Py_BuildValue("(y)", name);
    default:
        return PyTuple_New(0);
    }
}

static void answer_error(struct datapath *dp, uint64_t unique, int error) {
    struct out_header header = {sizeof header, -error, unique};
    carry_back(dp, &header);
}

/* A list of (opcode, unique, inode, uid, gid, pid, details). A request for which there is no memory
 * is answered. */
PyObject *datapath_requests(Datapath *self, PyObject *Py_UNUSED(ignored)) {
    struct datapath *dp = self->dp;
    PyObject *list = PyList_New(0);
    if (!list)
        return NULL;
    for (struct direct_request *each = direct_take(&dp->direct), *next; each; each = next) {
        const struct in_header *request = &each->message.header;
        next = each->next;
        PyObject *details = details_of(request);
        PyObject *item = details ? Py_BuildValue("(IKKIIIN)", request->opcode,
                                                 (unsigned long long)request->unique,
                                                 (unsigned long long)request->nodeid, request->uid,
                                                 request->gid, request->pid, details)
                                 : NULL;
        if (!item || PyList_Append(list, item)) {
            PyErr_Clear();
            answer_error(dp, request->unique, ENOMEM);
        }
        Py_XDECREF(item);
        free(each);
    }
    return list;
}

PyObject *datapath_requests_so_far(Datapath *self, PyObject *Py_UNUSED(ignored)) {
    return PyLong_FromUnsignedLongLong(LOAD(self->dp->direct.count));
}

/* The number of hints that were refused since the last call, and the user and the process that have
 * sent the last of them. */
PyObject *datapath_refused_hints(Datapath *self, PyObject *Py_UNUSED(ignored)) {
    struct refused_hints refused = direct_refused(&self->dp->direct);
    return Py_BuildValue("(KII)", (unsigned long long)refused.count, refused.uid, refused.pid);
}

PyObject *datapath_answer_error(Datapath *self, PyObject *args) {
    unsigned long long unique;
    int error;
    if (!PyArg_ParseTuple(args, "Ki", &unique, &error))
        return NULL;
    answer_error(self->dp, unique, error);
    Py_RETURN_NONE;
}

PyObject *datapath_answer_ioctl(Datapath *self, PyObject *args) {
    unsigned long long unique;
    int result;
    if (!PyArg_ParseTuple(args, "Ki", &unique, &result))
        return NULL;
    struct {
        struct out_header header;
        struct ioctl_out out;
    } reply = {{sizeof reply, 0, unique}, {.result = result}};
    carry_back(self->dp, &reply.header);
    Py_RETURN_NONE;
}

PyObject *datapath_answer_missing(Datapath *self, PyObject *args) {
    unsigned long long unique, valid_s;
    if (!PyArg_ParseTuple(args, "KK", &unique, &valid_s))
        return NULL;
    struct {
        struct out_header header;
        struct entry_out entry;
    } reply = {{sizeof reply, 0, unique}, {.entry_valid = valid_s}};
    carry_back(self->dp, &reply.header);
    Py_RETURN_NONE;
}

/* The last argument says what is answered: the attributes alone, a name, or a name and an open file
 * with these flags. */
enum { ATTRIBUTES_ALONE = -2, NAME = -1 };

PyObject *datapath_answer_attributes(Datapath *self, PyObject *args) {
    unsigned long long unique, valid_s;
    struct attr attr;
    int what;
    if (!PyArg_ParseTuple(args, "KKO&i", &unique, &valid_s, to_attr, &attr, &what))
        return NULL;
    if (what == ATTRIBUTES_ALONE) {
        struct {
            struct out_header header;
            struct attr_out out;
        } reply = {{sizeof reply, 0, unique}, {.attr_valid = valid_s, .attr = attr}};
        carry_back(self->dp, &reply.header);
        Py_RETURN_NONE;
    }
    struct {
        struct out_header header;
        struct entry_out entry;
        struct open_out open;
    } reply = {
        .header = {sizeof reply, 0, unique},
        .entry = {.nodeid = attr.ino, .entry_valid = valid_s, .attr_valid = valid_s, .attr = attr},
        .open = {.fh = attr.ino, .open_flags = (uint32_t)what},
    };
    if (what == NAME)
        reply.header.len -= sizeof reply.open;
    carry_back(self->dp, &reply.header);
    Py_RETURN_NONE;
}
