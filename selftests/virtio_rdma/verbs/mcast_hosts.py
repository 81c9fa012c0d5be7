#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Multicast between two hosts: the members on both hosts receive what either host sends, once."""

import hosts
import mcast
from rc import empty


def each_member_once(side, rng):
    """Each host sends in turn. No QP but the members receives it, and no member receives it twice."""
    with mcast.opened(mcast.Ud(), mcast.Ud(), mcast.Ud()) as ends:
        *members, _stranger = ends
        for member in members:
            member.attach(mcast.V4)
        for is_active in (True, False):
            data = rng.randbytes(1000)
            for end in ends:
                end.expect(1)
                end.expect(2)
            side.exchange()
            if side.active == is_active:
                members[0].cast(mcast.V4, data)
            for member in members:
                member.received(data)
            side.exchange()
            for end in ends:
                empty(end.recv_cq)
            side.exchange()


def after_detach(side, rng):
    """A QP that has left the group receives nothing more, and the other host's member still does."""
    with mcast.opened(mcast.Ud()) as (end,):
        end.attach(mcast.V4)
        end.expect()
        if not side.active:
            end.detach(mcast.V4)
        data = rng.randbytes(100)
        side.exchange()
        if side.active:
            end.cast(mcast.V4, data)
            end.received(data)
        side.exchange()
        empty(end.recv_cq)
        side.exchange()


if __name__ == "__main__":
    hosts.run([each_member_once, after_detach])
