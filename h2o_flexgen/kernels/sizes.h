/* Numbers that C and Python share: sizes.py reads this file too, a name and a whole number per line. */

#pragma once

#define KERNELS_VERSION 45    /* raised when a function's arguments change: a library built from older sources is not called */
#define STEP_HEAD_VALUES 1024 /* most values of a head in a slot, in attention of a step */
#define REGISTER_VALUES 16    /* float32 values of the widest register */
#define PROMPT_KEYS 256       /* keys of a prompt are filled up to a multiple of this: whole tiles on every processor */
#define PROMPT_QUERIES 48     /* queries of a prompt that a thread attends at once */
#define MANY_QUERIES 16       /* a KV head that more query heads attend has them in tiles */
#define MANY_VALUES 8192      /* and so has one of which fewer heads have more values: the nearest cache does not hold them */
#define STEP_QUERIES 128      /* of which a thread attends so many at once where there are tiles of registers */
#define STEP_SLOTS 256        /* and so many slots, one piece after the other */
#define STEP_BLOCK 32         /* of queries, of values of a head, and of slots: what tiles of registers hold at once */
#define PROMPT_HEADS 8        /* of so many heads, where they are many, a thread attends the prompt */
#define TILE_ROWS 6           /* queries of a tile */
#define SHARED_KEYS 256       /* keys of a shared text that all queries pass before the next ones come */
#define STATE_KEYS 256        /* most values of a key under which a state of a row is read and written */
#define CONVOLVED 8           /* most inputs of a channel that a short convolution adds up */
#define QUEUED_READS 128      /* of single tokens from a disk, under way at once */
#define SHARED_QUERIES 480    /* queries that pass the pieces of a shared text together: their sums stay in a near cache */
