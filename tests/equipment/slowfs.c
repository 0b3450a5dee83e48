/* slowfs: test equipment. A loopback FUSE file system that behaves like a busy parallel file
 * system, or like a disk that is full or dying: latency per call, metadata slots, smooth bandwidth
 * caps, errors, hangs, wrong bytes, and counters that the tested code cannot change. It keeps times
 * to the nanosecond, holes, and open files that were unlinked (read, but fstat is ESTALE), so it
 * can be a tier as well.
 *
 *   gcc -O2 slowfs.c -o slowfs $(pkg-config --cflags --libs fuse3) -lm
 *   SLOW_ROOT=/backing SLOW_CTL=/path/ctl ./slowfs MOUNTPOINT -o max_threads=128
 *
 * The control file is text and is read again within 50 ms of a change. Its lines:
 *
 *   lat OP MS [REGEX]    latency of each call           jitter SIGMA     log-normal spread of it
 *   slots N              metadata calls served at once
 *   read_MBps N          bandwidth of all readers       write_MBps N     of all writers together
 *   err OP ERRNO REGEX   fail calls, with 5 or with EIO
 *   hang OP REGEX        hang calls until the line is gone (a killed caller ends)
 *   bad FROM REGEX       reads that reach beyond byte FROM fail with EIO
 *   cut AT REGEX         reads end at byte AT, whatever size getattr reports
 *   short OP REGEX       read or write half of the requested bytes (files opened since)
 *   direct REGEX         the kernel keeps no pages (files opened since)
 *   flip OP REGEX        read or write the first byte of each call with its lowest bit wrong
 *   free BYTES           statfs reports them; then writes fail with ENOSPC (none is freed)
 *
 * OP: getattr open read readdir create write unlink mkdir rmdir rename truncate fsync readlink
 * symlink statfs setattr flush (of a close; with SLOW_FLUSH set), or * for all but flush. REGEX has
 * no blanks and is searched in the path from the mount point: /a/b. Of the lines of one kind that
 * match (err and hang are one kind) the last holds.
 *
 * Counters: cat MOUNTPOINT/.slowfs-stats: calls of each OP, bytes read and written, calls that hang
 * now (hanging), and how often the control file was read (loads), so that a test can wait for its
 * rules to hold. What the kernel keeps is not asked for: attributes and names for SLOW_ATTR_S
 * seconds (default 1), a file's pages until its next open.
 * A FUSE mount may back a FUSE passthrough file, so the datapath can be tested over it. */
#define FUSE_USE_VERSION 35
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <math.h>
#include <pthread.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
/* Debian 12's libfuse 3.14.0 never passes FUSE_PARALLEL_DIROPS on to the kernel (libfuse PR #861),
 * so lookups of one directory are serialised; put the bit (1<<18) into the INIT reply, the first
 * 16+64-byte message libfuse writes, ourselves */
ssize_t writev(int fd, const struct iovec *v, int n) {
    static int done;
    if (!done && n == 2 && v[0].iov_len == 16 && v[1].iov_len == 64) {
        done = 1;
        ((unsigned *)v[1].iov_base)[3] |= 1u << 18;
    }
    return syscall(SYS_writev, fd, v, n);
}
enum {
    GETATTR,
    OPEN,
    READ,
    READDIR,
    CREATE,
    WRITE,
    UNLINK,
    MKDIR,
    RMDIR,
    RENAME,
    TRUNCATE,
    FSYNC,
    READLINK,
    SYMLINK,
    STATFS,
    SETATTR,
    FLUSH,
    NOPS
};
static const char *NM[] = {"getattr",  "open",    "read",   "readdir", "create",   "write",
                           "unlink",   "mkdir",   "rmdir",  "rename",  "truncate", "fsync",
                           "readlink", "symlink", "statfs", "setattr", "flush"};
enum kind { LAT, STOP, BAD, CUT, SHORT, DIRECT, FLIP };
struct rule {
    enum kind kind;
    int op;   /* -1: any */
    double n; /* LAT: ms; STOP: the errno, 0 hangs; BAD, CUT: bytes */
    regex_t rx;
    struct rule *next;
};
struct conf {
    double jit, read_bw, write_bw;
    int slots;
    long long free; /* -1: as it is */
    struct rule *rules;
};
/* An open file. Its path is the one it was opened by. */
struct file {
    int fd;
    char path[];
};
static struct conf *cf;
static pthread_rwlock_t cl = PTHREAD_RWLOCK_INITIALIZER;
static char root[4096], *ctl;
static struct timespec cm;
static unsigned long cnt[NOPS], loads, hanging, read_bytes, write_bytes;
static pthread_mutex_t ml = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t mc = PTHREAD_COND_INITIALIZER;
static int busy;
static double read_next, write_next;
static pthread_mutex_t bl = PTHREAD_MUTEX_INITIALIZER;
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}
static void nap(double s) {
    if (s <= 0)
        return;
    struct timespec t = {(time_t)s, (long)((s - (time_t)s) * 1e9)};
    while (nanosleep(&t, &t) && errno == EINTR)
        ;
}
static int opn(const char *s) {
    for (int i = 0; i < NOPS; i++)
        if (!strcmp(s, NM[i]))
            return i;
    return -1;
}
static int errno_of(const char *s) {
    for (int e = 1; e < 134; e++)
        if (strerrorname_np(e) && !strcmp(s, strerrorname_np(e)))
            return e;
    return atoi(s);
}
static void add(struct conf *c, enum kind kind, const char *op, double n, const char *rx) {
    struct rule *r = calloc(1, sizeof *r);
    *r = (struct rule){.kind = kind, .op = opn(op), .n = n, .next = c->rules};
    if (regcomp(&r->rx, rx, REG_EXTENDED | REG_NOSUB))
        free(r);
    else
        c->rules = r;
}
__attribute__((noreturn)) static void *loader(void *a) {
    (void)a;
    for (;; nap(0.05)) { /* never ends */
        struct stat st;
        if (!ctl || stat(ctl, &st) ||
            (st.st_mtim.tv_sec == cm.tv_sec && st.st_mtim.tv_nsec == cm.tv_nsec))
            continue;
        cm = st.st_mtim;
        FILE *f = fopen(ctl, "r");
        if (!f)
            continue;
        struct conf *n = calloc(1, sizeof *n);
        n->free = -1;
        char line[1024], op[64], name[64], rx[512];
        double d;
        while (fgets(line, sizeof line, f)) {
            strcpy(rx, ".*");
            if (sscanf(line, "lat %63s %lf %511s", op, &d, rx) >= 2)
                add(n, LAT, op, d, rx);
            else if (sscanf(line, "err %63s %63s %511s", op, name, rx) == 3)
                add(n, STOP, op, errno_of(name), rx);
            else if (sscanf(line, "hang %63s %511s", op, rx) == 2)
                add(n, STOP, op, 0, rx);
            else if (sscanf(line, "bad %lf %511s", &d, rx) == 2)
                add(n, BAD, "read", d, rx);
            else if (sscanf(line, "cut %lf %511s", &d, rx) == 2)
                add(n, CUT, "read", d, rx);
            else if (sscanf(line, "short %63s %511s", op, rx) == 2)
                add(n, SHORT, op, 0, rx);
            else if (sscanf(line, "direct %511s", rx) == 1)
                add(n, DIRECT, "open", 0, rx);
            else if (sscanf(line, "flip %63s %511s", op, rx) == 2)
                add(n, FLIP, op, 0, rx);
            else if (sscanf(line, "jitter %lf", &d) == 1)
                n->jit = d;
            else if (sscanf(line, "slots %lf", &d) == 1)
                n->slots = d;
            else if (sscanf(line, "read_MBps %lf", &d) == 1)
                n->read_bw = d * 1e6;
            else if (sscanf(line, "write_MBps %lf", &d) == 1)
                n->write_bw = d * 1e6;
            else if (sscanf(line, "free %lf", &d) == 1)
                n->free = d;
        }
        fclose(f);
        pthread_rwlock_wrlock(&cl);
        cf = n;
        __atomic_fetch_add(&loads, 1, __ATOMIC_RELEASE);
        pthread_rwlock_unlock(&cl); /* the old one is leaked on purpose: a few hundred bytes */
    }
}
/* With the lock: the rule of a kind that holds for a call, or none. */
static const struct rule *rule_for(enum kind kind, int op, const char *path) {
    for (const struct rule *r = cf->rules; r; r = r->next)
        if (r->kind == kind && (r->op < 0 ? op != FLUSH : r->op == op) &&
            !regexec(&r->rx, path, 0, 0, 0))
            return r;
    return 0;
}
/* Whether there is such a rule; *n is its number if there is. */
static int ruled(enum kind kind, int op, const char *path, double *n) {
    pthread_rwlock_rdlock(&cl);
    const struct rule *r = rule_for(kind, op, path);
    if (r && n)
        *n = r->n;
    pthread_rwlock_unlock(&cl);
    return r != 0;
}
static void pay(double *next, double bytes, double bw) {
    pthread_mutex_lock(&bl);
    double n = now();
    if (*next < n - 0.02)
        *next = n - 0.02;
    *next += bytes / bw;
    double w = *next - n;
    pthread_mutex_unlock(&bl);
    nap(w);
}
static int gate(int op, const char *path, size_t bytes) {
    double d, bw, act;
    int slots;
    __atomic_fetch_add(&cnt[op], 1, __ATOMIC_RELAXED);
    for (int counted = 0;; counted = 1) {
        act = -1;
        pthread_rwlock_rdlock(&cl);
        const struct rule *stop = rule_for(STOP, op, path), *lat = rule_for(LAT, op, path);
        if (stop)
            act = stop->n;
        d = lat ? lat->n / 1e3 : 0;
        bw = op == READ ? cf->read_bw : cf->write_bw;
        slots = cf->slots;
        if (d && cf->jit) {
            double u = drand48() + 1e-12, v = drand48();
            d *= exp(cf->jit * sqrt(-2 * log(u)) * cos(2 * M_PI * v));
        }
        pthread_rwlock_unlock(&cl);
        if (act == 0 && !counted)
            __atomic_fetch_add(&hanging, 1, __ATOMIC_RELAXED);
        /* as a hard mount of NFS: a process that hangs can be killed */
        int over = act == 0 && fuse_interrupted();
        if (counted && (act != 0 || over))
            __atomic_fetch_sub(&hanging, 1, __ATOMIC_RELAXED);
        if (over)
            return -EINTR;
        if (act > 0)
            return -act;
        if (act < 0)
            break;
        nap(0.05); /* hang until the rule goes away */
    }
    if (d) {
        if (slots && op != READ && op != WRITE) {
            pthread_mutex_lock(&ml);
            while (busy >= slots)
                pthread_cond_wait(&mc, &ml);
            busy++;
            pthread_mutex_unlock(&ml);
            nap(d);
            pthread_mutex_lock(&ml);
            busy--;
            pthread_cond_signal(&mc);
            pthread_mutex_unlock(&ml);
        } else
            nap(d);
    }
    if (bytes && bw)
        pay(op == READ ? &read_next : &write_next, bytes, bw);
    return 0;
}
#define P(p)                                                                                       \
    char b_[8192];                                                                                 \
    snprintf(b_, sizeof b_, "%s%s", root, p)
#define G(op, p, n)                                                                                \
    do {                                                                                           \
        int g_ = gate(op, p, n);                                                                   \
        if (g_)                                                                                    \
            return g_;                                                                             \
    } while (0)
#define R(x) return (x) < 0 ? -errno : 0
#define ISSTATS(p) (!strcmp(p, "/.slowfs-stats"))
static int stats(char *o, size_t n) {
    int k = 0;
    for (int i = 0; i < NOPS; i++)
        k += snprintf(o + k, n - k, "%s %lu\n", NM[i], cnt[i]);
    k += snprintf(o + k, n - k, "read_bytes %lu\nwrite_bytes %lu\nhanging %lu\nloads %lu\n",
                  read_bytes, write_bytes, hanging, loads);
    return k;
}
static struct file *file_of(const struct fuse_file_info *fi) {
    return (struct file *)(uintptr_t)fi->fh;
}
static int opened(int fd, const char *p, struct fuse_file_info *fi) {
    struct file *f = malloc(sizeof *f + strlen(p) + 1);
    f->fd = fd;
    strcpy(f->path, p);
    fi->fh = (uintptr_t)f;
    /* The kernel's pages would make a short answer the end of the file. */
    fi->direct_io =
        ruled(SHORT, READ, p, 0) || ruled(SHORT, WRITE, p, 0) || ruled(DIRECT, OPEN, p, 0);
    return 0;
}
static int s_getattr(const char *p, struct stat *st, struct fuse_file_info *fi) {
    if (fi && !fi->fh)
        p = "/.slowfs-stats";
    else if (fi)
        p = file_of(fi)->path;
    if (ISSTATS(p)) {
        memset(st, 0, sizeof *st);
        st->st_mode = S_IFREG | 0444;
        st->st_nlink = 1;
        st->st_size = 4096;
        return 0;
    }
    G(GETATTR, p, 0);
    if (fi)
        R(fstat(file_of(fi)->fd, st));
    P(p);
    R(lstat(b_, st));
}
static int s_open(const char *p, struct fuse_file_info *fi) {
    if (ISSTATS(p)) {
        fi->direct_io = 1;
        fi->fh = 0;
        return 0;
    }
    G(OPEN, p, 0);
    P(p);
    int fd = open(b_, fi->flags & ~O_DIRECT);
    return fd < 0 ? -errno : opened(fd, p, fi);
}
static int s_create(const char *p, mode_t m, struct fuse_file_info *fi) {
    G(CREATE, p, 0);
    P(p);
    int fd = open(b_, (fi->flags & ~O_DIRECT) | O_CREAT, m);
    return fd < 0 ? -errno : opened(fd, p, fi);
}
static int s_read(const char *p, char *buf, size_t n, off_t off, struct fuse_file_info *fi) {
    if (!fi->fh) {
        char t[4096];
        int k = stats(t, sizeof t);
        if (off >= k)
            return 0;
        if (n > (size_t)(k - off))
            n = k - off;
        memcpy(buf, t + off, n);
        return n;
    }
    struct file *f = file_of(fi);
    double end;
    p = f->path;
    G(READ, p, n);
    if (ruled(BAD, READ, p, &end) && off + (double)n > end)
        return -EIO;
    if (ruled(SHORT, READ, p, 0))
        n = (n + 1) / 2;
    if (ruled(CUT, READ, p, &end) && off + (double)n > end)
        n = off < end ? (size_t)end - off : 0;
    ssize_t r = pread(f->fd, buf, n, off);
    if (r < 0)
        return -errno;
    if (r && ruled(FLIP, READ, p, 0))
        buf[0] ^= 1;
    __atomic_fetch_add(&read_bytes, r, __ATOMIC_RELAXED);
    return r;
}
/* How much of n bytes there is room for, and takes it. */
static size_t take_room(size_t n) {
    pthread_rwlock_wrlock(&cl);
    if (cf->free >= 0) {
        if ((long long)n > cf->free)
            n = cf->free;
        cf->free -= n;
    }
    pthread_rwlock_unlock(&cl);
    return n;
}
static int s_write(const char *p, const char *buf, size_t n, off_t off, struct fuse_file_info *fi) {
    struct file *f = file_of(fi);
    char wrong[1];
    p = f->path;
    G(WRITE, p, n);
    if (n && !(n = take_room(n)))
        return -ENOSPC;
    if (ruled(SHORT, WRITE, p, 0))
        n = (n + 1) / 2;
    ssize_t r = pwrite(f->fd, buf, n, off);
    if (r < 0)
        return -errno;
    if (r && ruled(FLIP, WRITE, p, 0)) {
        wrong[0] = buf[0] ^ 1;
        if (pwrite(f->fd, wrong, 1, off) != 1)
            return -EIO;
    }
    __atomic_fetch_add(&write_bytes, r, __ATOMIC_RELAXED);
    return r;
}
static int s_release(const char *p, struct fuse_file_info *fi) {
    (void)p;
    if (fi->fh && file_of(fi)->fd >= 0)
        close(file_of(fi)->fd);
    free(file_of(fi));
    return 0;
}
static off_t s_lseek(const char *p, off_t off, int whence, struct fuse_file_info *fi) {
    (void)p;
    off_t r = lseek(file_of(fi)->fd, off, whence);
    return r < 0 ? -errno : r;
}
static int s_opendir(const char *p, struct fuse_file_info *fi) {
    opened(-1, p, fi);
    return 0;
}
static int s_readdir(const char *p, void *buf, fuse_fill_dir_t fill, off_t o,
                     struct fuse_file_info *fi, enum fuse_readdir_flags fl) {
    (void)o;
    (void)fl;
    p = file_of(fi)->path;
    G(READDIR, p, 0);
    P(p);
    DIR *d = opendir(b_);
    if (!d)
        return -errno;
    struct dirent *e;
    while ((e = readdir(d))) {
        struct stat st = {.st_ino = e->d_ino, .st_mode = e->d_type << 12};
        if (fill(buf, e->d_name, &st, 0, 0))
            break;
    }
    closedir(d);
    return 0;
}
static int s_readlink(const char *p, char *o, size_t n) {
    G(READLINK, p, 0);
    P(p);
    ssize_t r = readlink(b_, o, n - 1);
    if (r < 0)
        return -errno;
    o[r] = 0;
    return 0;
}
static int s_unlink(const char *p) {
    G(UNLINK, p, 0);
    P(p);
    R(unlink(b_));
}
static int s_mkdir(const char *p, mode_t m) {
    G(MKDIR, p, 0);
    P(p);
    R(mkdir(b_, m));
}
static int s_rmdir(const char *p) {
    G(RMDIR, p, 0);
    P(p);
    R(rmdir(b_));
}
static int s_rename(const char *a, const char *z, unsigned f) {
    G(RENAME, a, 0);
    P(a);
    char t[8192];
    snprintf(t, sizeof t, "%s%s", root, z);
    R(renameat2(AT_FDCWD, b_, AT_FDCWD, t, f));
}
static int s_link(const char *a, const char *z) {
    P(a);
    char t[8192];
    snprintf(t, sizeof t, "%s%s", root, z);
    R(link(b_, t));
}
static int s_symlink(const char *t, const char *p) {
    G(SYMLINK, p, 0);
    P(p);
    R(symlink(t, b_));
}
static int s_truncate(const char *p, off_t n, struct fuse_file_info *fi) {
    G(TRUNCATE, fi ? file_of(fi)->path : p, 0);
    if (fi)
        R(ftruncate(file_of(fi)->fd, n));
    P(p);
    R(truncate(b_, n));
}
static int s_chmod(const char *p, mode_t m, struct fuse_file_info *fi) {
    G(SETATTR, fi ? file_of(fi)->path : p, 0);
    if (fi)
        R(fchmod(file_of(fi)->fd, m));
    P(p);
    R(chmod(b_, m));
}
static int s_chown(const char *p, uid_t u, gid_t g, struct fuse_file_info *fi) {
    G(SETATTR, fi ? file_of(fi)->path : p, 0);
    if (fi)
        R(fchown(file_of(fi)->fd, u, g));
    P(p);
    R(lchown(b_, u, g));
}
static int s_utimens(const char *p, const struct timespec t[2], struct fuse_file_info *fi) {
    G(SETATTR, fi ? file_of(fi)->path : p, 0);
    if (fi)
        R(futimens(file_of(fi)->fd, t));
    P(p);
    R(utimensat(AT_FDCWD, b_, t, AT_SYMLINK_NOFOLLOW));
}
static int s_fsync(const char *p, int d, struct fuse_file_info *fi) {
    (void)p;
    G(FSYNC, file_of(fi)->path, 0);
    R((d ? fdatasync : fsync)(file_of(fi)->fd));
}
static int s_flush(const char *p, struct fuse_file_info *fi) {
    (void)p;
    if (fi->fh)
        G(FLUSH, file_of(fi)->path, 0);
    return 0;
}
static int s_fsyncdir(const char *p, int d, struct fuse_file_info *fi) {
    (void)d;
    p = file_of(fi)->path;
    G(FSYNC, p, 0);
    P(p);
    int fd = open(b_, O_RDONLY | O_DIRECTORY), r = fd < 0 || fsync(fd) < 0 ? -errno : 0;
    close(fd);
    return r;
}
static int s_statfs(const char *p, struct statvfs *s) {
    G(STATFS, p, 0);
    P(p);
    if (statvfs(b_, s) < 0)
        return -errno;
    pthread_rwlock_rdlock(&cl);
    if (cf->free >= 0)
        s->f_bfree = s->f_bavail = cf->free / s->f_frsize;
    pthread_rwlock_unlock(&cl);
    return 0;
}
static void *s_init(struct fuse_conn_info *c, struct fuse_config *k) {
    if (getenv("SLOW_DEBUG"))
        fprintf(stderr, "capable %x want %x\n", c->capable, c->want);
    c->want |=
        c->capable &
        FUSE_CAP_PARALLEL_DIROPS; /* without it the kernel serialises lookups of one directory */
    /* the kernel sends no more reads of pages at the same time, 12 by default */
    const char *most = getenv("SLOW_BACKGROUND");
    if (most && atoi(most)) {
        c->max_background = atoi(most);
        c->congestion_threshold = c->max_background / 4 * 3;
    }
    const char *t = getenv("SLOW_ATTR_S");
    k->entry_timeout = k->attr_timeout = t ? atof(t) : 1.0;
    k->negative_timeout = 0;
    k->use_ino = 1;
    k->nullpath_ok = 1; /* calls on an open file name no path, also when it is unlinked */
    k->hard_remove = 1;
    pthread_t x;
    pthread_create(&x, 0, loader, 0);
    return 0;
}
static struct fuse_operations ops = {.init = s_init,
                                     .getattr = s_getattr,
                                     .open = s_open,
                                     .create = s_create,
                                     .read = s_read,
                                     .write = s_write,
                                     .release = s_release,
                                     .opendir = s_opendir,
                                     .readdir = s_readdir,
                                     .releasedir = s_release,
                                     .readlink = s_readlink,
                                     .unlink = s_unlink,
                                     .mkdir = s_mkdir,
                                     .rmdir = s_rmdir,
                                     .rename = s_rename,
                                     .symlink = s_symlink,
                                     .truncate = s_truncate,
                                     .chmod = s_chmod,
                                     .chown = s_chown,
                                     .utimens = s_utimens,
                                     .fsync = s_fsync,
                                     .fsyncdir = s_fsyncdir,
                                     .lseek = s_lseek,
                                     .link = s_link,
                                     .statfs = s_statfs};
int main(int c, char **v) {
    if (!getenv("SLOW_ROOT") || !realpath(getenv("SLOW_ROOT"), root)) {
        fprintf(stderr, "SLOW_ROOT?\n");
        return 2;
    }
    ctl = getenv("SLOW_CTL");
    cf = calloc(1, sizeof *cf);
    cf->free = -1;
    if (getenv("SLOW_FLUSH"))
        ops.flush = s_flush;
    return fuse_main(c, v, &ops, 0);
}
