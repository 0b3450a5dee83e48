/* The part of the FUSE protocol that the datapath uses (linux/fuse.h, 7.40). It is written out here
 * because the header of the machine that compiles may be older than the kernel that runs. All
 * numbers are in the host's byte order; a message is a header, followed by the operation's own
 * structure. */
#ifndef MONARCH_WIRE_H
#define MONARCH_WIRE_H

#include <stdint.h>
#include <sys/ioctl.h>

enum opcode {
    OP_LOOKUP = 1,
    OP_FORGET = 2,
    OP_GETATTR = 3,
    OP_SETATTR = 4,
    OP_SYMLINK = 6,
    OP_MKNOD = 8,
    OP_MKDIR = 9,
    OP_UNLINK = 10,
    OP_RMDIR = 11,
    OP_RENAME = 12,
    OP_LINK = 13,
    OP_OPEN = 14,
    OP_READ = 15,
    OP_WRITE = 16,
    OP_RELEASE = 18,
    OP_FSYNC = 20,
    OP_SETXATTR = 21,
    OP_GETXATTR = 22,
    OP_LISTXATTR = 23,
    OP_REMOVEXATTR = 24,
    OP_FLUSH = 25,
    OP_INIT = 26,
    OP_OPENDIR = 27,
    OP_READDIR = 28,
    OP_RELEASEDIR = 29,
    OP_FSYNCDIR = 30,
    OP_CREATE = 35,
    OP_INTERRUPT = 36,
    OP_IOCTL = 39,
    OP_BATCH_FORGET = 42,
    OP_FALLOCATE = 43,
    OP_READDIRPLUS = 44,
    OP_RENAME2 = 45,
    OP_LSEEK = 46,
};

enum {
    NOTIFY_STORE = 4,
};

enum open_flag {
    FOPEN_DIRECT_IO = 1 << 0,
    FOPEN_KEEP_CACHE = 1 << 1,
    FOPEN_NOFLUSH = 1 << 5,
    FOPEN_PASSTHROUGH = 1 << 7,
};

/* Flags of INIT; the second word counts from bit 32. */
enum {
    INIT_DONT_MASK = 1 << 6,
    INIT_NO_OPEN_SUPPORT = 1 << 17,
    INIT_PARALLEL_DIROPS = 1 << 18,
    INIT_HANDLE_KILLPRIV = 1 << 19,
    INIT_CACHE_SYMLINKS = 1 << 23,
    INIT_NO_OPENDIR_SUPPORT = 1 << 24,
    INIT_HANDLE_KILLPRIV_V2 = 1 << 28,
    INIT_EXT = 1 << 30,
    INIT2_PASSTHROUGH = 1 << (37 - 32),
};

/* In setattr_in.valid: ``fh`` is given. */
enum { FATTR_FH = 1 << 6 };

struct in_header {
    uint32_t len, opcode;
    uint64_t unique, nodeid;
    uint32_t uid, gid, pid;
    uint16_t total_extlen, padding;
};

struct out_header {
    uint32_t len;
    int32_t error;
    uint64_t unique;
};

struct attr {
    uint64_t ino, size, blocks, atime, mtime, ctime;
    uint32_t atimensec, mtimensec, ctimensec;
    uint32_t mode, nlink, uid, gid, rdev, blksize, flags;
};

struct entry_out {
    uint64_t nodeid, generation, entry_valid, attr_valid;
    uint32_t entry_valid_nsec, attr_valid_nsec;
    struct attr attr;
};

struct attr_out {
    uint64_t attr_valid;
    uint32_t attr_valid_nsec, dummy;
    struct attr attr;
};

struct open_in {
    uint32_t flags, open_flags;
};

struct open_out {
    uint64_t fh;
    uint32_t open_flags;
    int32_t backing_id;
};

struct release_in {
    uint64_t fh;
    uint32_t flags, release_flags;
    uint64_t lock_owner;
};

struct read_in {
    uint64_t fh, offset;
    uint32_t size, read_flags;
    uint64_t lock_owner;
    uint32_t flags, padding;
};

struct write_in {
    uint64_t fh, offset;
    uint32_t size, write_flags;
    uint64_t lock_owner;
    uint32_t flags, padding;
};

/* A bit of ``write_flags``: the caller may not keep the set-ID bits of the file. The kernel sets it
 * only for writes that bypass the page cache; before others it sends a SETATTR. */
enum { WRITE_KILL_SUIDGID = 1 << 2 };
/* Another one: the kernel writes pages that a process has stored to; it does not say which one. */
enum { WRITE_CACHE = 1 << 0 };

struct write_out {
    uint32_t size, padding;
};

struct fsync_in {
    uint64_t fh;
    uint32_t fsync_flags, padding;
};

struct setattr_in {
    uint32_t valid, padding;
    uint64_t fh, size, lock_owner, atime, mtime, ctime;
    uint32_t atimensec, mtimensec, ctimensec;
    uint32_t mode, unused4, uid, gid, unused5;
};

struct create_in {
    uint32_t flags, mode, umask, open_flags;
};

struct mkdir_in {
    uint32_t mode, umask;
};

struct rename_in {
    uint64_t newdir;
};

struct rename2_in {
    uint64_t newdir;
    uint32_t flags, padding;
};

struct fallocate_in {
    uint64_t fh, offset, length;
    uint32_t mode, padding;
};

struct lseek_in {
    uint64_t fh, offset;
    uint32_t whence, padding;
};

struct lseek_out {
    uint64_t offset;
};

struct getxattr_in {
    uint32_t size, padding;
};

struct getxattr_out {
    uint32_t size, padding;
};

struct ioctl_in {
    uint64_t fh;
    uint32_t ioctl_flags, cmd;
    uint64_t argument;
    uint32_t in_size, out_size;
};

struct ioctl_out {
    int32_t result;
    uint32_t ioctl_flags, in_parts, out_parts;
};

struct interrupt_in {
    uint64_t unique;
};

struct dirent_out {
    uint64_t ino, off;
    uint32_t namelen, type;
};

struct direntplus_out {
    struct entry_out entry;
    struct dirent_out dirent;
};

struct init_in {
    uint32_t major, minor, max_readahead, flags, flags2, unused[11];
};

struct init_out {
    uint32_t major, minor, max_readahead, flags;
    uint16_t max_background, congestion_threshold;
    uint32_t max_write, time_gran;
    uint16_t max_pages, map_alignment;
    uint32_t flags2, max_stack_depth;
    uint32_t unused[6];
};

struct store_out {
    uint64_t nodeid, offset;
    uint32_t size, padding;
};

struct backing_map {
    int32_t fd;
    uint32_t flags;
    uint64_t padding;
};

/* The ioctl of hints (docs/hints.md), whatever the size of its message. */
enum { HINT_TYPE = 0xe9, HINT_NUMBER = 1 };

#define DEV_IOC_CLONE _IOR(229, 0, uint32_t)
#define DEV_IOC_BACKING_OPEN _IOW(229, 1, struct backing_map)
#define DEV_IOC_BACKING_CLOSE _IOW(229, 2, uint32_t)

_Static_assert(sizeof(struct in_header) == 40, "in_header");
_Static_assert(sizeof(struct attr) == 88, "attr");
_Static_assert(sizeof(struct entry_out) == 128, "entry_out");
_Static_assert(sizeof(struct read_in) == 40, "read_in");
_Static_assert(sizeof(struct write_in) == 40, "write_in");
_Static_assert(sizeof(struct setattr_in) == 88, "setattr_in");
_Static_assert(sizeof(struct create_in) == 16, "create_in");
_Static_assert(sizeof(struct rename2_in) == 16, "rename2_in");
_Static_assert(sizeof(struct fallocate_in) == 32, "fallocate_in");
_Static_assert(sizeof(struct lseek_in) == 24, "lseek_in");
_Static_assert(sizeof(struct ioctl_in) == 32, "ioctl_in");
_Static_assert(sizeof(struct ioctl_out) == 16, "ioctl_out");
_Static_assert(sizeof(struct init_in) == 64, "init_in");
_Static_assert(sizeof(struct init_out) == 64, "init_out");

#endif
