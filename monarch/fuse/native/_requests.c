/* Requests that a reader answers itself, and those that it passes to Python. */
#include "_requests.h"

#include <errno.h>
#include <string.h>

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
        missing_is_certain(&thread->dp->missing, request->nodeid, name, length, begin, &valid_s)) {
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
        names_is_current(&thread->dp->names, request->nodeid) &&
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
    else if (!names_is_current(names, request->nodeid) || names->ask_xattrs ||
             (names->acl_count && names_acls(names, request->nodeid, &acls, &mode) != NAMES_NONE))
        pass_on(thread, request);
    else
        answer(thread, request, &out, in->size ? 0 : sizeof out);
}

/* Only hints are passed on. Python's open() asks of each file whether it is a terminal. */
static void do_ioctl(struct thread *thread, struct in_header *request, size_t size) {
    const struct ioctl_in *in = (const struct ioctl_in *)(request + 1);
    if (size < sizeof *in || _IOC_TYPE(in->cmd) != HINT_TYPE || _IOC_NR(in->cmd) != HINT_NUMBER ||
        _IOC_DIR(in->cmd) != _IOC_WRITE)
        refuse(thread, request, ENOTTY);
    else if (in->in_size != size - sizeof *in)
        refuse(thread, request, EINVAL);
    else if (!direct_takes_hint(&thread->dp->direct, request))
        refuse(thread, request, EBUSY);
    else
        pass_on(thread, request);
}

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
        do_ioctl(thread, request, size);
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
        opening_resume(thread, request, entry, place->fresh, place->begin_ns);
    else if (!entry)
        do_read(thread, request, request->len - sizeof *request, place->begin_ns);
    else if (!reading_resume(thread, request, entry, place->fresh, place->begin_ns))
        pass_on(thread, request);
}
