#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Moves memory between two hosts with the engine "rdma" of fio, and looks at every byte.

Usage: fio_data.py server VERB | fio_data.py client VERB ADDRESS; VERB is write, read or send.

fio keeps its buffers in a file, which holds the same block again and again where the data is, or has arrived.
"""

import random
import subprocess
import sys

BLOCK = 65536
DEPTH = 16
# A WRITE or READ goes to a block that fio chooses at random; so many meet all of them. fio asks for no retry where no
# receive is posted, so SENDs are as many as the receives that the server posts first.
COUNTS = {"write": 1024, "read": 1024, "send": DEPTH}
MEMORY = "/tmp/fio-memory"
PATTERN = "/tmp/fio-pattern"
# Which side receives the data.
RECEIVES = {"write": "server", "read": "client", "send": "server"}


def main():
    role, verb, *address = sys.argv[1:]
    block = random.Random(verb).randbytes(BLOCK)
    receives = RECEIVES[verb] == role
    with open(PATTERN, "wb") as file:
        file.write(block)
    with open(MEMORY, "wb") as file:
        file.write((bytes(BLOCK) if receives else block) * DEPTH)
    options = ["--name=data", "--ioengine=rdma", "--port=8888", f"--bs={BLOCK}", f"--size={BLOCK * COUNTS[verb]}",
               f"--iodepth={DEPTH}", "--thread", f"--iomem=mmapshared:{MEMORY}"]
    # The side that reads is the server, whatever the verb.
    if role == "server":
        options += ["--rw=read"]
    else:
        options += ["--rw=write", f"--hostname={address[0]}", f"--verb={verb}",
                    "--zero_buffers" if receives else f"--buffer_pattern='{PATTERN}'"]
    subprocess.run(["fio", *options], check=True)
    if receives:
        with open(MEMORY, "rb") as file:
            memory = file.read()
        wrong = [at for at in range(DEPTH) if memory[at * BLOCK:(at + 1) * BLOCK] != block]
        assert not wrong, f"{verb}: these blocks of {DEPTH} are not what was sent: {wrong}"
        print(f"{verb}: {DEPTH} blocks of {BLOCK} bytes are right", flush=True)


main()
