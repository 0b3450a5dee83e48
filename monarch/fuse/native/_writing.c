/* Requests that write, cut, sync or seek in a file. */
#include "_caller.h"
#include "_requests.h"

#include <errno.h>
#include <fcntl.h>

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

/* The user with whose rights a file is written; 0 also if the user is not known. */
static uid_t writer_of(struct open_inode *entry, const struct in_header *request, bool is_known) {
    uint32_t writer = LOAD(entry->writer);
    return writer || !is_known ? writer : request->uid;
}

/* Writes all bytes with the rights of ``user``; returns 0 or an errno. */
static int write_all(int fd, uid_t user, const uint8_t *data, size_t size, uint64_t offset) {
    size_t done = 0;
    int error = 0;
    bool is_user = writer_begin(user);
    while (done < size && !error) {
        ssize_t n = pwrite(fd, data + done, size - done, (off_t)(offset + done));
        if (n > 0)
            done += (size_t)n;
        else if (n == 0 || errno != EINTR)
            error = n < 0 ? errno : EIO;
    }
    if (is_user)
        writer_end();
    return error;
}

/* Whether a write must be durable before its answer: RWF_DSYNC through a handle for which the
 * kernel sends no FSYNC. A handle of pyfuse3 does not show whether it is one. */
static bool must_sync(const struct write_in *in) {
    if (!(in->flags & O_DSYNC))
        return false;
    return in->fh & HANDLE_FAST ? in->fh & HANDLE_DIRECT : (in->flags & O_ACCMODE) == O_WRONLY;
}

void do_write(struct thread *thread, struct in_header *request, size_t size) {
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
    bool synced = must_sync(in), removes_set_id = in->write_flags & WRITE_KILL_SUIDGID;
    struct written *file = NULL;
    struct open_inode *entry = NULL;
    /* Only Python can make it durable. */
    if (!synced)
        entry = use_written(dp, in->fh, request->nodeid, &file);
    if (file && removes_set_id && LOAD(entry->has_set_id)) {
        /* Only Python can record the new mode. */
        opens_unuse(file);
        file = NULL;
    }
    if (file) {
        opens_changing(&dp->opens, entry, request->nodeid, in->offset);
        uid_t user = writer_of(entry, request, !(in->write_flags & WRITE_CACHE));
        int error = write_all(file->fd, user, (const uint8_t *)(in + 1), in->size, in->offset);
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
    in->fh =
        request->nodeid | (synced ? WRITE_SYNC : 0) | (removes_set_id ? WRITE_REMOVES_SET_ID : 0);
    pass_on(thread, request);
}

/* Reserves room for a file, or changes its holes; returns 0 or an errno. EOPNOTSUPP, with the size
 * unchanged, if the disk has no room: the caller writes instead, for which Python finds room. */
static int allocate(int fd, int mode, off_t offset, off_t length) {
    int error = 0;
    /* If the room does not suffice, ext4 extends the file as far as it does. */
    if (mode == 0 && fallocate(fd, FALLOC_FL_KEEP_SIZE, offset, length))
        error = errno;
    if (!error && fallocate(fd, mode, offset, length))
        error = errno;
    return error == ENOSPC || error == EDQUOT || error == ENOSYS ? EOPNOTSUPP : error;
}

/* pyfuse3 does not support the next two requests. ENOSYS is never answered: the kernel would not
 * send the request again for any file. */
void do_fallocate(struct thread *thread, const struct in_header *request, size_t size) {
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
        bool is_user = writer_begin(writer_of(entry, request, true));
        do
            error = allocate(file->fd, (int)in->mode, offset, length);
        while (error == EINTR && !LOAD(dp->stopping));
        if (is_user)
            writer_end();
        opens_wrote(&dp->opens, entry, request->nodeid, in->offset, 0);
        opens_unuse(file);
    }
    refuse(thread, request, error);
}

/* The next data or hole of a file. A file of the snapshot is assumed to have no holes. */
void do_lseek(struct thread *thread, const struct in_header *request, size_t size) {
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
void do_sync(struct thread *thread, struct in_header *request, size_t size) {
    struct fsync_in *in = (struct fsync_in *)(request + 1);
    if (size < sizeof *in) {
        refuse(thread, request, EINVAL);
        return;
    }
    in->fh = (uint64_t)request->uid << TOKEN_SHIFT | request->nodeid;
    pass_on(thread, request);
}

void do_setattr(struct thread *thread, struct in_header *request, size_t size) {
    struct setattr_in *in = (struct setattr_in *)(request + 1);
    if (size < sizeof *in) {
        refuse(thread, request, EINVAL);
        return;
    }
    if (in->valid & FATTR_FH)
        in->fh = request->nodeid;
    pass_on(thread, request);
}
