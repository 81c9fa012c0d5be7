# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The command line of tools/vm/vm, inside the build root."""

import argparse
import os
import re
import shutil
import signal
import sys
import termios
import threading
import tty

from virtio_rdma import guests
from virtio_rdma.common import Failure, end_on, say

INTERRUPTED = 130


def parse(argv):
    """Returns the options of the guests, and the command lines by the number of their guest."""
    own, command = argv, []
    if "--" in argv:
        split = argv.index("--")
        own, command = argv[:split], argv[split + 1:]
    parser = argparse.ArgumentParser(prog="vm", allow_abbrev=False)
    parser.add_argument("--vmm", default="qemu")
    parser.add_argument("--guests", type=int, default=1)
    parser.add_argument("--rdma", default="virtio")
    parser.add_argument("--kernel", default="plain")
    parser.add_argument("--share", default="")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--memory", type=int)
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--image", required=True)
    parser.add_argument("--kernel-dir", required=True)
    parser.add_argument("--hugetlb", action="store_true")
    parser.add_argument("--swap", action="store_true")
    parser.add_argument("--keep", action="store_true")
    arguments, rest = parser.parse_known_args(own)
    commands = {}
    for word in rest:
        match = re.fullmatch(r"--cmd(\d+)=(.*)", word, re.S)
        if not match:
            parser.error(f"unknown argument {word}")
        commands[int(match[1])] = match[2]
    if not 1 <= arguments.guests <= 99:
        parser.error("--guests: 1 to 99")
    if not 1280 <= arguments.mtu <= 65535:
        parser.error("--mtu: 1280 to 65535")
    if any(number > arguments.guests or number < 1 for number in commands):
        parser.error("--cmdN: there is no such guest")
    if arguments.memory is None:
        arguments.memory = 2048 if arguments.kernel == "debug" else 1024
    options = guests.Options(serial=arguments.swap, **vars(arguments))
    common = command[0] if len(command) == 1 else command
    for number in range(1, options.guests + 1):
        if common:
            commands.setdefault(number, common)
    return options, commands


class Prefixer:
    """Writes a guest's output a whole line at a time, its number in front."""

    lock = threading.Lock()

    def __init__(self, number, many):
        self.prefix = f"{number}: ".encode() if many else b"1: "
        self.rest = b""

    def __call__(self, text):
        *lines, self.rest = (self.rest + text.encode("latin-1")).split(b"\n")
        self.write(lines)

    def write(self, lines):
        with self.lock:
            for line in lines:
                sys.stdout.buffer.write(self.prefix + line + b"\n")
            sys.stdout.buffer.flush()

    def end(self):
        if self.rest:
            self.write([self.rest])


def run_all(network, commands):
    """Runs the commands at the same time, and returns the first status that is not 0."""
    statuses = []
    waiters = []

    def one(guest, command):
        sink = Prefixer(guest.number, len(network.guests) > 1)
        status = guest.start(command, sink=sink).wait()
        sink.end()
        if status:
            statuses.append(status)

    for number, command in sorted(commands.items()):
        guest = network.guests[number - 1]
        waiters.append(threading.Thread(target=one, args=(guest, command)))
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join()
    return statuses[0] if statuses else 0


def shell(guest):
    """Connects this terminal with a shell in the guest, and returns its status."""
    size = shutil.get_terminal_size()
    saved = termios.tcgetattr(0)

    def sink(text):
        os.write(1, text.encode("latin-1"))

    job = guest.agent.new_job("shell", sink)
    guest.agent.send(id=job.number, shell=[size.lines, size.columns])
    tty.setraw(0)
    try:
        def copy():
            while not job.done.is_set():
                data = os.read(0, 256)
                if not data:
                    return
                job.type(data.decode("latin-1"))

        threading.Thread(target=copy, daemon=True).start()
        return job.wait()
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, saved)


def judge(network, status):
    """Returns the exit status, with the kernel logs taken into account."""
    panicked = [guest for guest in network.guests if guest.panicked]
    reports = network.reports()
    for number, line in reports[:20]:
        say(f"guest {number} kernel log: {line}")
    if panicked or (reports and network.options.kernel == "debug"):
        status = status or 1
    return status


def main():
    options, commands = parse(sys.argv[1:])
    interactive = not commands
    if interactive and not sys.stdin.isatty():
        raise Failure("no command, and no terminal for a shell")
    end_on(signal.SIGTERM, signal.SIGHUP)
    network = guests.Network(options)
    try:
        network.boot()
        status = shell(network.guests[0]) if interactive else run_all(network, commands)
        status = judge(network, status)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Failure as failure:
        say(str(failure))
        status = judge(network, 1)
    finally:
        network.close(failed="status" in locals() and status != 0 and not interactive)
    if status and not interactive:
        say("logs: " + " ".join(network.logs()))
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        say(str(failure))
        sys.exit(1)
