# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""An MPI program: each process says where it is, and gets a long message from the one before it."""

from mpi4py import MPI

LENGTH = 1 << 20

world = MPI.COMM_WORLD
others = (world.rank + 1) % world.size, (world.rank - 1) % world.size
came = bytearray(LENGTH)
world.Sendrecv(bytes([world.rank + 1]) * LENGTH, others[0], 0, came, others[1], 0)
assert came == bytes([others[1] + 1]) * LENGTH
print("hello from", world.rank, "of", world.size, "on", MPI.Get_processor_name(), flush=True)
