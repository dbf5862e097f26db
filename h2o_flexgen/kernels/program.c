/* A program: calls of kernels that were recorded, run one after the other without the interpreter.

   If one crashes, a line on stderr says where. The handler that was there before does the rest: Python's faulthandler still writes the
   stacks of all threads. */

#include "crashes.h"
#include "team.h"
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    void (*kernel)(const void *given, int threads);
    const void *given; /* what the kernel is told; it stays as long as the program */
    int threads;
    const char *name, *place; /* of the kernel; and the layer, the same pointer for all its calls */
} recorded_call;

typedef struct {
    const recorded_call *calls;
    long count;
} program;

/* What runs now. All threads of the team work on one call. */
static struct {
    _Atomic(const program *) program;
    _Atomic(const recorded_call *) call; /* NULL between programs */
} running;

/* -- crashes ------------------------------------------------------------------------------------------------------------------ */

#define MOST_TEXT 256 /* bytes of a report */

static struct sigaction before[CRASHES];

typedef struct {
    char bytes[MOST_TEXT];
    size_t length;
} text;

static void add_text(text *to, const char *from)
{
    const size_t length = strlen(from), left = MOST_TEXT - to->length, fits = length < left ? length : left;
    memcpy(to->bytes + to->length, from, fits);
    to->length += fits;
}

static void add_number(text *to, long number) /* a signal handler must not call printf */
{
    char digits[24], *first = digits + sizeof digits - 1;
    *first = 0;
    do
        *--first = (char)('0' + number % 10);
    while (number /= 10);
    add_text(to, first);
}

static void report(const program *p, const recorded_call *call)
{
    const recorded_call *first = call, *behind = call + 1;
    text line = {.length = 0};
    while (first > p->calls && first[-1].place == call->place)
        first--;
    while (behind < p->calls + p->count && behind->place == call->place)
        behind++;
    add_text(&line, "crash in the recorded program for ");
    add_text(&line, call->place);
    add_text(&line, ": operation ");
    add_text(&line, call->name);
    add_text(&line, " (call ");
    add_number(&line, call - first + 1);
    add_text(&line, " of ");
    add_number(&line, behind - first);
    add_text(&line, ")\n");
    const ssize_t written = write(STDERR_FILENO, line.bytes, line.length);
    (void)written;
}

/* Returns to what crashed, which crashes again: then the earlier handler sees it. A signal that was sent is sent again. */
static void on_crash(int number, siginfo_t *info, void *context)
{
    const program *p = atomic_load(&running.program);
    const recorded_call *call = atomic_exchange(&running.call, NULL); /* other threads may crash too: one line is enough */
    if (call && call >= p->calls && call < p->calls + p->count)
        report(p, call);
    for (int at = 0; at < CRASHES; at++)
        if (crashes[at] == number)
            sigaction(number, before + at, NULL);
    if (info->si_code <= 0)
        raise(number);
    (void)context;
}

static void watch_for_crashes(void)
{
    static atomic_int is_done;
    struct sigaction own = {.sa_sigaction = on_crash, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    if (atomic_exchange(&is_done, 1))
        return;
    sigemptyset(&own.sa_mask);
    for (int at = 0; at < CRASHES; at++)
        sigaction(crashes[at], &own, before + at);
}

/* -- running ------------------------------------------------------------------------------------------------------------------ */

void run_program(const void *given, int threads)
{
    const program *p = given;
    watch_for_crashes();
    atomic_store(&running.program, p);
    for (const recorded_call *call = p->calls, *behind = call + p->count; call < behind; call++) {
        atomic_store_explicit(&running.call, call, memory_order_relaxed);
        call->kernel(call->given, call->threads);
    }
    atomic_store(&running.call, NULL);
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
