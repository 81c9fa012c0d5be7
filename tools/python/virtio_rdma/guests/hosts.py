# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Guests that reach others over the wire. The uplink of a network is a tap on the bridge that the guests' own interfaces
are on."""

import subprocess

from virtio_rdma.guests.network import Network

PORT = 4791
# What finds packets of RoCE v2 without a VLAN: a MAC address that is not of a group, UDP, and the port it goes to,
# behind a header of IPv4 without options, and behind one of IPv6 without extensions.
FILTERS = {
    "ip": f"match u8 0 1 at -14 match u8 17 0xff at 9 match u16 {PORT} 0xffff at 22",
    "ipv6": f"match u8 0 1 at -14 match u8 17 0xff at 6 match u16 {PORT} 0xffff at 42",
}


def run(*commands):
    """Runs commands, which have no spaces in their words."""
    for command in commands:
        subprocess.run(command.split(), check=True)


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

    def start_daemon(self):
        for tap in self.taps():
            subprocess.run(["ip", "link", "delete", tap], check=False, stderr=subprocess.DEVNULL)
            run(f"ip tuntap add {tap} mode tap", f"ip link set {tap} mtu {self.options.mtu} up")
        super().start_daemon()

    def taps(self):
        """Returns the names of the networks by the names of their taps."""
        return {self.tap(guest): self.network_of(guest) for guest in self.of_device()}

    def device_command(self):
        command = super().device_command()
        for tap, network in self.taps().items():
            command += ["--uplink", f"network={network},tap={tap}"]
        return command

    def guest_spec(self, guest):
        return f"{super().guest_spec(guest)},network={self.network_of(guest)}"

    def prepare_networks(self):
        """Puts the taps on the bridge. The bridge learns no address behind a tap: the frames that come from it have the
        guest's. The bridge itself brings packets for multicast groups to the taps."""
        super().prepare_networks()
        for tap in self.taps():
            run(f"ip link set {tap} master bridge",
                f"ip link set {tap} type bridge_slave learning off flood off mcast_router 2")
        # The NIC of user-mode Linux does not segment trains of small UDP packets (vector_rx() of Linux 7.2.12 looks at
        # the size of its buffer), so the host does.
        for guest in self.guests:
            if guest not in self.of_device():
                run(f"ethtool -K {guest.name}b tx-udp-segmentation off")
        self.redirect(True)

    def redirect(self, to_taps):
        """Has packets of RoCE v2 go to the taps, or to the guests' own interfaces, where rxe gets them."""
        for guest in self.of_device():
            if guest.number not in self.redirected:
                continue
            port, tap = f"{guest.name}b", self.tap(guest)
            if not to_taps:
                run(f"tc qdisc del dev {port} clsact")
                continue
            run(f"tc qdisc add dev {port} clsact")
            for protocol, match in FILTERS.items():
                run(f"tc filter add dev {port} egress protocol {protocol} u32 {match} "
                    f"action mirred egress redirect dev {tap}")


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
