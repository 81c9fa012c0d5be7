# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Guests that reach others over the wire. The uplink of a network is a tap on the bridge that the guests' own
interfaces are on. It belongs to the user that the device's process runs as, which has no capabilities."""

import os
import subprocess

from virtio_rdma.common import TOP
from virtio_rdma.guests.network import UNPRIVILEGED, Network

# What administrators set an uplink up with.
UPLINK = os.path.join(TOP, "tools", "virtio-rdmad", "examples", "uplink")


def uplink(*words):
    """Sets up a part of an uplink."""
    subprocess.run([UPLINK, *words], check=True)


class Uplinked(Network):
    """Guests of one daemon, and in one network, whose uplink leads to what else is on the bridge. What the bridge sends
    to a guest, and is RoCE v2, goes to the daemon for the guests in `redirected`, by their numbers."""

    has_bridge = True
    redirected: tuple[int, ...] = (1,)

    def tap(self, guest):  # pylint: disable=unused-argument
        """Returns the name of the tap that a guest's packets go over."""
        return "tap0"

    def network_of(self, guest):  # pylint: disable=unused-argument
        """Returns the name of the network that a guest is in."""
        return "default"

    def taps(self):
        """Returns the names of the networks by the names of their taps."""
        return {self.tap(guest): self.network_of(guest) for guest in self.of_device()}

    def device_command(self):
        command = [*UNPRIVILEGED, *super().device_command()]
        for tap, network in self.taps().items():
            command += ["--uplink", f"network={network},tap={tap}"]
        return command

    def guest_spec(self, guest):
        return f"{super().guest_spec(guest)},network={self.network_of(guest)}"

    def prepare_networks(self):
        """Puts each tap on the bridge of its guests."""
        super().prepare_networks()
        for tap, bridge in {self.tap(guest): self.bridge_of(guest) for guest in self.of_device()}.items():
            subprocess.run(["ip", "link", "delete", tap], check=False, stderr=subprocess.DEVNULL)
            uplink("up", bridge, tap, "root", str(self.options.mtu))
        # The NIC of user-mode Linux does not segment trains of small UDP packets (vector_rx() of Linux 7.2.12 looks at
        # the size of its buffer), so the host does.
        for guest in self.guests:
            if guest not in self.of_device() and guest.options.vmm == "uml":
                subprocess.run(["ethtool", "-K", f"{guest.name}b", "tx-udp-segmentation", "off"], check=True)
        self.redirect(True)

    def redirect(self, to_taps):
        """Has packets of RoCE v2 go to the taps, or to the guests' own interfaces, where rxe gets them."""
        for guest in self.of_device():
            if guest.number in self.redirected and to_taps:
                uplink("guest", f"{guest.name}b", self.tap(guest))
            elif guest.number in self.redirected:
                uplink("no-guest", f"{guest.name}b")


class Hosts(Uplinked):
    """Guests, each as on a host of its own. Those with another driver, which are among Options.others, have it on their
    own network interface."""

    def tap(self, guest):
        return f"tap{guest.number}"

    def network_of(self, guest):
        return guest.name

    @property
    def redirected(self):
        return tuple(guest.number for guest in self.of_device())
