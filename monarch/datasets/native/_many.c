/* Reads many small files, or many ranges of one file, with threads that do not
 * need the interpreter (files.py, range_reads.py). */

#include "_parallel.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <unistd.h>

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
  char *buffer;
  size_t room;
  atomic_size_t used;
};

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

/* Reads up to ``size`` bytes from ``offset`` on; fewer only at the end of the
 * file. Returns their number, or -1 with errno. */
static int64_t read_range(int fd, char *into, int64_t size, int64_t offset) {
  int64_t done = 0;

  while (done < size) {
    ssize_t count = pread(fd, into + done, size - done, offset + done);

    if (count < 0 && errno == EINTR)
      continue;
    if (count < 0)
      return -1;
    if (count == 0)
      break;
    done += count;
  }
  return done;
}

static struct found read_open(struct many *many, int fd) {
  struct stat status;
  struct found found;

  if (fstat(fd, &status) != 0)
    return failed(errno);
  if (!S_ISREG(status.st_mode))
    return failed(S_ISDIR(status.st_mode) ? EISDIR : EINVAL);
  found.size = status.st_size;
  found.offset = take(many, (size_t)status.st_size);
  if (found.offset < 0)
    return found;
  found.size = read_range(fd, many->buffer + found.offset, found.size, 0);
  return found.size < 0 ? failed(errno) : found;
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

static void read_next(void *of, size_t index) {
  struct many *many = of;

  many->found[index] = read_file(many, many->names[index]);
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

/* read_many(directory, names, buffer, least, most): two 64-bit numbers for each
 * name of the tuple ``names``, as bytes. */
static PyObject *read_many(PyObject *module, PyObject *args) {
  PyObject *encoded = NULL, *result = NULL;
  PyObject *names;
  Py_buffer buffer;
  struct many many = {0};
  struct parallel work = {.piece = read_next, .of = &many};
  int least, most;

  (void)module;
  if (!PyArg_ParseTuple(args, "iO!w*ii", &many.directory, &PyTuple_Type, &names,
                        &buffer, &least, &most))
    return NULL;
  work.count = (size_t)PyTuple_GET_SIZE(names);
  many.buffer = buffer.buf;
  many.room = (size_t)buffer.len;
  many.names = calloc(work.count ? work.count : 1, sizeof *many.names);
  if (!many.names)
    PyErr_NoMemory();
  else
    encoded = encode(names, many.names, work.count);
  if (encoded)
    result = PyBytes_FromStringAndSize(
        NULL, (Py_ssize_t)(work.count * sizeof *many.found));
  if (result) {
    many.found = (struct found *)PyBytes_AS_STRING(result);
    if (!parallel_run(&work, least, most))
      Py_CLEAR(result);
  }
  Py_XDECREF(encoded);
  free(many.names);
  PyBuffer_Release(&buffer);
  return result;
}

/* A range of a file, and its place in the buffer. range_reads.py has the same
 * numbers. */
struct range {
  int64_t offset;
  int64_t size;
  int64_t place;
};

struct ranges {
  int fd;
  const struct range *of;
  char *buffer;
  int64_t *read; /* the bytes of each range, or the errno below 0 */
};

static void read_next_range(void *of, size_t index) {
  struct ranges *ranges = of;
  const struct range *range = &ranges->of[index];
  int64_t count = read_range(ranges->fd, ranges->buffer + range->place,
                             range->size, range->offset);

  ranges->read[index] = count < 0 ? -errno : count;
}

static bool fits(const struct range *range, Py_ssize_t room) {
  return range->size >= 0 && range->size <= room && range->place >= 0 &&
         range->place <= room - range->size;
}

/* read_ranges(fd, ranges, buffer, least, most): a 64-bit number for each range,
 * as bytes, and how many ranges were late. ``ranges`` has three 64-bit numbers
 * for each. */
static PyObject *read_ranges(PyObject *module, PyObject *args) {
  PyObject *result = NULL;
  Py_buffer table, buffer;
  struct ranges ranges;
  struct parallel work = {.piece = read_next_range, .of = &ranges};
  size_t index = 0;
  int least, most;

  (void)module;
  if (!PyArg_ParseTuple(args, "iy*w*ii", &ranges.fd, &table, &buffer, &least,
                        &most))
    return NULL;
  ranges.of = table.buf;
  ranges.buffer = buffer.buf;
  work.count = (size_t)table.len / sizeof *ranges.of;
  while (index < work.count && fits(&ranges.of[index], buffer.len))
    index++;
  if (index < work.count)
    PyErr_SetString(PyExc_ValueError, "a range is outside of the buffer");
  else
    result = PyBytes_FromStringAndSize(
        NULL, (Py_ssize_t)(work.count * sizeof *ranges.read));
  if (result) {
    ranges.read = (int64_t *)PyBytes_AS_STRING(result);
    if (!parallel_run(&work, least, most))
      Py_CLEAR(result);
  }
  PyBuffer_Release(&table);
  PyBuffer_Release(&buffer);
  if (!result)
    return NULL;
  return Py_BuildValue("Nn", result, (Py_ssize_t)atomic_load(&work.late));
}

static PyMethodDef methods[] = {
    {"read_many", read_many, METH_VARARGS, NULL},
    {"read_ranges", read_ranges, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "monarch.datasets._many",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__many(void) { return PyModuleDef_Init(&definition); }
