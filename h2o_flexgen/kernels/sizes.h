/* Numbers that C and Python share: sizes.py reads this file too. A name and a whole number to a line. */

#pragma once

#define KERNELS_VERSION 4     /* counted up when a function's arguments change: what was built from older sources is not called */
#define STEP_HEAD_VALUES 1024 /* of a head in a slot, at most, in attention of a step */
#define REGISTER_VALUES 16    /* float32 values of the widest register */
#define PROMPT_KEYS 256       /* keys of a prompt lie in multiples of so many: whole tiles on every processor */
#define PROMPT_QUERIES 48     /* queries of a prompt that a thread attends at once */
