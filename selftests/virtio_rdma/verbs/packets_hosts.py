#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Messages between two hosts that need each kind of packet: each operation of RC,
UC, XRC and UD with each path MTU, over IPv4 and IPv6, with and without a VLAN, and
what a responder refuses. The data of each message is compared."""

import contextlib
import os
import struct

import hosts
import ktap
import rc
from rc import AH, CQ, PD, QP, SGE, AHAttr, Endpoint, GlobalRoute, QPCap, e, post, recv_wr, send_wr, sge
from pyverbs.addr import GID
from pyverbs.mr import MW, MWBindInfo
from pyverbs.qp import QPEx, QPInitAttrEx
from pyverbs.wr import SendWR
from rc_xrc import DEVICE as XRC_DEVICE, XRC, Domain, Program
from vlan_hosts import HERE, NETWORKS, Vlan, have_vlans

SEND, SEND_IMM, SEND_INV = e.IBV_WR_SEND, e.IBV_WR_SEND_WITH_IMM, e.IBV_WR_SEND_WITH_INV
WRITE, WRITE_IMM, READ = e.IBV_WR_RDMA_WRITE, e.IBV_WR_RDMA_WRITE_WITH_IMM, e.IBV_WR_RDMA_READ
FAA, CAS = e.IBV_WR_ATOMIC_FETCH_AND_ADD, e.IBV_WR_ATOMIC_CMP_AND_SWP
HAS_IMM = (SEND_IMM, WRITE_IMM)
TAKES_RECEIVE = (SEND, SEND_IMM, WRITE_IMM)
MTUS = {256: e.IBV_MTU_256, 512: e.IBV_MTU_512, 1024: e.IBV_MTU_1024, 2048: e.IBV_MTU_2048, 4096: e.IBV_MTU_4096}
MOST = 3 * 4096
GRH = 40
QKEY = 0x11112222
FLUSHES = e.IBV_QP_EX_WITH_FLUSH | e.IBV_QP_EX_WITH_ATOMIC_WRITE | e.IBV_QP_EX_WITH_RDMA_WRITE
ACCESS = rc.ALL_ACCESS | e.IBV_ACCESS_MW_BIND
FLUSH_ACCESS = rc.ALL_ACCESS | e.IBV_ACCESS_FLUSH_GLOBAL
# The bit of device_cap_flags_ex for ATOMIC WRITE, which only the kernel's ib_verbs.h names.
ATOMIC_WRITE = 1 << 40
# What rxe puts in place of IBV_WC_WITH_INV: the kernel's own IB_WC_WITH_INVALIDATE (do_complete() of Linux 7.2.12).
RXE_WITH_INV = 1 << 2
# A peer that does not answer is given up after some milliseconds.
SOON = {"timeout": 10, "retry_cnt": 1}


class Initiator(Endpoint):
    """The end of an extended reliable connection that sends, to one SRQ of the other end."""

    # This endpoint receives nothing.
    def __init__(self, device):
        # pylint: disable=super-init-not-called
        self.device, self.mrs, self.channel, self.srqn = device, [], None, 0
        self.pd, self.own_cqs = PD(device.context), [CQ(device.context, 64)]
        (self.send_cq,) = self.own_cqs
        cap = QPCap(max_send_wr=16, max_recv_wr=0, max_send_sge=1, max_recv_sge=0)
        self.qp = QP(device.context, QPInitAttrEx(qp_type=e.IBV_QPT_XRC_SEND, comp_mask=e.IBV_QP_INIT_ATTR_PD,
                                                  pd=self.pd, scq=self.send_cq, cap=cap))

    def post_send(self, opcode, sges, wr_id=0, **options):
        wr = send_wr(opcode, sges, wr_id, **options)
        wr.set_qp_type_xrc(self.srqn)
        post(self.qp.post_send, [wr])


class Target(Endpoint):
    """The end of an extended reliable connection that receives, from an SRQ of its domain."""

    # This endpoint sends nothing.
    def __init__(self):
        # pylint: disable=super-init-not-called
        self.device, self.mrs, self.channel, self.own_cqs = XRC_DEVICE, [], None, []
        self.domain = Domain()
        self.program = Program(self.domain)
        self.pd, self.recv_cq, self.srqn = self.program.pd, self.program.cq, self.program.number
        self.qp = QP(XRC_DEVICE.context, QPInitAttrEx(qp_type=e.IBV_QPT_XRC_RECV, xrcd=self.domain.xrcd,
                                                      comp_mask=e.IBV_QP_INIT_ATTR_XRCD))

    def post_recv(self, sges, wr_id=0):
        post(self.program.srq.post_recv, [recv_wr(sges, wr_id)])

    def close(self):
        self.qp.close()
        for region in self.mrs:
            region.close()
        self.program.close()
        self.domain.close()


def connected(side, service, mtu=None, **changes):
    """Returns an endpoint of a transport service that is connected to the one of the other side."""
    if mtu:
        changes["path_mtu"] = MTUS[mtu]
    if service != "xrc":
        return side.endpoint(changes, qp_type=e.IBV_QPT_UC if service == "uc" else e.IBV_QPT_RC)
    end = Initiator(side.device) if side.active else Target()
    side.connect(end, **changes)
    end.srqn = side.exchange(end.srqn)
    return end


def carry(side, rng, end, region, there, opcode, length):
    """Carries one message from the active side to the other, or for a READ back."""
    data, imm = rng.randbytes(length), rng.getrandbits(32)
    if side.active == (opcode != READ):
        region.write(data, length)
    else:
        region.write(bytes(length), length)
    if side.active:
        side.exchange()
        end.post_send(opcode, [sge(region, 0, length)], imm=imm, remote=there)
        rc.complete(end.send_cq)
        if opcode == READ:
            ktap.same_bytes(region.read(length, 0), data, f"READ of {length} bytes")
    else:
        if opcode in TAKES_RECEIVE:
            end.post_recv([sge(region, 0, length)])
        side.exchange()
        if opcode in TAKES_RECEIVE:
            (wc,) = rc.complete(end.recv_cq)
            ktap.equal(wc.byte_len, length, "byte_len")
            if opcode in HAS_IMM:
                ktap.equal(wc.imm_data, imm, "immediate")
            ktap.same_bytes(region.read(length, 0), data, f"{length} bytes")
        while opcode == WRITE and region.read(length, 0) != data:
            os.sched_yield()
    side.exchange()


def lengths(mtu):
    """Returns lengths of messages of one, two and three packets, whose last packet is padded."""
    return mtu - 3, mtu + 1, 3 * mtu - 2


def operations(side, rng, service):
    """Every SEND, WRITE and READ that a service has, with each path MTU."""
    opcodes = (SEND, SEND_IMM, WRITE, WRITE_IMM) + ((READ,) if service != "uc" else ())
    most = max(mtu for mtu, value in MTUS.items() if value <= side.device.port.active_mtu)
    for mtu in [mtu for mtu in MTUS if mtu <= most]:
        end = connected(side, service, mtu)
        region = end.memory(MOST)
        there = side.target(region)
        for length in lengths(mtu):
            for opcode in opcodes:
                carry(side, rng, end, region, there, opcode, length)
        end.close()


def atomics(side, rng, service):
    """Fetch and add, and compare and swap."""
    end = connected(side, service)
    word, add, swap = (rng.getrandbits(63) for _ in range(3))
    region = end.memory(8, data=bytes(8) if side.active else struct.pack("=Q", word))
    there = side.target(region)
    if side.active:
        for opcode, operands, before in ((FAA, (add, 0), word), (CAS, (word + add, swap), word + add)):
            end.post_send(opcode, [sge(region)], remote=there, atomic=operands)
            rc.complete(end.send_cq)
            ktap.equal(struct.unpack("=Q", region.read(8, 0)), (before,), "before")
    side.exchange()
    if not side.active:
        ktap.equal(struct.unpack("=Q", region.read(8, 0)), (swap,), "after")
    end.close()


def datagrams(side, rng):
    """Datagrams of each length of the pad, the shortest and the longest, with immediate data and without."""
    end = Endpoint(side.device, qp_type=e.IBV_QPT_UD)
    end.connect(0, qkey=QKEY)
    region = end.memory(GRH + 4096)
    gid = str(side.device.context.query_gid(rc.PORT, side.gid_index))
    number, dgid = side.exchange((end.qp.qp_num, gid))
    route = GlobalRoute(dgid=GID(dgid), sgid_index=side.gid_index, hop_limit=64)
    with contextlib.closing(AH(end.pd, attr=AHAttr(port_num=rc.PORT, is_global=1, gr=route))) as address:
        longest = 128 << side.device.port.active_mtu
        for length in (0, 1, 2, 3, longest):
            for opcode in (SEND, SEND_IMM):
                data, imm = rng.randbytes(length), rng.getrandbits(32)
                if side.active:
                    region.write(data, length)
                    side.exchange()
                    wr = send_wr(opcode, [sge(region, 0, length)], imm=imm)
                    wr.set_wr_ud(address, number, QKEY)
                    post(end.qp.post_send, [wr])
                    rc.complete(end.send_cq)
                else:
                    end.post_recv([sge(region)])
                    side.exchange()
                    (wc,) = rc.complete(end.recv_cq)
                    ktap.equal((wc.byte_len, wc.src_qp), (GRH + length, number), "receive")
                    if opcode == SEND_IMM:
                        ktap.equal(wc.imm_data, imm, "immediate")
                    ktap.same_bytes(region.read(length, GRH), data, f"{length} bytes")
                side.exchange()
    end.close()


def untagged(side, family):
    """Has endpoints of this side use the port's own address of a family."""
    for entry in side.device.context.query_gid_table(side.device.port.gid_tbl_len):
        is_ipv6 = ":ffff:" not in entry.gid_str()
        if entry.port_num == rc.PORT and entry.gid_type == e.IBV_GID_TYPE_ROCE_V2 and is_ipv6 == (family == 6):
            side.gid_index = entry.gid_index
            return
    raise AssertionError(f"no GID of IPv{family}")


@contextlib.contextmanager
def addresses(side, is_tagged):
    """Yields functions that each have the endpoints of this side use another address."""
    if not is_tagged:
        yield [lambda family=family: untagged(side, family) for family in (4, 6)]
        return
    if not have_vlans():
        raise ktap.Skip("the kernel has no VLANs")
    with Vlan(side, HERE) as vlan:
        yield [lambda network=network: setattr(side, "gid_index", vlan.gid_index(
            network.format(2 if side.active else 1))) for network in NETWORKS]


def messages(service, is_tagged):
    """Returns the test of the messages of a service."""

    def test(side, rng):
        if service == "xrc" and not side.device.attr.device_cap_flags & XRC:
            raise ktap.Skip("the device has no XRC")
        with addresses(side, is_tagged) as uses:
            for use in uses:
                use()
                if service == "ud":
                    datagrams(side, rng)
                    continue
                operations(side, rng, service)
                if service != "uc":
                    atomics(side, rng, service)

    test.__name__ = service + "_in_a_vlan" * is_tagged
    return test


def flushing(side):
    """Returns an endpoint that has FLUSH and ATOMIC WRITE, and is connected to that of the other side."""
    attr = side.device.context.query_device_ex().device_cap_flags_ex
    if not attr & ATOMIC_WRITE:
        raise ktap.Skip("the device has no FLUSH and no ATOMIC WRITE")
    end = Endpoint(side.device)
    end.qp.close()
    cap = QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=1, max_recv_sge=1)
    end.qp = QPEx(side.device.context, QPInitAttrEx(
        qp_type=e.IBV_QPT_RC, scq=end.send_cq, rcq=end.recv_cq, cap=cap, pd=end.pd, send_ops_flags=FLUSHES,
        comp_mask=e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS))
    side.connect(end, qp_access_flags=FLUSH_ACCESS)
    return end


def does(end, verb, *arguments):
    """Posts a work request by a function of its own, and waits for its completion."""
    end.qp.wr_start()
    end.qp.wr_id, end.qp.wr_flags = 1, rc.SIGNALED
    verb(*arguments)
    end.qp.wr_complete()
    rc.complete(end.send_cq)


def atomic_write(side, rng):
    """Eight bytes are written at once."""
    end = flushing(side)
    region = end.memory(64, FLUSH_ACCESS, bytes(64))
    address, key = side.target(region)
    word = rng.randbytes(8)
    if side.active:
        does(end, end.qp.wr_atomic_write, key, address + 8, word)
    side.exchange()
    ktap.same_bytes(region.read(64, 0), bytes(64) if side.active else bytes(8) + word + bytes(48), "memory")
    side.exchange()
    end.close()


def flush(side, rng):
    """A FLUSH of a range and of an MR, behind a WRITE."""
    end = flushing(side)
    data = rng.randbytes(64)
    region = end.memory(64, FLUSH_ACCESS, data if side.active else bytes(64))
    address, key = side.target(region)
    if side.active:
        end.post_send(WRITE, [sge(region)], remote=(address, key))
        rc.complete(end.send_cq)
        does(end, end.qp.wr_flush, key, address, 64, e.IBV_FLUSH_GLOBAL, e.IBV_FLUSH_RANGE)
        does(end, end.qp.wr_flush, key, address, 0, e.IBV_FLUSH_GLOBAL, e.IBV_FLUSH_MR)
    side.exchange()
    ktap.same_bytes(region.read(64, 0), data, "memory")
    side.exchange()
    end.close()


def invalidate(side, rng):
    """A SEND of one packet and one of several end with the key of a window, which is of no use then."""
    if not side.device.attr.max_mw:
        raise ktap.Skip("the device has no memory windows")
    end = connected(side, "rc")
    region = end.memory(MOST, ACCESS)
    for length in (7, MOST - 1):
        data, key, window = rng.randbytes(length), None, None
        if not side.active:
            window = MW(end.pd, e.IBV_MW_TYPE_2)
            wr = SendWR(1, e.IBV_WR_BIND_MW)
            wr.set_bind_wr(window, MWBindInfo(region, region.buf, 64, e.IBV_ACCESS_REMOTE_WRITE))
            key = wr.rkey
            post(end.qp.post_send, [wr])
            rc.complete(end.send_cq)
            end.post_recv([sge(region)])
        theirs = side.exchange(key)
        if side.active:
            region.write(data, length)
            end.post_send(SEND_INV, [sge(region, 0, length)], imm=theirs)
            rc.complete(end.send_cq)
        else:
            (wc,) = rc.complete(end.recv_cq)
            flag = RXE_WITH_INV if is_rxe(side.device.name) else e.IBV_WC_WITH_INV
            ktap.equal((wc.wc_flags & flag, wc.imm_data & 0xffffffff), (flag, key), "key")
            ktap.same_bytes(region.read(length, 0), data, f"{length} bytes")
            window.close()
        side.exchange()
    end.close()


def invalidate_over_xrc(side, _rng):
    """A window belongs to the QP that bound it, and a target can bind none. What it is asked to invalidate is an error
    of class J, which no NAK tells of (IBA 9.9.3.1)."""
    if not side.device.attr.device_cap_flags & XRC:
        raise ktap.Skip("the device has no XRC")
    for length in (7, MOST - 1):
        end = connected(side, "xrc", **SOON)
        region = end.memory(MOST)
        if not side.active:
            end.post_recv([sge(region)])
        side.exchange()
        if side.active:
            end.post_send(SEND_INV, [sge(region, 0, length)], imm=0x12345678)
            rc.complete(end.send_cq, status=e.IBV_WC_RETRY_EXC_ERR)
        side.exchange()
        end.close()


def is_rxe(name):
    """Returns whether a device is the kernel's own."""
    return name.startswith("rxe")


def refused(side, status, prepare, opcode=SEND, key=0, **changes):
    """Posts a message that the other side refuses; prepare(end, region) posts its receive."""
    end = connected(side, "rc", **changes)
    region = end.memory(64)
    address, rkey = side.target(region)
    if not side.active:
        prepare(end, region)
    side.exchange()
    if side.active:
        end.post_send(opcode, [sge(region)], remote=(address, rkey ^ key))
        rc.complete(end.send_cq, status=status)
    side.exchange()
    end.close()


def negative_acknowledgements(side, _rng):
    """Each NAK that a responder sends: of a key, of a length, of its own receive, and of a PSN."""
    refused(side, e.IBV_WC_REM_ACCESS_ERR, lambda end, region: None, WRITE, 0x5A5A5A00)
    # rxe takes a receive that is too short for a malformed one (copy_data() and send_data_in() of Linux 7.2.12).
    too_long = e.IBV_WC_REM_OP_ERR if is_rxe(side.exchange(side.device.name)) else e.IBV_WC_REM_INV_REQ_ERR
    refused(side, too_long, lambda end, region: end.post_recv([sge(region, 0, 8)]))
    refused(side, e.IBV_WC_REM_OP_ERR, lambda end, region: end.post_recv([SGE(region.buf, 64, region.lkey ^ 0xff00)]))
    # The responder waits for packets that the requester did never send. It holds what is a little ahead of them, and
    # tells so; what is far ahead it refuses.
    for ahead in (9, 1000):
        psn = {"sq_psn": 0x123456 + ahead} if side.active else {}
        refused(side, e.IBV_WC_RETRY_EXC_ERR, lambda end, region: end.post_recv([sge(region)]), **SOON, **psn)


def not_ready(side, rng):
    """The responder has no receive, and says so."""
    end = connected(side, "rc")
    region, data = end.memory(64), rng.randbytes(64)
    if side.active:
        region.write(data, 64)
        end.post_send(SEND, [sge(region)])
        side.exchange()
        rc.complete(end.send_cq)
    else:
        side.exchange()
        end.post_recv([sge(region)])
        rc.complete(end.recv_cq)
        ktap.same_bytes(region.read(64, 0), data, "data")
    side.exchange()
    end.close()


if __name__ == "__main__":
    hosts.run([messages(service, is_tagged) for is_tagged in (False, True) for service in ("rc", "uc", "xrc", "ud")] +
              [atomic_write, flush, invalidate, invalidate_over_xrc, negative_acknowledgements, not_ready])
