/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Ends a program that cannot go on, and says why.
 */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__attribute__((format(printf, 1, 2), noreturn))
static inline void fail(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputc('\n', stderr);
	exit(1);
}

/* Checks a call that returns 0, an error number, or -1 with errno. */
static inline void check(int result, const char *what)
{
	if (result)
		fail("%s: %s", what, strerror(result > 0 ? result : errno));
}

/* Checks a call that returns NULL with errno. */
static inline void *checked(void *result, const char *what)
{
	if (!result)
		fail("%s: %s", what, strerror(errno));
	return result;
}

#endif /* CHECK_H */
