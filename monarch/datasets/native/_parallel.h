/* Many pieces of work, done by the calling thread of Python and by threads that
 * do not need the interpreter. */
#ifndef MONARCH_PARALLEL_H
#define MONARCH_PARALLEL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#define MOST_THREADS 256

struct parallel {
  /* Set by the caller: does piece ``index``, in any thread. */
  void (*piece)(void *of, size_t index);
  void *of;
  size_t count;
  /* The pieces that have taken so long that they have waited for a server. */
  atomic_size_t late;

  atomic_size_t next;
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

/* Does all pieces, and releases the interpreter meanwhile. ``least`` threads
 * begin at once, and a piece that is late starts one more, up to ``most``. What
 * the caller does not set must be 0. Returns false with the exception of a
 * signal handler; then pieces may be left undone. */
bool parallel_run(struct parallel *work, int least, int most);

#endif
