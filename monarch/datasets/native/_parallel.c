#include "_parallel.h"

#include <signal.h>
#include <stdint.h>
#include <time.h>

/* A piece that takes longer than this, in nanoseconds, has waited for a server:
 * one more thread then waits beside it. */
#define LATE_NS 500000

/* The calling thread runs the signal handlers of Python after this time, in
 * nanoseconds. */
#define SIGNALS_NS 100000000

static void *do_pieces(void *arg);

static int64_t now_ns(void) {
  struct timespec now;

  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Starts one more thread unless all are running. Without memory for it there
 * are fewer threads. */
static void start_thread(struct parallel *work) {
  sigset_t all, before;
  pthread_t thread;
  bool may;

  pthread_mutex_lock(&work->mutex);
  may = work->reserved < work->most;
  work->reserved += may;
  pthread_mutex_unlock(&work->mutex);
  if (!may)
    return;
  /* Signals are for the threads of the interpreter; the new thread inherits the
   * mask. */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  may = pthread_create(&thread, NULL, do_pieces, work) == 0;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!may)
    return;
  pthread_mutex_lock(&work->mutex);
  work->threads[work->started++] = thread;
  pthread_mutex_unlock(&work->mutex);
}

/* Waits for the thread that was started as number ``number``; whether there is
 * one. */
static bool join_thread(struct parallel *work, int number) {
  pthread_t thread;
  bool exists;

  pthread_mutex_lock(&work->mutex);
  exists = number < work->started;
  if (exists)
    thread = work->threads[number];
  pthread_mutex_unlock(&work->mutex);
  if (exists)
    pthread_join(thread, NULL);
  return exists;
}

/* Does the next piece, and starts a thread if that is late; false if none is
 * left. ``since`` is the time when the last piece was done. */
static bool do_next(struct parallel *work, int64_t *since) {
  size_t index = atomic_fetch_add(&work->next, 1);
  int64_t now;

  if (index >= work->count)
    return false;
  work->piece(work->of, index);
  now = now_ns();
  if (now - *since > LATE_NS) {
    atomic_fetch_add(&work->late, 1);
    if (atomic_load(&work->next) < work->count)
      start_thread(work);
  }
  *since = now;
  return true;
}

static void *do_pieces(void *arg) {
  int64_t since = now_ns();

  while (do_next(arg, &since))
    ;
  return NULL;
}

/* Runs the handlers of the signals that have come. If one raises an exception,
 * no further piece is begun. */
static void run_signal_handlers(struct parallel *work) {
  PyEval_RestoreThread(work->state);
  if (PyErr_CheckSignals() != 0) {
    work->raised = true;
    atomic_store(&work->next, work->count);
  }
  work->state = PyEval_SaveThread();
}

static void run_all(struct parallel *work, int least) {
  int64_t since = now_ns(), checked = since;
  int number;

  for (number = 1; number < least && (size_t)number < work->count; number++)
    start_thread(work);
  while (!work->raised && do_next(work, &since))
    if (since - checked > SIGNALS_NS) {
      run_signal_handlers(work);
      checked = now_ns();
    }
  /* A thread is listed before the thread that has started it ends, so none is
   * left out. */
  for (number = 0; join_thread(work, number); number++)
    ;
}

bool parallel_run(struct parallel *work, int least, int most) {
  work->most = most - 1 < MOST_THREADS ? most - 1 : MOST_THREADS;
  pthread_mutex_init(&work->mutex, NULL);
  work->state = PyEval_SaveThread();
  run_all(work, least);
  PyEval_RestoreThread(work->state);
  pthread_mutex_destroy(&work->mutex);
  return !work->raised;
}
