# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Several networks, with a daemon each."""

import contextlib
import os
import subprocess

from virtio_rdma.guests.hosts import Hosts
from virtio_rdma.guests.network import Network
from virtio_rdma.guests.uml import UmlGuest

# The interface of a namespace that leads to the other.
CABLE = "cable"


class Namespace:
    """A network namespace, which lives until it is closed."""

    OWN = "/proc/thread-self/ns/net"

    def __init__(self):
        with open(self.OWN, "rb") as home:
            os.unshare(os.CLONE_NEWNET)
            self.descriptor = os.open(self.OWN, os.O_RDONLY)
            os.setns(home.fileno())

    @property
    def path(self):
        """A path by which other processes find it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @contextlib.contextmanager
    def entered(self):
        """Has this thread, and the processes that it starts, in the namespace."""
        with open(self.OWN, "rb") as home:
            os.setns(self.descriptor)
            try:
                yield
            finally:
                os.setns(home.fileno())

    def close(self):
        """Lets go of it. It ends with its last process."""
        os.close(self.descriptor)


class InNamespace(Network):
    """One of several guests, in a network namespace. CABLE leads to the other namespace."""

    def __init__(self, options, number):
        self.number = number
        super().__init__(options)
        self.namespace = Namespace()

    def numbers(self):
        return (self.number,)

    def env(self, guest):
        peers = " ".join(f"10.0.0.{number}" for number in super().numbers() if number != self.number)
        return {"GUEST": str(guest.number), "PEERS": peers}

    def boot(self, links=True):
        with self.namespace.entered():
            super().boot(links)

    def close(self, failed=False):
        super().close(failed)
        self.namespace.close()


class Host(InNamespace, Hosts):
    """One guest and its daemon, whose tap is on a bridge with the cable."""

    def prepare_networks(self):
        super().prepare_networks()
        subprocess.run(["ip", "link", "set", CABLE, "mtu", str(self.options.mtu), "master", "bridge", "up"], check=True)


class Daemons:
    """What is asked of a daemon's process, of those of several networks."""

    def __init__(self, networks):
        self.networks = networks

    @property
    def processes(self):
        """The processes. A network whose guests have another driver has none."""
        return [network.daemon for network in self.networks if network.daemon]

    def poll(self):
        """Returns the status of one that has ended, or None."""
        return next((status for status in (process.poll() for process in self.processes) if status is not None), None)

    @property
    def returncode(self):
        """The status of one that failed, or of all."""
        statuses = [process.returncode for process in self.processes]
        return next((status for status in statuses if status), statuses[0])


class Several:
    """What tests ask of a Network, of several. `guests` are those that boot."""

    def __init__(self, options, networks):
        self.options = options
        self.networks = networks
        self.guests = [guest for network in networks for guest in network.guests]
        self.daemon = Daemons(networks)

    def of_device(self):
        """Returns the guests that have virtio-rdma."""
        return [guest for network in self.networks for guest in network.of_device()]

    def device_status(self):
        """Returns what the devices say of their guests, by the guests' names."""
        return {name: status for network in self.networks if network.daemon
                for name, status in network.device_status().items()}

    def close(self, failed=False):
        """Ends everything."""
        for network in self.networks:
            network.close(failed)

    def findings(self):
        """Returns what the devices say of the drivers in the end."""
        return [finding for network in self.networks for finding in network.findings()]

    def logs(self):
        """Returns the paths of the logs that there are."""
        return [log for network in self.networks for log in network.logs()]


class TwoHosts(Several):
    """Two hosts that have nothing in common: each is a network namespace. A pair of veth connects them."""

    # The classes of the hosts.
    kinds: tuple[type[InNamespace], type[InNamespace]] = (Host, Host)

    def __init__(self, options):
        super().__init__(options, [kind(options, number) for number, kind in enumerate(self.kinds, 1)])

    def boot(self, links=True):
        """Connects the hosts, and boots them."""
        first, second = self.networks
        with first.namespace.entered():
            subprocess.run(["ip", "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns",
                            second.namespace.path], check=True)
        for host in self.networks:
            host.boot(links)


class TwoPortGuest(UmlGuest):
    """A guest that has the network interface and the RDMA device of a second guest besides its own, as eth1."""

    def command(self, channel):
        second = self.network.second.guests[0]
        return super().command(channel) + [
            f"vec1:{self.packet_sockets(second.name)},depth=64,gro=1,mtu={second.options.mtu},mac={second.mac}",
            f"virtio_uml.device={second.rdma_socket}:42",
        ]


class SecondPort(Hosts):
    """The network, the daemon and the tap of the second port of a guest, and what stands for a second guest, which is
    never started."""

    def numbers(self):
        return (2,)


class FirstPort(Hosts):
    """The guest, with its first port."""

    guest_kind = TwoPortGuest

    def __init__(self, options, second):
        self.second = second
        super().__init__(options)

    def start_daemon(self):
        """Starts the daemons of both ports, which the guest looks for when it boots."""
        super().start_daemon()
        self.second.prepare_networks()
        self.second.start_daemon()


class TwoPorts(Several):
    """One guest with two RDMA devices, of a daemon each: what it sends from one to the other goes over the wire, by
    taps on one bridge."""

    def __init__(self, options):
        second = SecondPort(options)
        super().__init__(options, [FirstPort(options, second), second])
        self.guests = self.networks[0].guests

    def taps(self):
        """Returns the names of the taps."""
        return [tap for network in self.networks for tap in network.taps()]

    def boot(self, links=True):
        """Boots the guest."""
        self.networks[0].boot(links=False)
        guest, second = self.of_device()
        guest.check(f"ip link set vec1 name eth1 && ip link set eth1 mtu {self.options.mtu} up && "
                    f"ip addr add {second.address}/24 dev eth1")
        # What goes from one address of a machine to another of its own never leaves it, and needs no MAC address.
        for here, there, interface in ((guest, second, "eth0"), (second, guest, "eth1")):
            guest.check(f"ip route del table local local {here.address} && "
                        f"ip neigh replace {there.address} lladdr {there.mac} dev {interface} nud permanent")
        if links:
            Network.rdma_up(guest, self.options.rdma)
            for each in self.of_device():
                each.link = self.link_of(guest, each.address)

    @staticmethod
    def link_of(guest, address):
        """Waits until a device of a guest has the GID of an address; returns the name of the device and the index."""
        gid = "0000:0000:0000:0000:0000:ffff:0a00:{:02x}{:02x}".format(*map(int, address.split(".")[2:]))
        text = guest.check("cd /sys/class/infiniband && "
                           f"until grep -lx {gid} */ports/1/gids/*; do sleep 0.05; done", timeout=60)
        device, _, _, _, index = text.split()[0].split("/")
        return device, int(index)
