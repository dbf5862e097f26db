/* Copies values between places with any strides, and from one type to another. A value of another type is rounded to nearest, ties to
   even. Bytes of values that are only moved are copied as they are. */

#include "team.h"
#include "vectors.h"

#define MOST_AXES 6
#define LAST (MOST_AXES - 1)
#define MOVED (-1) /* the kind of values that are only moved */

typedef struct {
    const char *from;
    char *to;
    long sizes[MOST_AXES], from_strides[MOST_AXES], to_strides[MOST_AXES]; /* strides in bytes; the last axis is the innermost */
    int from_kind, to_kind;
    long nbytes; /* of a value that is only moved */
} copying;

static void convert_line(const copying *c, const char *from, char *to)
{
    const long count = c->sizes[LAST], step = c->from_strides[LAST], stride = c->to_strides[LAST];
    const long from_size = itemsize_of(c->from_kind), to_size = itemsize_of(c->to_kind);
    if (step == from_size && stride == to_size) {
#define CONVERT(AT, COUNT) store_some(to + (AT)*to_size, load_some(from + (AT)*from_size, COUNT, c->from_kind), COUNT, c->to_kind)
        EACH_REGISTER(at, count, CONVERT);
#undef CONVERT
        return;
    }
    for (long at = 0; at < count; at++)
        store_value(to + at * stride, load_value(from + at * step, c->from_kind), c->to_kind);
}

static void move_line(const copying *c, const char *from, char *to)
{
    const long count = c->sizes[LAST], step = c->from_strides[LAST], stride = c->to_strides[LAST];
    if (step == c->nbytes && stride == c->nbytes)
        memcpy(to, from, (size_t)(count * c->nbytes));
    else
        for (long at = 0; at < count; at++)
            memcpy(to + at * stride, from + at * step, (size_t)c->nbytes);
}

static void copy_line_numbered(const void *given, long number, int member)
{
    const copying *c = given;
    const char *from = c->from;
    char *to = c->to;
    for (int axis = LAST - 1; axis >= 0; axis--) {
        const long at = number % c->sizes[axis];
        number /= c->sizes[axis];
        from += at * c->from_strides[axis];
        to += at * c->to_strides[axis];
    }
    (c->from_kind == MOVED ? move_line : convert_line)(c, from, to);
}

void copy_values(const void *given, int threads)
{
    const copying *c = given;
    long lines = 1;
    for (int axis = 0; axis < LAST; axis++)
        lines *= c->sizes[axis];
    share_out(c, lines, threads, copy_line_numbered);
}

/* Fills bytes with zeros. */
typedef struct {
    char *to;
    long nbytes;
} zeroing;

void zero_bytes(const void *given, int threads)
{
    const zeroing *z = given;
    memset(z->to, 0, (size_t)z->nbytes);
    (void)threads;
}
