/* The requests of the kernel, by subject. Each ``do_`` function answers a request that was read
 * whole, or passes it on to Python. */
#ifndef MONARCH_REQUESTS_H
#define MONARCH_REQUESTS_H

#include "_datapath.h"

/* Whether an inode was created through the mount: the tables of the snapshot have no place for
 * it. */
static inline bool is_made(const struct datapath *dp, uint64_t ino) {
    return ino > dp->names.entries;
}

/* Whether small files without a copy may be fetched without Python. */
static inline bool may_fetch_any(const struct datapath *dp) {
    return dp->source >= 0 || dp->pack.records || dp->peers.entries;
}

/* -- _copies.c --------------------------------------------------------------------------------- */

int copies_open(struct datapath *dp, uint8_t tier, uint64_t ino);
uint8_t copies_tier(struct datapath *dp, uint64_t ino, struct identity *version);
bool copies_is_sealed(const struct tier *tier, int fd, uint64_t ino,
                      const struct identity *version);
bool copies_is_current(struct datapath *dp, uint64_t ino, uint8_t tier,
                       const struct identity *version);

/* -- _opening.c -------------------------------------------------------------------------------- */

int32_t register_backing(struct datapath *dp, int fd, uint8_t tier);
bool is_scarce(int fd);
bool opening_settle(struct datapath *dp, struct open_inode *entry, enum open_kind kind, int fd,
                    int32_t backing_id, uint8_t tier, uint64_t size);
void opening_settle_content(struct datapath *dp, struct open_inode *entry, uint64_t ino,
                            struct content *content);
bool opening_fetch(struct thread *thread, const struct in_header *request, struct open_inode *entry,
                   uint64_t begin, struct content **content);
bool store_pages(struct datapath *dp, uint64_t ino, const void *data, size_t size);
struct open_out opening_handle(const struct open_inode *entry, bool bound, uint32_t wanted);
void opening_resume(struct thread *thread, struct in_header *request, struct open_inode *entry,
                    bool fresh, uint64_t begin);
void do_open(struct thread *thread, struct in_header *request, size_t size, uint64_t begin);
void do_release(struct thread *thread, struct in_header *request, size_t size);

/* -- _reading.c -------------------------------------------------------------------------------- */

bool reading_resume(struct thread *thread, const struct in_header *request,
                    struct open_inode *entry, bool fresh, uint64_t begin);
void do_read(struct thread *thread, struct in_header *request, size_t size, uint64_t begin);

/* -- _splice.c --------------------------------------------------------------------------------- */

bool splice_take(struct thread *thread, const struct in_header *request, int fd, size_t size,
                 uint64_t offset);
void splice_drop(struct thread *thread);
void splice_answer(struct thread *thread, const struct in_header *request, size_t size);

/* -- _writing.c -------------------------------------------------------------------------------- */

void do_write(struct thread *thread, struct in_header *request, size_t size);
void do_fallocate(struct thread *thread, const struct in_header *request, size_t size);
void do_lseek(struct thread *thread, const struct in_header *request, size_t size);
void do_sync(struct thread *thread, struct in_header *request, size_t size);
void do_setattr(struct thread *thread, struct in_header *request, size_t size);

/* -- _requests.c ------------------------------------------------------------------------------- */

void dispatch(struct thread *thread, struct in_header *request, uint64_t begin);
void go_on(struct thread *thread, struct in_header *request, const struct pending *place);

#endif
