#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Datagrams of Reliable Datagram Sockets over RDMA: one host sends them back to
the other, which looks at what comes.

Usage: rds.py serve ADDRESS | ask ADDRESS SERVER COUNT
"""

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


def ask(address, server, count):
    """Sends datagrams of any size, and expects them back in order."""
    rng = random.Random(7)
    with bound(address) as sock:
        for number in range(int(count)):
            data = rng.randbytes(rng.randint(1, LONGEST))
            sock.sendto(data, (server, PORT))
            if sock.recvfrom(LONGEST)[0] != data:
                sys.exit(f"datagram {number} of {len(data)} bytes has come back otherwise")
        sock.sendto(END, (server, PORT))
        if sock.recvfrom(LONGEST)[0] != END:
            sys.exit("no end")
    print(f"{count} datagrams have come back")


if __name__ == "__main__":
    {"serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:])
