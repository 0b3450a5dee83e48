/* Requests that a reader answers itself, and those that it passes to Python. */
#include "_datapath.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* -- opening ----------------------------------------------------------------------------------- */

/* Opens the copy of ``ino`` in a tier, by the name that tiers/tier.py gives it. */
static int open_copy(struct datapath *dp, uint8_t tier, uint64_t ino) {
    char name[32];
    snprintf(name, sizeof name, "%02x/%llu", (unsigned)(ino & 0xff), (unsigned long long)ino);
    /* Updating the access time would cost every small read. O_NONBLOCK: another program may have
     * put a fifo in the place of a copy. */
    int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    int fd = openat(dp->tiers[tier].directory, name, flags | O_NOATIME);
    return fd < 0 && errno == EPERM ? openat(dp->tiers[tier].directory, name, flags) : fd;
}

/* The tier with a usable copy, 0 if there is none, and the version of the copy. */
static uint8_t usable_tier(struct datapath *dp, uint64_t ino, struct identity *version) {
    if (ino < 1 || ino > dp->names.entries)
        return 0;
    uint8_t tier = LOAD(dp->residency[ino]);
    if (tier == 0 || tier >= MAX_TIERS || dp->tiers[tier].directory < 0 ||
        LOAD(dp->tiers[tier].shunned))
        return 0;
    if (LOAD(dp->marks[ino]) & dp->unusable)
        return 0;
    return names_version(&dp->names, ino, version) == NAMES_YES ? tier : 0;
}

static bool is_same(const struct identity *a, const struct identity *b) {
    return a->size == b->size && a->source_ino == b->source_ino && a->mtime_ns == b->mtime_ns &&
           a->ctime_ns == b->ctime_ns;
}

/* splitmix64 */
static uint64_t mixed(uint64_t z) {
    z += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

/* Whether the copy of ``ino`` is the committed one of that version: its modification time is its
 * seal (tiers/seal.py). Other copies go to Python, which compares digests. */
static bool is_sealed(const struct tier *tier, int fd, uint64_t ino,
                      const struct identity *version) {
    struct stat status;
    if (fstat(fd, &status) || (uint64_t)status.st_size != version->size || !S_ISREG(status.st_mode))
        return false;
    uint64_t seal = mixed(ino ^ version->size);
    seal = mixed(seal ^ (uint64_t)version->mtime_ns);
    seal = mixed(seal ^ (uint64_t)version->ctime_ns);
    seal = mixed(seal ^ version->source_ino);
    return !tier->seals || ((uint64_t)status.st_mtim.tv_sec == seal >> 34 &&
                            (uint64_t)status.st_mtim.tv_nsec == (seal & 0x3ffffffff) % 1000000000);
}

/* Registers ``fd`` for passthrough; returns its number, 0 if the kernel refuses. */
int32_t register_backing(struct datapath *dp, int fd, uint8_t tier) {
    if (!LOAD(dp->passthrough) || LOAD(dp->tiers[tier].refuses))
        return 0;
    /* With passthrough a read error is returned to the caller. So the first byte is read here: if
     * the disk is gone, the copy is not registered, and a failed read of it is a miss. */
    char first;
    if (pread(fd, &first, 1, 0) < 0)
        return 0;
    struct backing_map map = {.fd = fd};
    int id = ioctl(dp->device, DEV_IOC_BACKING_OPEN, &map);
    if (id > 0) {
        ADD(dp->opens.backing_ids, 1);
        return id;
    }
    if (errno != EMFILE && errno != ENFILE && errno != ENOMEM) {
        /* The file system cannot do it (overlayfs: ELOOP); that will not change. */
        STORE(dp->refusal, errno);
        STORE(dp->tiers[tier].refuses, 1);
    }
    return 0;
}

/* Whether only few descriptors are free, which are kept for calls that need one. The kernel always
 * gives the lowest free number, so a high number shows it. */
bool is_scarce(int fd) {
    struct rlimit limit;
    return fd >= 128 && getrlimit(RLIMIT_NOFILE, &limit) == 0 &&
           (rlim_t)fd >= limit.rlim_cur - limit.rlim_cur / 4;
}

/* Opens the copy of a resident inode and settles its entry; false if that is not possible. */
static bool open_resident(struct datapath *dp, struct open_inode *entry, uint64_t ino) {
    struct identity version, now;
    uint8_t tier = dp->decide_opens ? 0 : usable_tier(dp, ino, &version);
    int fd = tier ? open_copy(dp, tier, ino) : -1;
    bool by_name = tier && fd < 0 && (errno == EMFILE || errno == ENFILE);
    if (fd >= 0 && !is_sealed(&dp->tiers[tier], fd, ino, &version)) {
        close(fd);
        fd = -1;
    }
    /* Checked again, since the state may have changed before the open. */
    if ((fd < 0 && !by_name) || usable_tier(dp, ino, &now) != tier || !is_same(&now, &version)) {
        if (fd >= 0)
            close(fd);
        return false;
    }
    int32_t backing_id = fd >= 0 ? register_backing(dp, fd, tier) : 0;
    if (fd >= 0 && (backing_id || is_scarce(fd))) {
        close(fd);
        fd = -1;
    }
    enum open_kind kind = backing_id ? OPEN_PASSTHROUGH : OPEN_RELAY;
    if (!settle(dp, entry, kind, fd, backing_id, tier, version.size)) {
        struct open_remains to_close = {.fd = fd, .tier = tier, .backing_id = backing_id};
        close_remains(dp, &to_close);
    }
    return true;
}

/* Whether an inode was created through the mount: the tables of the snapshot have no place for
 * it. */
static bool is_made(const struct datapath *dp, uint64_t ino) { return ino > dp->names.entries; }

/* Opens the object of a written file that is only read; false if Python must open it. */
static bool open_absorbed(struct datapath *dp, struct open_inode *entry, uint64_t ino) {
    uint64_t size;
    int fd = is_made(dp, ino) ? absorbed_open(&dp->absorbed, ino, &size) : -1;
    if (fd < 0)
        return false;
    uint8_t tier = dp->absorbed.tier;
    if (is_scarce(fd) || !settle(dp, entry, OPEN_RELAY, fd, 0, tier, size)) {
        close(fd);
        return false;
    }
    return true;
}

/* Settles an entry for its request, and wakes the requests that wait for that. False as for
 * opens_settle. */
bool settle(struct datapath *dp, struct open_inode *entry, enum open_kind kind, int fd,
            int32_t backing_id, uint8_t tier, uint64_t size) {
    bool open = opens_settle(&dp->opens, entry, kind, fd, backing_id, tier, size);
    wake_waiters(dp, entry);
    return open;
}

/* Settles an entry by fetched bytes, or leaves the file to Python. The caller stays a user of the
 * bytes. */
static void settle_content(struct datapath *dp, struct open_inode *entry, uint64_t ino,
                           struct content *content) {
    if (content && !(LOAD(dp->marks[ino]) & dp->unusable) &&
        opens_settle_content(&dp->opens, entry, content)) {
        content_retain(content);
        wake_waiters(dp, entry);
    } else {
        settle(dp, entry, OPEN_PYTHON, -1, 0, 0, 0);
    }
}

/* Fetches a small file without a copy as a whole, for the request that settles its entry. Python
 * must then be notified, and decides whether the bytes are kept. ``*content`` is NULL if Python
 * must handle the file first. False if the request waits in a queue. */
static bool fetch_file(struct thread *thread, const struct in_header *request,
                       struct open_inode *entry, uint64_t begin, struct content **content) {
    struct datapath *dp = thread->dp;
    uint64_t ino = request->nodeid;
    char name[4096];
    struct identity identity;
    *content = NULL;
    if (dp->source < 0 || dp->decide_opens || ino < 1 || ino > dp->names.entries ||
        LOAD(dp->residency[ino]) || LOAD(dp->marks[ino]) & (dp->unusable | dp->copying) ||
        names_file(&dp->names, ino, &identity, name, sizeof name) != NAMES_YES ||
        identity.size > dp->fetch_max || LOAD(dp->held) + (int64_t)identity.size > dp->hold_max)
        return true;
    enum turn turn = begin_source_call(thread, request, entry, true, begin);
    if (turn != TURN_NOW)
        return turn == TURN_NEVER;
    struct caller caller = {0};
    bool as_caller = LOAD(dp->as_caller) && request->uid != 0;
    if (as_caller && !caller_of(request->pid, request->uid, request->gid, &caller)) {
        end_source_call(thread);
        return true;
    }
    struct fetch_cost cost;
    *content = fetch(dp->source, name, &identity, &dp->held, as_caller ? &caller : NULL, &cost);
    end_source_call(thread);
    caller_free(&caller);
    ADD(dp->source_opens, cost.opens);
    ADD(dp->source_reads, cost.reads);
    ADD(dp->source_bytes, cost.bytes);
    return true;
}

/* Stores the first bytes of an inode in the page cache; no read of it may be waiting. */
bool store_pages(struct datapath *dp, uint64_t ino, const void *data, size_t size) {
    struct store_out out = {.nodeid = ino, .size = (uint32_t)size};
    struct out_header header = {(uint32_t)(sizeof header + sizeof out + size), NOTIFY_STORE, 0};
    struct iovec parts[] = {{&header, sizeof header}, {&out, sizeof out}, {(void *)data, size}};
    return writev(dp->device, parts, 3) >= 0;
}

/* Settles the entry of a first open without Python, if possible. False if the request waits in a
 * queue. */
static bool settle_open(struct thread *thread, const struct in_header *request,
                        struct open_inode *entry, uint64_t begin) {
    struct datapath *dp = thread->dp;
    uint64_t ino = request->nodeid;
    struct content *content;
    if (open_resident(dp, entry, ino) || open_absorbed(dp, entry, ino))
        return true;
    if (!fetch_file(thread, request, entry, begin, &content))
        return false;
    /* With its bytes in the page cache before it is open, no read request will come. No process has
     * the file open until the entry is settled: a read would have locked the pages, and this would
     * wait for it. */
    bool stored = content && content->size && LOAD(entry->kind) == OPEN_SETTLING &&
                  !(LOAD(dp->marks[ino]) & dp->unusable) &&
                  store_pages(dp, ino, content->bytes, content->size);
    settle_content(dp, entry, ino, content);
    content_release(content);
    content = opens_content(&dp->opens, entry, ino);
    if (!content)
        return true;
    if (stored) {
        struct tally *tally = tally_of(thread, 0);
        ADD(tally->reads, 1);
        ADD(tally->bytes, content->size);
    }
    /* The bytes stay for further opens until Python has taken the event: see datapath_taken. */
    opens_hold(&dp->opens, entry);
    tell(dp, ino, EVENT_FETCHED, content);
    return true;
}

/* The handle for ``entry``; ``wanted`` are flags from Python, which are used if possible. */
struct open_out handle_of(const struct open_inode *entry, bool bound, uint32_t wanted) {
    struct open_out out = {.fh = HANDLE_FAST | entry->slot | (bound ? HANDLE_BOUND : 0)};
    uint8_t kind = LOAD(entry->kind);
    if (kind == OPEN_PASSTHROUGH) {
        out.open_flags = FOPEN_PASSTHROUGH | FOPEN_NOFLUSH;
        out.backing_id = entry->backing_id;
    } else if (kind == OPEN_WRITTEN) {
        /* Without NOFLUSH, a close writes back changed pages and reports their errors. */
        out.open_flags = wanted & (FOPEN_KEEP_CACHE | FOPEN_DIRECT_IO);
        if (wanted & FOPEN_DIRECT_IO)
            out.fh |= HANDLE_DIRECT;
    } else {
        out.open_flags = FOPEN_NOFLUSH | (wanted & FOPEN_KEEP_CACHE);
    }
    return out;
}

/* Continues an open that uses ``entry``; ``fresh``: it settles the entry. */
static void open_entry(struct thread *thread, struct in_header *request, struct open_inode *entry,
                       bool fresh, uint64_t begin) {
    struct datapath *dp = thread->dp;
    const struct open_in *in = (const struct open_in *)(request + 1);
    bool writes = request->len >= sizeof *request + sizeof *in && in->flags & (O_ACCMODE | O_TRUNC);
    enum turn turn = TURN_NOW;
    if (fresh && LOAD(entry->kind) == OPEN_SETTLING)
        turn = settle_open(thread, request, entry, begin) ? TURN_NOW : TURN_LATER;
    else if (!fresh)
        turn = wait_for_entry(thread, request, entry, begin);
    if (turn == TURN_LATER)
        return;
    if (turn == TURN_NEVER) {
        drop_open(dp, request->nodeid, false);
        refuse(thread, request, ENOMEM);
        return;
    }
    uint8_t kind = LOAD(entry->kind);
    if (writes || kind == OPEN_PYTHON || LOAD(entry->bound)) {
        pass_open(thread, request, entry, writes);
        return;
    }
    uint8_t tier = LOAD(entry->tier);
    if ((!fresh || kind != OPEN_CONTENT) && !is_made(dp, request->nodeid))
        tell(dp, request->nodeid, tier, NULL);
    struct open_out out = handle_of(entry, false, FOPEN_KEEP_CACHE);
    if (!is_made(dp, request->nodeid))
        count_open(thread, tier, begin);
    if (answer(thread, request, &out, sizeof out))
        drop_open(dp, request->nodeid, false);
}

static void do_open(struct thread *thread, struct in_header *request, size_t size, uint64_t begin) {
    struct datapath *dp = thread->dp;
    const struct open_in *in = (const struct open_in *)(request + 1);
    bool writes = size >= sizeof *in && in->flags & (O_ACCMODE | O_TRUNC), fresh;
    if (LOAD(dp->no_open_agreed)) {
        refuse(thread, request, ENOSYS);
        return;
    }
    struct open_inode *entry = opens_take(&dp->opens, request->nodeid, &fresh);
    if (!entry) {
        refuse(thread, request, ENFILE);
        return;
    }
    if (fresh && writes)
        settle(dp, entry, OPEN_PYTHON, -1, 0, 0, 0);
    open_entry(thread, request, entry, fresh, begin);
}

static void do_release(struct thread *thread, struct in_header *request, size_t size) {
    struct datapath *dp = thread->dp;
    struct release_in *in = (struct release_in *)(request + 1);
    if (size < sizeof *in) {
        refuse(thread, request, EINVAL);
        return;
    }
    bool fast = in->fh & HANDLE_FAST;
    bool known = drop_open(dp, request->nodeid, !fast);
    if (!fast || in->fh & HANDLE_BOUND) {
        in->fh = request->nodeid;
        if (known)
            pass_on(thread, request);
        else
            refuse(thread, request, EBADF);
        return;
    }
    refuse(thread, request, known ? 0 : EBADF);
}

/* -- reading ----------------------------------------------------------------------------------- */

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
        ADD(dp->source_reads, 1);
        ADD(dp->source_bytes, (uint64_t)got);
    }
    errno = error;
    return got;
}

/* A read that begins at most this far from the end of the last one continues a sequential read. The
 * same number is in tiers/source.py. */
#define REACH_GAP (2 << 20)

/* Answers a read from ``fd``, the file of ``tier`` that must have ``whole`` bytes; false if it has
 * not. ``first``: the read stands for an open that the kernel did not send; false also if Python
 * must see it. */
static bool relay(struct thread *thread, struct in_header *request, int fd, uint8_t tier,
                  uint64_t whole, uint64_t begin, struct open_inode *entry, bool first) {
    struct read_in *in = (struct read_in *)(request + 1);
    uint64_t left = in->offset < whole ? whole - in->offset : 0;
    size_t wanted = in->size < left ? in->size : (size_t)left;
    /* A file of the source may have grown since it was opened; a copy does not change. */
    ssize_t got = tier ? read_all(fd, thread->data, wanted, in->offset)
                       : read_source(thread, fd, thread->data, in->size, in->offset);
    if (got < 0 || (size_t)got < wanted)
        return false;
    if (first && !put_event(thread->dp, request->nodeid, tier, NULL))
        return false;
    if (entry && tier == 0) {
        /* A copy that follows the reader needs its position. Readahead of the kernel arrives out of
         * order. */
        int64_t reached = LOAD(entry->reached);
        int64_t end = (int64_t)in->offset + got;
        if ((int64_t)in->offset <= reached + REACH_GAP && end > reached)
            STORE(entry->reached, end);
    }
    if (first)
        count_open(thread, tier, begin);
    count_read(thread, tier, (size_t)got, begin);
    answer(thread, request, thread->data, (size_t)got);
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
    struct identity version, now;
    uint64_t ino = request->nodeid;
    uint8_t tier = usable_tier(dp, ino, &version);
    int fd = tier ? open_copy(dp, tier, ino) : -1;
    if (fd < 0)
        return false;
    mark_given(dp, ino);
    bool served = is_sealed(&dp->tiers[tier], fd, ino, &version) &&
                  usable_tier(dp, ino, &now) == tier && is_same(&now, &version) &&
                  relay(thread, request, fd, tier, version.size, begin, NULL, first);
    close(fd);
    return served;
}

/* Answers a read from bytes in memory. */
static void give(struct thread *thread, const struct in_header *request,
                 const struct content *content, uint64_t begin) {
    const struct read_in *in = (const struct read_in *)(request + 1);
    uint64_t left = in->offset < content->size ? content->size - in->offset : 0;
    size_t size = in->size < left ? in->size : (size_t)left;
    count_read(thread, 0, size, begin);
    answer(thread, request, left ? content->bytes + in->offset : NULL, size);
}

/* Continues a read that stands for an open and uses ``entry``; ``fresh``: it settles the entry.
 * False if Python must answer it. */
static bool read_entry(struct thread *thread, const struct in_header *request,
                       struct open_inode *entry, bool fresh, uint64_t begin) {
    struct datapath *dp = thread->dp;
    uint64_t ino = request->nodeid;
    bool first = ((const struct read_in *)(request + 1))->offset == 0;
    struct content *content;
    if (fresh) {
        if (!fetch_file(thread, request, entry, begin, &content))
            return true;
        settle_content(dp, entry, ino, content);
        content_release(content);
    } else {
        enum turn turn = wait_for_entry(thread, request, entry, begin);
        if (turn == TURN_LATER)
            return true;
    }
    content = opens_content(&dp->opens, entry, ino);
    if (content) {
        /* The fetched bytes stay until Python has taken the event and drops them: see
         * datapath_taken. */
        if (fresh)
            tell(dp, ino, EVENT_FETCHED, content_retain(content));
        else
            drop_open(dp, ino, false);
        mark_given(dp, ino);
        if (first && !fresh)
            tell(dp, ino, 0, NULL);
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
    if (dp->source < 0 || ino < 1 || ino > dp->names.entries || LOAD(dp->residency[ino]))
        return false;
    bool fresh;
    struct open_inode *entry = opens_take(&dp->opens, ino, &fresh);
    return entry && read_entry(thread, request, entry, fresh, begin);
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

static void do_read(struct thread *thread, struct in_header *request, size_t size, uint64_t begin) {
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
        if (LOAD(entry->kind) == OPEN_CONTENT) {
            struct content *content = opens_content(&dp->opens, entry, request->nodeid);
            if (content)
                give(thread, request, content, begin);
            else if (LOAD(entry->kind) != OPEN_WRITTEN)
                refuse(thread, request, EBADF);
            content_release(content);
            if (content || LOAD(entry->kind) != OPEN_WRITTEN)
                return;
        }
        if (LOAD(entry->kind) == OPEN_WRITTEN) {
            if (!read_written(thread, request, entry, begin))
                pass_on(thread, request);
            return;
        }
        int fd = LOAD(entry->fd);
        uint64_t whole = LOAD(entry->size);
        uint8_t tier = LOAD(entry->tier);
        enum turn turn = TURN_NOW;
        if (fd >= 0 && tier == 0)
            turn = begin_source_call(thread, request, NULL, false, begin);
        if (turn == TURN_LATER)
            return;
        if (fd >= 0 && turn == TURN_NOW &&
            relay(thread, request, fd, tier, whole, begin, entry, false))
            return;
        if (fd < 0 && relay_by_name(thread, request, false, begin))
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

/* -- writing ----------------------------------------------------------------------------------- */

/* The entry of a handle made here, if it is bound to a written file, and that file in ``*file``,
 * with one more user; NULL if pyfuse3 has the file. */
static struct open_inode *use_written(struct datapath *dp, uint64_t fh, uint64_t ino,
                                      struct written **file) {
    struct open_inode *entry = fh & HANDLE_FAST ? opens_at(&dp->opens, (uint32_t)fh, ino) : NULL;
    if (!entry || LOAD(entry->kind) != OPEN_WRITTEN)
        entry = NULL;
    *file = entry ? opens_use(&dp->opens, entry, ino) : NULL;
    return entry;
}

/* Errors that only the caller can have caused; all others are handled by Python. */
static bool is_callers(int error) { return error == EFBIG || error == EINVAL || error == EPERM; }

/* Writes all bytes; returns 0 or an errno. */
static int write_all(int fd, const uint8_t *data, size_t size, uint64_t offset) {
    size_t done = 0;
    while (done < size) {
        ssize_t n = pwrite(fd, data + done, size - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? errno : EIO;
        done += (size_t)n;
    }
    return 0;
}

/* Whether a write must be durable before its answer: RWF_DSYNC through a handle for which the
 * kernel sends no FSYNC. A handle of pyfuse3 does not show whether it is one. */
static bool must_sync(const struct write_in *in) {
    if (!(in->flags & O_DSYNC))
        return false;
    return in->fh & HANDLE_FAST ? in->fh & HANDLE_DIRECT : (in->flags & O_ACCMODE) == O_WRONLY;
}

static void do_write(struct thread *thread, struct in_header *request, size_t size) {
    struct datapath *dp = thread->dp;
    struct write_in *in = (struct write_in *)(request + 1);
    if (size < sizeof *in || in->size > size - sizeof *in ||
        in->offset > INT64_MAX - (uint64_t)in->size) {
        refuse(thread, request, EINVAL);
        return;
    }
    if (in->fh & HANDLE_FAST && !opens_at(&dp->opens, (uint32_t)in->fh, request->nodeid)) {
        refuse(thread, request, EBADF);
        return;
    }
    bool synced = must_sync(in);
    struct written *file = NULL;
    struct open_inode *entry = NULL;
    /* Only Python can make it durable. */
    if (!synced)
        entry = use_written(dp, in->fh, request->nodeid, &file);
    if (file) {
        opens_changing(&dp->opens, entry, request->nodeid, in->offset);
        int error = write_all(file->fd, (const uint8_t *)(in + 1), in->size, in->offset);
        /* Counted before the answer is sent, also if only a part was written. */
        uint64_t run =
            opens_wrote(&dp->opens, entry, request->nodeid, in->offset, error ? 0 : in->size);
        struct write_out out = {.size = in->size};
        if (error == 0)
            answer(thread, request, &out, sizeof out);
        else if (is_callers(error))
            refuse(thread, request, error);
        if (error == 0 && run) {
            /* The disk writes while the caller continues, so a later fsync takes less time. That
             * fsync reports errors of this call. */
            off_t from = (off_t)(in->offset + in->size - run);
            sync_file_range(file->fd, from, (off_t)run, SYNC_FILE_RANGE_WRITE);
        }
        opens_unuse(file);
        if (error == 0 || is_callers(error))
            return;
    }
    in->fh = request->nodeid | (synced ? WRITE_SYNC : 0);
    pass_on(thread, request);
}

/* pyfuse3 does not support the next two requests. ENOSYS is never answered: the kernel would not
 * send the request again for any file. */
static void do_fallocate(struct thread *thread, const struct in_header *request, size_t size) {
    struct datapath *dp = thread->dp;
    const struct fallocate_in *in = (const struct fallocate_in *)(request + 1);
    if (size < sizeof *in || in->offset > INT64_MAX || in->length > INT64_MAX) {
        refuse(thread, request, EINVAL);
        return;
    }
    struct written *file;
    struct open_inode *entry = use_written(dp, in->fh, request->nodeid, &file);
    int error = EOPNOTSUPP;
    if (file) {
        off_t offset = (off_t)in->offset, length = (off_t)in->length;
        opens_changing(&dp->opens, entry, request->nodeid, in->offset);
        do
            error = fallocate(file->fd, (int)in->mode, offset, length) ? errno : 0;
        while (error == EINTR && !LOAD(dp->stopping));
        opens_changed(&dp->opens, entry, request->nodeid, in->offset);
        opens_unuse(file);
    }
    refuse(thread, request, error == ENOSYS ? EOPNOTSUPP : error);
}

/* The next data or hole of a file. A file of the snapshot is assumed to have no holes. */
static void do_lseek(struct thread *thread, const struct in_header *request, size_t size) {
    struct datapath *dp = thread->dp;
    const struct lseek_in *in = (const struct lseek_in *)(request + 1);
    if (size < sizeof *in || in->offset > INT64_MAX ||
        (in->whence != SEEK_DATA && in->whence != SEEK_HOLE)) {
        refuse(thread, request, EINVAL);
        return;
    }
    struct written *file;
    struct open_inode *entry = use_written(dp, in->fh, request->nodeid, &file);
    struct open_inode *read =
        in->fh & HANDLE_FAST ? opens_at(&dp->opens, (uint32_t)in->fh, request->nodeid) : NULL;
    int object = read && is_made(dp, request->nodeid) ? LOAD(read->fd) : -1;
    struct lseek_out out = {.offset = in->offset};
    /* EINVAL: the file system does not know holes. */
    int error = EINVAL;
    struct attr attr;
    if (file) {
        off_t found = lseek(file->fd, (off_t)in->offset, (int)in->whence);
        error = found < 0 ? errno : 0;
        opens_unuse(file);
        out.offset = (uint64_t)found;
    } else if (!entry && object >= 0) {
        off_t found = lseek(object, (off_t)in->offset, (int)in->whence);
        error = found < 0 ? errno : 0;
        out.offset = (uint64_t)found;
    } else if (!entry && names_attributes(&dp->names, request->nodeid, &attr) == NAMES_YES) {
        error = in->offset < attr.size ? 0 : ENXIO;
        if (in->whence == SEEK_HOLE)
            out.offset = attr.size;
    }
    if (error)
        refuse(thread, request, error == ENOSYS ? EINVAL : error);
    else
        answer(thread, request, &out, sizeof out);
}

/* pyfuse3's file handles are inode numbers, and it does not pass on the calling user. So the handle
 * also has as many low bits of the user's number as fit. */
static void do_sync(struct thread *thread, struct in_header *request, size_t size) {
    struct fsync_in *in = (struct fsync_in *)(request + 1);
    if (size < sizeof *in) {
        refuse(thread, request, EINVAL);
        return;
    }
    in->fh = (uint64_t)request->uid << TOKEN_SHIFT | request->nodeid;
    pass_on(thread, request);
}

static void do_setattr(struct thread *thread, struct in_header *request, size_t size) {
    struct setattr_in *in = (struct setattr_in *)(request + 1);
    if (size < sizeof *in) {
        refuse(thread, request, EINVAL);
        return;
    }
    if (in->valid & FATTR_FH)
        in->fh = request->nodeid;
    pass_on(thread, request);
}

/* -- names ------------------------------------------------------------------------------------- */

static void do_lookup(struct thread *thread, struct in_header *request, size_t size,
                      uint64_t begin) {
    const char *name = (const char *)(request + 1);
    size_t length = strnlen(name, size);
    struct entry_out entry;
    uint32_t valid_s;
    bool usual = length < size && length <= 255 && strcmp(name, ".") && strcmp(name, "..");
    enum names_answer known = NAMES_ASK;
    if (usual)
        known = names_lookup(&thread->dp->names, request->nodeid, name, length, &entry);
    if (known == NAMES_OTHERS &&
        missing_tells(&thread->dp->missing, request->nodeid, name, length, begin, &valid_s)) {
        entry = (struct entry_out){.entry_valid = valid_s};
        known = NAMES_NONE;
    }
    if (known == NAMES_YES || known == NAMES_NONE)
        answer(thread, request, &entry, sizeof entry);
    else if (length < size)
        pass_on(thread, request);
    else
        refuse(thread, request, EINVAL);
}

static void do_getattr(struct thread *thread, struct in_header *request) {
    struct attr_out out = {.attr_valid = NAMES_VALID_S};
    if (names_attributes(&thread->dp->names, request->nodeid, &out.attr) == NAMES_YES ||
        missing_attributes(&thread->dp->missing, request->nodeid, &out.attr))
        answer(thread, request, &out, sizeof out);
    else
        pass_on(thread, request);
}

static void do_readdir(struct thread *thread, struct in_header *request, size_t size) {
    struct read_in *in = (struct read_in *)(request + 1);
    if (size < sizeof *in) {
        refuse(thread, request, EINVAL);
        return;
    }
    size_t room = in->size < DATA_BYTES ? in->size : DATA_BYTES, used;
    bool plus = request->opcode == OP_READDIRPLUS;
    if (names_list(&thread->dp->names, request->nodeid, in->offset, plus, thread->data, room,
                   &used) == NAMES_YES) {
        answer(thread, request, thread->data, used);
        return;
    }
    in->fh = request->nodeid;
    if (in->size > LISTING_BYTES)
        in->size = LISTING_BYTES;
    pass_on(thread, request);
}

static void do_opendir(struct thread *thread, struct in_header *request) {
    struct open_out out = {.fh = request->nodeid};
    if (LOAD(thread->dp->no_opendir_agreed))
        refuse(thread, request, ENOSYS);
    else
        answer(thread, request, &out, sizeof out);
}

/* One entry of an access control list (linux/posix_acl_xattr.h); all numbers are little-endian, as
 * _names.c requires of the host. */
struct acl_entry {
    uint16_t tag, permissions;
    uint32_t id;
};
enum { ACL_HEAD_BYTES = 4, ACL_OWNER = 0x01, ACL_MASK = 0x10, ACL_OTHERS = 0x20 };

/* Fills the bits of a mode into a stored access list, like with_mode in acl.py. */
static void fill_in_mode(uint8_t *list, size_t size, uint32_t mode) {
    for (size_t at = ACL_HEAD_BYTES; at + sizeof(struct acl_entry) <= size;
         at += sizeof(struct acl_entry)) {
        struct acl_entry entry;
        memcpy(&entry, list + at, sizeof entry);
        if (entry.tag == ACL_OWNER)
            entry.permissions = mode >> 6 & 7;
        else if (entry.tag == ACL_MASK)
            entry.permissions = mode >> 3 & 7;
        else if (entry.tag == ACL_OTHERS)
            entry.permissions = mode & 7;
        memcpy(list + at, &entry, sizeof entry);
    }
}

/* Answers for an access control list. The kernel caches the answer as long as the attributes. If no
 * entry has a list, the kernel does not use lists (operations.py), and EOPNOTSUPP tells programs
 * that they need not ask for other files. */
static void give_acl(struct thread *thread, struct in_header *request, bool inherited) {
    const struct names *names = &thread->dp->names;
    const struct getxattr_in *in = (const struct getxattr_in *)(request + 1);
    const struct names_acls *acls;
    uint32_t mode;
    if (names->acl_count == 0) {
        refuse(thread, request, EOPNOTSUPP);
        return;
    }
    enum names_answer known = names_acls(names, request->nodeid, &acls, &mode);
    if (known == NAMES_ASK) {
        pass_on(thread, request);
        return;
    }
    size_t size = known == NAMES_NONE ? 0 : inherited ? acls->inherited_size : acls->access_size;
    struct getxattr_out out = {.size = (uint32_t)size};
    if (size == 0) {
        refuse(thread, request, ENODATA);
    } else if (in->size == 0) {
        answer(thread, request, &out, sizeof out);
    } else if (in->size < size) {
        refuse(thread, request, ERANGE);
    } else {
        memcpy(thread->data, inherited ? acls->inherited : acls->access, size);
        if (!inherited)
            fill_in_mode(thread->data, size, mode);
        answer(thread, request, thread->data, size);
    }
}

/* A file of the snapshot has only Monarch's own attributes, unless others can be set through the
 * mount (``ask_xattrs``); programs request those by name. No file has an attribute that gives
 * rights (security.capability, which the kernel requests before each write) or a label of SELinux.
 * EOPNOTSUPP for the label tells ls once for the whole mount that it need not ask for each file. */
static void do_getxattr(struct thread *thread, struct in_header *request, size_t size) {
    static const char ours[] = "user.monarch.", users[] = "user.", rights[] = "security.";
    const char *name = (const char *)(request + 1) + sizeof(struct getxattr_in);
    bool named = size > sizeof(struct getxattr_in);
    bool is_ours_only =
        names_tells(&thread->dp->names, request->nodeid) &&
        !(named && thread->dp->names.ask_xattrs && !strncmp(name, users, sizeof users - 1));
    bool inherited = named && strcmp(name, "system.posix_acl_default") == 0;
    if (named && strcmp(name, "security.selinux") == 0)
        refuse(thread, request, EOPNOTSUPP);
    else if (inherited || (named && strcmp(name, "system.posix_acl_access") == 0))
        give_acl(thread, request, inherited);
    else if (named && (strncmp(name, rights, sizeof rights - 1) == 0 ||
                       (is_ours_only && strncmp(name, ours, sizeof ours - 1))))
        refuse(thread, request, ENODATA);
    else
        pass_on(thread, request);
}

static void do_listxattr(struct thread *thread, struct in_header *request, size_t size) {
    const struct getxattr_in *in = (const struct getxattr_in *)(request + 1);
    struct getxattr_out out = {0};
    const struct names *names = &thread->dp->names;
    const struct names_acls *acls;
    uint32_t mode;
    if (size < sizeof *in)
        refuse(thread, request, EINVAL);
    else if (!names_tells(names, request->nodeid) || names->ask_xattrs ||
             (names->acl_count && names_acls(names, request->nodeid, &acls, &mode) != NAMES_NONE))
        pass_on(thread, request);
    else
        answer(thread, request, &out, in->size ? 0 : sizeof out);
}

/* -- all of them ------------------------------------------------------------------------------- */

static void agree_on_requests(struct datapath *dp, const struct in_header *request, size_t size) {
    const struct init_in *in = (const struct init_in *)(request + 1);
    /* Kernels before 5.17 send a shorter message, without the second word of flags. */
    if (size < 16)
        return;
    bool ext = in->flags & INIT_EXT && size >= 20;
    STORE(dp->no_open_agreed, dp->no_open && in->flags & INIT_NO_OPEN_SUPPORT);
    STORE(dp->no_opendir_agreed, dp->cache_listings && in->flags & INIT_NO_OPENDIR_SUPPORT);
    STORE(dp->passthrough, dp->want_passthrough && ext && in->flags2 & INIT2_PASSTHROUGH ? 1 : 0);
}

void dispatch(struct thread *thread, struct in_header *request, uint64_t begin) {
    size_t size = request->len - sizeof *request;
    switch (request->opcode) {
    case OP_LOOKUP:
        do_lookup(thread, request, size, begin);
        break;
    case OP_GETATTR:
        do_getattr(thread, request);
        break;
    case OP_OPEN:
        do_open(thread, request, size, begin);
        break;
    case OP_READ:
        do_read(thread, request, size, begin);
        break;
    case OP_WRITE:
        do_write(thread, request, size);
        break;
    case OP_RELEASE:
        do_release(thread, request, size);
        break;
    case OP_FALLOCATE:
        do_fallocate(thread, request, size);
        break;
    case OP_LSEEK:
        do_lseek(thread, request, size);
        break;
    case OP_FSYNC:
    case OP_FSYNCDIR:
        do_sync(thread, request, size);
        break;
    case OP_SETATTR:
        do_setattr(thread, request, size);
        break;
    case OP_FLUSH:
        refuse(thread, request, ENOSYS);
        break;
    case OP_OPENDIR:
        do_opendir(thread, request);
        break;
    case OP_READDIR:
    case OP_READDIRPLUS:
        do_readdir(thread, request, size);
        break;
    case OP_RELEASEDIR:
        refuse(thread, request, 0);
        break;
    case OP_GETXATTR:
        do_getxattr(thread, request, size);
        break;
    case OP_LISTXATTR:
        do_listxattr(thread, request, size);
        break;
    case OP_IOCTL:
        /* Python's open() asks of each file whether it is a terminal. */
        refuse(thread, request, ENOTTY);
        break;
    case OP_INTERRUPT:
        if (size >= sizeof(struct interrupt_in))
            interrupt(thread->dp, ((struct interrupt_in *)(request + 1))->unique);
        break;
    case OP_FORGET:
    case OP_BATCH_FORGET:
        /* No state is kept for an inode, and the request has no answer. */
        break;
    case OP_INIT:
        agree_on_requests(thread->dp, request, size);
        pass_on(thread, request);
        break;
    default:
        pass_on(thread, request);
    }
}

/* Continues a request that has waited for a call of the source, or for its entry. */
void go_on(struct thread *thread, struct in_header *request, const struct pending *place) {
    struct open_inode *entry = place->entry;
    if (request->opcode == OP_OPEN)
        open_entry(thread, request, entry, place->fresh, place->begin_ns);
    else if (!entry)
        do_read(thread, request, request->len - sizeof *request, place->begin_ns);
    else if (!read_entry(thread, request, entry, place->fresh, place->begin_ns))
        pass_on(thread, request);
}
