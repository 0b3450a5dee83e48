/* Requests that read a file, by its handle or by its inode alone. */
#include "_requests.h"

#include <errno.h>

/* Reads up to ``size`` bytes, fewer only at the end of the file; -1 on failure. */
static ssize_t read_all(int fd, uint8_t *data, size_t size, uint64_t offset) {
    size_t got = 0;
    while (got < size) {
        ssize_t n = pread(fd, data + got, size - got, (off_t)(offset + got));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -1;
        if (n == 0)
            break;
        got += (size_t)n;
    }
    return (ssize_t)got;
}

/* Reads from a source that may hang, for a request with a slot. */
static ssize_t read_source(struct thread *thread, int fd, uint8_t *data, size_t size,
                           uint64_t offset) {
    struct datapath *dp = thread->dp;
    ssize_t got = read_all(fd, data, size, offset);
    int error = errno;
    end_source_call(thread);
    if (got >= 0) {
        ADD(dp->source_calls, 1);
        ADD(dp->source_reads, 1);
        ADD(dp->source_bytes, (uint64_t)got);
    }
    errno = error;
    return got;
}

/* A read that begins at most this far from the end of the last one continues a sequential read. The
 * same number is in tiers/source.py. */
#define REACH_GAP (2 << 20)

/* A copy that follows the reader needs its position. Readahead of the kernel arrives out of
 * order. */
static void note_reached(struct open_inode *entry, uint64_t offset, uint64_t end) {
    int64_t reached = LOAD(entry->reached);
    if ((int64_t)offset <= reached + REACH_GAP && (int64_t)end > reached)
        STORE(entry->reached, (int64_t)end);
}

/* Answers a read from ``fd``, the file of ``tier`` that must have ``whole`` bytes; false if it has
 * not. ``first``: the read stands for an open that the kernel did not send; false also if Python
 * must see it. */
static bool relay(struct thread *thread, struct in_header *request, int fd, uint8_t tier,
                  uint64_t whole, uint64_t begin, struct open_inode *entry, bool first) {
    struct read_in *in = (struct read_in *)(request + 1);
    uint64_t left = in->offset < whole ? whole - in->offset : 0;
    size_t wanted = in->size < left ? in->size : (size_t)left;
    /* A file of the source may have grown since it was opened; a copy does not change. */
    bool is_in_pipe = tier && splice_take(thread, request, fd, wanted, in->offset);
    ssize_t got = is_in_pipe ? (ssize_t)wanted
                  : tier     ? read_all(fd, thread->data, wanted, in->offset)
                             : read_source(thread, fd, thread->data, in->size, in->offset);
    if (got < 0 || (size_t)got < wanted)
        return false;
    if (first && !put_event(thread->dp, request->nodeid, tier, NULL, request)) {
        if (is_in_pipe)
            splice_drop(thread);
        return false;
    }
    if (entry && tier == 0)
        note_reached(entry, in->offset, in->offset + (uint64_t)got);
    if (first)
        count_open(thread, tier, begin);
    count_read(thread, tier, (size_t)got, begin);
    if (is_in_pipe)
        splice_answer(thread, request, wanted);
    else
        answer(thread, request, thread->data, (size_t)got);
    return true;
}

/* As in tiers/partial.py. */
enum { GRANULE = 128 << 10, GRANULE_PRESENT = 0x55 };

/* Answers a read from the partial copy of an open inode, if all its granules are present; false if
 * Python must. The map of the granules follows the data, from a multiple of a granule on. */
static bool relay_part(struct thread *thread, struct in_header *request, struct open_inode *entry,
                       uint64_t begin) {
    const struct read_in *in = (const struct read_in *)(request + 1);
    uint8_t tier = LOAD(entry->part_tier), states[DATA_BYTES / GRANULE + 2];
    int fd = LOAD(entry->part) - 1;
    uint64_t whole = LOAD(entry->part_size);
    if (!tier || fd < 0 || LOAD(thread->dp->tiers[tier].shunned) || LOAD(entry->size) != whole ||
        in->offset >= whole || in->size == 0)
        return false;
    uint64_t left = whole - in->offset;
    size_t wanted = in->size < left ? in->size : (size_t)left;
    uint64_t first = in->offset / GRANULE;
    size_t count = (size_t)((in->offset + wanted - 1) / GRANULE - first) + 1;
    uint64_t map_at = (whole + GRANULE - 1) / GRANULE * GRANULE;
    if (read_all(fd, states, count, map_at + first) != (ssize_t)count)
        return false;
    for (size_t i = 0; i < count; i++)
        if (states[i] != GRANULE_PRESENT)
            return false;
    if (read_all(fd, thread->data, wanted, in->offset) != (ssize_t)wanted)
        return false;
    count_read(thread, tier, wanted, begin);
    answer(thread, request, thread->data, wanted);
    return true;
}

/* Marks that a process may have a part of this version from now on. */
static void mark_given(struct datapath *dp, uint64_t ino) {
    uint8_t bit = (uint8_t)(1 << (ino & 7));
    if (!(LOAD(dp->given[ino >> 3]) & bit))
        __atomic_fetch_or(&dp->given[ino >> 3], bit, __ATOMIC_RELEASE);
}

/* Answers a read from the copy of a resident inode without an open. */
static bool relay_by_name(struct thread *thread, struct in_header *request, bool first,
                          uint64_t begin) {
    struct datapath *dp = thread->dp;
    struct identity version;
    uint64_t ino = request->nodeid;
    uint8_t tier = copies_tier(dp, ino, &version);
    int fd = tier ? copies_open(dp, tier, ino) : -1;
    if (fd < 0)
        return false;
    mark_given(dp, ino);
    bool served = copies_is_sealed(&dp->tiers[tier], fd, ino, &version) &&
                  copies_is_current(dp, ino, tier, &version) &&
                  relay(thread, request, fd, tier, version.size, begin, NULL, first);
    close(fd);
    return served;
}

/* The number of bytes in memory that a read gets. */
static size_t given_of(const struct in_header *request, const struct content *content) {
    const struct read_in *in = (const struct read_in *)(request + 1);
    uint64_t left = in->offset < content->size ? content->size - in->offset : 0;
    return in->size < left ? in->size : (size_t)left;
}

/* Answers a read from bytes in memory. */
static void give(struct thread *thread, const struct in_header *request,
                 const struct content *content, uint64_t begin) {
    const struct read_in *in = (const struct read_in *)(request + 1);
    size_t size = given_of(request, content);
    count_read(thread, 0, size, begin);
    answer(thread, request, size ? content->bytes + in->offset : NULL, size);
}

/* Continues a read that stands for an open and uses ``entry``; ``fresh``: it settles the entry.
 * False if Python must answer it. */
bool reading_resume(struct thread *thread, const struct in_header *request,
                    struct open_inode *entry, bool fresh, uint64_t begin) {
    struct datapath *dp = thread->dp;
    uint64_t ino = request->nodeid;
    bool first = ((const struct read_in *)(request + 1))->offset == 0;
    struct content *content;
    if (fresh) {
        if (!opening_fetch(thread, request, entry, begin, &content))
            return true;
        opening_settle_content(dp, entry, ino, content);
        content_release(content);
    } else {
        enum turn turn = wait_for_entry(thread, request, entry, begin);
        if (turn == TURN_LATER)
            return true;
    }
    content = opens_content(&dp->opens, entry, ino);
    if (content && !fresh && LOAD(dp->marks[ino]) & dp->unusable) {
        /* The source has another version by now, and Python refuses to mix the two. */
        content_release(content);
        content = NULL;
    }
    if (content) {
        /* Otherwise each further read of the file would fetch it again. */
        if (opens_count_read(&dp->opens, entry, ino, given_of(request, content)))
            keep_partly_read(dp, ino);
        /* The fetched bytes stay until Python has taken the event and drops them: see
         * datapath_taken. */
        if (fresh)
            report_event(dp, ino, EVENT_FETCHED, content_retain(content), request);
        else
            drop_open(dp, ino, false);
        mark_given(dp, ino);
        if (first && !fresh)
            report_event(dp, ino, 0, NULL, request);
        if (first)
            count_open(thread, 0, begin);
        give(thread, request, content, begin);
        content_release(content);
    } else {
        drop_open(dp, ino, false);
    }
    return content;
}

/* Answers a read of a small file without a copy, if the kernel sends no opens. */
static bool give_fetched(struct thread *thread, const struct in_header *request, uint64_t begin) {
    struct datapath *dp = thread->dp;
    uint64_t ino = request->nodeid;
    if (!may_fetch_any(dp) || ino < 1 || ino > dp->names.entries || LOAD(dp->residency[ino]))
        return false;
    bool fresh;
    struct open_inode *entry = opens_take(&dp->opens, ino, &fresh);
    return entry && reading_resume(thread, request, entry, fresh, begin);
}

/* Answers a read of a written file; false if Python must. */
static bool read_written(struct thread *thread, const struct in_header *request,
                         struct open_inode *entry, uint64_t begin) {
    struct datapath *dp = thread->dp;
    const struct read_in *in = (const struct read_in *)(request + 1);
    struct written *file = opens_use(&dp->opens, entry, request->nodeid);
    if (!file)
        return false;
    uint8_t tier = file->tier;
    ssize_t got = read_all(file->fd, thread->data, in->size, in->offset);
    opens_unuse(file);
    if (got < 0)
        return false;
    count_read(thread, tier, (size_t)got, begin);
    answer(thread, request, thread->data, (size_t)got);
    return true;
}

void do_read(struct thread *thread, struct in_header *request, size_t size, uint64_t begin) {
    struct datapath *dp = thread->dp;
    const struct read_in *in = (const struct read_in *)(request + 1);
    if (size < sizeof *in || in->size > DATA_BYTES || in->offset > INT64_MAX - DATA_BYTES) {
        refuse(thread, request, EINVAL);
        return;
    }
    if (in->fh & HANDLE_FAST) {
        struct open_inode *entry = opens_at(&dp->opens, (uint32_t)in->fh, request->nodeid);
        if (!entry) {
            refuse(thread, request, EBADF);
            return;
        }
        // Loaded once for each decision: another file may get the entry of a killed process.
        uint8_t kind = LOAD(entry->kind);
        if (kind == OPEN_CONTENT) {
            struct content *content = opens_content(&dp->opens, entry, request->nodeid);
            if (content) {
                give(thread, request, content, begin);
                content_release(content);
                return;
            }
            kind = LOAD(entry->kind);
            if (kind != OPEN_WRITTEN) {
                refuse(thread, request, EBADF);
                return;
            }
        }
        if (kind == OPEN_WRITTEN) {
            if (!read_written(thread, request, entry, begin))
                pass_on(thread, request);
            return;
        }
        int fd = LOAD(entry->fd);
        uint64_t whole = LOAD(entry->size);
        uint8_t tier = LOAD(entry->tier);
        enum turn turn = TURN_NOW;
        bool has_part = LOAD(entry->part_tier);
        if (has_part && relay_part(thread, request, entry, begin))
            return;
        uint64_t watched_from = LOAD(entry->watched_from);
        bool decided = !has_part && (!watched_from || in->offset + in->size <= watched_from);
        if (watched_from && !decided && in->offset < whole)
            note_reached(entry, in->offset, in->offset + in->size);
        if (fd >= 0 && tier == 0 && decided)
            turn = begin_source_call(thread, request, NULL, false, begin);
        if (turn == TURN_LATER)
            return;
        if (decided && fd >= 0 && turn == TURN_NOW &&
            relay(thread, request, fd, tier, whole, begin, entry, false))
            return;
        /* Python knows which version an inode has that it has bound. */
        if (decided && fd < 0 && !LOAD(entry->bound) &&
            relay_by_name(thread, request, false, begin))
            return;
        if (tier && is_made(dp, request->nodeid) && LOAD(entry->kind) == OPEN_RELAY) {
            /* Python does not know of this open, only of the object. */
            refuse(thread, request, EIO);
            return;
        }
        if (opens_at(&dp->opens, (uint32_t)in->fh, request->nodeid) != entry ||
            LOAD(entry->fd) != fd) {
            /* The caller was killed meanwhile and has closed the file. */
            refuse(thread, request, EIO);
            return;
        }
    } else if (LOAD(dp->no_open_agreed)) {
        bool first = in->offset == 0;
        if (relay_by_name(thread, request, first, begin) || give_fetched(thread, request, begin))
            return;
    }
    pass_on(thread, request);
}
