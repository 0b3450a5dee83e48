/* Counts many opens at once in a pass over files (telemetry/passes.py). */
#include "_passes.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* The places of ``counts``, as in passes.py. */
enum { OPENS, FILES, REPEATS, RUN_OPENS, RUN, IN_WINDOW, WINDOWS, NEW, ALL_FILES, COUNTS };
enum { LEAST_RUN = 2, MOST_RUN = 64 };

struct pass {
    const uint32_t *opens;
    size_t stop, keep, files, window_size, new_size;
    uint32_t first, *run, *window, *new;
    uint8_t *seen, mark;
    uint64_t *counts;
};

static bool has(const uint32_t *numbers, uint64_t count, uint32_t number) {
    for (uint64_t index = 0; index < count; index++)
        if (numbers[index] == number)
            return true;
    return false;
}

/* Whether a run is so long that the pass is over. */
static bool is_over(const uint64_t *counts) {
    uint64_t half = counts[FILES] / 2;
    uint64_t least = half < LEAST_RUN ? LEAST_RUN : half > MOST_RUN ? MOST_RUN : half;
    return counts[RUN] >= least;
}

/* Counts one open; whether the run of repeated opens has become longer. */
static bool count(struct pass *pass, uint32_t number) {
    uint64_t *counts = pass->counts;
    counts[OPENS]++;
    if (pass->seen[number] != pass->mark) {
        pass->seen[number] = pass->mark;
        counts[FILES]++;
        counts[REPEATS] += counts[RUN];
        counts[RUN] = counts[RUN_OPENS] = 0;
        if (pass->new_size)
            pass->new[counts[NEW]++] = number;
        return false;
    }
    counts[RUN_OPENS]++;
    if (!has(pass->run, counts[RUN], number))
        pass->run[counts[RUN]++] = number;
    return true;
}

/* The index of the next open; ``stop`` + 1 if an open is of none of the files. */
static size_t count_all(struct pass *pass, size_t at) {
    uint64_t *counts = pass->counts;
    while (at < pass->stop) {
        uint32_t number = pass->opens[at++] - pass->first;
        if (number >= pass->files)
            return pass->stop + 1;
        if (pass->window_size) {
            if (!has(pass->window, counts[IN_WINDOW], number))
                pass->window[counts[IN_WINDOW]++] = number;
            else if (counts[FILES] < counts[ALL_FILES] || has(pass->run, counts[RUN], number))
                continue;
        }
        bool ends = count(pass, number) && is_over(counts);
        if (pass->window_size && counts[IN_WINDOW] == pass->window_size) {
            if (ends || pass->stop - at < pass->keep)
                return at;
            /* The second half has the last complete window. */
            memcpy(pass->window + pass->window_size, pass->window,
                   pass->window_size * sizeof *pass->window);
            counts[IN_WINDOW] = 0;
            counts[WINDOWS]++;
        }
        if (ends || (pass->new_size && counts[NEW] == pass->new_size))
            break;
    }
    return at;
}

static bool is_sound(const struct pass *pass, const Py_buffer buffers[], size_t at) {
    const uint64_t *counts = pass->counts;
    return buffers[5].len >= (Py_ssize_t)(COUNTS * sizeof *counts) && at <= pass->stop &&
           buffers[2].len >= (Py_ssize_t)(MOST_RUN * sizeof *pass->run) && counts[RUN] < MOST_RUN &&
           (!pass->new_size || counts[NEW] < pass->new_size) &&
           (!pass->window_size || counts[IN_WINDOW] < pass->window_size);
}

PyObject *count_opens(PyObject *module, PyObject *args) {
    (void)module;
    enum { OPENS_AT, SEEN_AT, RUN_AT, WINDOW_AT, NEW_AT, COUNTS_AT, BUFFERS };
    Py_buffer buffers[BUFFERS];
    Py_ssize_t at, keep;
    struct pass pass;
    if (!PyArg_ParseTuple(args, "y*nnIw*bw*w*w*w*", &buffers[OPENS_AT], &at, &keep, &pass.first,
                          &buffers[SEEN_AT], &pass.mark, &buffers[RUN_AT], &buffers[WINDOW_AT],
                          &buffers[NEW_AT], &buffers[COUNTS_AT]))
        return NULL;
    pass.opens = buffers[OPENS_AT].buf;
    pass.stop = (size_t)buffers[OPENS_AT].len / sizeof *pass.opens;
    pass.keep = (size_t)keep;
    pass.seen = buffers[SEEN_AT].buf;
    pass.files = (size_t)buffers[SEEN_AT].len;
    pass.run = buffers[RUN_AT].buf;
    pass.window = buffers[WINDOW_AT].buf;
    pass.window_size = (size_t)buffers[WINDOW_AT].len / sizeof *pass.window / 2;
    pass.new = buffers[NEW_AT].buf;
    pass.new_size = (size_t)buffers[NEW_AT].len / sizeof *pass.new;
    pass.counts = buffers[COUNTS_AT].buf;
    size_t next = pass.stop + 1;
    if (at >= 0 && keep >= 0 && is_sound(&pass, buffers, (size_t)at))
        next = count_all(&pass, (size_t)at);
    for (int index = 0; index < BUFFERS; index++)
        PyBuffer_Release(&buffers[index]);
    if (next > pass.stop) {
        PyErr_SetString(PyExc_ValueError, "an argument is out of range");
        return NULL;
    }
    return PyLong_FromSize_t(next);
}
