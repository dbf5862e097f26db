/* Tokens that lie apart in a file, read to their places in an image of slots. They lie in page groups; in one, a token has its
   values of all sets and heads side by side. Several threads of the caller take page groups from one list, each with a buffer of its
   own, so that a disk has many small reads under way. Page groups that lie side by side are read at once. */

#include <errno.h>
#include <unistd.h>

#include "kernel.h"

typedef struct {
    const int64_t *groups; /* (count, 3): a row of the image, where it begins in the file, and the number of a page group in it */
    const int64_t *held;   /* (rows): the tokens that a row has in the file */
    int64_t *progress;     /* the first page group that no thread has taken; what the system says of a read that failed, or ENDED */
    char *buffer;          /* of this thread, aligned as the file wants it */
    char *image;
    long count, at_once; /* page groups: all, and those for which the buffer has room */
    long group_bytes, group_tokens;
    long sets, heads, width;     /* bytes of a value of a head */
    long set, row, head, slot;   /* bytes from one to the next in the image */
    long alignment, file;
} token_reads;

#define ENDED -1

static int read_whole(const token_reads *r, int64_t from, long nbytes)
{
    long done = 0;
    while (done < nbytes) {
        const long at = done / r->alignment * r->alignment; /* a read past the page cache goes on where a page begins */
        const ssize_t count = pread((int)r->file, r->buffer + at, nbytes - at, from + at);
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

static void place_group(const token_reads *r, const int64_t *group, const char *from)
{
    const long first = group[2] * r->group_tokens;
    for (long token = 0; token < r->group_tokens && first + token < r->held[group[0]]; token++)
        for (long set = 0; set < r->sets; set++) {
            char *to = r->image + set * r->set + group[0] * r->row + (first + token) * r->slot;
            for (long head = 0; head < r->heads; head++, from += r->width)
                memcpy(to + head * r->head, from, r->width);
        }
}

/* Page groups from this one on that lie side by side, in the part of the list that is taken. */
static long side_by_side(const token_reads *r, long at, long end)
{
    long next = at + 1;
    while (next < end && r->groups[3 * next] == r->groups[3 * at] && r->groups[3 * next + 2] == r->groups[3 * next - 1] + 1)
        next++;
    return next - at;
}

void read_tokens(const void *given, int threads)
{
    const token_reads *r = given;
    (void)threads; /* those of the caller */
    for (;;) {
        const long start = __atomic_fetch_add(&r->progress[0], r->at_once, __ATOMIC_RELAXED);
        if (start >= r->count || __atomic_load_n(&r->progress[1], __ATOMIC_RELAXED))
            return;
        const long end = start + r->at_once < r->count ? start + r->at_once : r->count;
        for (long at = start, together; at < end; at += together) {
            const int64_t *group = r->groups + 3 * at;
            together = side_by_side(r, at, end);
            const int failed = read_whole(r, group[1] + group[2] * r->group_bytes, together * r->group_bytes);
            if (failed) {
                __atomic_store_n(&r->progress[1], failed, __ATOMIC_RELAXED);
                return;
            }
            for (long one = 0; one < together; one++)
                place_group(r, group + 3 * one, r->buffer + one * r->group_bytes);
        }
    }
}
