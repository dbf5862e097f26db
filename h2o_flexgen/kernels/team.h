/* The threads that compute together: work comes as numbered parts, and whichever thread is there takes the next few.

   The caller takes parts too. It waits for parts that a helper has begun, and never for a helper that has begun none: where another
   process has a helper's core, the caller does the work. Which thread computes a part changes no bit of it. */

#pragma once

/* `member` is 0 for the caller and below `threads` for all: no two threads of a work have the same one. */
typedef void part_action(const void *given, long number, int member);

/* Does the parts from 0 up to `count` with up to so many threads. A caller that finds the team at work computes alone until the team
   is free. */
void share_out(const void *given, long count, int threads, part_action action);

/* Several works in one: where the parts of each begin among all, and behind the last one where they end. Finds the work of a part. */
static inline long work_of_part(const long *begins, long works, long number)
{
    long low = 0, high = works - 1;
    while (low < high) {
        const long middle = (low + high + 1) / 2;
        if (begins[middle] <= number)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}
