/* slowfs: test equipment. A loopback FUSE file system that behaves like a busy parallel file system: latency per call,
 * a limited number of metadata slots, a smooth bandwidth cap, errors, hangs, and counters that no one under test can bend.
 *
 *   gcc -O2 -Wall slowfs.c -o slowfs $(pkg-config --cflags --libs fuse3) -lm
 *   SLOW_ROOT=/backing SLOW_CTL=/path/ctl ./slowfs MOUNTPOINT -o allow_other,max_threads=128,max_idle_threads=128
 *
 * The control file is text and is read again within 50 ms of a change. Its lines (OP: getattr open read readdir create
 * write unlink mkdir rmdir rename truncate fsync readlink symlink statfs, or *):
 *   lat OP MS             latency of each call          jitter SIGMA        log-normal spread of it
 *   slots N               metadata calls served at once read_MBps N         bandwidth cap over all readers
 *   err OP ERRNO REGEX    fail calls on matching paths  hang OP REGEX       hang them until the line is gone
 * Counters: cat MOUNTPOINT/.slowfs-stats: calls of each OP, bytes read, and how often the control file was read
 * (loads), so that a test can wait for its rules to hold. SLOW_ATTR_S sets the attribute timeout (default 1 s).
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
/* Debian 12's libfuse 3.14.0 never passes FUSE_PARALLEL_DIROPS on to the kernel (libfuse PR #861), so lookups
 * of one directory are serialised; put the bit (1<<18) into the INIT reply, the first 16+64-byte message
 * libfuse writes, ourselves */
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
    NOPS
};
static const char *NM[] = {"getattr",  "open",   "read",     "readdir", "create",
                           "write",    "unlink", "mkdir",    "rmdir",   "rename",
                           "truncate", "fsync",  "readlink", "symlink", "statfs"};
struct rule {
    int op, err;
    regex_t rx;
    struct rule *next;
}; /* op -1: any; err 0: hang */
struct conf {
    double lat[NOPS], jit, bw;
    int slots;
    struct rule *rules;
};
static struct conf *cf;
static pthread_rwlock_t cl = PTHREAD_RWLOCK_INITIALIZER;
static char root[4096], *ctl;
static struct timespec cm;
static unsigned long cnt[NOPS], loads, read_bytes;
static pthread_mutex_t ml = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t mc = PTHREAD_COND_INITIALIZER;
static int busy;
static double bwnext;
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
__attribute__((noreturn)) static void *loader(void *a) {
    (void)a;
    for (;; nap(0.05)) { /* never ends */
        struct stat st;
        if (!ctl || stat(ctl, &st) || (st.st_mtim.tv_sec == cm.tv_sec && st.st_mtim.tv_nsec == cm.tv_nsec))
            continue;
        cm = st.st_mtim;
        FILE *f = fopen(ctl, "r");
        if (!f)
            continue;
        struct conf *n = calloc(1, sizeof *n);
        char line[1024], op[64], rx[512];
        double d;
        int e;
        while (fgets(line, sizeof line, f)) {
            if (sscanf(line, "lat %63s %lf", op, &d) == 2) {
                if (*op == '*')
                    for (int i = 0; i < NOPS; i++)
                        n->lat[i] = d;
                else if (opn(op) >= 0)
                    n->lat[opn(op)] = d;
            } else if (sscanf(line, "jitter %lf", &d) == 1)
                n->jit = d;
            else if (sscanf(line, "slots %d", &e) == 1)
                n->slots = e;
            else if (sscanf(line, "read_MBps %lf", &d) == 1)
                n->bw = d * 1e6;
            else {
                int h = 0;
                if (sscanf(line, "err %63s %d %511s", op, &e, rx) == 3 ||
                    (h = sscanf(line, "hang %63s %511s", op, rx) == 2)) {
                    struct rule *r = calloc(1, sizeof *r);
                    r->op = opn(op);
                    r->err = h ? 0 : e;
                    if (regcomp(&r->rx, rx, REG_EXTENDED | REG_NOSUB)) {
                        free(r);
                        continue;
                    }
                    r->next = n->rules;
                    n->rules = r;
                }
            }
        }
        fclose(f);
        pthread_rwlock_wrlock(&cl);
        cf = n;
        __atomic_fetch_add(&loads, 1, __ATOMIC_RELEASE);
        pthread_rwlock_unlock(&cl); /* the old one is leaked on purpose: a few hundred bytes */
    }
}
static int gate(int op, const char *path, size_t bytes) {
    double d, bw;
    int slots, act;
    __atomic_fetch_add(&cnt[op], 1, __ATOMIC_RELAXED);
    for (;;) {
        act = -1;
        pthread_rwlock_rdlock(&cl);
        struct conf *c = cf;
        for (struct rule *r = c->rules; r; r = r->next)
            if ((r->op < 0 || r->op == op) && !regexec(&r->rx, path, 0, 0, 0)) {
                act = r->err;
                break;
            }
        d = c->lat[op] / 1e3;
        bw = c->bw;
        slots = c->slots;
        if (d && c->jit) {
            double u = drand48() + 1e-12, v = drand48();
            d *= exp(c->jit * sqrt(-2 * log(u)) * cos(2 * M_PI * v));
        }
        pthread_rwlock_unlock(&cl);
        if (act > 0)
            return -act;
        if (act < 0)
            break;
        if (fuse_interrupted())
            return -EINTR; /* as a hard mount of NFS: whoever hangs can be killed */
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
    if (bytes && bw) {
        pthread_mutex_lock(&bl);
        double n = now();
        if (bwnext < n - 0.02)
            bwnext = n - 0.02;
        bwnext += bytes / bw;
        double w = bwnext - n;
        pthread_mutex_unlock(&bl);
        nap(w);
    }
    return 0;
}
#define P(p)                                                                                                 \
    char b_[8192];                                                                                           \
    snprintf(b_, sizeof b_, "%s%s", root, p)
#define G(op, p, n)                                                                                          \
    do {                                                                                                     \
        int g_ = gate(op, p, n);                                                                             \
        if (g_)                                                                                              \
            return g_;                                                                                       \
    } while (0)
#define R(x) return (x) < 0 ? -errno : 0
#define ISSTATS(p) (!strcmp(p, "/.slowfs-stats"))
static int stats(char *o, size_t n) {
    int k = 0;
    for (int i = 0; i < NOPS; i++)
        k += snprintf(o + k, n - k, "%s %lu\n", NM[i], cnt[i]);
    k += snprintf(o + k, n - k, "read_bytes %lu\nloads %lu\n", read_bytes, loads);
    return k;
}
static int s_getattr(const char *p, struct stat *st, struct fuse_file_info *fi) {
    if (ISSTATS(p)) {
        memset(st, 0, sizeof *st);
        st->st_mode = S_IFREG | 0444;
        st->st_nlink = 1;
        st->st_size = 4096;
        return 0;
    }
    G(GETATTR, p, 0);
    if (fi)
        R(fstat(fi->fh, st));
    P(p);
    R(lstat(b_, st));
}
static int s_open(const char *p, struct fuse_file_info *fi) {
    if (ISSTATS(p)) {
        fi->direct_io = 1;
        fi->fh = -1;
        return 0;
    }
    G(OPEN, p, 0);
    P(p);
    int f = open(b_, fi->flags & ~O_DIRECT);
    if (f < 0)
        return -errno;
    fi->fh = f;
    return 0;
}
static int s_create(const char *p, mode_t m, struct fuse_file_info *fi) {
    G(CREATE, p, 0);
    P(p);
    int f = open(b_, (fi->flags & ~O_DIRECT) | O_CREAT, m);
    if (f < 0)
        return -errno;
    fi->fh = f;
    return 0;
}
static int s_read(const char *p, char *buf, size_t n, off_t off, struct fuse_file_info *fi) {
    if (fi->fh == (uint64_t)-1) {
        char t[4096];
        int k = stats(t, sizeof t);
        if (off >= k)
            return 0;
        if (n > (size_t)(k - off))
            n = k - off;
        memcpy(buf, t + off, n);
        return n;
    }
    int g = gate(READ, p, n);
    if (g)
        return g;
    ssize_t r = pread(fi->fh, buf, n, off);
    if (r > 0)
        __atomic_fetch_add(&read_bytes, r, __ATOMIC_RELAXED);
    return r < 0 ? -errno : r;
}
static int s_write(const char *p, const char *buf, size_t n, off_t off, struct fuse_file_info *fi) {
    G(WRITE, p, 0);
    ssize_t r = pwrite(fi->fh, buf, n, off);
    return r < 0 ? -errno : r;
}
static int s_release(const char *p, struct fuse_file_info *fi) {
    (void)p;
    if (fi->fh != (uint64_t)-1)
        close(fi->fh);
    return 0;
}
static int s_readdir(const char *p, void *buf, fuse_fill_dir_t fill, off_t o, struct fuse_file_info *fi,
                     enum fuse_readdir_flags fl) {
    (void)o;
    (void)fi;
    (void)fl;
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
    if (f)
        return -EINVAL;
    G(RENAME, a, 0);
    P(a);
    char t[8192];
    snprintf(t, sizeof t, "%s%s", root, z);
    R(rename(b_, t));
}
static int s_symlink(const char *t, const char *p) {
    G(SYMLINK, p, 0);
    P(p);
    R(symlink(t, b_));
}
static int s_truncate(const char *p, off_t n, struct fuse_file_info *fi) {
    G(TRUNCATE, p, 0);
    if (fi)
        R(ftruncate(fi->fh, n));
    P(p);
    R(truncate(b_, n));
}
static int s_chmod(const char *p, mode_t m, struct fuse_file_info *fi) {
    (void)fi;
    P(p);
    R(chmod(b_, m));
}
static int s_chown(const char *p, uid_t u, gid_t g, struct fuse_file_info *fi) {
    (void)fi;
    P(p);
    R(lchown(b_, u, g));
}
static int s_utimens(const char *p, const struct timespec t[2], struct fuse_file_info *fi) {
    (void)fi;
    P(p);
    R(utimensat(AT_FDCWD, b_, t, AT_SYMLINK_NOFOLLOW));
}
static int s_fsync(const char *p, int d, struct fuse_file_info *fi) {
    (void)d;
    G(FSYNC, p, 0);
    R(fsync(fi->fh));
}
static int s_statfs(const char *p, struct statvfs *s) {
    G(STATFS, p, 0);
    P(p);
    R(statvfs(b_, s));
}
static void *s_init(struct fuse_conn_info *c, struct fuse_config *k) {
    if (getenv("SLOW_DEBUG"))
        fprintf(stderr, "capable %x want %x\n", c->capable, c->want);
    c->want |=
        c->capable & FUSE_CAP_PARALLEL_DIROPS; /* without it the kernel serialises lookups of one directory */
    const char *t = getenv("SLOW_ATTR_S");
    k->entry_timeout = k->attr_timeout = t ? atof(t) : 1.0;
    k->negative_timeout = 0;
    k->use_ino = 1;
    k->nullpath_ok = 0;
    pthread_t x;
    pthread_create(&x, 0, loader, 0);
    return 0;
}
static const struct fuse_operations ops = {.init = s_init,
                                           .getattr = s_getattr,
                                           .open = s_open,
                                           .create = s_create,
                                           .read = s_read,
                                           .write = s_write,
                                           .release = s_release,
                                           .readdir = s_readdir,
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
                                           .statfs = s_statfs};
int main(int c, char **v) {
    if (!getenv("SLOW_ROOT") || !realpath(getenv("SLOW_ROOT"), root)) {
        fprintf(stderr, "SLOW_ROOT?\n");
        return 2;
    }
    ctl = getenv("SLOW_CTL");
    cf = calloc(1, sizeof *cf);
    return fuse_main(c, v, &ops, 0);
}
