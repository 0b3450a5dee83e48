/* Reads many small files, or many ranges of one file, with threads that do not
 * need the interpreter (files.py, range_reads.py). */

#include "_copies.h"
#include "_parallel.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
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

/* A file of at least LARGE bytes begins BEHIND bytes behind a page, if it may:
 * the processor copies it faster than across pages, and than to whole lines of
 * its cache (docs/benchmarks.md). */
#define LARGE (64 << 10)
#define PAGE 4096
#define BEHIND 32

/* The most bytes of a file that the kernel is asked to read while the next ones
 * are opened, and the most such files: one thread waits for all of them. */
#define AHEAD_BYTES (128 << 10)
#define MOST_AHEAD 64

/* What a file has taken of the buffer; at first nothing. */
struct place {
  size_t offset;
  size_t size;
};

/* An open file of ``size`` bytes, or the copy of one. */
struct opened {
  size_t index;
  int fd;
  int64_t size;
  bool is_copy;
};

struct many {
  int directory;
  const struct copies *copies; /* NULL: there are none */
  size_t directories;          /* of ``copies`` */
  const char **names;
  struct found *found;
  char *buffer;
  size_t room;
  int has_gaps; /* whether there may be unused bytes between the files */
  atomic_size_t used;
  atomic_size_t missing; /* the bytes for which there was no room */
  /* The files that the kernel reads, at most ``most_ahead`` at the same time,
   * and how many there were so far. */
  struct opened *opened;
  _Atomic(struct opened *) ahead[MOST_AHEAD];
  size_t most_ahead;
  atomic_size_t begun;
};

/* The first byte of the buffer, from ``used`` on, for a file of ``size`` bytes.
 */
static size_t begin_of(const struct many *many, size_t used, size_t size) {
  uintptr_t address = (uintptr_t)many->buffer + used;

  if (!many->has_gaps || size < LARGE)
    return used;
  return used + (size_t)((BEHIND - address) & (PAGE - 1));
}

/* Has ``place`` hold ``size`` bytes of the buffer: those that were taken for
 * the copy of the file, if that could not be read; false if there is no room.
 */
static bool take(struct many *many, size_t size, struct place *place) {
  size_t used = atomic_load(&many->used), begin;

  if (size <= place->size)
    return true;
  do {
    begin = begin_of(many, used, size);
    if (begin > many->room || size > many->room - begin) {
      atomic_fetch_add(&many->missing, size);
      return false;
    }
  } while (!atomic_compare_exchange_weak(&many->used, &used, begin + size));
  *place = (struct place){.offset = begin, .size = size};
  return true;
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

/* Reads an open file of ``size`` bytes. */
static struct found read_open(struct many *many, int fd, int64_t size,
                              struct place *place) {
  int64_t count;

  if (!take(many, (size_t)size, place))
    return (struct found){NO_ROOM, size};
  count = read_range(fd, many->buffer + place->offset, size, 0);
  return count < 0 ? failed(errno)
                   : (struct found){(int64_t)place->offset, count};
}

/* Opens a file, not its copy. Returns its descriptor and its size, or -1 with
 * errno. */
static int open_itself(const struct many *many, const char *name,
                       int64_t *size) {
  struct stat status;
  int fd, error = 0;

  /* O_NONBLOCK: a fifo must not wait for a process that writes to it. */
  do
    fd = openat(many->directory, name,
                O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  while (fd < 0 && errno == EINTR);
  if (fd < 0)
    return -1;
  if (fstat(fd, &status) != 0)
    error = errno;
  else if (!S_ISREG(status.st_mode))
    error = S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
  if (error) {
    close(fd);
    errno = error;
    return -1;
  }
  *size = status.st_size;
  return fd;
}

static struct found read_itself(struct many *many, const char *name,
                                struct place *place) {
  struct found found;
  int64_t size;
  int fd = open_itself(many, name, &size);

  if (fd < 0)
    return failed(errno);
  found = read_open(many, fd, size, place);
  close(fd);
  return found;
}

/* Reads an open file, and closes it. */
static void finish(struct many *many, const struct opened *opened) {
  struct place place = {0};
  struct found found = read_open(many, opened->fd, opened->size, &place);

  close(opened->fd);
  /* A short copy: the daemon has emptied it, since it is damaged. */
  if (opened->is_copy && (found.offset == FAILED ||
                          (found.offset >= 0 && found.size < opened->size)))
    found = read_itself(many, many->names[opened->index], &place);
  many->found[opened->index] = found;
}

/* Has the kernel read a small file, and finishes the one for which it was asked
 * to ``most_ahead`` files before. */
static void read_ahead(struct many *many, const struct opened *opened) {
  struct opened *kept = &many->opened[opened->index], *before;
  size_t turn = atomic_fetch_add(&many->begun, 1);

  posix_fadvise(opened->fd, 0, opened->size, POSIX_FADV_WILLNEED);
  *kept = *opened;
  before = atomic_exchange(&many->ahead[turn % many->most_ahead], kept);
  if (before)
    finish(many, before);
}

static bool finish_next(void *of, size_t place) {
  struct many *many = of;
  struct opened *opened = atomic_exchange(&many->ahead[place], NULL);

  if (opened)
    finish(many, opened);
  return false;
}

/* As open_itself. Without a free descriptor, those of the files that the kernel
 * reads are given back first. */
static int open_or_finish(struct many *many, const char *name, int64_t *size) {
  int fd = open_itself(many, name, size);
  size_t place;

  if (fd >= 0 || (errno != EMFILE && errno != ENFILE) || !many->most_ahead)
    return fd;
  for (place = 0; place < many->most_ahead; place++)
    finish_next(many, place);
  return open_itself(many, name, size);
}

static bool read_next(void *of, size_t index) {
  struct many *many = of;
  const char *name = many->names[index];
  struct opened opened = {.index = index, .fd = -1};

  if (many->copies)
    opened.fd = copy_open(many->copies, many->directories, many->directory,
                          name, &opened.size);
  opened.is_copy = opened.fd >= 0;
  if (opened.fd < 0)
    opened.fd = open_or_finish(many, name, &opened.size);
  if (opened.fd < 0) {
    many->found[index] = failed(errno);
    return true;
  }
  if (many->most_ahead && !opened.is_copy && opened.size <= AHEAD_BYTES) {
    read_ahead(many, &opened);
    return false;
  }
  finish(many, &opened);
  return true;
}

/* Reads all files. False with the exception of a signal handler. */
static bool read_all(struct many *many, size_t count, int least, int most) {
  struct parallel begin = {.piece = read_next, .of = many, .count = count};
  struct parallel end = {.piece = finish_next, .of = many};
  bool is_done = parallel_run(&begin, least, most);
  size_t begun = atomic_load(&many->begun), place;

  end.count = begun < many->most_ahead ? begun : many->most_ahead;
  if (is_done && end.count)
    is_done = parallel_run(&end, 1, 1);
  for (place = 0; !is_done && place < MOST_AHEAD; place++)
    if (many->ahead[place])
      close(many->ahead[place]->fd);
  return is_done;
}

/* The C string of a name that the system has in the same form, a str of ASCII
 * without a zero byte; else NULL. */
static const char *plain(PyObject *name) {
  const char *text;

  if (!PyUnicode_CheckExact(name) || !PyUnicode_IS_COMPACT_ASCII(name))
    return NULL;
  text = PyUnicode_DATA(name);
  return strlen(text) == (size_t)PyUnicode_GET_LENGTH(name) ? text : NULL;
}

/* The C strings of the names as the system has them: of str, bytes and
 * os.PathLike. They are valid as long as ``sequence`` and the returned list,
 * which has those that were encoded. NULL with an exception. */
static PyObject *encode(PyObject *sequence, const char **names, size_t count) {
  PyObject *encoded = PyList_New(0);
  size_t index;

  /* The bytes that were read since the names were made have driven these out of
   * the processor's cache. */
  for (index = 0; index < count; index++)
    __builtin_prefetch(PyTuple_GET_ITEM(sequence, index));
  for (index = 0; encoded && index < count; index++) {
    PyObject *name = PyTuple_GET_ITEM(sequence, index), *bytes;

    names[index] = plain(name);
    if (names[index])
      continue;
    /* Refuses a name with a zero byte. */
    if (!PyUnicode_FSConverter(name, &bytes)) {
      Py_CLEAR(encoded);
      break;
    }
    names[index] = PyBytes_AS_STRING(bytes);
    if (PyList_Append(encoded, bytes) != 0)
      Py_CLEAR(encoded);
    Py_DECREF(bytes);
  }
  return encoded;
}

/* The copies that the buffer ``table`` describes, if any. */
static void set_copies(struct many *many, const Py_buffer *table) {
  size_t size = (size_t)table->len;

  if (size < sizeof(struct copies))
    return;
  many->copies = table->buf;
  many->directories = (size - sizeof(struct copies)) / sizeof(int64_t);
}

/* How many files have no bytes in the buffer. */
static Py_ssize_t count_unread(const struct many *many, size_t count) {
  Py_ssize_t unread = 0;
  size_t index;

  for (index = 0; index < count; index++)
    unread += many->found[index].offset < 0;
  return unread;
}

/* read_many(directory, names, buffer, has_gaps, least, most, copies, ahead):
 * two 64-bit numbers for each name of the tuple ``names``, as bytes; the bytes
 * that all files need; and how many files have none in the buffer. ``copies``
 * is a table of copies.py, or empty; with ``ahead`` the kernel is asked to read
 * small files while others are opened. */
static PyObject *read_many(PyObject *module, PyObject *args) {
  PyObject *encoded = NULL, *result = NULL;
  PyObject *names;
  Py_buffer buffer, table;
  struct many many = {0};
  size_t count;
  int least, most, ahead;

  (void)module;
  if (!PyArg_ParseTuple(args, "iO!w*piiy*p", &many.directory, &PyTuple_Type,
                        &names, &buffer, &many.has_gaps, &least, &most, &table,
                        &ahead))
    return NULL;
  set_copies(&many, &table);
  count = (size_t)PyTuple_GET_SIZE(names);
  many.buffer = buffer.buf;
  many.room = (size_t)buffer.len;
  many.names = calloc(count ? count : 1, sizeof *many.names);
  many.opened = calloc(count ? count : 1, sizeof *many.opened);
  if (ahead && most > least)
    many.most_ahead =
        most - least < MOST_AHEAD ? (size_t)(most - least) : MOST_AHEAD;
  if (!many.names || !many.opened)
    PyErr_NoMemory();
  else
    encoded = encode(names, many.names, count);
  if (encoded)
    result = PyBytes_FromStringAndSize(
        NULL, (Py_ssize_t)(count * sizeof *many.found));
  if (result) {
    many.found = (struct found *)PyBytes_AS_STRING(result);
    if (!read_all(&many, count, least, most))
      Py_CLEAR(result);
  }
  Py_XDECREF(encoded);
  free(many.names);
  free(many.opened);
  PyBuffer_Release(&table);
  PyBuffer_Release(&buffer);
  if (!result)
    return NULL;
  return Py_BuildValue(
      "Nnn", result,
      (Py_ssize_t)(atomic_load(&many.used) + atomic_load(&many.missing)),
      count_unread(&many, count));
}

/* views(buffer, found): the part of the memoryview ``buffer`` of each file that
 * ``found`` of read_many describes; of one without bytes a part without a
 * meaning. */
static PyObject *views(PyObject *module, PyObject *args) {
  PyObject *buffer, *list;
  Py_buffer table;
  const struct found *found;
  Py_ssize_t count, index;

  (void)module;
  if (!PyArg_ParseTuple(args, "O!y*", &PyMemoryView_Type, &buffer, &table))
    return NULL;
  found = table.buf;
  count = table.len / (Py_ssize_t)sizeof *found;
  list = PyList_New(count);
  for (index = 0; list && index < count; index++) {
    Py_ssize_t begin = found[index].offset < 0 ? 0 : found[index].offset;
    PyObject *view =
        PySequence_GetSlice(buffer, begin, begin + found[index].size);

    if (view)
      PyList_SET_ITEM(list, index, view);
    else
      Py_CLEAR(list);
  }
  PyBuffer_Release(&table);
  return list;
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

static bool read_next_range(void *of, size_t index) {
  struct ranges *ranges = of;
  const struct range *range = &ranges->of[index];
  int64_t count = read_range(ranges->fd, ranges->buffer + range->place,
                             range->size, range->offset);

  ranges->read[index] = count < 0 ? -errno : count;
  return true;
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
    {"views", views, METH_VARARGS, NULL},
    {"read_ranges", read_ranges, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "monarch.datasets._many",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__many(void) {
  return parallel_prepare() ? PyModuleDef_Init(&definition) : PyErr_NoMemory();
}
