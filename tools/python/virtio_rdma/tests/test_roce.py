# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The crate roce beside scapy: it reads in frames what scapy wrote into them, and makes the same frames again."""

import itertools
import json
import os
import random
import subprocess

import pytest
from scapy.contrib.roce import BTH
from scapy.fields import BitField, IntField, LongField, XByteField, XIntField
from scapy.layers.inet import IP, TCP, UDP, IPOption_NOP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrFragment
from scapy.layers.l2 import ARP, Dot1Q, Ether
from scapy.packet import Packet, Raw

from virtio_rdma.common import BUILD, TOP
from virtio_rdma.tests import capture

PORT = 4791
MACS = {"dst": "52:54:00:00:00:02", "src": "52:54:00:00:00:01"}
ADDRESSES = {4: {"src": "192.0.2.1", "dst": "192.0.2.2"}, 6: {"src": "fe80::5054:ff:fe00:1", "dst": "2001:db8::2"}}


# The extended headers of IBA 9.3, A14 and A19, which scapy does not have. Each has the name and the fields that
# the example fields.rs prints; what begins with an underscore is reserved.

class Xrceth(Packet):
    name = "xrceth"
    fields_desc = [XByteField("_reserved", 0), BitField("srq", 0, 24)]


class Deth(Packet):
    name = "deth"
    fields_desc = [XIntField("qkey", 0), XByteField("_reserved", 0), BitField("source_qp", 0, 24)]


class Feth(Packet):
    name = "feth"
    fields_desc = [BitField("_reserved", 0, 26), BitField("selectivity", 0, 2), BitField("placement", 0, 4)]


class Reth(Packet):
    name = "reth"
    fields_desc = [LongField("va", 0), XIntField("rkey", 0), IntField("dma_len", 0)]


class AtomicEth(Packet):
    name = "atomic_eth"
    fields_desc = [LongField("va", 0), XIntField("rkey", 0), LongField("swap_add", 0), LongField("compare", 0)]


class Aeth(Packet):
    name = "aeth"
    fields_desc = [XByteField("syndrome", 0), BitField("msn", 0, 24)]


class AtomicAckEth(Packet):
    name = "atomic_ack_eth"
    fields_desc = [LongField("orig", 0)]


class SackEth(Packet):
    name = "sack_eth"
    fields_desc = [LongField(word, 0) for word in ("first", "second", "third", "fourth")]


class ImmDt(Packet):
    name = "imm_dt"
    fields_desc = [IntField("data", 0)]


class Ieth(Packet):
    name = "ieth"
    fields_desc = [XIntField("rkey", 0)]


class CnpReserved(Packet):
    name = "cnp_reserved"
    fields_desc = [LongField("_reserved1", 0), LongField("_reserved2", 0)]


# What follows the BTH by bits 4 to 0 of the opcode, as the kernel's rxe_opcode.c has it; what may carry payload has
# Raw behind it.
FOLLOWS: dict[int, list[type[Packet]]] = {
    0x00: [Raw], 0x01: [Raw], 0x02: [Raw], 0x03: [ImmDt, Raw], 0x04: [Raw], 0x05: [ImmDt, Raw],
    0x06: [Reth, Raw], 0x07: [Raw], 0x08: [Raw], 0x09: [ImmDt, Raw], 0x0a: [Reth, Raw], 0x0b: [Reth, ImmDt, Raw],
    0x0c: [Reth], 0x0d: [Aeth, Raw], 0x0e: [Raw], 0x0f: [Aeth, Raw], 0x10: [Aeth, Raw],
    0x11: [Aeth], 0x12: [Aeth, AtomicAckEth], 0x13: [AtomicEth], 0x14: [AtomicEth],
    0x16: [Ieth, Raw], 0x17: [Ieth, Raw], 0x1c: [Feth, Reth], 0x1d: [Reth, Raw],
}
RESPONSES = range(0x0d, 0x13)
OPCODES: dict[int, list[type[Packet]]] = {
    **FOLLOWS,
    **{0x20 | bits: FOLLOWS[bits] for bits in range(0x0c)},
    0x64: [Deth, Raw], 0x65: [Deth, ImmDt, Raw],
    0x81: [CnpReserved],
    0xd1: [Aeth, SackEth],
    0xd2: [],
    **{0xa0 | bits: follows if bits in RESPONSES else [Xrceth, *follows] for bits, follows in FOLLOWS.items()},
}


def said(frames):
    """Returns what the crate says of each frame."""
    done = subprocess.run(["cargo", "run", "--locked", "--quiet", "-p", "roce", "--example", "fields"],
                          cwd=os.path.join(TOP, "tools/virtio-rdmad"), check=True, encoding="ascii",
                          env={**os.environ, "CARGO_TARGET_DIR": os.path.join(BUILD, "cargo-virtio-rdmad")},
                          input="".join(bytes(frame).hex() + "\n" for frame in frames), stdout=subprocess.PIPE)
    return [json.loads(line) for line in done.stdout.splitlines()]


def randomly(kind, choice):
    """Returns a header of this kind with random fields, and zeros for what is reserved."""
    header = kind()
    for field in kind.fields_desc:
        if not field.name.startswith("_"):
            bits = field.size if isinstance(field, BitField) else field.sz * 8
            setattr(header, field.name, choice.getrandbits(int(bits)))
    return header


class Made:
    """A frame that scapy makes of an opcode and random fields, and what the crate must say of it."""

    def __init__(self, opcode, version, tag, choice):
        self.opcode, self.version = opcode, version
        flags = {name: bool(choice.getrandbits(1)) for name in ("solicited", "migreq", "fecn", "becn", "ackreq")}
        self.bth = {"opcode": opcode, "pkey": choice.getrandbits(16), "dqpn": choice.getrandbits(24),
                    "psn": choice.getrandbits(24), **flags}
        self.headers = [randomly(kind, choice) for kind in OPCODES[opcode] if kind is not Raw]
        length = choice.choice([*range(9), 1023, 1024]) if Raw in OPCODES[opcode] else 0
        self.payload = choice.randbytes(length)
        self.vlan = [choice.getrandbits(3), choice.getrandbits(12)] if tag else None
        self.source_port = 0xc000 | choice.getrandbits(14)
        self.ip = {"version": version, "traffic_class": choice.getrandbits(8), "hop_limit": choice.getrandbits(8)}
        if version == 4:
            self.ip |= {"identification": choice.getrandbits(16), "dont_fragment": bool(choice.getrandbits(1))}
        else:
            self.ip |= {"flow_label": choice.getrandbits(20)}

    def outer(self, identification):
        """Returns the frame up to the IP header."""
        ethernet = Ether(**MACS)
        if self.vlan:
            ethernet /= Dot1Q(prio=self.vlan[0], vlan=self.vlan[1])
        traffic_class, hop_limit = self.ip["traffic_class"], self.ip["hop_limit"]
        if self.version == 6:
            return ethernet / IPv6(tc=traffic_class, hlim=hop_limit, fl=self.ip["flow_label"], **ADDRESSES[6])
        flags = "DF" if self.ip["dont_fragment"] else 0
        return ethernet / IP(tos=traffic_class, ttl=hop_limit, id=identification, flags=flags, **ADDRESSES[4])

    def frame(self, step=0):
        """Returns the frame; IPv4's identification is `step` more."""
        pad = -len(self.payload) % 4
        transport = BTH(padcount=pad, **self.bth)
        for header in self.headers:
            transport /= header
        if self.payload:
            transport /= Raw(self.payload + bytes(pad))
        identification = (self.ip.get("identification", 0) + step) % 0x10000
        return bytes(self.outer(identification) / UDP(sport=self.source_port, dport=PORT, chksum=0) / transport)

    def expected(self):
        """Returns what the crate says."""
        extended = {header.name: {name: value for name, value in header.fields.items() if not name.startswith("_")}
                    for header in self.headers if not isinstance(header, CnpReserved)}
        return {
            "destination": MACS["dst"].replace(":", ""), "source": MACS["src"].replace(":", ""), "vlan": self.vlan,
            "source_ip": ADDRESSES[self.version]["src"], "destination_ip": ADDRESSES[self.version]["dst"],
            "ip": self.ip, "source_port": self.source_port,
            "bth": self.bth, "extended": extended,
            "payload": self.payload.hex(), "again": self.frame().hex(), "icrc_of_next": self.frame(1)[-4:].hex(),
        }


@pytest.mark.parametrize("tag", [False, True], ids=["untagged", "tagged"])
@pytest.mark.parametrize("version", [4, 6], ids=["ipv4", "ipv6"])
def test_every_opcode(version, tag):
    choice = random.Random(version * 2 + tag)
    made = [Made(opcode, version, tag, choice) for opcode, _ in itertools.product(OPCODES, range(3))]
    answers = said(one.frame() for one in made)
    for one, answer in zip(made, answers):
        assert answer == one.expected(), f"opcode {one.opcode:#04x}"


def test_reserved_bits_pad_and_udp_checksum_are_ignored():
    ip = Ether(**MACS) / IP(**ADDRESSES[4], flags="DF")
    udp = UDP(sport=PORT, dport=PORT, chksum=0)
    frames = [
        ip / UDP(sport=PORT, dport=PORT) / BTH(opcode=4, padcount=3, resv6=0x3f, resv7=0x7f) / Raw(b"dpad"),
        ip / udp / BTH(opcode=0x64) / Deth(_reserved=0xff, source_qp=5),
        ip / udp / BTH(opcode=0x81) / CnpReserved(_reserved2=1),
        # Ethernet fills a frame up to 60 bytes.
        bytes(ip / udp / BTH(opcode=4)) + b"..",
    ]
    send, datagram, cnp, filled = said(frames)
    assert (send["payload"], send["bth"]["dqpn"], send["bth"]["psn"]) == (b"d".hex(), 0, 0)
    assert datagram["extended"] == {"deth": {"qkey": 0, "source_qp": 5}}
    assert (cnp["bth"]["opcode"], cnp["payload"]) == (0x81, "")
    assert filled["again"] == bytes(frames[3])[:-2].hex()


def test_what_is_refused():
    def four(**fields):
        return Ether(**MACS) / IP(**ADDRESSES[4], **fields)

    udp, send = UDP(sport=PORT, dport=PORT, chksum=0), BTH(opcode=4) / Raw(b"four")
    refused = [
        ("not_ip", Ether(**MACS) / ARP()),
        ("not_ip", Ether(**MACS) / Dot1Q(vlan=1) / Dot1Q(vlan=2) / IP(**ADDRESSES[4]) / udp / send),
        ("ip_header_length", four(options=[IPOption_NOP()] * 4) / udp / send),
        ("fragment", four(flags="MF") / udp / send),
        ("fragment", four(frag=1) / udp / send),
        ("fragment", Ether(**MACS) / IPv6(**ADDRESSES[6]) / IPv6ExtHdrFragment(m=1) / udp / send),
        ("not_udp", four() / TCP(dport=PORT)),
        ("ip_checksum", four(chksum=1) / udp / send),
        ("not_roce_port", four() / UDP(dport=4792) / Raw(bytes(32))),
        ("udp_length", four() / UDP(dport=PORT, len=20, chksum=0) / send),
        ("bth_cut_off", four() / UDP(dport=PORT) / Raw(bytes(15))),
        ("transport_version", four() / udp / BTH(opcode=4, version=1)),
        ("unknown_opcode", four() / udp / BTH(opcode=0x15)),
        ("unknown_opcode", four() / udp / BTH(opcode=0x44) / Raw(bytes(12))),
        ("extended_header_cut_off", four() / udp / BTH(opcode=0x0a) / Raw(bytes(12))),
        ("pad_count", four() / udp / BTH(opcode=4, padcount=1)),
        ("pad_count", four() / udp / BTH(opcode=4) / Raw(b"three")),
        ("unexpected_payload", four() / udp / BTH(opcode=0x0c) / Reth() / Raw(b"four")),
        ("icrc", four() / udp / BTH(opcode=4, icrc=0) / Raw(b"four")),
    ]
    answers = said(frame for _, frame in refused)
    assert [answer.get("malformed") for answer in answers] == [cause for cause, _ in refused]


@pytest.mark.parametrize("version", [4, 6], ids=["ipv4", "ipv6"])
def test_judge_of_captured_packets_refuses_wrong_ones(version):
    choice = random.Random(version)
    outer = {4: IP(flags="DF", **ADDRESSES[4]), 6: IPv6(**ADDRESSES[6])}[version]
    right = bytes(Ether(**MACS) / outer / UDP(sport=0xc000, dport=PORT, chksum=0) /
                  BTH(opcode=4, dqpn=3, psn=5) / Raw(choice.randbytes(20)))
    assert not capture.complaints(right)
    header = capture.base_header(right)
    assert (header.opcode, header.destination, header.psn) == (4, 3, 5)
    start = 62 if version == 6 else 42
    for place in (*range(start, start + 4), start + 5, len(right) - 5, len(right) - 1):
        wrong = bytearray(right)
        wrong[place] ^= 1
        assert capture.complaints(bytes(wrong)), f"byte {place}"
    assert capture.complaints(right[:-4])
