#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Moves data between the ranks of an MPI program and looks at every byte.

Usage: mpirun ... mpi_data.py point-to-point | one-sided | collectives

Each message holds bytes that follow from its sender, receiver and number, so
that one that went elsewhere, came twice or came in part is seen.
"""

import sys
from array import array

from mpi4py import MPI

COMM = MPI.COMM_WORLD
RANK, RANKS = COMM.Get_rank(), COMM.Get_size()
# Around the limits at which UCX changes how it sends: inline, by a copy, by a rendezvous.
SIZES = (0, 1, 8, 63, 64, 65, 1000, 1024, 4096, 8191, 8192, 8193, 65536, 100001, 1 << 20)
ROUNDS = 5
WINDOW = 16
# Additions of each rank to a counter that all of them use.
TURNS = 20


def pattern(sender, receiver, number, size):
    """What a message holds."""
    seed = bytes(((sender * 7 + receiver * 13 + number * 29 + i * 31) & 255) for i in range(251))
    return (seed * (size // len(seed) + 1))[:size]


def want(what, got, expected):
    """Ends the whole program where data differs."""
    if got == expected:
        return
    at = next((i for i, pair in enumerate(zip(got, expected)) if pair[0] != pair[1]), min(len(got), len(expected)))
    print(f"rank {RANK}: {what}: differs at {at} of {len(expected)}", flush=True)
    COMM.Abort(1)


def point_to_point():
    """Messages of each size to each other rank, many under way, received in
    another order than they are sent, and some before anybody asks for them."""
    for size in SIZES:
        for number in range(ROUNDS if size > 65536 else WINDOW):
            sends, buffers = [], {}
            early = number % 2
            for peer in range(RANKS):
                if peer != RANK:
                    sends.append(COMM.Isend([pattern(RANK, peer, number, size), MPI.BYTE], peer, number))
            if early:
                COMM.Barrier()
            receives = []
            for peer in reversed(range(RANKS)):
                if peer != RANK:
                    buffers[peer] = bytearray(size)
                    receives.append(COMM.Irecv([buffers[peer], MPI.BYTE], peer, number))
            MPI.Request.Waitall(receives + sends)
            for peer, got in buffers.items():
                want(f"message {number} of {peer}", bytes(got), pattern(peer, RANK, number, size))
    probed()


def probed():
    """A receiver that asks how long a message is, and who sent it."""
    if RANK == 0:
        for number in range(RANKS - 1):
            status = MPI.Status()
            COMM.Probe(MPI.ANY_SOURCE, 99, status)
            sender, size = status.Get_source(), status.Get_count(MPI.BYTE)
            got = bytearray(size)
            COMM.Recv([got, MPI.BYTE], sender, 99)
            want(f"probed message {number}", bytes(got), pattern(sender, 0, 99, 1000 * sender))
    else:
        COMM.Ssend([pattern(RANK, 0, 99, 1000 * RANK), MPI.BYTE], 0, 99)


def one_sided():
    """Put, get and atomics, with fences and with locks."""
    longest = max(SIZES)
    window = MPI.Win.Allocate(longest * RANKS, 1, comm=COMM)
    memory = window.tomemory()
    following, preceding = (RANK + 1) % RANKS, (RANK - 1) % RANKS
    for number, size in enumerate(SIZES):
        data = pattern(RANK, following, number, size)
        window.Fence()
        window.Put([data, MPI.BYTE], following, [RANK * longest, size, MPI.BYTE])
        window.Fence()
        expected = pattern(preceding, RANK, number, size)
        want("put", bytes(memory[preceding * longest:preceding * longest + size]), expected)
        got = bytearray(size)
        window.Lock(following, MPI.LOCK_SHARED)
        window.Get([got, MPI.BYTE], following, [RANK * longest, size, MPI.BYTE])
        window.Unlock(following)
        want("get", bytes(got), data)
    window.Fence()
    window.Free()
    counters()


def counters():
    """Every rank adds to the counters of rank 0, in turns that only atomics can
    keep apart."""
    window = MPI.Win.Allocate(16, 8, comm=COMM)
    memory = memoryview(window.tomemory()).cast("q")
    memory[0] = memory[1] = 0
    COMM.Barrier()
    one, old, seen = array("q", [1]), array("q", [0]), []
    window.Lock_all()
    for _ in range(TURNS):
        window.Fetch_and_op([one, MPI.INT64_T], [old, MPI.INT64_T], 0, 0, MPI.SUM)
        window.Flush(0)
        seen.append(old[0])
        expected, swapped = array("q", [0]), False
        while not swapped:
            new, found = array("q", [expected[0] + 1]), array("q", [0])
            window.Compare_and_swap([new, MPI.INT64_T], [expected, MPI.INT64_T], [found, MPI.INT64_T], 0, 1)
            window.Flush(0)
            swapped = found[0] == expected[0]
            expected = found
    window.Unlock_all()
    values = sorted(value for part in COMM.allgather(seen) for value in part)
    want("values fetched", values, list(range(TURNS * RANKS)))
    if RANK == 0:
        window.Lock(0)
        want("counters", list(memory), [TURNS * RANKS] * 2)
        window.Unlock(0)
    COMM.Barrier()
    window.Free()


def collectives():
    """Each with short and with long data, from each root."""
    for count in (1, 100, 2000, 100000):
        for root in range(RANKS):
            data = array("i", [root * 1000 + i for i in range(count)] if RANK == root else [0] * count)
            COMM.Bcast([data, MPI.INT], root)
            want("bcast", data, array("i", [root * 1000 + i for i in range(count)]))
        mine, total = array("i", [RANK + i for i in range(count)]), array("i", [0] * count)
        sums = array("i", [RANKS * (RANKS - 1) // 2 + RANKS * i for i in range(count)])
        COMM.Allreduce([mine, MPI.INT], [total, MPI.INT], MPI.SUM)
        want("allreduce", total, sums)
        COMM.Barrier()
        sent = array("i", [RANK * 100 + peer for peer in range(RANKS) for _ in range(count)])
        got = array("i", [0] * count * RANKS)
        COMM.Alltoall([sent, MPI.INT], [got, MPI.INT])
        want("alltoall", got, array("i", [peer * 100 + RANK for peer in range(RANKS) for _ in range(count)]))
        COMM.Allgather([mine, MPI.INT], [got, MPI.INT])
        want("allgather", got, array("i", [peer + i for peer in range(RANKS) for i in range(count)]))


if __name__ == "__main__":
    {"point-to-point": point_to_point, "one-sided": one_sided, "collectives": collectives}[sys.argv[1]]()
    COMM.Barrier()
    if RANK == 0:
        print(f"{sys.argv[1]}: {RANKS} ranks agree", flush=True)
