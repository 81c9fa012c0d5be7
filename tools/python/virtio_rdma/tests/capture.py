# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Packets that the device sends over taps: how they are captured, and what a judge of its own (scapy) says of them."""

import os
import random
import select
import socket
import struct
import threading
import time

from scapy.contrib.roce import BTH
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.utils import checksum

PORT = 4791
ETH_P_ALL = 3
# Room for what comes while the thread does not run. The option goes beyond the limit of the system.
SO_RCVBUFFORCE = 33
ROOM = 1 << 30
# Has a virtio_net_hdr in front of each frame (linux/if_packet.h), which says whether the frame is a train of packets
# that is segmented later: type and payload of a segment (linux/virtio_net.h).
SOL_PACKET = 263
PACKET_STATISTICS = 6
PACKET_VNET_HDR = 15
VNET_HDR = struct.Struct("=BBHHHH")
GSO_UDP_L4 = 5
# How long no packet comes before all have come that were sent, in seconds.
QUIET_SECONDS = 0.3
# How many packets of each opcode and IP version scapy looks at.
SAMPLE = 150
PSNS = 1 << 24
# The opcodes of what comes behind another packet of its message: SENDs, WRITEs and responses of READs.
BEHIND = {0x01, 0x02, 0x03, 0x07, 0x08, 0x09, 0x0e, 0x0f, 0x16}
# The opcodes that answer requests of a reliable connection.
ANSWERS = range(0x0d, 0x13)


class Capture:
    """All frames that were sent into taps, in their order. As a context, it captures until the context ends, and then
    writes a file that tcpdump and Wireshark read."""

    def __init__(self, taps, path):
        self.path = path
        self.frames = []
        self.times = []
        self.sockets = [self.open(tap) for tap in taps]
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.read, daemon=True)

    @staticmethod
    def open(tap):
        """Returns a socket that gets all frames of a tap."""
        packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        packets.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, ROOM)
        packets.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        packets.bind((tap, ETH_P_ALL))
        return packets

    def read(self):
        """Takes frames until the end. Those that go out of the tap are for the device, and not its own."""
        while not self.ends.is_set():
            for ready in select.select(self.sockets, [], [], 0.1)[0]:
                data, address = ready.recvfrom(1 << 17)
                if address[2] == socket.PACKET_OUTGOING:
                    continue
                _, kind, _, size, _, _ = VNET_HDR.unpack_from(data)
                frame = data[VNET_HDR.size:]
                frames = segments(frame, size) if kind == GSO_UDP_L4 else [frame]
                self.frames += frames
                self.times += [time.time()] * len(frames)

    def settled(self):
        """Returns how many frames there are, once no more come."""
        count = -1
        while count != len(self.frames):
            count = len(self.frames)
            time.sleep(QUIET_SECONDS)
        return count

    def missed(self):
        """Returns how many frames the kernel had no room for since the last call."""
        counts = [each.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8) for each in self.sockets]
        return sum(struct.unpack("=II", both)[1] for both in counts)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, kind, value, traceback):
        self.ends.set()
        self.thread.join()
        for each in self.sockets:
            each.close()
        self.write()

    def write(self):
        """Writes the file: libpcap's format 2.4, for Ethernet."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with open(self.path, "wb") as file:
            file.write(struct.pack("=IHHiIII", 0xa1b2c3d4, 2, 4, 0, 0, 1 << 16, 1))
            for moment, frame in zip(self.times, self.frames):
                seconds = int(moment)
                head = (seconds, int((moment - seconds) * 1000000), len(frame), len(frame))
                file.write(struct.pack("=IIII", *head) + frame)


def segments(train, size):
    """Returns the frames that the kernel makes of a train of packets with `size` bytes of UDP payload each, as
    inet_gso_segment() and __udp_gso_segment() do; the checksum of UDP, which ICRC does not cover, is left out."""
    is_ipv4 = train[12:14] == b"\x08\x00"
    header = 42 if is_ipv4 else 62
    frames = []
    for index, at in enumerate(range(header, len(train), size)):
        head, payload = bytearray(train[:header]), train[at:at + size]
        struct.pack_into("!HH", head, header - 4, 8 + len(payload), 0)
        if is_ipv4:
            identification, = struct.unpack_from("!H", head, 18)
            struct.pack_into("!HH", head, 16, 28 + len(payload), (identification + index) % 0x10000)
            struct.pack_into("!H", head, 24, 0)
            struct.pack_into("!H", head, 24, checksum(bytes(head[14:34])))
        else:
            struct.pack_into("!H", head, 18, 8 + len(payload))
        frames.append(bytes(head) + payload)
    return frames


def base_header(frame):
    """Returns version of IP, addresses, opcode, QP number of the destination and PSN."""
    kind, = struct.unpack_from("!H", frame, 12)
    version, at, addresses = (4, 42, frame[26:34]) if kind == 0x0800 else (6, 62, frame[22:54])
    opcode, _, _, destination, psn = struct.unpack_from("!BBHII", frame, at)
    return version, addresses, opcode, destination % PSNS, psn % PSNS


def distance(psn, other):
    """Returns how far a PSN is ahead of another (IBA 9.7.2)."""
    return (psn - other + PSNS // 2) % PSNS - PSNS // 2


def flows(frames):
    """Returns opcodes and PSNs by flow: requests, or answers, from one address to a QP at another."""
    found: dict[tuple, list] = {}
    for frame in frames:
        _, addresses, opcode, destination, psn = base_header(frame)
        found.setdefault((addresses, destination, opcode in ANSWERS), []).append((opcode, psn))
    return found


def broken_messages(frames):
    """Returns the packets that do not follow the packet in front of them in their message. Go-back-N may send a part of
    a message again."""
    broken = []
    for flow in flows(frames).values():
        seen = set()
        for opcode, psn in flow:
            if opcode in BEHIND and (psn - 1) % PSNS not in seen:
                broken.append((hex(opcode), psn))
            seen.add(psn)
    return broken


def gaps(frames):
    """Returns the requests in front of which a PSN was left out. Each flow must be one connection, without READs."""
    found = []
    for (_, _, answers), flow in flows(frames).items():
        expected = flow[0][1]
        for _, psn in () if answers else flow:
            ahead = distance(psn, expected)
            if ahead > 0:
                found.append((psn, expected))
            if ahead >= 0:
                expected = (psn + 1) % PSNS
    return found


def complaints(frame):
    """Returns what scapy finds wrong with a frame."""
    packet = Ether(frame)
    if UDP not in packet or BTH not in packet:
        return ["no packet of RoCE v2"]
    ip, udp, bth = packet[IP if IP in packet else IPv6], packet[UDP], packet[BTH]
    length = len(frame) - 14
    payload = length - (20 if ip.version == 4 else 40)
    again = packet.copy()
    again[BTH].icrc = None
    if ip.version == 4:
        again[IP].chksum = None
    checks = {
        "IP length": (ip.len if ip.version == 4 else ip.plen) == (length if ip.version == 4 else payload),
        "fragment": ip.version == 6 or (ip.frag == 0 and ip.flags == "DF"),
        "UDP length": udp.len == payload,
        "UDP ports": udp.dport == PORT and udp.sport >= 0xc000,
        "BTH": (bth.version, bth.pkey, bth.resv6, bth.resv7) == (0, 0xffff, 0, 0),
        "length": length % 4 == 0,
        "ICRC or IP checksum": bytes(again) == frame,
    }
    return [name for name, passed in checks.items() if not passed]


def judge(frames):
    """Returns the complaints of scapy about some of the frames of each kind, chosen at random, each with the kind."""
    kinds: dict[tuple[int, int], list] = {}
    for frame in frames:
        version, _, opcode, _, _ = base_header(frame)
        kinds.setdefault((opcode, version), []).append(frame)
    choice = random.Random(1)
    sample = {kind: choice.sample(of_kind, min(SAMPLE, len(of_kind))) for kind, of_kind in kinds.items()}
    return [(f"opcode {opcode:#04x}, IPv{version}", complaint)
            for (opcode, version), chosen in sample.items() for frame in chosen for complaint in complaints(frame)]


def opcodes(frames):
    """Returns the opcodes and versions of IP that are among the frames."""
    return {(opcode, version) for version, _, opcode, _, _ in map(base_header, frames)}
