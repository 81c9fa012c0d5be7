# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The lines of Documentation/containers.md, run by podman in two guests: a container has the device and the provider,
and each network that the page names. IMAGE and the addresses of the page are replaced, and ibv_devinfo by other
programs.

An image is a root of another distribution, which guests read from this machine (test_containers.py).
"""

import os
import re

import pytest

from virtio_rdma.common import TOP, Failure
from virtio_rdma.tests import examples, tools
from virtio_rdma.tests.test_containers import RPING_HANGS, SECONDS, install_provider
from virtio_rdma.tests.tools import CM, TCP, Case

PAGE = os.path.join(TOP, "Documentation", "containers.md")
# What the page runs, and what the tests put in its place.
IMAGE, DEVINFO = "IMAGE", "ibv_devinfo"
ADDRESS = re.compile(r"\b10\.\d\.0\.21\b")
MEMLOCK = " --ulimit memlock=-1"
# The numbers of the interfaces for providers of the images.
INTERFACES = {"bookworm": 34, "forky": 65}
# A guest of a distribution has these mounted. podman has its storage on no overlay.
MOUNTS = """
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /var/lib/containers && mount -t tmpfs tmpfs /var/lib/containers
"""
# As root has it by default; the guests of these tests have no limit.
LIMITED = "ulimit -l 8192 && "
# More than that limit.
LARGE = 16 << 20
# A listener of any network namespace.
ANY_TCP = TCP.replace("/proc/net/", "/proc/[0-9]*/net/")
# The last namespace ends some time after its name.
ALONE = "until rdma system set netns exclusive 2>/dev/null; do sleep 0.05; done; rdma system set netns shared"


def commands(title, image="bookworm"):
    """Returns the commands of a section of the page, with the image."""
    lines = re.sub(r" \\\n +", " ", examples.blocks(PAGE)[title]).splitlines()
    path = f"--rootfs /run/images/{image}:O"
    return [line.replace(IMAGE, path).replace("-rdmav34", f"-rdmav{INTERFACES[image]}") for line in lines if line]


def in_each(network, lines, what):
    """Runs a line in each guest, all at the same time. Each must succeed. Returns what they say."""
    jobs = [guest.start(["bash", "-exc", line]) for guest, line in zip(network.guests, lines)]
    for job in jobs:
        if job.wait(SECONDS):
            raise Failure(f"guest {job.guest.number}: {what} failed:\n{job.text}")
    return [job.text for job in jobs]


def prepare(network, directories):
    """Gives the guests the provider, the images, and what podman needs."""
    for guest in network.guests:
        install_provider(guest)
        guest.check("set -e" + MOUNTS, "podman's mounts")
        for name in INTERFACES:
            guest.check(f"mkdir -p /run/images/{name} && "
                        f"mount -t hostfs -o ro,hostfs={directories[name]} hostfs /run/images/{name}")


def programs(first, second, manager="rping"):
    """Yields what runs in two containers. first and second: the lines that run ibv_devinfo in them. manager: the
    program of the RDMA CM."""
    def both(tool):
        return first.replace(DEVINFO, tool), second.replace(DEVINFO, tool)

    if manager == "rping":
        server, client = both("rping {} -V -C 50 -S 4096 -a {{a1}}")
        yield Case(manager, server.format("-s"), CM, client.format("-c"))
    else:
        server, client = both("ucmatose {} {{a1}} -c 5 -C 20 -S 4096")
        yield Case(manager, server.format("-b"), CM, client.format("-s"), "test complete")
    server, client = both("ibv_rc_pingpong -c -n 500")
    yield Case("ibv_rc_pingpong", server + " -d {d1} -g {g1}", ANY_TCP.format(18515),
               client + " -d {d2} -g {g2} {a1}", "bytes in")


def gid_of(address):
    """Returns the GID of an address of IPv4, as sysfs shows it."""
    one, two, three, four = map(int, address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{one:02x}{two:02x}:{three:02x}{four:02x}"


def has_gid(text, index, address):
    """Returns whether ibv_devinfo -v shows the GID of an address."""
    return re.search(rf"GID\[ *{index}\]:\s+::ffff:{re.escape(address)}, RoCE v2$", text, re.MULTILINE)


@pytest.mark.network("podman", guests=2)
class TestPodman:
    """Containers with the network of the guest."""

    @pytest.fixture(scope="class", autouse=True)
    def prepared(self, network, platform):
        prepare(network, platform.directories)

    @pytest.mark.parametrize("way", [0, 1], ids=["CDI", "files"])
    @pytest.mark.parametrize("name", INTERFACES)
    def test_line(self, network, results, name, way):
        """Both lines of the page, in containers of both guests."""
        line = commands("Podman and Docker", name)[way]
        label = f"{name}, {('CDI', 'without CDI')[way]}"
        for guest, text in zip(network.guests, in_each(network, [line] * 2, label)):
            seen = guest.link[0] in text and "PORT_ACTIVE" in text
            results.result(f"{label}: guest {guest.number}: ibv_devinfo", seen) or results.note(text)
        manager = "ucmatose" if name in RPING_HANGS else "rping"
        for case in programs(line, line, manager):
            tools.report(results, case, network.guests, tools.names_of(*network.guests), SECONDS, f"{label}: ")

    def test_locked_memory(self, network, results):
        """A container may lock as much as its limit says, unless the line lifts the limit."""
        line = LIMITED + commands("Podman and Docker")[0]
        guest = network.guests[0]
        tool = f"sh -c 'ulimit -l; ibv_rc_pingpong -g {guest.link[1]} -s {LARGE}'"
        status, text = guest.run(line.replace(MEMLOCK, "").replace(DEVINFO, tool), timeout=SECONDS)
        refused = status == 1 and text.split() == ["8192", "Couldn't", "register", "MR"]
        results.result("locked memory: a limit refuses an MR", refused) or results.note(f"status {status}\n{text}")
        tool = f"ibv_rc_pingpong -c -n 10 -s {LARGE}"
        case = Case(f"{tool}, without a limit", f"{line.replace(DEVINFO, tool)} -g {{g1}}", ANY_TCP.format(18515),
                    f"{line.replace(DEVINFO, tool)} -g {{g2}} {{a1}}", "bytes in")
        tools.report(results, case, network.guests, tools.names_of(*network.guests), SECONDS, "locked memory: ")

    def test_counters(self, network, results):
        """A container with the network of the guest reads the device's counters."""
        line, _ = commands("Podman and Docker")
        guest = network.guests[0]
        path = f"/sys/class/infiniband/{guest.link[0]}/ports/1/hw_counters/commands"
        status, text = guest.run(line.replace(DEVINFO, f"cat {path}"), timeout=SECONDS)
        results.result("hw_counters", not status and int(text) > 0) or results.note(text)


@pytest.mark.network("networks of containers", guests=2)
class TestNetworks:
    """Each network of the page, with data between containers of two guests. A title is that of a section."""

    STACKED = "A macvlan or an ipvlan"

    @pytest.fixture(scope="class", autouse=True)
    def prepared(self, network, platform):
        prepare(network, platform.directories)
        for guest in network.guests:
            guest.check("ip link set lo up && modprobe -a macvlan ipvlan 8021q bridge veth")

    @staticmethod
    def begin(network, title, kind="macvlan"):
        """Runs all lines of a section but the last one, in each guest with an address of its own. Returns the last
        line of each guest, and the addresses."""
        (first,) = set(ADDRESS.findall("\n".join(commands(title))))
        addresses = [f"{first[:-1]}{guest.number}" for guest in network.guests]
        lines = []
        for guest, address in zip(network.guests, addresses):
            text = "\n".join(commands(title)).replace(first, address).replace("virtio_rdma0", guest.link[0])
            lines.append(text.replace("-d macvlan", f"-d {kind}").splitlines())
        in_each(network, ["\n".join(each[:-1]) for each in lines], title)
        return [each[-1] for each in lines], addresses

    @staticmethod
    def names(network, addresses, enter=""):
        """Returns the names in the lines of cases. enter: runs a command where sysfs has the device."""
        names: dict[str, str | int] = {}
        for number, (guest, address) in enumerate(zip(network.guests, addresses), 1):
            path = f"/sys/class/infiniband/{guest.link[0]}/ports/1/gids"
            index = guest.check(f"{enter} sh -c 'cd {path} && until grep -lx {gid_of(address)} *; do sleep 0.05; done'",
                                f"the GID of {address}", SECONDS)
            names |= {f"d{number}": guest.link[0], f"g{number}": int(index), f"a{number}": address}
        return names

    @staticmethod
    def data(network, results, label, lines, names, kinds=("rping", "ibv_rc_pingpong"), enter=""):
        """Reports the GIDs that containers have, and what programs in them say."""
        for number, text in enumerate(in_each(network, [f"{line} -v" for line in lines], label), 1):
            found = has_gid(text, names[f"g{number}"], names[f"a{number}"])
            results.result(f"{label}: guest {number}: the GID", found) or results.note(text)
        for case in programs(*lines):
            if case.name in kinds:
                case.ready = f"{enter} {case.ready}" if enter and case.ready == CM else case.ready
                tools.report(results, case, network.guests, names, SECONDS, f"{label}: ")

    @pytest.mark.parametrize("kind", ["macvlan", "ipvlan"])
    def test_stacked(self, network, results, kind):
        """The interface is there while its container runs, so that programs run in one container."""
        lines, addresses = self.begin(network, self.STACKED, kind)
        lines = [line.replace("--rm", "--rm --detach --name pod").replace(DEVINFO, "sleep infinity") for line in lines]
        in_each(network, lines, "a container that stays")
        self.data(network, results, kind, [f"podman exec pod {DEVINFO}"] * 2, self.names(network, addresses))
        in_each(network, ["podman rm --force --time 0 pod; podman network rm rdma"] * 2, "the container's end")

    def test_vlan(self, network, results):
        """User-mode Linux's network interface carries no tags: neighbours are written down, and there is no TCP."""
        lines, addresses = self.begin(network, "A VLAN, moved")
        for guest, peer, address in zip(network.guests, reversed(network.guests), reversed(addresses)):
            guest.check(f"ip -n pod neigh replace {address} lladdr {peer.mac} dev eth0.7 nud permanent")
        self.data(network, results, "a VLAN", lines, self.names(network, addresses), ("rping",))
        for guest in network.guests:
            guest.check("ip netns del pod")

    def test_bridge(self, network, results):
        """podman's own network: the RDMA CM finds no device at the container's address. The GIDs of the guest are seen,
        and nothing keeps a program from using one of them."""
        line = commands("Podman and Docker")[0].replace("--network host", "--network podman")
        first, second = network.guests
        status, text = second.run(line.replace(DEVINFO, f"rping -c -C 1 -a {first.address}"), timeout=SECONDS)
        refused = status and "RDMA_CM_EVENT_ADDR_ERROR" in text
        results.result("a bridge: the RDMA CM finds no device", refused) or results.note(f"status {status}\n{text}")
        status, text = second.run(f"{line} -v", timeout=SECONDS)
        seen = has_gid(text, second.link[1], second.address)
        results.result("a bridge: the guest's GID is seen", not status and seen) or results.note(text)
        server = commands("Podman and Docker")[0]
        (case,) = (case for case in programs(server, line) if case.name == "ibv_rc_pingpong")
        tools.report(results, case, network.guests, tools.names_of(first, second), SECONDS,
                     "a bridge, with the guest's GID: ")

    def test_interface(self, network, results):
        lines, addresses = self.begin(network, "The paired interface, moved")
        self.data(network, results, "the interface", lines, self.names(network, addresses))
        for guest in network.guests:
            guest.check("ip netns del pod && until ip link show eth0; do sleep 0.05; done", "the interface is back",
                        SECONDS)

    def test_exclusive(self, network, results):
        """The last one: the guests' interface has its address no more."""
        for guest in network.guests:
            guest.check(ALONE, "no other network namespace", SECONDS)
        lines, addresses = self.begin(network, "Device and interface, moved in exclusive mode")
        enter = "ip netns exec pod"
        self.data(network, results, "exclusive", lines, self.names(network, addresses, enter), enter=enter)
        status, text = network.guests[0].run(commands("Podman and Docker")[0], timeout=SECONDS)
        unseen = status and "No IB devices found" in text
        results.result("exclusive: a container outside has no device", unseen) or results.note(text)
        for guest in network.guests:
            guest.check(f"ip netns del pod && until rdma link show {guest.link[0]}/1; do sleep 0.05; done",
                        "the device is back", SECONDS)
