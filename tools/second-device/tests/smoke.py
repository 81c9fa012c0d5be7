#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Smoke test of second-device: what a driver does most, and some of what it must not do. Runs in seconds."""

import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

from driver import GUEST, PAGE, RIGHTS, SIZE, Cq, Driver, Qp, wait
from second_device.layout import abi

PROGRAM = Path(__file__).resolve().parents[1] / "second-device"


class Smoke(unittest.TestCase):
    """Each test has a process of its own with two device instances."""

    def setUp(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        paths = [f"{self.folder.name}/{name}" for name in "ab"]
        self.process = subprocess.Popen([sys.executable, "-B", PROGRAM, *(f"--socket={path}" for path in paths)],
                                        stderr=subprocess.DEVNULL)
        self.addCleanup(self.process.wait)
        self.addCleanup(self.process.kill)
        wait(lambda: all(Path(path).exists() for path in paths), "socket")
        self.paths = paths
        self.a = Driver(paths[0])

    def tearDown(self) -> None:
        assert self.process.poll() is None, "the device has ended"

    def pd(self, driver: Driver) -> int:
        return driver.make(abi.CMD_CREATE_PD, b"", abi.RspCreatePd).pdn

    def key(self, driver: Driver, pd: int, access: int = RIGHTS) -> int:
        request = abi.CmdGetDmaMr(pdn=pd, access_flags=access)
        return driver.make(abi.CMD_GET_DMA_MR, request, abi.RspMr).lkey

    def pair(self, driver: Driver, peer: Driver, **attributes: Any) -> tuple[Qp, Qp]:
        """Returns two RC QPs that are connected; attributes are those of both ways to RTS."""
        gid = driver.add_gid(1)
        peer_gid = gid if peer is driver else peer.add_gid(2)
        first, second = Qp(driver, self.pd(driver)), Qp(peer, self.pd(peer))
        first.init()
        second.init()
        first.ready_to_receive(peer_gid, second.number)
        second.ready_to_receive(gid, first.number)
        first.ready_to_send(**attributes)
        second.ready_to_send(**attributes)
        return first, second

    def check_data(self, first: Qp, second: Qp) -> None:
        """SEND, WRITE and READ, each with more than a packet of data."""
        near, far = first.driver, second.driver
        near_key, far_key = self.key(near, first.pd), self.key(far, second.pd)
        source, place = near.alloc(PAGE), far.alloc(PAGE)
        data = bytes(range(256)) * 12
        near.write(source, data)
        sges = [(source, 1000, near_key), (source + 1000, len(data) - 1000, near_key)]

        second.receive((place, 1500, far_key), (place + 1500, 2500, far_key))
        first.send(abi.WR_SEND_WITH_IMM, sges, imm_data=0x11223344, flags=abi.SEND_SIGNALED | abi.SEND_SOLICITED)
        cqe = second.cq.next()
        assert (cqe.status, cqe.opcode, cqe.byte_len) == (0, abi.WC_RECV, len(data))
        assert (cqe.wr_id, cqe.imm_data, cqe.wc_flags) == (2000, 287454020, abi.WC_WITH_IMM)
        assert far.read(place, len(data)) == data
        cqe = first.cq.next()
        assert (cqe.status, cqe.opcode, cqe.wr_id, cqe.qp_num) == (0, abi.WC_SEND, 1000, first.number)

        far.write(place, bytes(PAGE))
        first.send(abi.WR_RDMA_WRITE, sges, remote_addr=place + 3, rkey=far_key)
        assert (first.cq.next().status, far.read(place + 3, len(data))) == (0, data)
        second.receive()
        first.send(abi.WR_RDMA_WRITE_WITH_IMM, inline=b"inline", remote_addr=place, rkey=far_key, imm_data=5)
        assert (first.cq.next().status, far.read(place, 6)) == (0, b"inline")
        cqe = second.cq.next()
        assert (cqe.opcode, cqe.byte_len, cqe.imm_data) == (abi.WC_RECV_RDMA_WITH_IMM, 6, 5)

        near.write(source, bytes(PAGE))
        far.write(place, data)
        first.send(abi.WR_RDMA_READ, sges, remote_addr=place, rkey=far_key)
        cqe = first.cq.next()
        assert (cqe.status, cqe.byte_len) == (0, len(data))
        assert near.read(source, len(data)) == data
        assert first.query().sq_psn == second.query().rq_psn

    def test_loopback(self) -> None:
        self.check_data(*self.pair(self.a, self.a))

    def test_two_instances(self) -> None:
        b = Driver(self.paths[1])
        first, second = self.pair(self.a, b)
        self.check_data(first, second)
        gid = abi.CmdAddGid(gid=bytes_of(bytes(10) + b"\xff\xff\x0a\0\0\1"), gid_type=2, port_num=1)
        assert b.command(abi.CMD_ADD_GID, gid)[0] == abi.STATUS_EXISTS
        b.socket.close()
        first.send(abi.WR_SEND, inline=b"nobody")
        assert first.cq.next().status == abi.WC_RETRY_EXC_ERR
        assert first.query().qp_state == abi.QPS_ERR
        Driver(self.paths[1]).add_gid(2)

    def test_user_mr(self) -> None:
        a = self.a
        first, second = self.pair(a, a)
        pages = [a.alloc(PAGE) for _ in range(3)][::-1]
        request = abi.CmdRegUserMr(pdn=second.pd, access_flags=RIGHTS, start=0x1234100, length=2 * PAGE,
                                   virt_addr=0xabc000, pages=a.table(pages), npages=3)
        mr = a.make(abi.CMD_REG_USER_MR, request, abi.RspMr)
        source = a.alloc(2 * PAGE)
        data = bytes(i * 7 % 256 for i in range(2 * PAGE))
        a.write(source, data)
        key = self.key(a, first.pd)
        first.send(abi.WR_RDMA_WRITE, [(source, len(data), key)], remote_addr=0xabc000, rkey=mr.rkey)
        assert first.cq.next().status == 0
        found = a.read(pages[0] + 0x100, PAGE - 0x100) + a.read(pages[1], PAGE) + a.read(pages[2], 0x100)
        assert found == data
        for change, status in (({"npages": 2}, abi.STATUS_INVAL), ({"pages": request.pages + 4}, abi.STATUS_INVAL),
                               ({"pages": a.table([pages[0], 5, pages[1]])}, abi.STATUS_INVAL),
                               ({"pages": a.table([pages[0], GUEST + SIZE, pages[1]])}, abi.STATUS_FAULT),
                               ({"pages": 0}, abi.STATUS_FAULT), ({"pdn": 77}, abi.STATUS_NO_OBJECT),
                               ({"access_flags": abi.ACCESS_REMOTE_WRITE}, abi.STATUS_INVAL)):
            wrong = abi.CmdRegUserMr.from_buffer_copy(request)
            for name, value in change.items():
                setattr(wrong, name, value)
            assert a.command(abi.CMD_REG_USER_MR, wrong, abi.RspMr)[0] == status, change
        a.make(abi.CMD_DEREG_MR, abi.CmdDeregMr(mrn=mr.mrn))
        first.send(abi.WR_RDMA_WRITE, [(source, 1, key)], remote_addr=0xabc000, rkey=mr.rkey)
        assert first.cq.next().status == abi.WC_REM_ACCESS_ERR
        assert self.events(1) == [(abi.EVENT_QP_ACCESS_ERR, second.number)]
        assert second.query().qp_state == abi.QPS_ERR

    def events(self, count: int) -> list[tuple[int, int]]:
        return [wait(self.a.events.take, "event") for _ in range(count)]

    def test_no_receive(self) -> None:
        first, second = self.pair(self.a, self.a, rnr_retry=7)
        first.send(abi.WR_SEND, inline=b"late")
        second.receive((self.a.alloc(64), 64, self.key(self.a, second.pd)))
        assert (second.cq.next().status, first.cq.next().status) == (0, 0)
        first, second = self.pair(self.a, self.a, rnr_retry=1)
        first.send(abi.WR_SEND, inline=b"too late")
        assert first.cq.next().status == abi.WC_RNR_RETRY_EXC_ERR
        assert (first.query().qp_state, second.query().qp_state) == (abi.QPS_ERR, abi.QPS_RTS)

    def test_receive_wakes(self) -> None:
        first, second = self.pair(self.a, self.a)
        assert second.modify(abi.QP_MIN_RNR_TIMER, min_rnr_timer=0) == 0  # 655 ms
        first.send(abi.WR_SEND, inline=b"waits")
        wait(lambda: self.a.word(second.head + 132), "wake word")
        begin = time.monotonic()
        second.receive((self.a.alloc(64), 64, self.key(self.a, second.pd)))
        assert first.cq.next().status == 0
        assert time.monotonic() - begin < 0.5

    def test_flush_and_reset(self) -> None:
        a = self.a
        first, second = self.pair(a, a)
        for _ in range(3):
            first.receive()
        assert first.modify(0, abi.QPS_ERR) == 0
        first.send(abi.WR_SEND, inline=b"flushed", flags=0)
        cqes = [first.cq.next() for _ in range(4)]
        assert {cqe.status for cqe in cqes} == {abi.WC_WR_FLUSH_ERR}
        assert [cqe.wr_id for cqe in cqes if cqe.opcode >> 7] == [2000, 2001, 2002]
        for qp in (first, second):
            assert qp.modify(0, abi.QPS_RESET) == 0
            assert qp.query().qp_access_flags == 0
        gid = a.add_gid(3)
        first.init()
        first.ready_to_receive(gid, first.number)  # A QP that is connected with itself
        first.ready_to_send()
        first.receive((a.alloc(64), 4, self.key(a, first.pd)))
        first.send(abi.WR_SEND, inline=b"self")
        assert [first.cq.next().status for _ in range(2)] == [0, 0]

    def test_malformed_requests(self) -> None:
        a = self.a
        cases = (({"opcode": 99}, abi.WC_LOC_QP_OP_ERR),
                 ({"opcode": abi.WR_SEND, "flags": 1 << 9}, abi.WC_LOC_QP_OP_ERR),
                 ({"opcode": abi.WR_SEND, "sges": [(GUEST, 1, 5)]}, abi.WC_LOC_PROT_ERR),
                 ({"opcode": abi.WR_SEND, "sges": [(GUEST, 1, 5)] * 3}, abi.WC_LOC_QP_OP_ERR),
                 ({"opcode": abi.WR_RDMA_READ, "inline": b""}, abi.WC_LOC_QP_OP_ERR))
        for request, status in cases:
            first, second = self.pair(a, a)
            first.send(**request)
            assert (first.cq.next().status, first.query().qp_state) == (status, abi.QPS_ERR), request
            second.receive((GUEST, 1, 5))
            assert second.query().qp_state == abi.QPS_RTS

    def test_producer_jumps(self) -> None:
        first, _ = self.pair(self.a, self.a)
        self.a.set_word(first.head, 1000)
        self.a.ring((first.number, 0), (first.number, 7), (12345, 0))
        assert self.events(1) == [(abi.EVENT_QP_FATAL, first.number)]
        assert first.query().qp_state == abi.QPS_ERR

    def test_overflow(self) -> None:
        a = self.a
        cq = Cq(a, 2)
        gid, qp = a.add_gid(1), Qp(a, self.pd(a), cq=cq)
        qp.init()
        qp.ready_to_receive(gid, qp.number)
        qp.ready_to_send()
        for _ in range(3):
            qp.send(abi.WR_RDMA_WRITE)
        assert set(self.events(2)) == {(abi.EVENT_CQ_ERR, cq.number), (abi.EVENT_QP_FATAL, qp.number)}
        assert [cq.next().wr_id for _ in range(2)] == [1000, 1001]

    def test_arming(self) -> None:
        a = self.a
        first, second = self.pair(a, a)
        first.cq.arm()
        first.send(abi.WR_RDMA_WRITE)
        assert wait(a.completions[0].take, "event") == (first.cq.number, 0)
        second.cq.arm(solicited=True)
        for flags in (0, abi.SEND_SOLICITED):
            second.receive()
            first.send(abi.WR_SEND, flags=flags)
        assert wait(a.completions[0].take, "event") == (second.cq.number, 0)
        assert a.completions[0].take() is None

    def test_datagrams(self) -> None:
        a, b = self.a, Driver(self.paths[1])
        a.add_gid(1)
        gid = b.add_gid(2)
        sender, receiver = Qp(a, self.pd(a), abi.QPT_UD), Qp(b, self.pd(b), abi.QPT_GSI)
        assert receiver.number == abi.GSI_QPN
        sender.datagrams(1)
        receiver.driver.make(abi.CMD_MODIFY_QP, abi.CmdModifyQp(
            qpn=1, attr_mask=abi.QP_STATE | abi.QP_PKEY_INDEX | abi.QP_QKEY,
            attr=abi.QpAttr(qp_state=abi.QPS_INIT, qkey=0x80010000)))
        assert receiver.modify(0, abi.QPS_RTR) == 0
        place = b.alloc(64)
        receiver.receive((place, 64, self.key(b, receiver.pd)))
        av = abi.Av(port=1, pdn=sender.pd, sl_tclass_flowlabel=3 << 28 | 4 << 20, dgid=bytes_of(gid), hop_limit=9)
        sender.send(abi.WR_SEND, inline=b"dropped", remote_qpn=1, remote_qkey=5, av=av)
        sender.send(abi.WR_SEND_WITH_IMM, inline=b"datagram", remote_qpn=1, remote_qkey=0x00010000, av=av, imm_data=6)
        assert [sender.cq.next().status for _ in range(2)] == [0, 0]
        port = b.make(abi.CMD_QUERY_PORT, abi.CmdQueryPort(port=1), abi.RspQueryPort)
        assert port.qkey_viol_cntr == 2
        assert sender.modify(abi.QP_QKEY, abi.QPS_RTS, qkey=0x80010000) == 0
        sender.send(abi.WR_SEND_WITH_IMM, inline=b"datagram", remote_qpn=1, remote_qkey=1 << 31, av=av, imm_data=6)
        cqe = receiver.cq.next()
        assert (cqe.byte_len, cqe.wc_flags, cqe.src_qp, cqe.sl) == (48, 3, sender.number, 3)
        area = b.read(place, 48)
        assert (area[20:22], area[28:30]) == (b"\x45\x04", bytes([9, 17]))
        assert (area[32:40], area[40:]) == (bytes([10, 0, 0, 1, 10, 0, 0, 2]), b"datagram")
        sender.cq.next()
        sender.send(abi.WR_SEND, av=abi.Av(port=2))
        assert (sender.cq.next().status, sender.query().qp_state) == (abi.WC_LOC_QP_OP_ERR, abi.QPS_SQE)
        assert sender.modify(0, abi.QPS_RTS) == 0

    def test_commands(self) -> None:
        a = self.a
        assert a.command(200)[0] == abi.STATUS_UNSUPPORTED
        assert a.command(abi.CMD_CREATE_QP)[0] == abi.STATUS_UNSUPPORTED
        assert a.command(abi.CMD_QUERY_PORT, b"", None)[0] == abi.STATUS_LENGTH
        assert a.command(abi.CMD_CREATE_PD, b"", None, room=3)[0] == abi.STATUS_LENGTH
        assert a.command(abi.CMD_DESTROY_CQ, abi.CmdDestroyCq(cqn=0))[0] == abi.STATUS_NO_OBJECT
        pkey = a.make(abi.CMD_QUERY_PKEY, abi.CmdQueryPkey(port=1), abi.RspQueryPkey).pkey
        assert pkey == 65535
        qp = Qp(a, self.pd(a))
        assert a.command(abi.CMD_DESTROY_CQ, abi.CmdDestroyCq(cqn=qp.cq.number))[0] == abi.STATUS_BUSY
        assert a.command(abi.CMD_DESTROY_PD, abi.CmdDestroyPd(pdn=qp.pd))[0] == abi.STATUS_BUSY
        assert qp.modify(0, abi.QPS_RTS) == abi.STATUS_STATE
        assert qp.modify(0, abi.QPS_INIT) == abi.STATUS_INVAL
        a.make(abi.CMD_DESTROY_QP, abi.CmdDestroyQp(qpn=qp.number))
        a.make(abi.CMD_DESTROY_CQ, abi.CmdDestroyCq(cqn=qp.cq.number))
        a.make(abi.CMD_DESTROY_PD, abi.CmdDestroyPd(pdn=qp.pd))

    def test_malformed_chain(self) -> None:
        a = self.a
        head = a.control.free % 64
        a.control.add([(a.page, 8, False)], following=head)
        assert self.events(1) == [(abi.EVENT_DEVICE_FATAL, 0)]
        assert a.status() & 64 == 64

    def test_reset(self) -> None:
        a = self.a
        qp = Qp(a, self.pd(a))
        a.set_status(0)
        assert a.status() == 0
        a.start()
        assert a.command(abi.CMD_QUERY_QP, abi.CmdQueryQp(qpn=qp.number), abi.RspQueryQp)[0] == abi.STATUS_NO_OBJECT
        self.check_data(*self.pair(a, a))


def bytes_of(gid: bytes) -> Any:
    """Returns a GID as a field of a structure."""
    return abi.CmdAddGid.from_buffer_copy(gid + bytes(12)).gid


if __name__ == "__main__":
    unittest.main()
