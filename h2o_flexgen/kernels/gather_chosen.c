/* The rows that some experts were given, expert by expert, and those of one in the order of their tokens. How many there are is known
   to memory alone. So there is room for a number of rows, and experts whose rows do not fit beside those before wait for another
   turn: each turn has as many whole experts as fit, or one. */

#include "team.h"
#include "vectors.h"

typedef struct {
    const char *numbers; /* (tokens, chosen), int32 */
    const char *shares;  /* alike, float32 */
    const char *rows;    /* of each token, `nbytes` each */
    char *out;           /* (most, nbytes) */
    int64_t *to;         /* (most): the token of each row */
    float *weights;      /* (most): its share */
    int64_t *begins;     /* (experts + 2): the first row of each, where the last one ends, and the rows left to later turns */
    long tokens, chosen, nbytes;
    long numbers_row, shares_row, rows_row; /* bytes from a token to the next */
    long first, experts;                    /* the first of them, and how many */
    long most, turn;
} gathering;

#define ROWS_OF_PART 8

static ALWAYS_INLINE const int32_t *numbers_of(const gathering *g, long token)
{
    return (const int32_t *)(g->numbers + token * g->numbers_row);
}

static ALWAYS_INLINE int is_own(const gathering *g, long expert)
{
    return expert >= 0 && expert < g->experts;
}

static void count_rows(const gathering *g, int64_t *counts)
{
    memset(counts, 0, g->experts * sizeof *counts);
    for (long token = 0; token < g->tokens; token++)
        for (long at = 0; at < g->chosen; at++) {
            const long expert = numbers_of(g, token)[at] - g->first;
            if (is_own(g, expert))
                counts[expert]++;
        }
}

#define ANOTHER_TURN -1

/* Notes where the rows of each expert begin. Those of another turn have none here. */
static void place_experts(const gathering *g, const int64_t *counts, int64_t *next)
{
    long turn = 0, together = 0, there = 0, left = 0;
    for (long expert = 0; expert < g->experts; expert++) {
        if (together && together + counts[expert] > g->most) {
            turn++;
            together = 0;
        }
        together += counts[expert];
        g->begins[expert] = there;
        next[expert] = turn == g->turn ? there : ANOTHER_TURN;
        there += turn == g->turn ? counts[expert] : 0;
        left += turn > g->turn ? counts[expert] : 0;
    }
    g->begins[g->experts] = there;
    g->begins[g->experts + 1] = left;
}

static void place_tokens(const gathering *g, int64_t *next)
{
    for (long token = 0; token < g->tokens; token++)
        for (long at = 0; at < g->chosen; at++) {
            const long expert = numbers_of(g, token)[at] - g->first;
            if (!is_own(g, expert) || next[expert] == ANOTHER_TURN)
                continue;
            const long row = next[expert]++;
            g->to[row] = token;
            g->weights[row] = ((const float *)(g->shares + token * g->shares_row))[at];
        }
}

static void gather_part(const void *given, long number, int member)
{
    const gathering *g = given;
    const long there = g->begins[g->experts];
    for (long row = number * ROWS_OF_PART; row < (number + 1) * ROWS_OF_PART && row < there; row++)
        memcpy(g->out + row * g->nbytes, g->rows + g->to[row] * g->rows_row, g->nbytes);
}

void gather_chosen(const void *given, int threads)
{
    const gathering *g = given;
    int64_t counts[g->experts], next[g->experts];
    count_rows(g, counts);
    place_experts(g, counts, next);
    place_tokens(g, next);
    share_out(given, (g->begins[g->experts] + ROWS_OF_PART - 1) / ROWS_OF_PART, threads, gather_part);
}
