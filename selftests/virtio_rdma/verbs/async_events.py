# SPDX-License-Identifier: GPL-2.0
"""Asynchronous events of a program, which has no completion channel."""

import os
import select

from rc import descriptors


def async_fds():
    """Returns the descriptors of asynchronous events of all contexts that are open."""
    names = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in descriptors()}
    return {fd for fd, name in names.items() if name == "anon_inode:[infinibandevent]"}


def async_fd():
    """Returns the descriptor of asynchronous events of the only context."""
    (found,) = async_fds()
    return found


def has_event():
    """Returns whether an event is there already."""
    return bool(select.select([async_fd()], [], [], 0)[0])


def next_event(context):
    """Waits for the next event; returns its type."""
    event = context.get_async_event()
    kind = event.event_type
    event.ack()
    return kind
