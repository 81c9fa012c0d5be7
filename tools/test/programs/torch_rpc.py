#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Calls functions of another host by PyTorch RPC, with tensors both ways, and looks at every element.

Usage: torch_rpc.py RANK PORT ADDRESS [killed]; rank 0 has the address ADDRESS, rank 1 calls it, and is called.

TensorPipe is told to use verbs alone: by itself it also takes verbs, but carries large tensors by TCP beside them. With
"killed", rank 1 dies by SIGKILL while rank 0 waits for its answer: rank 0 has to get an error.
"""

import os
import signal
import sys
import time

import torch
from torch.distributed import rpc

SIZES = (1, 1000, 65537)
ROUNDS = 5
SECONDS = 60
# How long the function runs that rank 1 dies in, if it does not die.
LONG = 600


def plus(tensor, number):
    """Returns what the other side expects."""
    return tensor + number


def die():
    """Ends this process as a crash does."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LONG)


def call(peer):
    """Compares the answers of the other side."""
    for size in SIZES:
        for number in range(ROUNDS):
            tensor = torch.arange(size, dtype=torch.int64) * 31 + number
            got = rpc.rpc_sync(peer, plus, (tensor, number), timeout=SECONDS)
            differs = (got != tensor + number).nonzero()
            assert not len(differs), f"{size} elements: the first that differs is {differs[0].item()}"


def main():
    rank, port, address, *how = sys.argv[1:]
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=port)
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=SECONDS, _transports=["ibv"], _channels=["basic"])
    rpc.init_rpc(f"rank{rank}", rank=int(rank), world_size=2, rpc_backend_options=options)
    call(f"rank{1 - int(rank)}")
    if not how:
        rpc.shutdown()
        print(f"rank {rank}: all elements are right", flush=True)
        return
    if rank == "1":
        time.sleep(LONG)
    try:
        rpc.rpc_sync("rank1", die, timeout=LONG)
    except RuntimeError as error:
        print(f"rank 0: the peer died: {error}", flush=True)
        os._exit(0)
    sys.exit("the call of a peer that died returned")


main()
