# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite containers: programs of other distributions' images in two guests, with the provider mounted into them as
containers.md says; and a Python wheel that brings a libibverbs of its own, in an image without one and in one that has
both.

Platform.directories names each root, and the share has in "provider" what the provider's package installs.
"""

import dataclasses

import pytest

from virtio_rdma.tests import tools
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.tools import TCP, Case

# The roots that have the tools, and the major release of their rdma-core.
DISTRIBUTIONS = {"bookworm": 44, "forky": 65}
# Where rping may not end: one thread of it destroys the id whose event poll() has told another one of, which then waits
# for that event (cm_thread() of rdma-core 65).
RPING_HANGS = ("forky",)
NIXL_PORT = 18800
# The bound on a program that hangs. On an idle machine no program takes a twentieth of it.
SECONDS = 240
# Where libibverbs of a distribution and that of wheels look for providers.
DIRECTORIES = ("/usr/lib/x86_64-linux-gnu/libibverbs", "/usr/lib64/libibverbs")
# A tmpfs above a directory of the machine, and in it what a runtime for containers mounts.
UNPACK = """
mkdir -p /srv/{name} /run/{name}/image /run/{name}/above
mount -t hostfs -o ro,hostfs={path} hostfs /run/{name}/image
mount -t tmpfs tmpfs /run/{name}/above
mkdir /run/{name}/above/files /run/{name}/above/work
cd /run/{name}
mount -t overlay -o lowerdir=image,upperdir=above/files,workdir=above/work overlay /srv/{name}
for directory in dev proc sys; do mount --rbind /$directory /srv/{name}/$directory; done
"""
# What a runtime for containers mounts: the files of the provider.
MOUNT_PROVIDER = """
for file in {files}; do
	mkdir -p "/srv/{name}$(dirname $file)"
	touch "/srv/{name}$file"
	mount --bind -o ro $file "/srv/{name}$file"
done
"""
PROVIDER = " ".join(("/etc/libibverbs.d/virtio_rdma.driver", *(f"{directory}/libvirtio_rdma-rdmav*.so"
                                                             for directory in DIRECTORIES)))


def unpack(guest, name, path):
    """Makes a root of the machine a writable one in a guest, below /srv."""
    guest.check("set -e" + UNPACK.format(name=name, path=path), f"the root {name}", HANG_SECONDS)


def install_provider(guest):
    """Gives a guest the files of the provider's package."""
    guest.check("cp -a --no-preserve=ownership /mnt/provider/. /")


def give_provider(guest, name):
    """Mounts the provider into a root, file by file."""
    install_provider(guest)
    files = guest.check(f"ls {PROVIDER}").split()
    guest.check("set -e" + MOUNT_PROVIDER.format(name=name, files=" ".join(files)), f"the provider in {name}")


def inside(name, case, server=True, client=True):
    """Returns a case whose sides run in a root."""
    enter = f"chroot /srv/{name} "
    return dataclasses.replace(case, server=enter * server + case.server, client=enter * client + case.client)


def cases(name):
    """Yields what runs in a root, on both sides or on one of them; the other side is Debian 13's."""
    both = [*tools.pingpongs(), *tools.connection_managers("IPv4")]
    # cmtime has other options in each release.
    left_out = ("cmtime", "rping") if name in RPING_HANGS else ("cmtime",)
    for case in (case for case in both if case.kind not in left_out):
        yield f"both sides: {case}", inside(name, case)
    for case in tools.pingpongs():
        yield f"server: {case}", inside(name, case, client=False)
        yield f"client: {case}", inside(name, case, server=False)
    for post in ("", " --use_old_post_send"):
        for operation in ("send_bw", "write_lat", "read_bw"):
            tool = f"ib_{operation} -n 500 -s 4096 -F{post}"
            case = Case(f"ib_{operation}{post}", f"{tool} -d {{d1}} -x {{g1}}", TCP.format(18515),
                        f"{tool} -d {{d2}} -x {{g2}} {{t1}}", "#bytes")
            yield f"both sides: {case}", inside(name, case)


@pytest.mark.network("images of distributions", guests=2)
@pytest.mark.parametrize("name", DISTRIBUTIONS, scope="class")
class TestDistribution:
    """The tools of another release of rdma-core."""

    @pytest.fixture(scope="class")
    def image(self, network, platform, name):
        for guest in network.guests:
            unpack(guest, name, platform.directories[name])
            give_provider(guest, name)
        return name

    def test_devinfo(self, network, image, results):
        guest = network.guests[0]
        release = guest.check(f"chroot /srv/{image} dpkg-query -f '${{Version}}' -W libibverbs1")
        results.result(f"{image}: release {release}", release.startswith(f"{DISTRIBUTIONS[image]}."))
        status, text = guest.run(f"chroot /srv/{image} ibv_devinfo -v")
        wanted = (guest.link[0], "fw_ver", "PORT_ACTIVE")
        if not results.result(f"{image}: ibv_devinfo", not status and all(word in text for word in wanted)):
            results.note(text)

    def test_programs(self, network, image, results):
        names = tools.names_of(*network.guests)
        for title, case in cases(image):
            outcome = tools.run(case, network.guests, names, SECONDS)
            tools.TRIES.add(outcome)
            if outcome.failure:
                results.note(f"{outcome.failure}\n{outcome.text}")
            results.result(f"{image}: {title}", not outcome.failure)


@pytest.mark.network("a wheel", guests=2, memory=2048)
class TestWheel:
    """NIXL, whose wheel has a libibverbs under another name, in the memory of hosts."""

    @pytest.fixture(scope="class")
    def slim(self, network, platform):
        for guest in network.guests:
            unpack(guest, "slim", platform.directories["slim"])
            give_provider(guest, "slim")
            guest.check("mkdir -p /srv/slim/opt/wheels /srv/slim/mnt && mount --bind /mnt /srv/slim/mnt && "
                        f"mount -t hostfs -o ro,hostfs={platform.directories['wheels']} hostfs /srv/slim/opt/wheels")

    @staticmethod
    def case(name, copies, environment=""):
        tool = f"env PYTHONPATH=/opt/wheels UCX_TLS=rc,ud UCX_NET_DEVICES={{}}:1 {environment} python3 -B " \
               f"/mnt/nixl_data.py {{}} {NIXL_PORT}"
        server, client = tool.format("{d1}", "target"), tool.format("{d2}", "initiator") + " {a1}"
        said = f"initiator: all bytes are right, with {copies} libibverbs"
        return inside("slim", Case(name, server, TCP.format(NIXL_PORT), client, said))

    def test_without_library(self, network, slim, results):
        """The image has no libibverbs but that of the wheel."""
        present = network.guests[0].run("chroot /srv/slim sh -c 'ldconfig -p | grep libibverbs'")[1]
        results.result("slim: the image has no libibverbs", not present)
        tools.report(results, self.case("NIXL, with the wheel's libibverbs alone", 1), network.guests,
                     tools.names_of(*network.guests), HANG_SECONDS)

    def test_with_library(self, network, slim, results):
        """The image has the libibverbs of Debian 13 as well, and one process uses both: first that of the system."""
        for guest in network.guests:
            guest.check("cd /usr/lib/x86_64-linux-gnu && cp -a libibverbs.so.1* libnl-3.so* libnl-route-3.so* "
                        "/srv/slim/usr/lib/x86_64-linux-gnu/")
        tools.report(results, self.case("NIXL, beside the system's libibverbs", 2, "SYSTEM=1"), network.guests,
                     tools.names_of(*network.guests), HANG_SECONDS)
