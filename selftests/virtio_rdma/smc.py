#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Streams of SMC-R version 2 (RFC 7609 and its successor of IBM): sockets of TCP whose
bytes RDMA carries. One host sends them back to the other, which looks at what comes.

Usage: smc.py ueid | smc.py serve ADDRESS | smc.py ask SERVER COUNT | smc.py once SERVER | smc.py load SERVER STOP |
       smc.py groups | smc.py gone [GROUP...]

"ueid" gives the host the name of the group that both must be in: without one, version 2 is not used, and the streams
go by TCP. "ask" opens so many connections, two at a time, and fails if one of them went by TCP. "once" opens one, which
may go by TCP. "load" uses one connection until there is a file STOP, and says "running" every now and then. "groups"
prints the numbers of the link groups that the host has, and "gone" fails if it has one of these groups. No group gets
the number of an earlier one while the module of SMC is loaded.
"""

import contextlib
import os
import random
import socket
import struct
import sys
import threading
from concurrent import futures

PORT = 18801
# linux/in.h
IPPROTO_SMC = 256
# linux/netlink.h, linux/genetlink.h and linux/smc.h
NETLINK_GENERIC = 16
NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP = 1, 4, 0x300
GENL_ID_CTRL, CTRL_CMD_GETFAMILY, CTRL_ATTR_FAMILY_ID, CTRL_ATTR_FAMILY_NAME = 16, 3, 1, 2
GET_LGR_SMCR, GET_LINK_SMCR, GET_STATS, ADD_UEID = 2, 3, 7, 10
EID_TABLE_ENTRY = 1
STATS_SMCR_TECH, STATS_T_CLNT_V2_SUCC = 2, 8
LGR_R_ID = 1
LINK_IB_DEV = 2
NESTED = 0x3FFF
# A name of 32 characters with the NUL behind it.
UEID = "VIRTIO.RDMA".ljust(32).encode() + b"\0"
SIZES = (1, 100, 4096, 65537, 1000001, 16 << 20)


def attribute(kind, data):
    """Returns an attribute of netlink."""
    length = 4 + len(data)
    return struct.pack("=HH", length, kind) + data + bytes(-length % 4)


def attributes(data):
    """Yields the kinds and the contents of attributes."""
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            sys.exit(f"no attribute of netlink has {length} bytes")
        yield kind & NESTED, data[4:length]
        data = data[length + -length % 4:]


class Netlink:
    """A socket of generic netlink."""

    def __init__(self, family="SMC_GEN_NETLINK"):
        self.sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_GENERIC)
        self.sock.bind((0, 0))
        name = attribute(CTRL_ATTR_FAMILY_NAME, family.encode() + b"\0")
        (answer,) = self.ask(GENL_ID_CTRL, CTRL_CMD_GETFAMILY, name, NLM_F_ACK)
        (self.family,) = struct.unpack("=H", dict(attributes(answer))[CTRL_ATTR_FAMILY_ID])

    def ask(self, family, command, payload, flags):
        """Sends a command. Returns the payloads of the answers."""
        body = struct.pack("=BBH", command, 1, 0) + payload
        self.sock.send(struct.pack("=LHHLL", 16 + len(body), family, NLM_F_REQUEST | flags, 1, 0) + body)
        answers = []
        while True:
            data = self.sock.recv(1 << 20)
            while data:
                length, kind = struct.unpack_from("=LH", data)
                if kind in (NLMSG_ERROR, NLMSG_DONE):
                    (error,) = struct.unpack_from("=i", data, 16)
                    if error:
                        raise OSError(-error, os.strerror(-error))
                    return answers
                answers.append(data[20:length])
                data = data[length + -length % 4:]

    def dump(self, command):
        """Returns what there is of a kind: the attributes of each."""
        found = []
        for answer in self.ask(self.family, command, b"", NLM_F_DUMP):
            found += [dict(attributes(nest)) for _, nest in attributes(answer)]
        return found

    def add_ueid(self):
        """Adds the name of the group."""
        self.ask(self.family, ADD_UEID, attribute(EID_TABLE_ENTRY, UEID), NLM_F_ACK)

    def carried(self):
        """Returns how many connections of this host's clients went by SMC-R version 2."""
        (found,) = self.dump(GET_STATS)
        return struct.unpack("=Q", dict(attributes(found[STATS_SMCR_TECH]))[STATS_T_CLNT_V2_SUCC])[0]

    def devices(self):
        """Returns the RDMA devices of the links."""
        return {found[LINK_IB_DEV].rstrip(b"\0").decode() for found in self.dump(GET_LINK_SMCR) if LINK_IB_DEV in found}

    def groups(self):
        """Returns the numbers of the link groups that connections may use."""
        return {struct.unpack("=L", found[LGR_R_ID])[0] for found in self.dump(GET_LGR_SMCR)}


def receive(sock, count):
    """Receives so many bytes."""
    data = bytearray()
    while len(data) < count:
        part = sock.recv(min(1 << 20, count - len(data)))
        if not part:
            sys.exit(f"the stream ends after {len(data)} of {count} bytes")
        data += part
    return bytes(data)


def send_back(sock):
    """Sends what comes back to where it came from, until the end, or until the connection breaks."""
    with sock, contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            sock.sendall(data)


def serve(address):
    """Serves until it is told to end."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_SMC) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, PORT))
        sock.listen(16)
        print("listening", flush=True)
        while True:
            threading.Thread(target=send_back, args=sock.accept()[:1], daemon=True).start()


def connect(server):
    """Opens a connection."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_SMC)
    sock.connect((server, PORT))
    return sock


def exchange(sock, seed):
    """Sends blocks of all sizes over a connection, and expects them back."""
    rng = random.Random(seed)
    for size in SIZES:
        data = rng.randbytes(size)
        sender = threading.Thread(target=sock.sendall, args=(data,))
        sender.start()
        if receive(sock, size) != data:
            sys.exit(f"{size} bytes have come back otherwise")
        sender.join()


def once(server, seed):
    """Opens a connection, and closes it when all blocks have come back."""
    with connect(server) as sock:
        exchange(sock, seed)


def ask(server, count):
    """Opens connections, and tells which devices carried them."""
    netlink = Netlink()
    before = netlink.carried()
    with futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda seed: once(server, seed), range(count)))
    print("devices: " + " ".join(sorted(netlink.devices() - {""})))
    if netlink.carried() - before != count:
        sys.exit(f"RDMA carried {netlink.carried() - before} of {count} connections")


def load(server, stop):
    """Exchanges blocks over one connection."""
    seed = 0
    with connect(server) as sock:
        while not os.path.exists(stop):
            print("running", flush=True)
            exchange(sock, seed)
            seed += 1


def main():
    if sys.argv[1] == "ueid":
        Netlink().add_ueid()
    elif sys.argv[1] == "serve":
        serve(sys.argv[2])
    elif sys.argv[1] == "ask":
        ask(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "once":
        once(sys.argv[2], 0)
    elif sys.argv[1] == "groups":
        print(*sorted(Netlink().groups()))
    elif sys.argv[1] == "gone":
        sys.exit(not Netlink().groups().isdisjoint(map(int, sys.argv[2:])))
    else:
        load(sys.argv[2], sys.argv[3])


main()
