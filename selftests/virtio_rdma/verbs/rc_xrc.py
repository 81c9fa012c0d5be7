#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Extended reliable connections: messages that name the SRQ they are for."""

import ctypes
import errno
import os
import subprocess
import sys
import tempfile

import ktap
from rc import (ALL_ACCESS, Endpoint, PyverbsError, complete, e, empty, fails_with, move, open_device, post,
                recv_wr, send_wr, sge, status_name)
from async_events import has_event, next_event
from pyverbs.cq import CQ
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPCap, QPInitAttr, QPInitAttrEx
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr, SrqInitAttrEx
from pyverbs.xrcd import XRCD, XRCDInitAttr

DEVICE = open_device()
SIZE = 64
XRC = e.IBV_DEVICE_XRC


class Domain:
    """An XRC domain; the file that names it is `path`."""

    def __init__(self, path=None):
        # pylint: disable-next=consider-using-with
        self.file = open(path, "rb") if path else tempfile.NamedTemporaryFile()
        init = XRCDInitAttr(e.IBV_XRCD_INIT_ATTR_FD | e.IBV_XRCD_INIT_ATTR_OFLAGS, os.O_CREAT,
                            self.file.fileno())
        self.xrcd = XRCD(DEVICE.context, init)

    def close(self):
        """Closes the domain."""
        self.xrcd.close()
        self.file.close()


class Program:
    """What a program has in a domain: an SRQ with a PD, memory and a CQ of its own."""

    def __init__(self, domain, depth=16):
        self.pd = PD(DEVICE.context)
        self.cq = CQ(DEVICE.context, 4 * depth)
        init = SrqInitAttrEx(max_wr=depth, max_sge=1)
        init.srq_type, init.pd, init.xrcd, init.cq = e.IBV_SRQT_XRC, self.pd, domain.xrcd, self.cq
        init.comp_mask = (e.IBV_SRQ_INIT_ATTR_TYPE | e.IBV_SRQ_INIT_ATTR_PD |
                          e.IBV_SRQ_INIT_ATTR_CQ | e.IBV_SRQ_INIT_ATTR_XRCD)
        self.srq = SRQ(DEVICE.context, init)
        self.number = self.srq.get_srq_num()
        self.inbox = MR(self.pd, depth * SIZE, ALL_ACCESS)

    def post(self, slot, length=SIZE):
        """Posts a receive."""
        post(self.srq.post_recv, [recv_wr([sge(self.inbox, slot * SIZE, length)], slot)])

    def close(self):
        """Destroys everything that is left."""
        for thing in (self.srq, self.inbox, self.cq, self.pd):
            thing.close()


class Connection(Endpoint):
    """An initiator, which is an endpoint without receives, and its target."""

    def __init__(self, domain, **changes):
        # pylint: disable=super-init-not-called
        self.device, self.mrs, self.channel = DEVICE, [], None
        self.pd = PD(DEVICE.context)
        self.own_cqs = [CQ(DEVICE.context, 64)]
        (self.send_cq,) = self.own_cqs
        init = QPInitAttrEx(qp_type=e.IBV_QPT_XRC_RECV, comp_mask=e.IBV_QP_INIT_ATTR_XRCD,
                            xrcd=domain.xrcd)
        self.target = QP(DEVICE.context, init)
        cap = QPCap(max_send_wr=16, max_recv_wr=0, max_send_sge=1, max_recv_sge=0)
        init = QPInitAttrEx(qp_type=e.IBV_QPT_XRC_SEND, comp_mask=e.IBV_QP_INIT_ATTR_PD, pd=self.pd,
                            scq=self.send_cq, cap=cap)
        self.qp = QP(DEVICE.context, init)
        self.connect(self.target.qp_num, **changes)
        self.target.to_rts(self.attributes(self.qp.qp_num))
        self.out = self.memory(SIZE)

    def send(self, srqn, opcode=e.IBV_WR_SEND, sges=None, **options):
        """Posts a message for an SRQ."""
        wr = send_wr(opcode, [sge(self.out)] if sges is None else sges, **options)
        wr.set_qp_type_xrc(srqn)
        post(self.qp.post_send, [wr])

    def close(self):
        self.target.close()
        super().close()


class Bench:
    """Programs and connections of one domain."""

    def __init__(self, programs=1, connections=1, **changes):
        self.domain = Domain()
        self.programs = [Program(self.domain) for _ in range(programs)]
        self.connections = [Connection(self.domain, **changes) for _ in range(connections)]

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            for thing in (*self.connections, *self.programs, self.domain):
                thing.close()
        except PyverbsError:
            # Of a test that failed already, the first error is the one to see.
            if kind is None:
                raise


def attributes(_rng):
    """The device says that it has XRC; SRQs for XRC have numbers, and other SRQs do not."""
    with Bench(2) as bench:
        numbers = {program.number for program in bench.programs}
        ktap.equal((len(numbers), 0 in numbers), (2, False), "numbers")
        ktap.equal(bench.programs[0].srq.query().max_wr, 16, "max_wr")
        basic = SRQ(bench.programs[0].pd, SrqInitAttr(SrqAttr(max_wr=1, max_sge=1)))
        fails_with(errno.EOPNOTSUPP, basic.get_srq_num)
        basic.close()
        target = bench.connections[0].target
        ktap.equal(target.query(e.IBV_QP_STATE)[0].qp_state, e.IBV_QPS_RTS, "state")


def refused(_rng):
    """What makes no sense is refused, and changes nothing."""
    with Bench() as bench:
        program, connection = bench.programs[0], bench.connections[0]
        cap = QPCap(max_send_wr=1, max_recv_wr=0, max_send_sge=1, max_recv_sge=0)
        rc = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=program.cq, rcq=program.cq, srq=program.srq, cap=cap)
        fails_with(errno.EINVAL, QP, program.pd, rc)
        target = QPInitAttrEx(qp_type=e.IBV_QPT_XRC_RECV, comp_mask=e.IBV_QP_INIT_ATTR_PD, pd=program.pd)
        fails_with(errno.EINVAL, QP, DEVICE.context, target)
        for qp in (connection.qp, connection.target):
            fails_with(errno.EINVAL, post, qp.post_recv, [recv_wr([])])
        fails_with(errno.EINVAL, post, connection.target.post_send, [send_wr(e.IBV_WR_SEND, [])])


def traffic(rng):
    """Random messages of several connections for several SRQs: each arrives once, whole, and at its SRQ."""
    with Bench(3, 8) as bench:
        targets = {connection.target.qp_num: index for index, connection in enumerate(bench.connections)}
        free = [set(range(16)) for _ in bench.programs]
        under_way, received, sent = {}, 0, 0
        while received < 1000:
            for program, slots in zip(bench.programs, free):
                for slot in rng.sample(sorted(slots), rng.randint(0, len(slots))):
                    program.post(slot)
                    slots.remove(slot)
            for index, connection in enumerate(bench.connections):
                if index in under_way or sent == 1000:
                    continue
                data, to = rng.randbytes(rng.randint(0, SIZE)), rng.randrange(3)
                connection.out.write(data, len(data))
                connection.send(bench.programs[to].number, sges=[sge(connection.out, 0, len(data))])
                under_way[index] = (to, data)
                sent += 1
            for to, program in enumerate(bench.programs):
                for wc in program.cq.poll(rng.randint(1, 8))[1]:
                    ktap.equal(status_name(wc.status), "SUCCESS", "status")
                    index = targets[wc.qp_num]
                    expected, data = under_way.pop(index)
                    ktap.equal((expected, wc.byte_len), (to, len(data)), "SRQ and length")
                    ktap.same_bytes(program.inbox.read(len(data), wc.wr_id * SIZE), data, "message")
                    complete(bench.connections[index].send_cq)
                    free[to].add(wc.wr_id)
                    received += 1


def keys(rng):
    """RDMA and atomics reach the memory of the SRQ's PD, and no other."""
    with Bench(2, 2) as bench:
        first, second = bench.programs
        connection, other = bench.connections
        data = rng.randbytes(SIZE)
        connection.out.write(data, SIZE)
        place = (first.inbox.buf + SIZE, first.inbox.rkey)
        connection.send(first.number, e.IBV_WR_RDMA_WRITE, remote=place)
        complete(connection.send_cq)
        ktap.same_bytes(first.inbox.read(SIZE, SIZE), data, "written")
        connection.out.write(bytes(SIZE), SIZE)
        connection.send(first.number, e.IBV_WR_RDMA_READ, remote=place)
        complete(connection.send_cq)
        ktap.same_bytes(connection.out.read(SIZE, 0), data, "read")
        first.inbox.write(bytes([5]) + bytes(7), 8)
        connection.send(first.number, e.IBV_WR_ATOMIC_FETCH_AND_ADD, [sge(connection.out, 0, 8)],
                        remote=(first.inbox.buf, first.inbox.rkey), atomic=(7, 0))
        complete(connection.send_cq)
        ktap.same_bytes(first.inbox.read(8, 0), bytes([12]) + bytes(7), "added")
        first.post(3, 0)
        connection.send(first.number, e.IBV_WR_RDMA_WRITE_WITH_IMM, remote=place, imm=77)
        ktap.equal([(wc.wr_id, wc.imm_data) for wc in complete(first.cq)], [(3, 77)], "receive")
        complete(connection.send_cq)
        other.send(second.number, e.IBV_WR_RDMA_WRITE, remote=place)
        complete(other.send_cq, status=e.IBV_WC_REM_ACCESS_ERR)
        ktap.equal([next_event(DEVICE.context) for _ in range(2)],
                   [e.IBV_EVENT_QP_ACCESS_ERR, e.IBV_EVENT_QP_LAST_WQE_REACHED], "events")


def wrong_srq(_rng):
    """A message for an SRQ that is not one of the domain ends its connection, and that alone."""
    with Bench(2, 5) as bench:
        program, gone = bench.programs
        elsewhere = Domain()
        foreign = Program(elsewhere)
        basic = SRQ(program.pd, SrqInitAttr(SrqAttr(max_wr=1, max_sge=1)))
        number = gone.number
        gone.srq.close()
        for connection, srqn in zip(bench.connections, (0, 0xffffff, foreign.number, number)):
            connection.send(srqn)
            complete(connection.send_cq, status=e.IBV_WC_REM_INV_REQ_ERR)
            ktap.equal([next_event(DEVICE.context) for _ in range(2)],
                       [e.IBV_EVENT_QP_REQ_ERR, e.IBV_EVENT_QP_LAST_WQE_REACHED], "events")
        program.post(1)
        bench.connections[4].send(program.number)
        ktap.equal(complete(program.cq)[0].wr_id, 1, "wr_id")
        empty(program.cq)
        for thing in (basic, foreign, elsewhere):
            thing.close()


def waits(_rng):
    """Senders wait for receives without an end; each receive that is posted wakes one of them."""
    with Bench(1, 8, min_rnr_timer=0) as bench:
        (program,) = bench.programs
        for connection in bench.connections:
            connection.send(program.number)
        seen = set()
        for slot in range(8):
            program.post(slot)
            seen |= {wc.qp_num for wc in complete(program.cq)}
            empty(program.cq)
        ktap.equal(len(seen), 8, "targets")
        # The SRQ is destroyed while a sender waits for it.
        bench.connections[0].send(program.number)
        program.srq.close()
        ktap.equal(complete(bench.connections[0].send_cq)[0].status, e.IBV_WC_SUCCESS, "the first")
        complete(bench.connections[0].send_cq, status=e.IBV_WC_REM_INV_REQ_ERR)
        ktap.equal([next_event(DEVICE.context) for _ in range(2)],
                   [e.IBV_EVENT_QP_REQ_ERR, e.IBV_EVENT_QP_LAST_WQE_REACHED], "events")


def limit_and_size(_rng):
    """SRQs for XRC have a limit, and are resized, as others."""
    with Bench() as bench:
        (program,), (connection,) = bench.programs, bench.connections
        for slot in range(4):
            program.post(slot)
        program.srq.modify(SrqAttr(max_wr=64, srq_limit=4), e.IBV_SRQ_MAX_WR | e.IBV_SRQ_LIMIT)
        for slot in range(4):
            connection.send(program.number)
            ktap.equal(complete(program.cq)[0].wr_id, slot, "wr_id")
        ktap.equal(next_event(DEVICE.context), e.IBV_EVENT_SRQ_LIMIT_REACHED, "event")
        ktap.equal(has_event(), False, "another event")


def orders(_rng):
    """What others use cannot be destroyed; what a destroyed SRQ had completed is gone."""
    with Bench() as bench:
        (program,), (connection,) = bench.programs, bench.connections
        for slot in range(2):
            program.post(slot)
            connection.send(program.number)
        complete(connection.send_cq, 2)
        program.srq.close()
        empty(program.cq)
        connection.target.close()
        connection.send(program.number)
        move(connection.qp, e.IBV_QPS_ERR)
        complete(connection.send_cq, status=e.IBV_WC_WR_FLUSH_ERR)


class Other:
    """Another program, `program` below."""

    def __init__(self, path, *words):
        # pylint: disable-next=consider-using-with
        self.process = subprocess.Popen([sys.executable, "-B", __file__, path, *map(str, words)], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, line=None):
        """Sends a line; returns the answer."""
        if line:
            print(line, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def end(self):
        """Ends the program."""
        self.process.stdin.close()
        return self.process.wait()


def program(path):
    """Receives from a domain that the file names, and tells the numbers of its SRQ and what came."""
    domain = Domain(path)
    own = Program(domain)
    print(own.number, flush=True)
    for slot, _line in enumerate(sys.stdin):
        own.post(slot)
        (wc,) = complete(own.cq)
        print(wc.wr_id, wc.qp_num, own.inbox.read(SIZE, slot * SIZE)[:wc.byte_len].hex(), flush=True)
    own.close()
    domain.close()


def programs(rng):
    """A connection serves the SRQs of other programs, which come and go."""
    with Bench() as bench:
        (connection,) = bench.connections
        others = [Other(bench.domain.file.name) for _ in range(3)]
        numbers = [int(other.ask()) for other in others]
        ktap.equal(len({*numbers, bench.programs[0].number}), 4, "numbers")
        for slot in range(5):
            for other, number in zip(others, numbers):
                data = rng.randbytes(SIZE)
                connection.out.write(data, SIZE)
                connection.send(number)
                expected = f"{slot} {connection.target.qp_num} {data.hex()}"
                ktap.equal(other.ask("next"), expected, "receive")
                complete(connection.send_cq)
        others[0].process.kill()
        others[0].process.wait()
        ktap.equal([other.end() for other in others[1:]], [0, 0], "exit status")
        bench.programs[0].post(0)
        connection.send(bench.programs[0].number)
        complete(bench.programs[0].cq)


class Raw:
    """A context of libibverbs' own: pyverbs does not know ibv_open_qp()."""

    # Pointers that stand before struct ibv_context in struct verbs_context, the last first.
    CLOSE_XRCD, OPEN_XRCD, OPEN_QP = 3, 4, 8

    def __init__(self, path, qp_num):
        self.lib = ctypes.CDLL("libibverbs.so.1", use_errno=True)
        for name in ("ibv_get_device_list", "ibv_get_device_name", "ibv_open_device"):
            getattr(self.lib, name).restype = ctypes.c_void_p
        devices = self.lib.ibv_get_device_list(None)
        names = ctypes.cast(devices, ctypes.POINTER(ctypes.c_void_p))
        (device,) = [ctypes.c_void_p(device) for device in iter_until_null(names)
                     if ctypes.string_at(self.lib.ibv_get_device_name(ctypes.c_void_p(device))).decode()
                     == DEVICE.name]
        self.context = self.lib.ibv_open_device(device)
        self.lib.ibv_free_device_list(ctypes.c_void_p(devices))
        with open(path, "rb") as file:
            # comp_mask, fd, oflags
            init = (ctypes.c_int * 3)(3, file.fileno(), 0)
            self.xrcd = self.call(self.OPEN_XRCD, ctypes.c_void_p(self.context), init)
        # comp_mask (number, domain, type), qp_num; xrcd; qp_context; qp_type
        self.attr = (ctypes.c_uint64 * 4)(1 | 2 | 8 | qp_num << 32, self.xrcd, 0, e.IBV_QPT_XRC_RECV)
        self.qp = self.call(self.OPEN_QP, ctypes.c_void_p(self.context), self.attr)

    def call(self, place, *arguments):
        """Calls an operation of struct verbs_context."""
        at = ctypes.c_void_p.from_address(self.context - 8 * place)
        kinds = [ctypes.c_void_p] * len(arguments)
        result = ctypes.CFUNCTYPE(ctypes.c_void_p, *kinds, use_errno=True)(at.value)(
            *[ctypes.cast(argument, ctypes.c_void_p) for argument in arguments])
        return result or 0

    def close(self):
        """Closes the QP, the domain and the context."""
        if self.qp:
            ktap.equal(self.lib.ibv_destroy_qp(ctypes.c_void_p(self.qp)), 0, "ibv_destroy_qp")
        ktap.equal(self.call(self.CLOSE_XRCD, ctypes.c_void_p(self.xrcd)) & 0xffffffff, 0, "ibv_close_xrcd")
        ktap.equal(self.lib.ibv_close_device(ctypes.c_void_p(self.context)), 0, "ibv_close_device")


def iter_until_null(pointers):
    """The elements of an array that ends with a null pointer."""
    index = 0
    while pointers[index]:
        yield pointers[index]
        index += 1


def opened(_rng):
    """A target lives as long as a program has it open."""
    with Bench() as bench:
        (program_here,), (connection,) = bench.programs, bench.connections
        number = connection.target.qp_num
        raw = Raw(bench.domain.file.name, number)
        ktap.equal(bool(raw.qp), True, "ibv_open_qp")
        nobody = Raw(bench.domain.file.name, connection.qp.qp_num)
        ktap.equal(bool(nobody.qp), False, "ibv_open_qp of an initiator")
        nobody.close()
        connection.target.close()
        for slot in range(2):
            program_here.post(slot)
            connection.send(program_here.number)
            ktap.equal(complete(program_here.cq)[0].qp_num, number, "qp_num")
            complete(connection.send_cq)
        raw.close()
        connection.send(program_here.number)
        move(connection.qp, e.IBV_QPS_ERR)
        complete(connection.send_cq, status=e.IBV_WC_WR_FLUSH_ERR)


def without(_rng):
    """A device without XRC says so."""
    fails_with(errno.EOPNOTSUPP, Domain)
    pd, cq = PD(DEVICE.context), CQ(DEVICE.context, 1)
    cap = QPCap(max_send_wr=1, max_recv_wr=0, max_send_sge=1, max_recv_sge=0)
    init = QPInitAttrEx(qp_type=e.IBV_QPT_XRC_SEND, comp_mask=e.IBV_QP_INIT_ATTR_PD, pd=pd, scq=cq, cap=cap)
    fails_with(errno.EOPNOTSUPP, QP, DEVICE.context, init)
    cq.close()
    pd.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        program(sys.argv[1])
    elif DEVICE.attr.device_cap_flags & XRC:
        ktap.run([attributes, refused, traffic, keys, wrong_srq, waits, limit_and_size, orders, programs,
                  opened])
    else:
        ktap.run([without])
