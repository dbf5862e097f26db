/* Values that are limited, then scaled, then added to others, then multiplied by a number. What comes of each step is rounded to
   the type of the values, as torch does it. */

#include "team.h"
#include "vectors.h"

typedef struct {
    char *x;           /* (rows, width): becomes the outcome */
    const char *added; /* alike; NULL: nothing is added */
    const float *by;   /* one number; NULL: 1 */
    long rows, width, x_row, added_row; /* the last two are bytes from a row to the next */
    float scale;
    float limit; /* values are not larger, on either side of 0 */
    int kind;
} sums;

#define AT_ONCE 1024 /* values of a part */

static ALWAYS_INLINE floats limited(floats value, floats limit) /* a NaN stays one */
{
    const integers above = value > limit, below = value < -limit;
    const floats low = (floats)(((integers)-limit & below) | ((integers)value & ~below));
    return (floats)(((integers)limit & above) | ((integers)low & ~above));
}

static ALWAYS_INLINE void add_register(char *x, const char *added, floats scale, floats limit, floats by, long count, int kind)
{
    const floats value = rounded_to(limited(load_some(x, count, kind), limit) * scale, kind);
    store_some(x, rounded_to(added ? value + load_some(added, count, kind) : value, kind) * by, count, kind);
}

static ALWAYS_INLINE void add_some(const sums *s, long number, int kind)
{
    const long parts = (s->width + AT_ONCE - 1) / AT_ONCE, row = number / parts, first = number % parts * AT_ONCE;
    const long size = itemsize_of(kind), count = s->width - first < AT_ONCE ? s->width - first : AT_ONCE;
    char *x = s->x + row * s->x_row + first * size;
    const char *added = s->added ? s->added + row * s->added_row + first * size : NULL;
    const floats scale = all(s->scale), limit = rounded_to(all(s->limit), kind), by = all(s->by ? *s->by : 1.0f);
#define ADD(AT, COUNT) add_register(x + (AT)*size, added ? added + (AT)*size : NULL, scale, limit, by, COUNT, kind)
    EACH_REGISTER(at, count, ADD);
#undef ADD
}

static void add_bf16(const void *s, long number, int member) { add_some(s, number, BF16); }
static void add_float(const void *s, long number, int member) { add_some(s, number, FLOAT); }
static void add_half(const void *s, long number, int member) { add_some(s, number, HALF); }

void add_scaled(const void *given, int threads)
{
    const sums *s = given;
    static part_action *const actions[] = {[BF16] = add_bf16, [FLOAT] = add_float, [HALF] = add_half};
    share_out(given, s->rows * ((s->width + AT_ONCE - 1) / AT_ONCE), threads, actions[s->kind]);
}
