/* A team of threads for this library, started when it is first wanted, which sleep when there is nothing to do. */

#include "crashes.h"
#include "team.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#define MOST_HELPERS 255
#define STACK_BYTES (2l << 20) /* of a helper: no kernel needs a quarter of it */
#define LINE 64                /* what one thread writes often lies in lines of the cache of its own */
#define SPIN_NS 50000          /* how long a thread that waits looks for work before it sleeps */
#define STOLEN_NS 300000       /* a thread that was away for so long between two looks was preempted by another process */
#define CROWDED_NS 20000000    /* and for so long sleeps at once */
#define LOOKS 32               /* between two looks at the clock */
#define TAKES 16               /* what a thread takes at once is at most one of so many times what would be its share of the whole, */
#define LAST_TAKES 4           /* and one of so many times its share of what is left: no thread waits long for the slowest */

/* Where a thread sleeps. */
typedef struct {
    _Alignas(LINE) atomic_int is_asleep;
    int64_t crowded_until; /* of the thread itself */
    pthread_mutex_t door;
    pthread_cond_t bell;
} bed;

static struct {
    _Alignas(LINE) _Atomic uint64_t ticket; /* number of the work in the upper half, parts that are left in the lower one */
    _Alignas(LINE) atomic_long done;
    _Alignas(LINE) atomic_int is_taken; /* a caller has the team */
    _Atomic(part_action *) action; /* of the work, as are those below: they stay while a thread has taken a part that is not done */
    _Atomic(const void *) given;
    atomic_long count;
    atomic_int threads;
    int helpers, is_whole; /* `is_whole`: there are no more to be had */
    bed beds[1 + MOST_HELPERS];
} team;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static void pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* -- waiting ------------------------------------------------------------------------------------------------------------------ */

typedef int there_is(int member);

static int is_work(int member)
{
    return (uint32_t)atomic_load(&team.ticket) && member < atomic_load(&team.threads);
}

static int is_over(int member)
{
    (void)member;
    return atomic_load(&team.done) == atomic_load(&team.count);
}

/* Whether what is waited for came while the thread was awake. */
static int spin(int member, there_is *ready)
{
    bed *own = team.beds + member;
    const int64_t begun = now_ns();
    for (int64_t before = begun, now; before - begun < SPIN_NS && before > own->crowded_until; before = now) {
        for (int look = 0; look < LOOKS; look++) {
            if (ready(member))
                return 1;
            pause_briefly();
        }
        now = now_ns();
        if (now - before > STOLEN_NS)
            own->crowded_until = now + CROWDED_NS;
    }
    return ready(member);
}

static void await(int member, there_is *ready)
{
    bed *own = team.beds + member;
    if (spin(member, ready))
        return;
    pthread_mutex_lock(&own->door);
    for (;;) {
        atomic_store(&own->is_asleep, 1); /* before the last look: the thread that makes it ready looks here after that */
        if (ready(member))
            break;
        pthread_cond_wait(&own->bell, &own->door);
    }
    atomic_store(&own->is_asleep, 0);
    pthread_mutex_unlock(&own->door);
}

static void wake(int member)
{
    bed *other = team.beds + member;
    if (!atomic_load(&other->is_asleep))
        return;
    pthread_mutex_lock(&other->door);
    atomic_store(&other->is_asleep, 0);
    pthread_mutex_unlock(&other->door);
    pthread_cond_signal(&other->bell);
}

/* -- working ------------------------------------------------------------------------------------------------------------------ */

typedef struct {
    long first, behind;
} parts;

static long parts_at_once(long left, long count, long threads)
{
    const long of_all = count / (threads * TAKES), of_left = left / (threads * LAST_TAKES), least = of_all < of_left ? of_all : of_left;
    return least > 1 ? least : 1;
}

/* Takes some parts, if there are any. What was read of a work that has ended meanwhile is not used: its ticket is another one. */
static parts take(int member)
{
    uint64_t ticket = atomic_load(&team.ticket);
    for (;;) {
        const long left = (uint32_t)ticket, threads = atomic_load(&team.threads), count = atomic_load(&team.count);
        if (!left || member >= threads)
            return (parts){0, 0};
        const long some = parts_at_once(left, count, threads);
        if (atomic_compare_exchange_weak(&team.ticket, &ticket, ticket - some))
            return (parts){count - left, count - left + some};
    }
}

static void work(int member)
{
    long taken = 0, count = 0;
    for (parts some; (some = take(member)).behind; taken += some.behind - some.first) {
        part_action *action = atomic_load(&team.action);
        const void *given = atomic_load(&team.given);
        count = atomic_load(&team.count);
        for (long number = some.first; number < some.behind; number++)
            action(given, number, member);
    }
    if (taken && atomic_fetch_add(&team.done, taken) + taken == count && member)
        wake(0);
}

static void *help(void *number)
{
    const int member = (int)(intptr_t)number;
    for (;;) {
        await(member, is_work);
        work(member);
    }
    return NULL;
}

static void make_beds(void)
{
    for (int member = 0; member <= MOST_HELPERS; member++) {
        bed *own = team.beds + member;
        atomic_store(&own->is_asleep, 0);
        own->crowded_until = 0;
        pthread_mutex_init(&own->door, NULL);
        pthread_cond_init(&own->bell, NULL);
    }
}

/* A forked process has none of the threads. */
static void forget_helpers(void)
{
    atomic_store(&team.ticket, 0);
    atomic_store(&team.is_taken, 0);
    team.helpers = team.is_whole = 0;
    make_beds();
}

static int start_helper(int member)
{
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    for (int at = 0; at < CRASHES; at++)
        sigdelset(&all, crashes[at]); /* of the thread itself: blocked, they would end the process without a report */
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of the program */
    const int error = pthread_create(&thread, &attributes, help, (void *)(intptr_t)member);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return !error;
}

/* Starts what is missing, for a caller that has the team. Where there is no room for a thread, there are fewer. */
static int members_of(int threads)
{
    static int is_known; /* to the process, which its forks inherit */
    if (!is_known) {
        is_known = 1;
        make_beds();
        pthread_atfork(NULL, NULL, forget_helpers);
    }
    while (team.helpers < threads - 1 && !team.is_whole)
        if (team.helpers < MOST_HELPERS && start_helper(team.helpers + 1))
            team.helpers++;
        else
            team.is_whole = 1;
    return threads <= team.helpers ? threads : team.helpers + 1;
}

static void share_with_team(const void *given, long first, long count, int threads, part_action action)
{
    const int members = members_of(threads);
    const uint64_t number = (atomic_load(&team.ticket) >> 32) + 1;
    atomic_store(&team.action, action);
    atomic_store(&team.given, given);
    atomic_store(&team.count, count);
    atomic_store(&team.threads, members);
    atomic_store(&team.done, first);
    atomic_store(&team.ticket, number << 32 | (uint64_t)(count - first));
    for (int member = 1; member < members && member < count - first; member++)
        wake(member);
    work(0);
    if (!is_over(0))
        await(0, is_over);
}

void share_out(const void *given, long count, int threads, part_action action)
{
    for (long number = 0; number < count; number++) {
        if (threads > 1 && count - number > 1 && count <= UINT32_MAX && !atomic_exchange(&team.is_taken, 1)) {
            share_with_team(given, number, count, threads, action);
            atomic_store(&team.is_taken, 0);
            return;
        }
        action(given, number, 0);
    }
}

/* Starts the team while there is room for its threads. Gives how many there are, with the caller. */
int start_team(int threads)
{
    int members = 1;
    if (threads > 1 && !atomic_exchange(&team.is_taken, 1)) {
        members = members_of(threads);
        atomic_store(&team.is_taken, 0);
    }
    return members;
}
