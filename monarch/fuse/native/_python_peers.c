/* Methods of the datapath for files that other nodes have. */
#include "_python.h"

#include <unistd.h>

PyObject *datapath_set_peers(Datapath *self, PyObject *args) {
    struct datapath *dp = self->dp;
    PyObject *given[2], *requests;
    int gives_bytes;
    if (!PyArg_ParseTuple(args, "OOO!p", &given[0], &given[1], &PyTuple_Type, &requests,
                          &gives_bytes))
        return NULL;
    if (dp->started || dp->peers.members || dp->pack.records || dp->source >= 0)
        return value_error("cannot be set now");
    Py_ssize_t counts[2], members = PyTuple_GET_SIZE(requests);
    uint16_t *givers = array_of(self, given[0], sizeof *givers, true, &counts[0]);
    uint64_t *digests = givers ? array_of(self, given[1], sizeof *digests, true, &counts[1]) : NULL;
    if (!digests)
        return NULL;
    if ((uint64_t)counts[0] != dp->names.entries + 1 || counts[1] != counts[0] ||
        members >= GIVER_NOT_KEPT)
        return value_error("the arrays do not agree");
    if (!peers_prepare(&dp->peers, dp->names.entries, (uint32_t)members, givers, digests))
        return PyErr_NoMemory();
    dp->peers.gives_bytes = gives_bytes;
    for (Py_ssize_t i = 0; i < members; i++) {
        const char *before, *after;
        PyObject *request = PyTuple_GET_ITEM(requests, i);
        if (request == Py_None)
            continue;
        if (!PyArg_ParseTuple(request, "yy", &before, &after))
            return NULL;
        if (!peers_set_request(&dp->peers, (uint32_t)i, before, after))
            return value_error("no such request");
    }
    Py_RETURN_NONE;
}

/* Whether a connection is kept; if so, it belongs to the datapath. */
PyObject *datapath_keep_connection(Datapath *self, PyObject *args) {
    unsigned member, limit_us;
    int fd;
    if (!PyArg_ParseTuple(args, "IiI", &member, &fd, &limit_us))
        return NULL;
    return PyBool_FromLong(peers_keep(&self->dp->peers, member, fd, limit_us));
}

/* A connection with its limit; None if there is none. */
PyObject *datapath_take_connection(Datapath *self, PyObject *number) {
    unsigned long member = PyLong_AsUnsignedLong(number);
    if (PyErr_Occurred())
        return NULL;
    uint32_t limit_us;
    int fd = member < UINT32_MAX ? peers_take(&self->dp->peers, (uint32_t)member, &limit_us) : -1;
    if (fd < 0)
        Py_RETURN_NONE;
    PyObject *found = Py_BuildValue("(iI)", fd, limit_us);
    if (!found)
        close(fd);
    return found;
}

PyObject *datapath_drop_connections(Datapath *self, PyObject *number) {
    unsigned long member = PyLong_AsUnsignedLong(number);
    if (PyErr_Occurred())
        return NULL;
    if (member < UINT32_MAX)
        peers_drop(&self->dp->peers, (uint32_t)member);
    Py_RETURN_NONE;
}

/* Files, bytes, slow answers, the time for which answers were late, and a list of the last
 * latencies of a member since the last call. The limit of its waits and the fair time are set. */
PyObject *datapath_received(Datapath *self, PyObject *args) {
    unsigned member, limit_us;
    unsigned long long fair_us;
    struct received found;
    if (!PyArg_ParseTuple(args, "IIK", &member, &limit_us, &fair_us))
        return NULL;
    peers_received(&self->dp->peers, member, limit_us, fair_us, &found);
    Py_ssize_t count = found.latencies < PEERS_LATENCIES ? found.latencies : PEERS_LATENCIES;
    PyObject *latencies = PyList_New(count);
    for (Py_ssize_t i = 0; latencies && i < count; i++) {
        PyObject *each = PyLong_FromUnsignedLong(found.latencies_us[i]);
        if (each)
            PyList_SET_ITEM(latencies, i, each);
        else
            Py_CLEAR(latencies);
    }
    return latencies ? Py_BuildValue("(KKKKN)", found.files, found.bytes, found.slow, found.late_us,
                                     latencies)
                     : NULL;
}
