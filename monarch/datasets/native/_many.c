/* Reads many small files at once, with threads that do not need the interpreter
 * (files.py). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* A call that opens or reads longer than this, in nanoseconds, has waited for a
 * server: one more thread then waits beside it. */
#define LONG_NS 500000

/* While it reads, the calling thread runs the signal handlers of Python after
 * this time, in nanoseconds. */
#define SIGNALS_NS 100000000

#define MOST_THREADS 256

/* Of one file: its place in the buffer, and its size; or FAILED and the errno;
 * or NO_ROOM and the size of the file. files.py has the same numbers. */
struct found {
  int64_t offset;
  int64_t size;
};

#define FAILED (-1)
#define NO_ROOM (-2)

struct many {
  int directory;
  const char **names;
  struct found *found;
  size_t count;
  char *buffer;
  size_t room;
  atomic_size_t next;
  atomic_size_t used;
  /* The threads besides the caller: those allowed, those that exist or are
   * being started, and those that were started, under the mutex. */
  pthread_mutex_t mutex;
  int most;
  int reserved;
  int started;
  pthread_t threads[MOST_THREADS];
  /* Only of the calling thread: its state while it does not hold the
   * interpreter, and whether a signal handler has raised an exception. */
  PyThreadState *state;
  bool raised;
};

static void *read_files(void *arg);

static int64_t now_ns(void) {
  struct timespec now;

  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Starts one more thread unless all are running. Without memory for it there
 * are fewer threads. */
static void start_thread(struct many *many) {
  sigset_t all, before;
  pthread_t thread;
  bool may;

  pthread_mutex_lock(&many->mutex);
  may = many->reserved < many->most;
  many->reserved += may;
  pthread_mutex_unlock(&many->mutex);
  if (!may)
    return;
  /* Signals are for the threads of the interpreter; the new thread inherits the
   * mask. */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  may = pthread_create(&thread, NULL, read_files, many) == 0;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!may)
    return;
  pthread_mutex_lock(&many->mutex);
  many->threads[many->started++] = thread;
  pthread_mutex_unlock(&many->mutex);
}

/* Waits for the thread that was started as number ``number``; whether there is
 * one. */
static bool join_thread(struct many *many, int number) {
  pthread_t thread;
  bool exists;

  pthread_mutex_lock(&many->mutex);
  exists = number < many->started;
  if (exists)
    thread = many->threads[number];
  pthread_mutex_unlock(&many->mutex);
  if (exists)
    pthread_join(thread, NULL);
  return exists;
}

/* Takes ``size`` bytes of the buffer; returns their offset, or NO_ROOM. */
static int64_t take(struct many *many, size_t size) {
  size_t used = atomic_load(&many->used);

  do {
    if (size > many->room - used)
      return NO_ROOM;
  } while (!atomic_compare_exchange_weak(&many->used, &used, used + size));
  return (int64_t)used;
}

static struct found failed(int number) {
  return (struct found){FAILED, number};
}

static struct found read_open(struct many *many, int fd) {
  struct stat status;
  struct found found;
  int64_t done = 0;

  if (fstat(fd, &status) != 0)
    return failed(errno);
  if (!S_ISREG(status.st_mode))
    return failed(S_ISDIR(status.st_mode) ? EISDIR : EINVAL);
  found.size = status.st_size;
  found.offset = take(many, (size_t)status.st_size);
  if (found.offset < 0)
    return found;
  while (done < found.size) {
    ssize_t count =
        pread(fd, many->buffer + found.offset + done, found.size - done, done);

    if (count < 0 && errno == EINTR)
      continue;
    if (count < 0)
      return failed(errno);
    if (count == 0)
      break; /* The file became shorter. */
    done += count;
  }
  found.size = done;
  return found;
}

static struct found read_file(struct many *many, const char *name) {
  struct found found;
  int fd;

  /* O_NONBLOCK: a fifo must not wait for a process that writes to it. */
  do
    fd = openat(many->directory, name,
                O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  while (fd < 0 && errno == EINTR);
  if (fd < 0)
    return failed(errno);
  found = read_open(many, fd);
  close(fd);
  return found;
}

/* Reads the next file, and starts a thread if that has waited for a server;
 * false if none is left. ``since`` is the time when the last file was read. */
static bool read_next(struct many *many, int64_t *since) {
  size_t index = atomic_fetch_add(&many->next, 1);
  int64_t now;

  if (index >= many->count)
    return false;
  many->found[index] = read_file(many, many->names[index]);
  now = now_ns();
  if (now - *since > LONG_NS && atomic_load(&many->next) < many->count)
    start_thread(many);
  *since = now;
  return true;
}

static void *read_files(void *arg) {
  int64_t since = now_ns();

  while (read_next(arg, &since))
    ;
  return NULL;
}

/* Runs the handlers of the signals that have come. If one raises an exception,
 * no further file is read. */
static void run_signal_handlers(struct many *many) {
  PyEval_RestoreThread(many->state);
  if (PyErr_CheckSignals() != 0) {
    many->raised = true;
    atomic_store(&many->next, many->count);
  }
  many->state = PyEval_SaveThread();
}

static void read_all(struct many *many, int least) {
  int64_t since = now_ns(), checked = since;
  int number;

  for (number = 1; number < least && (size_t)number < many->count; number++)
    start_thread(many);
  while (!many->raised && read_next(many, &since))
    if (since - checked > SIGNALS_NS) {
      run_signal_handlers(many);
      checked = now_ns();
    }
  /* A thread is listed before the thread that has started it ends, so none is
   * left out. */
  for (number = 0; join_thread(many, number); number++)
    ;
}

/* The names as the system has them: of str, bytes and os.PathLike; as a list of
 * bytes, with the C strings of these in ``names``. NULL with an exception. */
static PyObject *encode(PyObject *sequence, const char **names, size_t count) {
  PyObject *encoded = PyList_New((Py_ssize_t)count);
  size_t index;

  for (index = 0; encoded && index < count; index++) {
    PyObject *name;

    /* Refuses a name with a zero byte. */
    if (!PyUnicode_FSConverter(PyTuple_GET_ITEM(sequence, index), &name)) {
      Py_CLEAR(encoded);
      break;
    }
    PyList_SET_ITEM(encoded, index, name);
    names[index] = PyBytes_AS_STRING(name);
  }
  return encoded;
}

/* Reads the files of ``many``; its names, its room and its directory are set.
 * Returns the places as bytes; NULL with an exception. */
static PyObject *places_of(struct many *many, int least, int most) {
  PyObject *result = PyBytes_FromStringAndSize(
      NULL, (Py_ssize_t)(many->count * sizeof(struct found)));

  if (!result)
    return NULL;
  many->found = (struct found *)PyBytes_AS_STRING(result);
  many->most = most - 1 < MOST_THREADS ? most - 1 : MOST_THREADS;
  pthread_mutex_init(&many->mutex, NULL);
  many->state = PyEval_SaveThread();
  read_all(many, least);
  PyEval_RestoreThread(many->state);
  pthread_mutex_destroy(&many->mutex);
  if (many->raised)
    Py_CLEAR(result);
  return result;
}

/* read_many(directory, names, buffer, least, most): two 64-bit numbers for each
 * name of the tuple ``names``, as bytes. */
static PyObject *read_many(PyObject *module, PyObject *args) {
  PyObject *encoded = NULL, *result = NULL;
  PyObject *names;
  Py_buffer buffer;
  struct many *many;
  int directory, least, most;

  (void)module;
  if (!PyArg_ParseTuple(args, "iO!w*ii", &directory, &PyTuple_Type, &names,
                        &buffer, &least, &most))
    return NULL;
  many = calloc(1, sizeof *many);
  if (many) {
    many->directory = directory;
    many->count = (size_t)PyTuple_GET_SIZE(names);
    many->buffer = buffer.buf;
    many->room = (size_t)buffer.len;
    many->names = calloc(many->count ? many->count : 1, sizeof *many->names);
  }
  if (!many || !many->names)
    PyErr_NoMemory();
  else
    encoded = encode(names, many->names, many->count);
  if (encoded)
    result = places_of(many, least, most);
  Py_XDECREF(encoded);
  if (many)
    free(many->names);
  free(many);
  PyBuffer_Release(&buffer);
  return result;
}

static PyMethodDef methods[] = {
    {"read_many", read_many, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "monarch.datasets._many",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__many(void) { return PyModuleDef_Init(&definition); }
