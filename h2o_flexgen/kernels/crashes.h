/* The signals by which a thread learns that it has crashed. */

#pragma once

#include <signal.h>

static const int crashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
#define CRASHES ((int)(sizeof crashes / sizeof *crashes))
