/* Tokens that lie apart in a file, read to their places in an image of slots. They lie in page groups; in one, a token has its
   values of all sets and heads side by side. A disk is fast at small reads only where many are under way. Where the system has
   queues of reads, one thread keeps one full. Otherwise several threads of the caller take page groups from one list, each with a
   buffer of its own. Page groups that lie side by side are read at once. A token that has whole pages, and lies in the image as it
   does in the file, is read straight to its place. */

#include <errno.h>
#include <unistd.h>

#include "kernel.h"
#include "sizes.h"

typedef struct {
    const int64_t *groups;  /* (count, 3): a row of the image, where it begins in the file, and the number of a page group in it */
    const int64_t *held;    /* (rows): the tokens that a row has in the file */
    const int32_t *entries; /* (rows, slots): the slot of the image for each token of a row, below 0: none; NULL: its own number */
    int64_t *progress;      /* the first page group that no thread has taken; what the system says of a read that failed, or ENDED */
    char *buffer;           /* of this thread, aligned as the file wants it */
    char *image;
    int64_t queue;            /* of reads, or 0 */
    long count, at_once, most; /* page groups: all, and those that are read at once; reads that are under way in the queue */
    long group_bytes, group_tokens;
    long sets, heads, width;     /* bytes of a value of a head */
    long set, row, head, slot;   /* bytes from one to the next in the image */
    long slots;                  /* of a row in `entries` */
    long alignment, file;
} token_reads;

#define ENDED -1

/* What is read at once: neighbouring page groups of a row. */
typedef struct {
    const int64_t *groups;
    long count;
    char *to;
} neighbours;

/* Reads what is not there yet. Gives what the system says where it fails, or ENDED. */
static int read_rest(const token_reads *r, int64_t from, char *to, long nbytes, long done)
{
    while (done < nbytes) {
        const long at = done / r->alignment * r->alignment; /* a read past the page cache goes on where a page begins */
        const ssize_t count = pread((int)r->file, to + at, nbytes - at, from + at);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0)
            return errno;
        if (at + count <= done)
            return ENDED;
        done = at + count;
    }
    return 0;
}

static int64_t place_in_file(const token_reads *r, const int64_t *group)
{
    return group[1] + group[2] * r->group_bytes;
}

/* Whether tokens lie in the image as they do in the file, with all their heads and sets side by side. */
static int are_whole(const token_reads *r)
{
    return (r->heads == 1 || r->head == r->width) && (r->sets == 1 || r->set == r->heads * r->width);
}

static int are_direct(const token_reads *r)
{
    const int64_t apart = (int64_t)(uintptr_t)r->image | r->row | r->slot | r->group_bytes;
    return r->group_tokens == 1 && are_whole(r) && r->sets * r->heads * r->width == r->group_bytes && apart % r->alignment == 0;
}

/* Where a token of a row goes, or NULL. */
static char *place_in_image(const token_reads *r, int64_t row, int64_t token)
{
    const int64_t slot = r->entries ? r->entries[row * r->slots + token] : token;
    return slot < 0 ? NULL : r->image + row * r->row + slot * r->slot;
}

static void place_group(const token_reads *r, const int64_t *group, const char *from)
{
    const long first = group[2] * r->group_tokens, whole = are_whole(r), nbytes = r->sets * r->heads * r->width;
    for (long token = 0; token < r->group_tokens && first + token < r->held[group[0]]; token++, from += nbytes) {
        char *to = place_in_image(r, group[0], first + token);
        if (to && whole)
            memcpy(to, from, nbytes);
        else if (to)
            for (long set = 0; set < r->sets; set++)
                for (long head = 0; head < r->heads; head++)
                    memcpy(to + set * r->set + head * r->head, from + (set * r->heads + head) * r->width, r->width);
    }
}

static void place(const token_reads *r, const neighbours *one)
{
    if (!are_direct(r))
        for (long next = 0; next < one->count; next++)
            place_group(r, one->groups + 3 * next, one->to + next * r->group_bytes);
}

/* Page groups from this one on that lie side by side, up to the end of the part of the list that is taken. */
static neighbours neighbours_from(const token_reads *r, long at, long end, char *buffer)
{
    const int64_t *groups = r->groups + 3 * at;
    const int direct = are_direct(r);
    neighbours found = {groups, 1, direct ? place_in_image(r, groups[0], groups[2]) : buffer};
    for (const int64_t *next = groups + 3; found.count < end - at; next += 3, found.count++)
        if (next[0] != groups[0] || next[2] != groups[2] + found.count ||
            (direct && place_in_image(r, next[0], next[2]) != found.to + found.count * r->group_bytes))
            break;
    return found;
}

static int read_here(const token_reads *r, const neighbours *one, long done)
{
    const int failed = read_rest(r, place_in_file(r, one->groups), one->to, one->count * r->group_bytes, done);
    if (failed)
        __atomic_store_n(&r->progress[1], failed, __ATOMIC_RELAXED);
    else
        place(r, one);
    return failed;
}

/* The part of one thread. */
static void read_in_turn(const token_reads *r)
{
    for (;;) {
        const long start = __atomic_fetch_add(&r->progress[0], r->at_once, __ATOMIC_RELAXED);
        if (start >= r->count || __atomic_load_n(&r->progress[1], __ATOMIC_RELAXED))
            return;
        const long end = start + r->at_once < r->count ? start + r->at_once : r->count;
        for (long at = start; at < end;) {
            const neighbours one = neighbours_from(r, at, end, r->buffer);
            if (read_here(r, &one, 0))
                return;
            at += one.count;
        }
    }
}

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/aio_abi.h>) /* not every Linux has the headers of its kernel */
#define HAS_QUEUES
#endif
#endif

#if defined(HAS_QUEUES)
#include <linux/aio_abi.h>
#include <sys/syscall.h>

static int64_t opened_queue(void)
{
    aio_context_t made = 0;
    return syscall(SYS_io_setup, QUEUED_READS, &made) == 0 ? (int64_t)made : 0;
}

static void closed_queue(int64_t queue)
{
    syscall(SYS_io_destroy, (aio_context_t)queue);
}

/* Has these reads begin. One that the queue does not take is made here. */
static long sent(const token_reads *r, struct iocb **reads, long count, neighbours *of, int *spare, long free_ones)
{
    for (long at = 0; at < count;) {
        const long taken = syscall(SYS_io_submit, (aio_context_t)r->queue, count - at, reads + at);
        if (taken > 0) {
            at += taken;
        } else {
            const int own = (int)reads[at++]->aio_data;
            read_here(r, of + own, 0);
            spare[free_ones++] = own;
        }
    }
    return free_ones;
}

static void read_queued(const token_reads *r)
{
    struct iocb reads[QUEUED_READS], *begun[QUEUED_READS];
    struct io_event ended[QUEUED_READS];
    neighbours of[QUEUED_READS];
    int spare[QUEUED_READS];
    const long most = r->most < QUEUED_READS ? r->most : QUEUED_READS;
    long at = 0, free_ones = most;
    for (int own = 0; own < most; own++)
        spare[own] = own;
    for (;;) {
        long count = 0;
        while (free_ones && at < r->count && !r->progress[1]) {
            const int own = spare[--free_ones];
            const long end = at + r->at_once < r->count ? at + r->at_once : r->count;
            of[own] = neighbours_from(r, at, end, r->buffer + own * r->at_once * r->group_bytes);
            memset(reads + own, 0, sizeof *reads);
            reads[own].aio_data = own;
            reads[own].aio_lio_opcode = IOCB_CMD_PREAD;
            reads[own].aio_fildes = (uint32_t)r->file;
            reads[own].aio_buf = (uint64_t)(uintptr_t)of[own].to;
            reads[own].aio_nbytes = of[own].count * r->group_bytes;
            reads[own].aio_offset = place_in_file(r, of[own].groups);
            begun[count++] = reads + own;
            at += of[own].count;
        }
        free_ones = sent(r, begun, count, of, spare, free_ones);
        if (free_ones == most && (at >= r->count || r->progress[1]))
            return;
        const long under_way = most - free_ones, few = most / 4 < under_way ? most / 4 : under_way;
        const long events = under_way ? syscall(SYS_io_getevents, (aio_context_t)r->queue, few ? few : 1, most, ended, NULL) : 0;
        if (events < 0 && errno != EINTR) { /* the caller closes the queue, which waits for what is under way */
            r->progress[1] = errno;
            return;
        }
        for (long event = 0; event < events; event++) {
            const int own = (int)ended[event].data;
            const long got = (long)ended[event].res;
            if (got == (long)reads[own].aio_nbytes)
                place(r, of + own);
            else /* it says there what is wrong */
                read_here(r, of + own, got > 0 ? got : 0);
            spare[free_ones++] = own;
        }
    }
}
#else
static int64_t opened_queue(void)
{
    return 0;
}

static void closed_queue(int64_t queue)
{
    (void)queue;
}

static void read_queued(const token_reads *r)
{
    read_in_turn(r);
}
#endif

/* Makes a queue of reads. It is 0 if the system has none. */
int open_read_queue(int64_t *queue)
{
    *queue = opened_queue();
    return *queue != 0;
}

int close_read_queue(const int64_t *queue)
{
    closed_queue(*queue);
    return 0;
}

void read_tokens(const void *given, int threads)
{
    const token_reads *r = given;
    (void)threads; /* those of the caller */
    if (r->queue)
        read_queued(r);
    else
        read_in_turn(r);
}
