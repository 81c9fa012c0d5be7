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
# What the number of messages is divided by: with all of them, rxe would take most of the time.
FEWER = {"virtio": 1, "rxe": 5}


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

    def links(self, kind):
        return [self.network.rdma_up(guest, kind) for guest in self.network.guests]

    def both(self, argv):
        """Runs a tool's server in guest 1 and its client in guest 2, and returns the client's output."""
        server = self.server.start(argv)
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

    def pingpong(self, device, index):
        return self.both(["ibv_rc_pingpong", "-d", device, "-g", str(index), "-c", "-n", "500"])

    def measure(self, tool, arguments, pattern, device, index):
        """Returns one figure of perftest."""
        text = self.both([tool, "-d", device, "-x", str(index), "-F", *arguments])
        match = re.search(pattern, text, re.MULTILINE)
        if not match:
            raise Failure(f"{tool} printed no result:\n{text}")
        return float(match[1])

    def figures(self, kind, link):
        """Runs every tool over one driver, after a ping-pong that checks its data, and returns their figures."""
        self.step(f"{kind}: ibv_rc_pingpong -c", self.pingpong, *link)
        return [self.figure(kind, link, *tool) for tool in TOOLS]

    def figure(self, kind, link, tool, size, count, _unit, pattern):
        """Returns one figure. rxe, which is there for comparison, may fail: on a machine that is much too busy its own
        time-outs end it. Its figure is None then."""
        arguments = ("-s", str(size), "-n", str(count // FEWER[kind]))
        title = f"{kind}: {tool} {' '.join(arguments)}"
        try:
            return self.step(title, self.measure, tool, arguments, pattern, *link)
        except Failure as failure:
            if kind != "rxe":
                raise
            print(failure, file=sys.stderr)
            return None

    def unload(self):
        for guest in self.network.guests:
            guest.check(["rmmod", "virtio_rdma"], timeout=HANG_SECONDS)

    def run(self):
        self.step("boot two guests", self.network.boot, False)
        (link, _) = self.step("insmod virtio_rdma.ko", self.links, "virtio")
        self.show(["rdma", "link", "show"])
        self.show(["ibv_devinfo", "-d", link[0]])
        virtio = self.figures("virtio", link)
        self.step("rmmod virtio_rdma", self.unload)
        (link, _) = self.step("rxe on the same guests' NICs", self.links, "rxe")
        rxe = self.figures("rxe", link)
        return [
            {"tool": tool, "size": size, "unit": unit, "virtio": ours, "rxe": theirs,
             "ratio": theirs and round(times_better(ours, theirs, unit), 2)}
            for (tool, size, _, unit, _), ours, theirs in zip(TOOLS, virtio, rxe)
        ]


def times_better(ours, theirs, unit):
    """Returns how many times more bandwidth, or less latency, ours is."""
    return ours / theirs if unit == "MiB/s" else theirs / ours


def table(rows):
    print(f"\n{'':<14}{'size':>8}{'virtio-rdma':>14}{'rxe':>12}{'unit':>8}{'times better':>15}")
    for row in rows:
        theirs = (f"{row['rxe']:>12.2f}{row['unit']:>8}{row['ratio']:>15.1f}" if row["rxe"]
                  else f"{'failed':>12}{row['unit']:>8}")
        print(f"{row['tool']:<14}{row['size']:>8}{row['virtio']:>14.2f}{theirs}")


def main(kernel_dir, image):
    end_on(signal.SIGTERM)
    options = guests.Options(vmm="qemu", guests=2, rdma="virtio", kernel_dir=kernel_dir, image=image)
    network = guests.Network(options)
    failed = True
    try:
        rows = Demo(network).run()
        table(rows)
        with open(os.path.join(BUILD, "run.json"), "w", encoding="ascii") as file:
            json.dump({"rows": rows}, file, indent=1)
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
