# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The device's tunnel and switch beside the kernel's vxlan device, which is the other end of the tunnel. This test is
the VMM of the only guest's network interface; no guest runs. The device's process belongs to a user without rights."""

import os
import pathlib
import shutil
import socket
import struct
import subprocess
import tempfile

import pytest
from scapy.layers.inet import ICMP, IP
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Raw

from virtio_rdma.common import BUILD, die_with_parent

MAC = "52:54:00:12:34:01"
# The addresses of the tunnel's ends, ours first, and of the stations in its network.
ENDS = {"IPv4": ("192.0.2.1", "192.0.2.2", 24), "IPv6": ("fd00:2::1", "fd00:2::2", 64)}
GUEST, KERNEL = "198.51.100.1", "198.51.100.2"
# The user that the device's process belongs to from its start: nobody. It has no capability, and can get none.
USER = 65534
UNPRIVILEGED = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs",
                "--inh-caps=-all", "--bounding-set=-all", "--pdeathsig=TERM"]
# The bound on an answer that does not come, in seconds.
LIMIT_SECONDS = 60


def ip(*words, inside=None):
    """Runs ip, in the network namespace of a process if one is given."""
    enter = ["nsenter", f"--net=/proc/{inside}/ns/net"] if inside else []
    subprocess.run([*enter, "ip", *words], check=True)


@pytest.fixture(params=ENDS)
def ends(request):
    """A vxlan device of the kernel in a network namespace of its own, behind a pair of veth."""
    ours, theirs, length = ENDS[request.param]
    flags = ["nodad"] if ":" in ours else []
    with subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE,
                          preexec_fn=die_with_parent) as other:
        try:
            assert other.stdout
            assert other.stdout.readline()
            inside = str(other.pid)
            ip("link", "add", "under0", "type", "veth", "peer", "name", "under1", "netns", inside)
            ip("address", "add", f"{ours}/{length}", "dev", "under0", *flags)
            ip("link", "set", "under0", "up")
            ip("address", "add", f"{theirs}/{length}", "dev", "under1", *flags, inside=inside)
            ip("link", "set", "under1", "up", inside=inside)
            ip("link", "add", "vxlan42", "type", "vxlan", "id", "42", "local", theirs, "remote", ours,
               "dstport", "4789", inside=inside)
            ip("address", "add", f"{KERNEL}/24", "dev", "vxlan42", inside=inside)
            ip("link", "set", "vxlan42", "up", inside=inside)
            yield ours, theirs
        finally:
            other.kill()
            subprocess.run(["ip", "link", "delete", "under0"], check=False, stderr=subprocess.DEVNULL)


@pytest.fixture
def place():
    """A directory of the user, with the program in it: the user may not be able to reach those of the checkout."""
    with tempfile.TemporaryDirectory(prefix="vxlan.", dir="/tmp") as name:
        shutil.copy(os.path.join(BUILD, "virtio-rdmad"), name)
        os.chown(name, USER, USER)
        yield pathlib.Path(name)


@pytest.fixture
def interface(ends, place):
    """The connection to the socket of a guest's network interface."""
    local, remote = ends
    path = place / "nic"
    command = [*UNPRIVILEGED, place / "virtio-rdmad",
               "--guest", f"name=g,mac={MAC},vfio-user={place / 'g'},nic={path}",
               "--uplink", f"vxlan=42,local={local},remote={remote}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as daemon:
        try:
            assert daemon.stderr
            assert any(b"ready" in line for line in daemon.stderr), "virtio-rdmad does not start"
            assert os.stat(f"/proc/{daemon.pid}").st_uid == USER
            with socket.socket(socket.AF_UNIX) as stream:
                stream.settimeout(LIMIT_SECONDS)
                stream.connect(str(path))
                yield stream
        finally:
            daemon.terminate()


def send(stream, frame):
    """Sends a frame as QEMU does."""
    stream.sendall(struct.pack("!I", len(frame)) + bytes(frame))


def receive(stream, count):
    """Receives so many bytes."""
    data = b""
    while len(data) < count:
        part = stream.recv(count - len(data))
        assert part, "virtio-rdmad has ended the connection"
        data += part
    return data


def answer(stream, wanted):
    """Returns the next frame that is wanted. The kernel sends others as well, to find its neighbours."""
    while True:
        (length,) = struct.unpack("!I", receive(stream, 4))
        frame = Ether(receive(stream, length))
        if wanted(frame):
            return frame


def test_kernel_is_other_end(interface):
    """The kernel answers over its vxlan device: to a broadcast, and to what is sent to it alone."""
    send(interface, Ether(src=MAC, dst="ff:ff:ff:ff:ff:ff") / ARP(hwsrc=MAC, psrc=GUEST, pdst=KERNEL))
    found = answer(interface, lambda frame: ARP in frame and frame[ARP].op == 2)
    assert (found[ARP].psrc, found.dst) == (KERNEL, MAC)
    for size in (0, 56, 1300):
        payload = os.urandom(size)
        send(interface, Ether(src=MAC, dst=found.src) / IP(src=GUEST, dst=KERNEL) / ICMP(seq=size) / Raw(payload))
        echo = answer(interface, lambda frame, size=size: ICMP in frame and frame[ICMP].seq == size)
        assert (echo[ICMP].type, bytes(echo[ICMP].payload)[:size]) == (0, payload)
