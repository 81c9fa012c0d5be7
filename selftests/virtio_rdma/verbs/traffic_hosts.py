#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Exchanges messages with this program on another host until the active side is told to end (SIGTERM).

Usage: traffic_hosts.py PORT

PORT is the TCP port on which the two sides find each other; PEERS and GUEST in the environment are those of hosts.py.
The active side sends numbered messages, some at a time, and the other side sends them back. Both sleep until a message
comes, and compare it with the one that is due: a message that is lost, doubled or altered, and a QP that ends, end the
program with an error. The active side prints "running" now and then, as long as messages come back.
"""

import os
import random
import select
import signal
import sys
import time

import hosts
import rc
from rc import e, sge

# How many messages are under way, and the bytes of each.
WINDOW, LENGTH = 8, 8192
# What the last message holds.
END = b"\xff" * LENGTH
# The time between two lines of output, in seconds.
PAUSE = 0.2


def message(number):
    """Returns the message with a number."""
    return number.to_bytes(8, "little") + random.Random(number).randbytes(LENGTH - 8)


class Flow:
    """One side of the connection. Message n is at place n modulo WINDOW of each region."""

    def __init__(self, side):
        self.end = side.endpoint(depth=WINDOW, channel=True)
        self.source, self.target = (self.end.memory(WINDOW * LENGTH) for _ in range(2))
        self.sent = self.came = 0
        for number in range(WINDOW):
            self.receive(number)
        self.end.recv_cq.req_notify()
        side.exchange()

    @staticmethod
    def place(region, number):
        """Returns the SGE of a message in a region."""
        return sge(region, number % WINDOW * LENGTH, LENGTH)

    def receive(self, number):
        """Posts the receive of a message."""
        self.end.post_recv([self.place(self.target, number)], number)

    def send(self, data):
        """Sends the next message. Its place is free."""
        self.source.write(data, LENGTH, self.sent % WINDOW * LENGTH)
        self.end.post_send(e.IBV_WR_SEND, [self.place(self.source, self.sent)])
        self.sent += 1

    def messages(self):
        """Yields messages as they come, without an end. Each is the one that is due, or END."""
        while True:
            for completion in self.end.recv_cq.poll(WINDOW)[1]:
                rc.ktap.equal((completion.wr_id, rc.status_name(completion.status)), (self.came, "SUCCESS"), "receive")
                data = self.target.read(LENGTH, self.came % WINDOW * LENGTH)
                if data != END:
                    rc.ktap.same_bytes(data, message(self.came), f"message {self.came}")
                self.receive(self.came + WINDOW)
                self.came += 1
                yield data
            # A signal would end a wait of the library's with an error.
            select.select([self.end.channel_fd], [], [])
            self.end.channel.get_cq_event(self.end.recv_cq)
            self.end.recv_cq.ack_events(1)
            self.end.recv_cq.req_notify()


def lead(flow):
    """Sends messages until this program is told to end, and then END."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    said = 0.0
    for number in range(WINDOW):
        flow.send(message(number))
    for data in flow.messages():
        rc.complete(flow.end.send_cq)
        if data == END:
            return
        if not told:
            flow.send(message(flow.sent))
        elif flow.came == flow.sent:
            flow.send(END)
        if time.monotonic() > said + PAUSE:
            said = time.monotonic()
            print("running", flush=True)


def follow(flow):
    """Sends back what comes, up to END."""
    for data in flow.messages():
        flow.send(data)
        rc.complete(flow.end.send_cq)
        if data == END:
            return


def main():
    hosts.TCP_PORT = int(sys.argv[1])
    with next(hosts.links()) as link:
        side = hosts.Side(rc.open_device(), link, os.environ["GUEST"] != "1")
        flow = Flow(side)
        (lead if side.active else follow)(flow)
        side.exchange()
        for cq in (flow.end.send_cq, flow.end.recv_cq):
            rc.empty(cq)
        flow.end.close()
    print(f"{flow.came} messages came", flush=True)


if __name__ == "__main__":
    main()
