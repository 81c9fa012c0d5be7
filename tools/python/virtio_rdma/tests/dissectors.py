# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""tshark and tcpdump, in a root of their own (tools/vm/roots/packets), as judges of a file of captured packets."""

import subprocess

from virtio_rdma.tests.capture import CNP, PORT, SELECTIVE_ACKNOWLEDGE, SELECTIVE_OFFER

# Whom the programs run as: nobody.
USER = "65534:65534"
# What tshark tells of each packet.
TELLS = ("frame.protocols", "_ws.expert.message", "infiniband.bth.opcode", "infiniband.bth.destqp",
         "infiniband.bth.psn", "infiniband.invariant.crc")
# The bits of an opcode that name the service, and those of XRC. tshark 4.4 knows no extended headers of XRC, of
# congestion notification and of what IBA leaves to manufacturers, so it does not find their ICRC.
SERVICE, OF_XRC = 0xe0, 0xa0
UNKNOWN = (CNP, SELECTIVE_ACKNOWLEDGE, SELECTIVE_OFFER)


def run(root, path, *command):
    """Returns the lines that a program in a root says of a file, which it reads from its standard input."""
    with open(path, "rb") as file:
        done = subprocess.run(["chroot", f"--userspec={USER}", root, *command], stdin=file, stdout=subprocess.PIPE,
                              check=True, encoding="utf-8", env={"PATH": "/usr/sbin:/usr/bin", "HOME": "/nonexistent"})
    return done.stdout.splitlines()


def guesses(root):
    """Returns the names of the dissectors by which tshark guesses what the payload of a packet is. What the tests send
    is random, and some of it looks like a protocol that it is not."""
    lines = [line.split("\t") for line in run(root, "/dev/null", "tshark", "-G", "heuristic-decodes")]
    return [columns[4] for columns in lines if columns[0].startswith("infiniband.")]


def tshark(root, path, packets):
    """Returns what tshark says of packets, each with its Header, that is not what they say, or that it calls wrong."""
    options = ["-o", "udp.ignore_ipv6_zero_checksum:TRUE"]  # IBA A17.4.5.2 wants no checksum of UDP over IPv6 either
    options += [word for name in guesses(root) for word in ("--disable-heuristic", name)]
    options += ["-T", "fields", "-E", "separator=|"]
    options += [word for field in TELLS for word in ("-e", field)]
    lines = run(root, path, "tshark", "-n", "-r", "-", *options)
    complaints = [] if len(lines) == len(packets) else [f"{len(lines)} packets, not {len(packets)}"]
    for number, (line, (frame, header)) in enumerate(zip(lines, packets), 1):
        layers, expert, *words = line.split("|")
        expected = [header.opcode, header.destination, header.psn]
        if header.opcode not in UNKNOWN and header.opcode & SERVICE != OF_XRC:
            expected.append(int.from_bytes(frame[-4:]))
        if "udp:infiniband" not in layers or expert or [int(word, 0) for word in words if word] != expected:
            complaints.append(f"packet {number}, {header}: {line}")
    return complaints


def tcpdump(root, path):
    """Returns how many packets of RoCE v2 tcpdump sees, within VLANs and without."""
    udp = f"udp dst port {PORT}"
    return len(run(root, path, "tcpdump", "-n", "-q", "-r", "-", f"({udp}) or (vlan and {udp})"))
