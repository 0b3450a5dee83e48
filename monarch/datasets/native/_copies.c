#include "_copies.h"

#include <fcntl.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "../../fuse/native/_seal.h"

/* Of tiers/records.py: a record of a copy, and its place in the file. */
struct copy_record {
  uint8_t place, young, unused[2];
  uint32_t term;
  uint64_t size;
  int64_t mtime_ns, ctime_ns;
  uint64_t source_ino;
  uint8_t digest[16], check[8];
};
_Static_assert(sizeof(struct copy_record) == 64, "record");

/* So that the place of a record is a number of a file. */
#define MOST_INODES (UINT64_C(1) << 56)

/* "ff/", the 20 digits of the largest number, and a zero. */
enum { PATH_BYTES = 24 };

enum { HEADER_BYTES = 4096, ALL_MAY_READ = S_IRUSR | S_IRGRP | S_IROTH };

static int64_t ns_of(struct statx_timestamp time) {
  return kept_ns(time.tv_sec, time.tv_nsec);
}

static bool may_read(const struct copies *copies, const struct statx *file,
                     int directory, const char *name) {
  if (!copies->has_acls && (file->stx_mode & ALL_MAY_READ) == ALL_MAY_READ)
    return true;
  return faccessat(directory, name, R_OK, AT_EACCESS) == 0;
}

/* The descriptor of the directory with the copy, if there is one of this
 * version of the file that needs no check; else -1. */
static int directory_of(const struct copies *copies, size_t count,
                        const struct statx *file, struct copy_record *record) {
  off_t offset =
      HEADER_BYTES + (off_t)(file->stx_ino * sizeof(struct copy_record));
  bool is_current = file->stx_ino < MOST_INODES &&
                    pread((int)copies->records, record, sizeof *record,
                          offset) == sizeof *record &&
                    record->term == (uint64_t)copies->term &&
                    record->size == file->stx_size &&
                    record->mtime_ns == ns_of(file->stx_mtime) &&
                    record->ctime_ns == ns_of(file->stx_ctime);
  if (!is_current || record->place < 1 || record->place > count)
    return -1;
  return (int)copies->directories[record->place - 1];
}

/* Whether the open file ``fd`` is the copy that the record describes. A record
 * that is being written shows another seal. */
static bool is_copy(int fd, uint64_t ino, const struct copy_record *record) {
  struct timespec seal = seal_of(ino, record->size, record->mtime_ns,
                                 record->ctime_ns, record->source_ino);
  struct stat status;
  return fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
         (uint64_t)status.st_size == record->size &&
         status.st_mtim.tv_sec == seal.tv_sec &&
         status.st_mtim.tv_nsec == seal.tv_nsec;
}

/* Writes the path of the copy of a file, which has two hexadecimal digits, a
 * slash and the inode number. Takes a fifth of the time of snprintf. */
static const char *path_of(uint64_t ino, char path[PATH_BYTES]) {
  static const char hexadecimal[] = "0123456789abcdef";
  char *begin = path + PATH_BYTES - 1;
  uint64_t left = ino;

  *begin = 0;
  do
    *--begin = (char)('0' + left % 10);
  while (left /= 10);
  *--begin = '/';
  *--begin = hexadecimal[ino & 0xf];
  *--begin = hexadecimal[ino >> 4 & 0xf];
  return begin;
}

int copy_open(const struct copies *copies, size_t count, int directory,
              const char *name, int64_t *size) {
  struct statx file;
  struct copy_record record;
  char path[PATH_BYTES];
  if (statx(directory, name, 0, STATX_BASIC_STATS, &file) != 0 ||
      !S_ISREG(file.stx_mode) ||
      makedev(file.stx_dev_major, file.stx_dev_minor) !=
          (dev_t)copies->device ||
      !may_read(copies, &file, directory, name))
    return -1;
  int copies_fd = directory_of(copies, count, &file, &record);
  if (copies_fd < 0)
    return -1;
  int fd = openat(copies_fd, path_of(file.stx_ino, path),
                  O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd >= 0 && !is_copy(fd, file.stx_ino, &record)) {
    close(fd);
    return -1;
  }
  *size = (int64_t)record.size;
  return fd;
}
