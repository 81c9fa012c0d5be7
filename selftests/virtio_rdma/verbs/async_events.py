# SPDX-License-Identifier: GPL-2.0
"""Asynchronous events of a program, which has no completion channel."""

import os
import select


def async_fd():
    """The descriptor of asynchronous events: that of the only context."""
    names = {int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
             if os.path.lexists(f"/proc/self/fd/{fd}")}
    (found,) = [fd for fd, name in names.items() if name == "anon_inode:[infinibandevent]"]
    return found


def has_event():
    """Whether an event is there already."""
    return bool(select.select([async_fd()], [], [], 0)[0])


def next_event(context):
    """The type of the next event, waited for."""
    event = context.get_async_event()
    kind = event.event_type
    event.ack()
    return kind
