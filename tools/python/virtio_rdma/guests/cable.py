# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Guests on both sides of a network cable that loses and changes packets of RoCE v2."""

import json
import os
import subprocess
from typing import Any

from virtio_rdma.common import BUILD, Failure, die_with_parent
from virtio_rdma.guests.hosts import Hosts

# The bridges at the ends of the cable, and its taps on them.
BRIDGES = ("bridge", "bridge2")
TAPS = ("cable1", "cable2")
# How many frames wait in a tap of the cable until it takes them: a long message, packet by packet.
QUEUE = 10000
# How long the cable may take to end, in seconds.
END_SECONDS = 20


class Cable:
    """The process that carries frames between two taps (virtio-rdma-impair). Frames other than packets of RoCE v2 pass
    unchanged."""

    def __init__(self) -> None:
        self.process: Any = subprocess.Popen(
            [os.path.join(BUILD, "virtio-rdma-impair"), "--json", *TAPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            encoding="ascii", preexec_fn=die_with_parent)

    def impair(self, **faults: Any):
        """Chooses the faults that packets meet from now on (impair/src/faults.rs). Returns what was counted since the
        last choice. Raises Failure if the cable has ended."""
        try:
            print(json.dumps(faults), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass
        answer = self.process.stdout.readline()
        if not answer:
            raise Failure(f"the cable has ended with status {self.process.wait(END_SECONDS)}")
        return json.loads(answer)

    def end(self):
        """Ends the process, which says what it counted when its input ends."""
        try:
            self.process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Cabled(Hosts):
    """Two hosts, each on a bridge of its own, with a cable between the bridges."""

    cable: Any = None

    def bridge_of(self, guest):
        return BRIDGES[guest.number - 1]

    def prepare_networks(self):
        """Makes the second bridge, and puts an end of the cable on each."""
        subprocess.run(["ip", "link", "delete", BRIDGES[1]], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "add", BRIDGES[1], "type", "bridge"], check=True)
        subprocess.run(["ip", "link", "set", BRIDGES[1], "up"], check=True)
        for tap, bridge in zip(TAPS, BRIDGES):
            subprocess.run(["ip", "link", "delete", tap], check=False, stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "tuntap", "add", tap, "mode", "tap"], check=True)
            subprocess.run(["ip", "link", "set", tap, "txqueuelen", str(QUEUE), "mtu", str(self.options.mtu),
                            "master", bridge, "up"], check=True)
        self.cable = Cable()
        super().prepare_networks()

    def close(self, failed=False):
        super().close(failed)
        if self.cable:
            self.cable.end()
