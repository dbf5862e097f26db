/* The end of a decode step for caches that evict: what slots got goes into their scores, and where a row is full, the newest token takes
   over the slot of the one that goes, with all that is noted of it. That is the one which ranks lowest of those that may go; among
   equals, the oldest. */

#include "slots.h"
#include "team.h"
#include "vectors.h"

typedef struct {
    slots keys, values;    /* (rows, heads, slots, width) */
    slot_notes notes;
    const float *got;      /* (rows, heads, slots); NULL: scores stay as they are */
    float *room;           /* for ranks, (rows, heads, slots), where they are neither scores alone nor worth alone nor age */
    const int64_t *newest; /* (rows): the slot of the newest token, behind all others */
    const int64_t *from, *to, *after; /* (rows): positions from `from` up to but not including `to` may go; slots in the end */
    int64_t *out;          /* (rows, heads): the slot that the newest token has in the end; NULL: nothing goes */
    long rows, heads, slots, nbytes; /* the last of a key, and of a value */
    float decay, least;    /* scores fade by the first; the second is added to those that worth weighs */
    int is_highest;        /* a score is the highest that a slot got, not the sum; what the newest gave itself does not count */
    int by_chance;
} evicting;

static ALWAYS_INLINE void note(const evicting *e, float *scores, const float *got, long newest)
{
#define NOTE(AT, COUNT)                                                                                                          \
    do {                                                                                                                         \
        const floats own = load_some((const char *)(got + (AT)), COUNT, FLOAT);                                                  \
        const floats faded = rounded(load_some((const char *)(scores + (AT)), COUNT, FLOAT) * e->decay);                         \
        store_some((char *)(scores + (AT)), e->is_highest ? highest(faded, own) : faded + own, COUNT, FLOAT);                    \
    } while (0)
    const float own = scores[newest] * e->decay;
    EACH_REGISTER(at, e->slots, NOTE);
#undef NOTE
    if (e->is_highest)
        scores[newest] = highest(all(own), all(0.0f))[0];
}

/* A pseudo-random number that depends on position and head alone. */
static ALWAYS_INLINE float chance(uint32_t position, uint32_t head)
{
    uint32_t x = position * 2654435761u + head * 2246822519u + 374761393u;
    x = (x ^ x >> 15) * 2246822519u;
    x = (x ^ x >> 13) * 3266489917u;
    return (float)((x ^ x >> 16) >> 8);
}

/* What the tokens of a head rank by; NULL: by their age. */
static ALWAYS_INLINE const float *ranks_of(const evicting *e, long head, long noted, float *room, long held)
{
    const float *scores = e->notes.scores ? e->notes.scores + noted : NULL, *worth = e->notes.worth ? e->notes.worth + noted : NULL;
    if (e->by_chance)
        for (long slot = 0; slot < held; slot++)
            room[slot] = chance((uint32_t)e->notes.positions[noted + slot], (uint32_t)head);
    else if (scores && worth)
        for (long slot = 0; slot < held; slot++)
            room[slot] = (scores[slot] + e->least) * worth[slot];
    else
        return scores ? scores : worth;
    return room;
}

static ALWAYS_INLINE int32_t within_int32(int64_t number)
{
    return number < INT32_MIN ? INT32_MIN : number > INT32_MAX ? INT32_MAX : (int32_t)number;
}

static ALWAYS_INLINE long lowest(const int32_t *positions, const float *ranks, long held, int32_t first, int32_t end)
{
    float least = INFINITY;
    if (ranks) {
#pragma omp simd reduction(min : least)
        for (long slot = 0; slot < held; slot++) {
            const float rank = (positions[slot] >= first) & (positions[slot] < end) ? ranks[slot] : INFINITY;
            least = rank < least ? rank : least;
        }
    }
    int32_t oldest = INT32_MAX;
#pragma omp simd reduction(min : oldest)
    for (long slot = 0; slot < held; slot++) {
        const int goes = (positions[slot] >= first) & (positions[slot] < end) & (ranks ? ranks[slot] == least : 1);
        const int32_t position = goes ? positions[slot] : INT32_MAX;
        oldest = position < oldest ? position : oldest;
    }
    for (long slot = 0; slot < held; slot++)
        if (positions[slot] == oldest)
            return slot;
    return held - 1;
}

static ALWAYS_INLINE void move(const evicting *e, long row, long head, long noted, long to, long from)
{
    memcpy((char *)slot_at(&e->keys, row, head, to), slot_at(&e->keys, row, head, from), e->nbytes);
    memcpy((char *)slot_at(&e->values, row, head, to), slot_at(&e->values, row, head, from), e->nbytes);
    e->notes.positions[noted + to] = e->notes.positions[noted + from];
    if (e->notes.scores)
        e->notes.scores[noted + to] = e->notes.scores[noted + from];
    if (e->notes.worth)
        e->notes.worth[noted + to] = e->notes.worth[noted + from];
}

static void evict_of_head(const void *given, long number, int member)
{
    const evicting *e = given;
    const long row = number / e->heads, head = number % e->heads, newest = e->newest[row], held = newest + 1;
    const long noted = row * e->notes.row + head * e->notes.head;
    if (e->notes.scores && e->got)
        note(e, e->notes.scores + noted, e->got + number * e->slots, newest);
    if (!e->out)
        return;
    e->out[number] = newest;
    if (e->after[row] > newest)
        return;
    const float *ranks = ranks_of(e, head, noted, e->room + number * e->slots, held);
    const long goes = ranks ? lowest(e->notes.positions + noted, ranks, held, within_int32(e->from[row]), within_int32(e->to[row]))
                            : lowest(e->notes.positions + noted, NULL, held, within_int32(e->from[row]), within_int32(e->to[row]));
    if (goes != newest)
        move(e, row, head, noted, goes, newest);
    e->out[number] = goes;
}

void evict(const void *given, int threads)
{
    const evicting *e = given;
    share_out(given, e->rows * e->heads, threads, evict_of_head);
}
