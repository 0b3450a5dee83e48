/* Requests that open and release a file: by a copy, by an object, or by bytes that are fetched. */
#include "_requests.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/uio.h>

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
    struct identity version;
    uint8_t tier = dp->decide_opens ? 0 : copies_tier(dp, ino, &version);
    int fd = tier ? copies_open(dp, tier, ino) : -1;
    bool by_name = tier && fd < 0 && (errno == EMFILE || errno == ENFILE);
    if (fd >= 0 && !copies_is_sealed(&dp->tiers[tier], fd, ino, &version)) {
        close(fd);
        fd = -1;
    }
    /* Checked again, since the state may have changed before the open. */
    if ((fd < 0 && !by_name) || !copies_is_current(dp, ino, tier, &version)) {
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
    if (!opening_settle(dp, entry, kind, fd, backing_id, tier, version.size)) {
        struct open_remains to_close = {.fd = fd, .tier = tier, .backing_id = backing_id};
        close_remains(dp, &to_close);
    }
    return true;
}

/* Opens the object of a written file that is only read; false if Python must open it. */
static bool open_absorbed(struct datapath *dp, struct open_inode *entry, uint64_t ino) {
    uint64_t size;
    int fd = is_made(dp, ino) ? absorbed_open(&dp->absorbed, ino, &size) : -1;
    if (fd < 0)
        return false;
    uint8_t tier = dp->absorbed.tier;
    if (is_scarce(fd) || !opening_settle(dp, entry, OPEN_RELAY, fd, 0, tier, size)) {
        close(fd);
        return false;
    }
    return true;
}

/* Settles an entry for its request, and wakes the requests that wait for that. False as for
 * opens_settle. */
bool opening_settle(struct datapath *dp, struct open_inode *entry, enum open_kind kind, int fd,
                    int32_t backing_id, uint8_t tier, uint64_t size) {
    bool open = opens_settle(&dp->opens, entry, kind, fd, backing_id, tier, size);
    wake_waiters(dp, entry);
    return open;
}

/* Settles an entry by fetched bytes, or leaves the file to Python. The caller stays a user of the
 * bytes. */
void opening_settle_content(struct datapath *dp, struct open_inode *entry, uint64_t ino,
                            struct content *content) {
    if (content && !(LOAD(dp->marks[ino]) & dp->unusable) &&
        opens_settle_content(&dp->opens, entry, content)) {
        content_retain(content);
        wake_waiters(dp, entry);
    } else {
        opening_settle(dp, entry, OPEN_PYTHON, -1, 0, 0, 0);
    }
}

/* Whether a file has no copy, and may be fetched here: its version, and its path. The marks are
 * read first: a complete copy is in the table before the mark of a running one is removed. */
static bool may_fetch(struct datapath *dp, uint64_t ino, struct identity *identity, char *name,
                      size_t room) {
    if (!may_fetch_any(dp) || dp->decide_opens || ino < 1 || ino > dp->names.entries ||
        LOAD(dp->marks[ino]) & (dp->unusable | dp->copying) || LOAD(dp->residency[ino]))
        return false;
    enum names_answer known = dp->source < 0 ? names_version(&dp->names, ino, identity)
                                             : names_file(&dp->names, ino, identity, name, room);
    return known == NAMES_YES && identity->size <= dp->fetch_max &&
           LOAD(dp->held) + (int64_t)identity->size <= dp->hold_max &&
           (!dp->pack.records || pack_may_fetch(&dp->pack, identity)) &&
           (!dp->peers.entries || peers_may_fetch(&dp->peers, ino, identity->size));
}

/* Fetches a small file without a copy as a whole, for the request that settles its entry. Python
 * must then be notified. ``*content`` is NULL if Python must handle the file first. False if the
 * request waits in a queue. */
bool opening_fetch(struct thread *thread, const struct in_header *request, struct open_inode *entry,
                   uint64_t begin, struct content **content) {
    struct datapath *dp = thread->dp;
    uint64_t ino = request->nodeid;
    char name[4096];
    struct identity identity;
    *content = NULL;
    if (!may_fetch(dp, ino, &identity, name, sizeof name))
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
    struct fetch_cost cost = {0};
    if (dp->pack.records) {
        *content = pack_fetch(&dp->pack, &identity, &dp->held, &cost);
    } else if (dp->peers.entries) {
        ask_peer(thread);
        *content = peers_fetch(&dp->peers, ino, identity.size, &dp->held);
    } else {
        *content = fetch(dp->source, name, &identity, &dp->held, as_caller ? &caller : NULL, &cost);
    }
    end_source_call(thread);
    caller_free(&caller);
    ADD(dp->source_calls, *content != NULL);
    ADD(dp->source_opens, cost.opens);
    ADD(dp->source_reads, cost.reads);
    ADD(dp->source_bytes, cost.bytes);
    return true;
}

/* Whether Python only counts the open of a file that was fetched: another node keeps it. */
static bool is_only_counted(const struct datapath *dp, uint64_t ino) {
    return dp->peers.entries && !dp->peers.gives_bytes && !(LOAD(dp->marks[ino]) & dp->forced);
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
    if (!opening_fetch(thread, request, entry, begin, &content))
        return false;
    /* With its bytes in the page cache before it is open, no read request will come. No process has
     * the file open until the entry is settled: a read would have locked the pages, and this would
     * wait for it. */
    bool stored = content && content->size && LOAD(entry->kind) == OPEN_SETTLING &&
                  !(LOAD(dp->marks[ino]) & dp->unusable) &&
                  store_pages(dp, ino, content->bytes, content->size);
    opening_settle_content(dp, entry, ino, content);
    content_release(content);
    content = opens_content(&dp->opens, entry, ino);
    if (!content)
        return true;
    if (stored) {
        struct tally *tally = tally_of(thread, 0);
        ADD(tally->reads, 1);
        ADD(tally->bytes, content->size);
    }
    if (is_only_counted(dp, ino)) {
        hold_last(dp, entry, ino);
        report_event(dp, ino, 0, NULL, request);
        content_release(content);
        return true;
    }
    /* The bytes stay for further opens until Python has taken the event: see datapath_taken. */
    opens_hold(&dp->opens, entry);
    report_event(dp, ino, EVENT_FETCHED, content, request);
    return true;
}

/* The handle for ``entry``; ``wanted`` are flags from Python, which are used if possible. */
struct open_out opening_handle(const struct open_inode *entry, bool bound, uint32_t wanted) {
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
void opening_resume(struct thread *thread, struct in_header *request, struct open_inode *entry,
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
    if (writes || opens_needs_python(&dp->opens, entry)) {
        pass_open(thread, request, entry, writes);
        return;
    }
    uint8_t kind = LOAD(entry->kind), tier = LOAD(entry->tier);
    if ((!fresh || kind != OPEN_CONTENT) && !is_made(dp, request->nodeid))
        report_event(dp, request->nodeid, tier, NULL, request);
    struct open_out out = opening_handle(entry, false, FOPEN_KEEP_CACHE);
    if (!is_made(dp, request->nodeid))
        count_open(thread, tier, begin);
    if (answer(thread, request, &out, sizeof out))
        drop_open(dp, request->nodeid, false);
}

/* Whether a process belongs to a session that is measured (vfs/measured.py). */
static bool is_measured(struct datapath *dp, uint32_t pid) {
    int count = LOAD(dp->measured_count);
    if (!count)
        return false;
    uint32_t session = session_of(pid);
    for (int i = 0; i < count; i++) {
        if (session && LOAD(dp->measured[i]) == (int)session)
            return true;
    }
    return false;
}

void do_open(struct thread *thread, struct in_header *request, size_t size, uint64_t begin) {
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
    if (fresh && (writes || is_measured(dp, request->pid)))
        opening_settle(dp, entry, OPEN_PYTHON, -1, 0, 0, 0);
    opening_resume(thread, request, entry, fresh, begin);
}

void do_release(struct thread *thread, struct in_header *request, size_t size) {
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
