#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Datagrams of Reliable Datagram Sockets over RDMA: one host sends them back to
the other, which looks at what comes.

Usage: rds.py serve ADDRESS | ask ADDRESS SERVER COUNT | load ADDRESS SERVER STOP

The last one goes on until there is a file STOP, and says "running" every now and
then.
"""

import itertools
import os
import random
import socket
import sys

PORT = 18800
LONGEST = 60000
# linux/rds.h
AF_RDS = 21
SOL_RDS = 276
SO_RDS_TRANSPORT = 8
RDS_TRANS_IB = 0
END = b"end"


def bound(address):
    """Returns a socket whose datagrams RDMA carries."""
    sock = socket.socket(AF_RDS, socket.SOCK_SEQPACKET)
    sock.setsockopt(SOL_RDS, SO_RDS_TRANSPORT, RDS_TRANS_IB)
    sock.bind((address, PORT))
    return sock


def serve(address):
    """Sends datagrams back until the end."""
    with bound(address) as sock:
        print("listening", flush=True)
        data = b""
        while data != END:
            data, peer = sock.recvfrom(LONGEST)
            sock.sendto(data, peer)


def exchange(sock, server, numbers):
    """Sends datagrams of any size, and expects them back in order, and the end."""
    rng = random.Random(7)
    for number in numbers:
        data = rng.randbytes(rng.randint(1, LONGEST))
        sock.sendto(data, (server, PORT))
        if sock.recvfrom(LONGEST)[0] != data:
            sys.exit(f"datagram {number} of {len(data)} bytes has come back otherwise")
    sock.sendto(END, (server, PORT))
    if sock.recvfrom(LONGEST)[0] != END:
        sys.exit("no end")


def ask(address, server, count):
    """Sends so many datagrams."""
    with bound(address) as sock:
        exchange(sock, server, range(int(count)))
    print(f"{count} datagrams have come back")


def until(stop):
    """Counts until there is a file."""
    for number in itertools.count():
        if number % 50 == 0:
            print("running", flush=True)
            if os.path.exists(stop):
                return
        yield number


def load(address, server, stop):
    """Sends datagrams until there is a file."""
    with bound(address) as sock:
        exchange(sock, server, until(stop))


if __name__ == "__main__":
    {"serve": serve, "ask": ask, "load": load}[sys.argv[1]](*sys.argv[2:])
