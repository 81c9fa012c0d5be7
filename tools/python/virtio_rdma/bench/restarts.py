# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""How long guests wait while the device's process is restarted, and until they have their devices again behind a
process that was killed."""

import re
import sys
import time

from virtio_rdma import guests
from virtio_rdma.bench import plan
from virtio_rdma.common import Failure, say
from virtio_rdma.guests.supervised import Supervised

# How often the process is restarted and killed, in a run of 20 minutes (False), and in one of 2 (True).
ROUNDS = {False: 9, True: 3}
# The bound on what makes the objects, in seconds.
HANG_SECONDS = 120
PATH = "rings"


class Restarts:
    """Two user-mode Linux guests whose device's process ends again and again."""

    def __init__(self, vmm, options, found):
        self.vmm = vmm
        self.found = found
        self.rounds = ROUNDS[options.quick]
        self.points = {point.tool: point for point in plan.points(vmm, options.quick)
                       if not options.only or re.search(options.only, f"{point.tool} {point.size} {point.qps}")}
        self.network = Supervised(guests.Options(vmm="uml", guests=2, rdma="virtio", kernel_dir=options.kernel[vmm],
                                                 image=options.image, share=options.share))

    def run(self):
        """Measures everything."""
        if not self.points:
            return
        print(f"{self.vmm}: boot 2 guests", file=sys.stderr, flush=True)
        failed = True
        try:
            self.network.boot()
            self.upgrades()
            self.crashes()
            failed = False
        finally:
            self.network.close(failed)
            if failed:
                say("logs: " + " ".join(self.network.logs()))

    def record(self, tool, number, value):
        """Keeps a figure."""
        point = self.points.get(tool)
        if point:
            row = self.found.row(self.vmm, PATH, point.tool, point.size, point.qps, point.unit)
            row.samples[(number, point.key)] = value

    def upgrades(self):
        """Measures the pause of a restart while both guests have many objects, and without those."""
        print(f"{self.vmm}: restarts", file=sys.stderr, flush=True)
        self.restart("pause")
        holders = [self.hold(guest) for guest in self.network.guests]
        for holder in holders:
            if not holder.shows("holding", HANG_SECONDS):
                raise Failure(f"objects: {holder.text}")
        self.restart("pause_full")
        for holder in holders:
            holder.kill()
            if holder.wait(HANG_SECONDS):
                raise Failure(f"objects: {holder.text}")

    @staticmethod
    def hold(guest):
        """Starts a program that makes the objects."""
        assert guest.link
        device, index = guest.link
        return guest.start(["python3", "-B", "/mnt/objects.py", device, str(index), "hold", str(plan.HELD_QPS),
                            str(plan.HELD_MRS)])

    def restart(self, tool):
        """Measures how long the guests were not served, as the device's process says it."""
        for number in range(self.rounds):
            self.network.restart()
            self.record(tool, number, self.network.pauses()[-1])

    def crashes(self):
        """Measures the time from the end of a process that is killed until all guests have their devices again."""
        print(f"{self.vmm}: kills", file=sys.stderr, flush=True)
        for number in range(self.rounds):
            start = time.monotonic()
            self.network.crash()
            self.network.wait_recovered()
            self.record("recovery", number, 1000 * (time.monotonic() - start))
