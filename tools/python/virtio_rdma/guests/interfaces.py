# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Guests that reach others through packet sockets on network interfaces of the host."""

import subprocess

from virtio_rdma.guests.network import Network
from virtio_rdma.guests.tunnel import Tunnelled

# What runs the device's process with the one capability that it needs to open the sockets.
NET_RAW = ("setpriv", "--no-new-privs", "--inh-caps=-all,+net_raw", "--bounding-set=-all,+net_raw")


class Interfaces(Tunnelled):
    """Two guests, each in a network of its own, whose interfaces for packets of RoCE v2 are a pair of veth. Their own
    interfaces are on a bridge, over which the guests' kernels find each other's MAC addresses."""

    def wire(self, guest):
        """Returns the name of the interface that a guest's packets go over."""
        return f"wire{guest.number}"

    def device_command(self):
        command = [*NET_RAW, *Network.device_command(self)]
        for guest in self.of_device():
            command += ["--uplink", f"network={guest.name},interface={self.wire(guest)}"]
        return command

    def prepare_networks(self):
        """Makes the pair."""
        super().prepare_networks()
        names = [self.wire(guest) for guest in self.guests]
        subprocess.run(["ip", "link", "delete", names[0]], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1]], check=True)
        for name in names:
            subprocess.run(["ip", "link", "set", name, "mtu", str(self.options.mtu), "up"], check=True)


class InterfaceToRxe(Interfaces):
    """A guest with virtio-rdma, and one that has rxe on its network interface. The packets of the first go over the
    interface of the host that leads to the second."""

    def wire(self, guest):
        (other,) = (other for other in self.guests if other is not guest)
        return f"{other.name}b"

    def prepare_networks(self):
        """Has the host segment trains, which the network interface of user-mode Linux does not."""
        Network.prepare_networks(self)
        for guest in self.of_device():
            subprocess.run(["ethtool", "-K", self.wire(guest), "tx-udp-segmentation", "off"], check=True)
