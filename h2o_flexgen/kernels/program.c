/* A program: calls of kernels that were recorded, run one after the other without the interpreter. */

#include "team.h"
#include <stdint.h>
#include <time.h>

typedef struct {
    void (*kernel)(const void *given, int threads);
    const void *given; /* what the kernel is told; it stays as long as the program */
    int threads;
} recorded_call;

typedef struct {
    const recorded_call *calls;
    long count;
} program;

void run_program(const void *given, int threads)
{
    const program *p = given;
    for (const recorded_call *call = p->calls, *behind = call + p->count; call < behind; call++)
        call->kernel(call->given, call->threads);
    (void)threads;
}

/* Notes when it is reached, in nanoseconds of the clock that Python's perf_counter reads. */
void note_time(const void *given, int threads)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    **(int64_t *const *)given = now.tv_sec * 1000000000ll + now.tv_nsec;
    (void)threads;
}
