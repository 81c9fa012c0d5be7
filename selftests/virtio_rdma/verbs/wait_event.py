#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Waits for a completion that never comes until the device is taken away, then ends with status 0.

Prints "waiting" before that. The kernel wakes it with a completion event, unless
the RDMA device goes before the program reads that; then its CQ is closed, and an
asynchronous event says that the device has failed.
"""

import rc
from rc import e


def main():
    device = rc.open_device()
    channel = rc.CompChannel(device.context)
    cq = rc.CQ(device.context, 16, None, channel, 0)
    cq.req_notify()
    print("waiting", flush=True)
    try:
        channel.get_cq_event(cq)
        cq.ack_events(1)
    except rc.PyverbsError as error:
        print(f"woken: {error}", flush=True)
    # The ring of a CQ is closed at once; a CQ that the kernel polls stays empty until the RDMA device is gone.
    try:
        while True:
            rc.empty(cq)
    except rc.PyverbsError as error:
        print(f"ended: {error}", flush=True)
    event = device.context.get_async_event()
    rc.ktap.equal(event.event_type, e.IBV_EVENT_DEVICE_FATAL, "event")
    event.ack()


if __name__ == "__main__":
    main()
