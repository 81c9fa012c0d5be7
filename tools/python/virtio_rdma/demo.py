# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The demonstration behind "make run", inside the build root.

Arguments: the kernel's build directory, the guest image.
"""

import json
import os
import re
import signal
import sys
import time

from virtio_rdma import guests
from virtio_rdma.common import BUILD, Failure, end_on
from virtio_rdma.guests import qemu
from virtio_rdma.guests.hosts import Uplinked

TCP_PORT = 18515  # of ibv_rc_pingpong and of perftest
# The bound on a command that hangs, in seconds. No command takes a tenth of it.
HANG_SECONDS = 600
# Name, size and number of messages, unit, and the pattern of the line with the result: bandwidth
# is the average column, latency the typical one (the median).
TOOLS = (
    ("ib_write_bw", 65536, 2000, "MiB/s", r"^\s*65536\s+\d+\s+\S+\s+(\S+)"),
    ("ib_read_bw", 65536, 2000, "MiB/s", r"^\s*65536\s+\d+\s+\S+\s+(\S+)"),
    ("ib_send_lat", 2, 1000, "us", r"^\s*2\s+\d+\s+\S+\s+\S+\s+(\S+)"),
    ("ib_read_lat", 2, 1000, "us", r"^\s*2\s+\d+\s+\S+\s+\S+\s+(\S+)"),
)
# Which drivers the two guests have.
VIRTIO, MIXED, RXE = "virtio", "virtio with rxe", "rxe"
# What the number of messages is divided by: with all of them, rxe would take most of the time.
FEWER = {VIRTIO: 1, MIXED: 5, RXE: 5}
TUN = "/dev/net/tun"


class Demo:
    def __init__(self, network):
        self.network = network
        self.server, self.client = network.guests

    def step(self, title, action, *arguments):
        """Runs one step, and says which and how long it took, or that it failed."""
        print(f"{title:<44}", end="", file=sys.stderr, flush=True)
        start = time.monotonic()
        try:
            result = action(*arguments)
        except Failure as failure:
            print("FAILED", file=sys.stderr)
            raise Failure(f'step "{title}" failed: {failure}') from failure
        print(f"{time.monotonic() - start:6.1f} s", file=sys.stderr, flush=True)
        return result

    def links(self, kind, *guests):
        for guest in guests:
            self.network.rdma_up(guest, kind)

    def both(self, tool, *arguments):
        """Runs a tool's server in guest 1 and its client in guest 2, and returns the client's output. {device} and
        {index} in an argument are those of the guest's link."""
        argv, ours = ([tool, *(each.format(device=guest.link[0], index=guest.link[1]) for each in arguments)]
                      for guest in (self.client, self.server))
        server = self.server.start(ours)
        while self.server.run(f"grep -qi ':{TCP_PORT:04X} [^ ]* 0A ' /proc/net/tcp /proc/net/tcp6")[0]:
            if server.status is not None:
                raise Failure(f"{' '.join(argv)}: the server ended: {server.text}")
            time.sleep(0.05)
        status, text = self.client.run([*argv, self.server.address], timeout=HANG_SECONDS)
        if status or server.wait(HANG_SECONDS):
            raise Failure(f"{' '.join(argv)}: exit status {status or server.status}\n"
                                 f"client:\n{text}\nserver:\n{server.text}")
        return text

    def show(self, argv):
        """Runs a command in guest 1, and shows its output."""
        print(self.server.check(argv).rstrip(), flush=True)

    def pingpong(self):
        return self.both("ibv_rc_pingpong", "-d", "{device}", "-g", "{index}", "-c", "-n", "500")

    def measure(self, tool, arguments, pattern):
        """Returns one figure of perftest."""
        text = self.both(tool, "-d", "{device}", "-x", "{index}", "-F", *arguments)
        match = re.search(pattern, text, re.MULTILINE)
        if not match:
            raise Failure(f"{tool} printed no result:\n{text}")
        return float(match[1])

    def figures(self, kind):
        """Runs every tool over one driver, after a ping-pong that checks its data, and returns their figures."""
        self.step(f"{kind}: ibv_rc_pingpong -c", self.pingpong)
        return [self.figure(kind, *tool) for tool in TOOLS]

    def figure(self, kind, tool, size, count, _unit, pattern):
        """Returns one figure. rxe, which is there for comparison and as a peer, may fail: on a machine that is much too
        busy its own time-outs end it. Its figure is None then."""
        arguments = ("-s", str(size), "-n", str(count // FEWER[kind]))
        title = f"{kind}: {tool} {' '.join(arguments)}"
        try:
            return self.step(title, self.measure, tool, arguments, pattern)
        except Failure as failure:
            if kind == VIRTIO:
                raise
            print(failure, file=sys.stderr)
            return None

    @staticmethod
    def unload(guest):
        guest.check(["rmmod", "virtio_rdma"], timeout=HANG_SECONDS)

    def over_the_wire(self):
        """Returns the figures of guest 1 with virtio-rdma against guest 2 with rxe, or no figure where the device has
        no way out."""
        self.step("rmmod virtio_rdma in guest 2", self.unload, self.client)
        self.step("rxe on guest 2's NIC", self.links, "rxe", self.client)
        return self.figures(MIXED) if isinstance(self.network, Uplinked) else [None] * len(TOOLS)

    def run(self):
        self.step("boot two guests", self.network.boot, False)
        self.step("insmod virtio_rdma.ko", self.links, "virtio", self.server, self.client)
        self.show(["rdma", "link", "show"])
        self.show(["ibv_devinfo", "-d", self.server.link[0]])
        virtio = self.figures(VIRTIO)
        mixed = self.over_the_wire()
        self.step("rmmod virtio_rdma in guest 1", self.unload, self.server)
        self.step("rxe on guest 1's NIC", self.links, "rxe", self.server)
        self.step("rxe's packets to the NIC again", self.away)
        rxe = self.figures(RXE)
        return [
            {"tool": tool, "size": size, "unit": unit, "virtio": ours, "mixed": both, "rxe": theirs,
             "ratio": theirs and round(times_better(ours, theirs, unit), 2)}
            for (tool, size, _, unit, _), ours, both, theirs in zip(TOOLS, virtio, mixed, rxe)
        ]

    def away(self):
        if isinstance(self.network, Uplinked):
            self.network.redirect(False)


def has_taps():
    """Returns whether this machine has taps, over which guests reach what is not of their device."""
    try:
        os.close(os.open(TUN, os.O_RDWR))
    except OSError:
        return False
    return True


def times_better(ours, theirs, unit):
    """Returns how many times more bandwidth, or less latency, ours is."""
    return ours / theirs if unit == "MiB/s" else theirs / ours


def cell(value, width):
    """Returns a figure in a column."""
    return f"{value:>{width}.2f}" if value else f"{'-':>{width}}"


def table(rows):
    """Prints what was measured. The column in the middle is over the wire."""
    print(f"\n{'':<14}{'size':>8}{'virtio-rdma':>14}{'with rxe':>12}{'rxe':>12}{'unit':>8}{'times better':>15}")
    for row in rows:
        ratio = f"{row['ratio']:>15.1f}" if row["ratio"] else f"{'-':>15}"
        figures = cell(row["virtio"], 14) + cell(row["mixed"], 12) + cell(row["rxe"], 12)
        print(f"{row['tool']:<14}{row['size']:>8}{figures}{row['unit']:>8}{ratio}")
    print("\nwith rxe: guest 1 with virtio-rdma, guest 2 with rxe on its NIC, in packets of RoCE v2")
    if not rows[0]["mixed"]:
        print("(failed, see above)" if has_taps() else f"(not measured: {TUN} cannot be opened)")


def main(kernel_dir, image):
    end_on(signal.SIGTERM)
    options = guests.Options(vmm="qemu", guests=2, rdma="virtio", kernel_dir=kernel_dir, image=image,
                             device=os.path.join(BUILD, "quick", "virtio-rdmad"))
    kind = Uplinked if has_taps() else guests.Network
    network = kind(options)
    failed = True
    try:
        rows = Demo(network).run()
        table(rows)
        accelerator = "KVM" if qemu.kvm_works(options) else "TCG"
        print(f"the guests ran under {accelerator}" + " (emulation; no KVM)" * (accelerator == "TCG"))
        with open(os.path.join(BUILD, "run.json"), "w", encoding="ascii") as file:
            json.dump({"accelerator": accelerator, "rows": rows}, file, indent=1)
        print("\nalso in build/run.json")
        failed = False
    except KeyboardInterrupt:
        return 130
    except Failure as failure:
        print(failure, file=sys.stderr)
        return 1
    finally:
        network.close(failed)
        if failed:
            print("logs: " + " ".join(network.logs()), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
