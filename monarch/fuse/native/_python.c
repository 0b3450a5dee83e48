/* The interface of the datapath to Python: its type, and the type of fetched bytes. */
#include "_python.h"
#include "_look.h"
#include "_lots.h"
#include "_passes.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/eventfd.h>

PyObject *python_error(int error) {
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

PyObject *value_error(const char *what) {
    PyErr_SetString(PyExc_ValueError, what);
    return NULL;
}

/* Keeps the access control lists, a sequence of pairs of bytes; false with an exception set. */
static bool take_acls(Datapath *self, PyObject *given) {
    struct names *names = &self->dp->names;
    self->acls = PySequence_Tuple(given);
    if (!self->acls)
        return false;
    size_t count = (size_t)PyTuple_GET_SIZE(self->acls);
    names->acls = calloc(count + 1, sizeof *names->acls);
    if (!names->acls) {
        PyErr_NoMemory();
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        struct names_acls *pair = &names->acls[i];
        Py_ssize_t access, inherited;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(self->acls, (Py_ssize_t)i), "y#y#", &pair->access,
                              &access, &pair->inherited, &inherited))
            return false;
        pair->access_size = (size_t)access;
        pair->inherited_size = (size_t)inherited;
    }
    names->acl_count = count;
    return true;
}

static PyObject *datapath_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {"residency", "marks",       "differs",   "unusable", "copying", "forced",
                           "entries",   "directories", "bounds_ns", "acls",     NULL};
    Py_buffer residency, marks;
    unsigned char differs, unusable, copying, forced;
    unsigned long long entries, directories;
    PyObject *bounds, *acls;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$y*y*bbbbKKOO", keys, &residency, &marks,
                                     &differs, &unusable, &copying, &forced, &entries, &directories,
                                     &bounds, &acls))
        return NULL;
    Datapath *self = (Datapath *)type->tp_alloc(type, 0);
    if (!self) {
        PyBuffer_Release(&residency);
        PyBuffer_Release(&marks);
        return NULL;
    }
    self->residency = residency;
    self->marks = marks;
    self->blocks = PyList_New(0);
    struct datapath *dp = self->dp = calloc(1, sizeof *dp);
    if (!self->blocks || !dp) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    dp->device = dp->channel = dp->wake = dp->nothing = dp->source = -1;
    dp->direct.wake = dp->absorbed.directory = -1;
    dp->pending_free = NO_PENDING;
    dp->source_max = 1;
    dp->overflow_end = &dp->overflow;
    dp->closing_end = &dp->closing;
    for (int tier = 0; tier < MAX_TIERS; tier++)
        dp->tiers[tier].directory = -1;
    PyObject *sequence = PySequence_Fast(bounds, "bounds_ns must be a sequence");
    Py_ssize_t count = sequence ? PySequence_Fast_GET_SIZE(sequence) : -1;
    if (count < 0 || count >= BUCKETS || (uint64_t)residency.len != entries + 1 ||
        marks.len != residency.len || entries > INO_MASK) {
        Py_XDECREF(sequence);
        Py_DECREF(self);
        return PyErr_Occurred() ? NULL : value_error("tables and entries do not agree");
    }
    for (dp->bounds = 0; dp->bounds < count; dp->bounds++)
        dp->bounds_ns[dp->bounds] =
            PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(sequence, dp->bounds));
    Py_DECREF(sequence);
    if (!take_acls(self, acls)) {
        Py_DECREF(self);
        return NULL;
    }
    dp->residency = residency.buf;
    dp->marks = dp->names.marks = marks.buf;
    dp->names.differs = differs;
    dp->unusable = unusable;
    dp->copying = copying;
    dp->forced = forced;
    dp->tallies = calloc(SHARDS, sizeof *dp->tallies);
    dp->events = calloc(EVENTS, sizeof *dp->events);
    dp->given = calloc(1, entries / 8 + 1);
    if (dp->events)
        for (uint64_t i = 0; i < EVENTS; i++)
            dp->events[i].turn = i;
    dp->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!dp->tallies || !dp->events || !dp->given ||
        !names_prepare(&dp->names, entries, directories) ||
        !opens_prepare(&dp->opens, dp, close_later) || !absorbed_prepare(&dp->absorbed) ||
        !missing_prepare(&dp->missing) || !direct_prepare(&dp->direct) ||
        pthread_mutex_init(&dp->pending_lock, NULL) ||
        pthread_mutex_init(&dp->overflow_lock, NULL) ||
        pthread_mutex_init(&dp->threads_lock, NULL)) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    if (dp->wake < 0 || PyErr_Occurred()) {
        if (!PyErr_Occurred())
            PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *datapath_stop(Datapath *self, PyObject *Py_UNUSED(ignored)) {
    struct datapath *dp = self->dp;
    Py_BEGIN_ALLOW_THREADS;
    if (dp->started) {
        stop(dp);
        close_all(dp);
    }
    dp->started = false;
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static void datapath_dealloc(Datapath *self) {
    struct datapath *dp = self->dp;
    if (dp) {
        if (dp->started) {
            Py_BEGIN_ALLOW_THREADS;
            stop(dp);
            close_all(dp);
            Py_END_ALLOW_THREADS;
        }
        if (still_runs(dp)) {
            /* A thread hangs in the source and will use this memory when it returns. */
            Py_TYPE(self)->tp_free((PyObject *)self);
            return;
        }
        join_ended(dp);
        splice_free(dp);
        if (dp->wake >= 0)
            close(dp->wake);
        for (int tier = 0; tier < MAX_TIERS; tier++)
            if (dp->tiers[tier].directory >= 0)
                close(dp->tiers[tier].directory);
        names_free(&dp->names);
        opens_free(&dp->opens);
        pack_free(&dp->pack);
        peers_free(&dp->peers);
        absorbed_free(&dp->absorbed);
        missing_free(&dp->missing);
        direct_free(&dp->direct);
        for (int chunk = 0; chunk < PENDING_CHUNKS; chunk++)
            free(dp->pending[chunk]);
        struct event event;
        while (dp->events && next_event(dp, &event))
            content_release(event.content);
        free(dp->tallies);
        free(dp->events);
        free(dp->given);
        free(dp);
    }
    Py_XDECREF(self->blocks);
    Py_XDECREF(self->acls);
    PyBuffer_Release(&self->residency);
    PyBuffer_Release(&self->marks);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int to_number(PyObject *given, long least, int *number) {
    long found = PyLong_AsLong(given);
    if (found == -1 && PyErr_Occurred())
        return 0;
    if (found < least || found >= MAX_TIERS) {
        PyErr_SetString(PyExc_ValueError, "no such tier");
        return 0;
    }
    *number = (int)found;
    return 1;
}

int to_tier(PyObject *given, void *number) { return to_number(given, 1, number); }

int to_place(PyObject *given, void *number) { return to_number(given, 0, number); }

int to_attr(PyObject *given, void *attr) {
    struct attr *to = attr;
    long long atime_ns, mtime_ns, ctime_ns;
    *to = (struct attr){0};
    if (!PyArg_ParseTuple(given, "KIIIIIKKLLL", &to->ino, &to->mode, &to->nlink, &to->uid, &to->gid,
                          &to->rdev, &to->size, &to->blocks, &atime_ns, &mtime_ns, &ctime_ns))
        return 0;
    names_times(to, atime_ns, mtime_ns, ctime_ns);
    return 1;
}

static PyObject *datapath_add_tier(Datapath *self, PyObject *args) {
    int number, directory, seals;
    if (!PyArg_ParseTuple(args, "O&ip", to_tier, &number, &directory, &seals))
        return NULL;
    int own = fcntl(directory, F_DUPFD_CLOEXEC, 0);
    if (own < 0)
        return python_error(errno);
    self->dp->tiers[number].directory = own;
    self->dp->tiers[number].seals = seals;
    Py_RETURN_NONE;
}

/* Replaces the directory of a tier under the same descriptor number. Files that readers have open
 * stay open. */
static PyObject *datapath_move_tier(Datapath *self, PyObject *args) {
    int number, directory, seals, moved = -1;
    if (!PyArg_ParseTuple(args, "O&ip", to_tier, &number, &directory, &seals))
        return NULL;
    if (self->dp->tiers[number].directory < 0)
        return value_error("no such tier");
    struct tier *tier = &self->dp->tiers[number];
    /* Closing the last descriptor of an unmounted file system may take long. */
    Py_BEGIN_ALLOW_THREADS;
    moved = dup3(directory, tier->directory, O_CLOEXEC);
    Py_END_ALLOW_THREADS;
    if (moved < 0)
        return python_error(errno);
    tier->seals = seals;
    STORE(tier->refuses, 0);
    Py_RETURN_NONE;
}

static PyObject *datapath_shun(Datapath *self, PyObject *args) {
    int number, shunned;
    if (!PyArg_ParseTuple(args, "O&p", to_tier, &number, &shunned))
        return NULL;
    STORE(self->dp->tiers[number].shunned, shunned);
    Py_RETURN_NONE;
}

/* Sends the first opens of files by the processes of these sessions to Python. */
static PyObject *datapath_measure(Datapath *self, PyObject *args) {
    struct datapath *dp = self->dp;
    PyObject *sessions;
    if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &sessions))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(sessions);
    if (count > MAX_MEASURED)
        return value_error("too many sessions");
    int32_t numbers[MAX_MEASURED];
    for (Py_ssize_t i = 0; i < count; i++) {
        numbers[i] = (int32_t)PyLong_AsLong(PyTuple_GET_ITEM(sessions, i));
        if (numbers[i] == -1 && PyErr_Occurred())
            return NULL;
    }
    for (Py_ssize_t i = 0; i < MAX_MEASURED; i++)
        STORE(dp->measured[i], i < count ? numbers[i] : 0);
    STORE(dp->measured_count, (int)count);
    Py_RETURN_NONE;
}

/* So many more requests wait with Python for the limits of their jobs, or fewer. */
static PyObject *datapath_throttled(Datapath *self, PyObject *args) {
    int change;
    if (!PyArg_ParseTuple(args, "i", &change))
        return NULL;
    pthread_mutex_lock(&self->dp->pending_lock);
    self->dp->python_throttled += change;
    pthread_mutex_unlock(&self->dp->pending_lock);
    if (change > 0)
        pass_queued(self->dp);
    Py_RETURN_NONE;
}

static PyObject *datapath_set_source(Datapath *self, PyObject *args) {
    struct datapath *dp = self->dp;
    int directory;
    unsigned long long fetch_max;
    long long hold_max, source_max;
    unsigned long long patience_ns;
    if (!PyArg_ParseTuple(args, "iKLLK", &directory, &fetch_max, &hold_max, &source_max,
                          &patience_ns))
        return NULL;
    if (dp->source >= 0 || dp->started)
        return value_error("cannot be set now");
    /* Not a duplicate: a lost source is opened again under the same descriptor number. */
    dp->source = directory;
    /* The kernel takes the bytes in one message, with a 32-bit length. */
    dp->fetch_max = fetch_max < MAX_FETCH ? fetch_max : MAX_FETCH;
    dp->hold_max = hold_max;
    dp->source_max = source_max < MAX_THREADS / 2 ? (int)source_max : MAX_THREADS / 2;
    dp->patience_ns = patience_ns;
    Py_RETURN_NONE;
}

static PyObject *datapath_publish(Datapath *self, PyObject *args) {
    unsigned table;
    Py_ssize_t number;
    PyObject *block;
    if (!PyArg_ParseTuple(args, "InO", &table, &number, &block))
        return NULL;
    PyObject *view = PyMemoryView_FromObject(block);
    if (!view)
        return NULL;
    Py_buffer *buffer = PyMemoryView_GET_BUFFER(view);
    /* Kept as long as a reader may use it. */
    bool kept = PyBuffer_IsContiguous(buffer, 'C') && PyList_Append(self->blocks, view) == 0;
    Py_DECREF(view);
    if (!kept || number < 0 ||
        !names_publish(&self->dp->names, table, (size_t)number, buffer->buf, (size_t)buffer->len)) {
        return PyErr_Occurred() ? NULL : value_error("no such block");
    }
    Py_RETURN_NONE;
}

static PyObject *datapath_start(Datapath *self, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {
        "device",         "channel",   "threads",    "passthrough", "no_open", "decide_opens",
        "cache_listings", "ask_names", "ask_xattrs", "as_caller",   NULL};
    struct datapath *dp = self->dp;
    int device, channel, threads;
    if (dp->started || dp->device >= 0)
        return value_error("cannot be started so");
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$iiippppppp", keys, &device, &channel, &threads,
                                     &dp->want_passthrough, &dp->no_open, &dp->decide_opens,
                                     &dp->cache_listings, &dp->names.ask, &dp->names.ask_xattrs,
                                     &dp->as_caller))
        return NULL;
    if (threads < 1 || threads > MAX_THREADS)
        return value_error("cannot be started so");
    dp->idle_target = threads;
    int error = start(dp, device, channel, threads);
    if (error)
        return python_error(error);
    Py_RETURN_NONE;
}

/* Registering reads a byte of the copy: that waits for the disk. */
static PyObject *datapath_register(Datapath *self, PyObject *args) {
    struct datapath *dp = self->dp;
    int fd, tier, backing_id = 0;
    if (!PyArg_ParseTuple(args, "iO&", &fd, to_tier, &tier))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    if (dp->started)
        backing_id = register_backing(dp, fd, (uint8_t)tier);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLong(backing_id);
}

static PyObject *datapath_unregister(Datapath *self, PyObject *args) {
    struct open_remains to_close = {.fd = -1};
    if (!PyArg_ParseTuple(args, "i", &to_close.backing_id))
        return NULL;
    close_remains(self->dp, &to_close);
    Py_RETURN_NONE;
}

/* Fetched bytes as a Python object; freed with the last user. */
typedef struct {
    PyObject_HEAD struct content *content;
    PyObject *dp; /* it counts the bytes that are held, so it must stay */
} Content;

static int content_buffer(Content *self, Py_buffer *view, int flags) {
    return PyBuffer_FillInfo(view, (PyObject *)self, self->content->bytes,
                             (Py_ssize_t)self->content->size, 1, flags);
}

static void content_dealloc(Content *self) {
    content_release(self->content);
    Py_DECREF(self->dp);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyBufferProcs content_as_buffer = {.bf_getbuffer = (getbufferproc)content_buffer};

static PyTypeObject content_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "monarch.fuse._datapath.Content",
    .tp_basicsize = sizeof(Content),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = (destructor)content_dealloc,
    .tp_as_buffer = &content_as_buffer,
};

PyObject *view_of(Datapath *self, struct content *content) {
    if (!content)
        Py_RETURN_NONE;
    Content *made = PyObject_New(Content, &content_type);
    if (!made)
        return NULL;
    made->content = content_retain(content);
    Py_INCREF(self);
    made->dp = (PyObject *)self;
    PyObject *view = PyMemoryView_FromObject((PyObject *)made);
    Py_DECREF(made);
    return view;
}

/* A list of (inode, tier or kind of event, bytes or None, process, session, user). */
static PyObject *datapath_events(Datapath *self, PyObject *Py_UNUSED(ignored)) {
    struct datapath *dp = self->dp;
    uint64_t count;
    if (read(dp->wake, &count, sizeof count) < 0) {
        /* Nobody has called. */
    }
    STORE(dp->awake, 0);
    /* An event that another thread stores from here on is read below, if that thread saw Python
     * awake. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    /* Several tasks take events; the one that notices the end of the session must wake, too. */
    if (LOAD(dp->ended))
        wake_python(dp);
    PyObject *list = PyList_New(0);
    struct event event;
    while (list && next_event(dp, &event)) {
        PyObject *item = Py_BuildValue("(KiNIII)", (unsigned long long)(event.what & INO_MASK),
                                       (int)(event.what >> 56), view_of(self, event.content),
                                       event.pid, event.session, event.uid);
        content_release(event.content);
        if (!item || PyList_Append(list, item))
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    release_last(dp);
    return list;
}

static PyObject *numbers(const uint64_t *values, int count) {
    PyObject *list = PyList_New(count);
    for (int i = 0; list && i < count; i++)
        PyList_SET_ITEM(list, i, PyLong_FromUnsignedLongLong(values[i]));
    return list;
}

/* For each tier: opens, reads, bytes, then counts and total of the histograms of opens and of
 * reads. */
static PyObject *datapath_tallies(Datapath *self, PyObject *args) {
    struct datapath *dp = self->dp;
    int tiers;
    if (!PyArg_ParseTuple(args, "i", &tiers))
        return NULL;
    if (tiers < 0 || tiers > MAX_TIERS)
        return value_error("no such tier");
    PyObject *list = PyList_New(tiers);
    for (int tier = 0; list && tier < tiers; tier++) {
        struct tally sum = {0};
        for (int shard = 0; shard < SHARDS; shard++) {
            const uint64_t *from = (const uint64_t *)&dp->tallies[shard][tier];
            uint64_t *to = (uint64_t *)&sum;
            for (size_t i = 0; i < sizeof sum / sizeof *to; i++)
                to[i] += __atomic_load_n(&from[i], __ATOMIC_RELAXED);
        }
        int buckets = dp->bounds + 1;
        PyObject *row = Py_BuildValue("(KKKNKNK)", sum.opens, sum.reads, sum.bytes,
                                      numbers(sum.open.counts, buckets), sum.open.total_ns,
                                      numbers(sum.read.counts, buckets), sum.read.total_ns);
        if (!row) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, tier, row);
    }
    return list;
}

static PyObject *datapath_source(Datapath *self, PyObject *Py_UNUSED(ignored)) {
    struct datapath *dp = self->dp;
    return Py_BuildValue("(KKKLKK)", LOAD(dp->source_opens), LOAD(dp->source_reads),
                         LOAD(dp->source_bytes),
                         (long long)(LOAD(dp->at_source) + LOAD(dp->for_source_count)),
                         LOAD(dp->source_calls), LOAD(dp->source_waited_ns));
}

/* The earlier of two times; 0 is none. */
static uint64_t earlier(uint64_t a, uint64_t b) { return b && b < a ? b : a; }

static PyObject *datapath_state(Datapath *self, PyObject *Py_UNUSED(ignored)) {
    struct datapath *dp = self->dp;
    int threads = 0;
    uint64_t now = now_ns() - LOAD(dp->stopped_ns);
    uint64_t source = now, request = now;
    for (int i = 0; i < LOAD(dp->thread_count); i++) {
        struct thread *thread = &dp->threads[i];
        threads += LOAD(thread->state) == THREAD_RUNS;
        if (!LOAD(thread->asks_peer))
            source = earlier(source, LOAD(thread->source_since_ns));
        request = earlier(request, LOAD(thread->begin_ns));
    }
    pthread_mutex_lock(&dp->pending_lock);
    long long waiting = dp->unanswered_count;
    if (dp->unanswered.first)
        request = earlier(request, dp->unanswered.first->since_ns);
    pthread_mutex_unlock(&dp->pending_lock);
    return Py_BuildValue(
        "{s:O,s:L,s:L,s:O,s:O,s:i,s:i,s:i,s:d,s:L,s:L,s:d}", "serving",
        LOAD(dp->serving) ? Py_True : Py_False, "open_files", LOAD(dp->opens.users), "backing_ids",
        LOAD(dp->opens.backing_ids), "passthrough", LOAD(dp->passthrough) ? Py_True : Py_False,
        "no_open", LOAD(dp->no_open_agreed) ? Py_True : Py_False, "refusal", LOAD(dp->refusal),
        "ended", LOAD(dp->ended), "threads", threads, "oldest_wait_s", (double)(now - source) / 1e9,
        "timed_out", LOAD(dp->timed_out), "waiting", waiting, "oldest_request_s",
        (double)(now - request) / 1e9);
}

static PyObject *datapath_fileno(Datapath *self, PyObject *Py_UNUSED(ignored)) {
    return PyLong_FromLong(self->dp->wake);
}

#define METHOD(name, how) {#name, (PyCFunction)datapath_##name, how, NULL}

static PyMethodDef methods[] = {
    OTHER_METHODS(METHOD),
    METHOD(add_tier, METH_VARARGS),
    METHOD(move_tier, METH_VARARGS),
    METHOD(shun, METH_VARARGS),
    METHOD(measure, METH_VARARGS),
    METHOD(throttled, METH_VARARGS),
    METHOD(set_source, METH_VARARGS),
    METHOD(publish, METH_VARARGS),
    METHOD(register, METH_VARARGS),
    METHOD(unregister, METH_VARARGS),
    METHOD(events, METH_NOARGS),
    METHOD(tallies, METH_VARARGS),
    METHOD(source, METH_NOARGS),
    METHOD(state, METH_NOARGS),
    METHOD(fileno, METH_NOARGS),
    METHOD(stop, METH_NOARGS),
    {"start", (PyCFunction)(void (*)(void))datapath_start, METH_VARARGS | METH_KEYWORDS, NULL},
    {0},
};

static PyTypeObject datapath_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "monarch.fuse._datapath.Datapath",
    .tp_basicsize = sizeof(Datapath),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = datapath_new,
    .tp_dealloc = (destructor)datapath_dealloc,
    .tp_methods = methods,
};

static PyMethodDef functions[] = {
    {"count_opens", (PyCFunction)count_opens, METH_VARARGS, NULL},
    {"look", (PyCFunction)look, METH_VARARGS, NULL},
    {"write_copies", (PyCFunction)write_copies, METH_VARARGS, NULL},
    {0},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "monarch.fuse._datapath",
    .m_doc = "Answers the kernel without the interpreter; see monarch/fuse/datapath.py.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__datapath(void) {
    if (PyType_Ready(&datapath_type) < 0 || PyType_Ready(&content_type) < 0)
        return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddObjectRef(made, "Datapath", (PyObject *)&datapath_type) < 0)
        Py_CLEAR(made);
    return made;
}
