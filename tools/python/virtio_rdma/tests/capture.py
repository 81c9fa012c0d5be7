# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Packets that the device sends over taps: how they are captured, and what a judge of its own (scapy) says of them."""

import dataclasses
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
from scapy.layers.l2 import Dot1Q, Ether
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
PACKET_AUXDATA = 8
PACKET_VNET_HDR = 15
VNET_HDR = struct.Struct("=BBHHHH")
GSO_UDP_L4 = 5
# struct tpacket_auxdata. The kernel takes the tag of a VLAN out of a frame, and tells it there if the status says so.
AUXDATA = struct.Struct("=IIIHHHH")
TP_STATUS_VLAN_VALID = 1 << 4
TAG = 0x8100
# How long no packet comes before all have come that were sent, in seconds.
QUIET_SECONDS = 0.3
# How many packets of each opcode and IP version scapy looks at.
SAMPLE = 150
PSNS = 1 << 24
# Bytes of the ICRC.
ICRC = 4
# Congestion notification; bits 4 to 0 of its opcode mean something else for every other service.
CNP = 0x81
# A selective acknowledgement, and the offer of a requester, of the opcodes that IBA leaves to manufacturers.
SELECTIVE_ACKNOWLEDGE = 0xd1
SELECTIVE_OFFER = 0xd2
# Bits 4 to 0 of the opcodes of what comes behind another packet of its message: SENDs, WRITEs and responses of READs.
BEHIND = {0x01, 0x02, 0x03, 0x07, 0x08, 0x09, 0x0e, 0x0f, 0x16}
# Bits 4 to 0 of the opcodes that answer requests of a reliable connection.
ANSWERS = range(0x0d, 0x13)


class Capture:
    """All frames that were sent into taps, in their order. As a context, it captures until the context ends, and then
    writes a file that tcpdump and Wireshark read."""

    def __init__(self, taps, path):
        self.path = path
        self.frames = []
        self.times = []
        self.sockets = {tap: self.open(tap) for tap in taps}
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.read, daemon=True)

    @staticmethod
    def open(tap):
        """Returns a socket that gets all frames of a tap."""
        packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        packets.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, ROOM)
        packets.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        packets.setsockopt(SOL_PACKET, PACKET_AUXDATA, 1)
        packets.bind((tap, ETH_P_ALL))
        return packets

    def read(self):
        """Takes frames until the end. Those that go out of the tap are for the device, and not its own."""
        while not self.ends.is_set():
            for ready in select.select(list(self.sockets.values()), [], [], 0.1)[0]:
                data, extra, _, address = ready.recvmsg(1 << 17, socket.CMSG_SPACE(AUXDATA.size))
                if address[2] == socket.PACKET_OUTGOING:
                    continue
                _, kind, _, size, _, _ = VNET_HDR.unpack_from(data)
                frame, tag = data[VNET_HDR.size:], tag_of(extra)
                frames = [frame[:12] + tag + frame[12:]
                          for frame in (segments(frame, size) if kind == GSO_UDP_L4 else [frame])]
                self.frames += frames
                self.times += [time.time()] * len(frames)

    def settled(self):
        """Returns how many frames there are, once no more come."""
        count = -1
        while count != len(self.frames):
            count = len(self.frames)
            time.sleep(QUIET_SECONDS)
        return count

    def bring(self, tap, frame):
        """Brings a frame to the device that has this tap."""
        self.sockets[tap].send(bytes(VNET_HDR.size) + frame)

    def missed(self):
        """Returns how many frames the kernel had no room for since the last call."""
        counts = [each.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8) for each in self.sockets.values()]
        return sum(struct.unpack("=II", both)[1] for both in counts)

    def __enter__(self):
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self.thread.start()
        return self

    def __exit__(self, kind, value, traceback):
        self.ends.set()
        self.thread.join()
        for each in self.sockets.values():
            each.close()
        self.write()

    def write(self):
        """Writes the file: libpcap's format 2.4, for Ethernet."""
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


def tag_of(extra):
    """Returns the tag of a VLAN that a frame had, from what recvmsg() says of the frame."""
    (_, _, auxdata), = extra
    status, _, _, _, _, tci, _ = AUXDATA.unpack(auxdata)
    return struct.pack("!HH", TAG, tci) if status & TP_STATUS_VLAN_VALID else b""


@dataclasses.dataclass(frozen=True)
class Header:
    """What a packet's own bytes say: the VLAN (None: there is no tag), version of IP, both addresses, opcode, number of
    the QP that the packet is for, and PSN. `end` is the place behind the BTH."""

    vlan: int | None
    version: int
    addresses: bytes
    opcode: int
    destination: int
    psn: int
    end: int


def base_header(frame):
    """Returns the Header of a packet."""
    kind, vlan, at = *struct.unpack_from("!H", frame, 12), None, 14
    if kind == TAG:
        (tci, kind), at = struct.unpack_from("!HH", frame, 14), 18
        vlan = tci % 0x1000
    version, addresses, bth = (4, (12, 20), 28) if kind == 0x0800 else (6, (8, 40), 48)
    opcode, _, _, destination, psn = struct.unpack_from("!BBHII", frame, at + bth)
    return Header(vlan, version, frame[at + addresses[0]:at + addresses[1]], opcode, destination % PSNS, psn % PSNS,
                  at + bth + 12)


def syndromes(frames):
    """Returns the syndromes of acknowledgements (IBA 9.7.5.2.1): 0x1f is an ACK without credits, 0x20 and above an RNR
    NAK, 0x60 and above a NAK."""
    headers = ((frame, base_header(frame)) for frame in frames)
    return {frame[header.end] for frame, header in headers if header.opcode % 0x20 == 0x11 and header.opcode < 0xc0}


def distance(psn, other):
    """Returns how far a PSN is ahead of another (IBA 9.7.2)."""
    return (psn - other + PSNS // 2) % PSNS - PSNS // 2


def flows(frames):
    """Returns opcodes and PSNs by flow: requests, or answers, from one address to a QP at another, in one VLAN. A CNP
    has the PSN of a packet of the other direction, and belongs to none."""
    found: dict[tuple, list] = {}
    for frame in frames:
        header = base_header(frame)
        if header.opcode == CNP:
            continue
        flow = header.vlan, header.addresses, header.destination, header.opcode % 0x20 in ANSWERS
        found.setdefault(flow, []).append((header.opcode, header.psn))
    return found


def broken_messages(frames):
    """Returns the packets that do not follow the packet in front of them in their message. Go-back-N may send a part of
    a message again."""
    broken = []
    for flow in flows(frames).values():
        seen = set()
        for opcode, psn in flow:
            if opcode % 0x20 in BEHIND and (psn - 1) % PSNS not in seen:
                broken.append((hex(opcode), psn))
            seen.add(psn)
    return broken


def gaps(frames):
    """Returns the requests in front of which a PSN was left out. Each flow must be one connection, without READs."""
    found = []
    for (*_, answers), flow in flows(frames).items():
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
    length = len(frame) - (18 if Dot1Q in packet else 14)
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
    kinds: dict[tuple[int, int, int | None], list] = {}
    for frame in frames:
        header = base_header(frame)
        kinds.setdefault((header.opcode, header.version, header.vlan), []).append(frame)
    choice = random.Random(1)
    sample = {kind: choice.sample(of_kind, min(SAMPLE, len(of_kind))) for kind, of_kind in kinds.items()}
    return [(f"opcode {kind[0]:#04x}, IPv{kind[1]}, VLAN {kind[2]}", complaint)
            for kind, chosen in sample.items() for frame in chosen for complaint in complaints(frame)]


def kinds_of(frames):
    """Returns the opcodes, versions of IP and VLANs that are among the frames."""
    return {(header.opcode, header.version, header.vlan) for header in map(base_header, frames)}


def payloads(frames, opcode):
    """Returns the lengths of the payload, of packets without extended headers."""
    headers = ((frame, base_header(frame)) for frame in frames)
    return {len(frame) - ICRC - header.end for frame, header in headers if header.opcode == opcode}


def marked(frame):
    """Returns a packet of IPv4 as it is after it has met congestion (CE, RFC 3168)."""
    packet = Ether(frame)
    packet[IP].tos |= 3
    packet[IP].chksum = None
    # ICRC does not cover these bits.
    return bytes(packet)
