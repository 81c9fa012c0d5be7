# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""A small driver of virtio-rdma, with the front end's side of vhost-user, for the smoke test.

The memory of the guest is a memfd. Objects are made with rings of fixed depths, each in a region of its own.
"""

import ctypes
import mmap
import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from second_device.layout import abi  # noqa: E402
from second_device.memory import full_barrier  # noqa: E402

GUEST, USER, SIZE = 0x40000000, 0x7f0000000000, 16 << 20
PAGE, QUEUE_SIZE, DEPTH, STRIDE = 4096, 64, 16, 128
PATIENCE = 10
FEATURES = 1 << 32 | 1 << abi.F_RINGS
RIGHTS = abi.ACCESS_LOCAL_WRITE | abi.ACCESS_REMOTE_WRITE | abi.ACCESS_REMOTE_READ
GET_FEATURES, SET_FEATURES, SET_OWNER, SET_MEM_TABLE = 1, 2, 3, 5
SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE, GET_VRING_BASE, SET_VRING_KICK, SET_VRING_CALL = 8, 9, 10, 11, 12, 13
GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, SET_VRING_ENABLE, GET_CONFIG = 15, 16, 18, 24
SET_STATUS, GET_STATUS = 39, 40


def wait(condition: Any, what: str) -> Any:
    """Returns what `condition` returns as soon as it is true."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, f"no {what}"
        time.sleep(0.0005)
    return found


class Queue:
    """A virtqueue."""

    def __init__(self, driver: "Driver", index: int) -> None:
        self.driver, self.index = driver, index
        self.kick, self.call = os.eventfd(0), os.eventfd(0)
        self.descriptors, self.available, self.used = driver.alloc(PAGE), driver.alloc(PAGE), driver.alloc(PAGE)
        self.free = 0
        self.produced = self.consumed = 0
        send = driver.send
        send(SET_VRING_NUM, struct.pack("<II", index, QUEUE_SIZE))
        send(SET_VRING_BASE, struct.pack("<II", index, 0))
        addresses = [USER + place - GUEST for place in (self.descriptors, self.used, self.available)]
        send(SET_VRING_ADDR, struct.pack("<IIQQQQ", index, 0, *addresses, 0))
        send(SET_VRING_CALL, struct.pack("<Q", index), [self.call])
        send(SET_VRING_KICK, struct.pack("<Q", index), [self.kick])
        send(SET_VRING_ENABLE, struct.pack("<II", index, 1))

    def add(self, buffers: list[tuple[int, int, bool]], following: int | None = None) -> int:
        """Makes a chain of (address, length, writable) available, and returns its head."""
        head = self.free % QUEUE_SIZE
        for number, (address, length, writable) in enumerate(buffers):
            index = self.free % QUEUE_SIZE
            self.free += 1
            last = number + 1 == len(buffers)
            flags = (not last or following is not None) | writable << 1
            behind = self.free % QUEUE_SIZE if not last else following or 0
            self.driver.write(self.descriptors + 16 * index, struct.pack("<QIHH", address, length, flags, behind))
        self.driver.write(self.available + 4 + 2 * (self.produced % QUEUE_SIZE), struct.pack("<H", head))
        self.produced += 1
        self.driver.write(self.available + 2, struct.pack("<H", self.produced & 0xffff))
        os.eventfd_write(self.kick, 1)
        return head

    def take(self) -> tuple[int, int] | None:
        """Returns the head and the length of the next used chain, if there is one."""
        produced, = struct.unpack("<H", self.driver.read(self.used + 2, 2))
        if produced == self.consumed & 0xffff:
            return None
        place = self.used + 4 + 8 * (self.consumed % QUEUE_SIZE)
        self.consumed += 1
        return struct.unpack("<II", self.driver.read(place, 8))


class Events:
    """A queue of events, with buffers of 8 bytes."""

    def __init__(self, driver: "Driver", index: int, buffers: int = 16) -> None:
        self.driver, self.queue = driver, Queue(driver, index)
        self.places = {}
        for _ in range(buffers):
            place = driver.alloc(8)
            self.places[self.queue.add([(place, 8, True)])] = place

    def take(self) -> tuple[int, int] | None:
        """Returns the next event, if there is one."""
        used = self.queue.take()
        if used is None:
            return None
        assert used[1] == 8
        place = self.places[used[0]]
        found = struct.unpack("<II", self.driver.read(place, 8))
        self.places[self.queue.add([(place, 8, True)])] = place
        return found


class Driver:
    """A driver, and the guest around it."""

    def __init__(self, path: str) -> None:
        self.fd = os.memfd_create("guest")
        os.ftruncate(self.fd, SIZE)
        self.memory = mmap.mmap(self.fd, SIZE)
        self.next = GUEST
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        assert struct.unpack("<Q", self.ask(GET_FEATURES))[0] & FEATURES == FEATURES
        self.send(SET_PROTOCOL_FEATURES, self.ask(GET_PROTOCOL_FEATURES))
        self.send(SET_OWNER)
        self.start()

    def start(self) -> None:
        """Initializes the device."""
        self.set_status(3)
        self.send(SET_FEATURES, struct.pack("<Q", FEATURES | 1 << 30))
        self.set_status(11)
        assert self.status() == 11
        self.send(SET_MEM_TABLE, struct.pack("<IIQQQQ", 1, 0, GUEST, SIZE, USER, 0), [self.fd])
        config = self.ask(GET_CONFIG, struct.pack("<III", 0, 256, 0) + bytes(256))
        self.config = abi.Config.from_buffer_copy(config, 12)
        vectors = self.config.num_comp_vectors
        self.control = Queue(self, 0)
        self.completions = [Events(self, 1 + vector) for vector in range(vectors)]
        self.doorbells = Queue(self, 1 + vectors)
        self.events = Events(self, 2 + vectors)
        self.set_status(15)
        self.page = self.alloc(PAGE)

    # ---- vhost-user

    def send(self, request: int, payload: bytes = b"", fds: list[int] | None = None) -> None:
        """Sends a message and waits until it is done, except before there are acknowledgements."""
        early = request in (SET_PROTOCOL_FEATURES, SET_OWNER)
        header = struct.pack("<III", request, 1 if early else 9, len(payload))
        socket.send_fds(self.socket, [header + payload], fds or [])
        if not early:
            assert self._reply(request) == bytes(8), f"request {request} failed"

    def ask(self, request: int, payload: bytes = b"") -> bytes:
        """Sends a message that has a reply, and returns the reply."""
        self.socket.sendall(struct.pack("<III", request, 1, len(payload)) + payload)
        return self._reply(request)

    def _reply(self, request: int) -> bytes:
        answered, flags, size = struct.unpack("<III", self.socket.recv(12, socket.MSG_WAITALL))
        assert (answered, flags) == (request, 5)
        return self.socket.recv(size, socket.MSG_WAITALL)

    def set_status(self, status: int) -> None:
        """Writes the device status."""
        self.send(SET_STATUS, struct.pack("<Q", status))

    def status(self) -> int:
        """Reads the device status."""
        return struct.unpack("<Q", self.ask(GET_STATUS))[0]

    # ---- memory

    def alloc(self, size: int) -> int:
        """Returns the address of memory that is 0 and that nothing else uses."""
        align = PAGE if size >= PAGE else 64
        address = -(-self.next // align) * align
        self.next = address + size
        assert self.next <= GUEST + SIZE
        return address

    def read(self, address: int, length: int) -> bytes:
        """Copies memory."""
        return self.memory[address - GUEST:address - GUEST + length]

    def write(self, address: int, data: bytes) -> None:
        """Writes memory."""
        self.memory[address - GUEST:address - GUEST + len(data)] = data

    def word(self, address: int) -> int:
        """Reads a word."""
        return struct.unpack("<I", self.read(address, 4))[0]

    def set_word(self, address: int, value: int) -> None:
        """Writes a word."""
        self.write(address, struct.pack("<I", value & 0xffffffff))

    def table(self, pages: list[int]) -> int:
        """Writes a page table."""
        address = self.alloc(8 * len(pages))
        self.write(address, struct.pack(f"<{len(pages)}Q", *pages))
        return address

    def region(self, pages: int) -> tuple[int, Any]:
        """Returns the address of the memory of a region, and the region."""
        address = self.alloc(pages * PAGE)
        table = self.table([address + PAGE * i for i in range(pages)])
        return address, abi.RingRegion(pages=table, npages=pages)

    # ---- commands

    def command(self, code: int, request: Any = b"", reply: Any = None, room: int | None = None) -> tuple[int, Any]:
        """Sends a command, and returns its status and its reply."""
        data = bytes([code]) + bytes(request)
        if room is None:
            room = 1 + (ctypes.sizeof(reply) if reply else 0)
        self.write(self.page, data + b"\xee" * room)
        self.control.add([(self.page, len(data), False), (self.page + len(data), room, True)])
        _, length = wait(self.control.take, "reply")
        answer = self.read(self.page + len(data), length)
        assert length == (room if reply and answer[0] == 0 else 1)
        return answer[0], reply.from_buffer_copy(answer, 1) if reply and answer[0] == 0 else None

    def make(self, code: int, request: Any = b"", reply: Any = None) -> Any:
        """Sends a command that succeeds, and returns its reply."""
        status, found = self.command(code, request, reply)
        assert status == 0, f"command {code}: status {status}"
        return found

    def ring(self, *doorbells: tuple[int, int]) -> None:
        """Sends doorbells of (number, queue)."""
        place = self.alloc(8 * len(doorbells))
        self.write(place, b"".join(struct.pack("<II", *doorbell) for doorbell in doorbells))
        self.doorbells.add([(place, 8 * len(doorbells), False)])
        assert wait(self.doorbells.take, "doorbell back")[1] == 0

    def add_gid(self, last: int, index: int = 0) -> bytes:
        """Adds the GID 10.0.0.`last`."""
        gid = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, last])
        self.make(abi.CMD_ADD_GID, abi.CmdAddGid(gid=(ctypes.c_uint8 * 16)(*gid), gid_type=2, index=index, port_num=1))
        return gid


class Cq:
    """A CQ."""

    def __init__(self, driver: Driver, depth: int = 64, vector: int = 0) -> None:
        self.driver, self.depth = driver, depth
        self.head, region = driver.region(-(-(128 + 64 * depth) // PAGE))
        request = abi.CmdCreateRingCq(region=region, cqe=depth, comp_vector=vector)
        self.number = driver.make(abi.CMD_CREATE_RING_CQ, request, abi.RspCreateCq).cqn
        self.index = 0

    def poll(self) -> Any:
        """Returns the next CQE, if there is one."""
        place = self.head + 128 + self.index % self.depth * 64
        if self.driver.word(place + 60) != self.index // self.depth + 1:
            return None
        self.index += 1
        cqe = abi.RingCqe.from_buffer_copy(self.driver.read(place, 64))
        self.driver.set_word(self.head, self.index)
        return cqe

    def next(self) -> Any:
        """Waits for the next CQE."""
        return wait(self.poll, "CQE")

    def arm(self, solicited: bool = False) -> None:
        """Asks for an event."""
        place = self.head + (68 if solicited else 64)
        self.driver.set_word(place, self.driver.word(place) + 1)


class Qp:
    """A QP with a CQ for its sends and its receives."""

    def __init__(self, driver: Driver, pd: int, qp_type: int = abi.QPT_RC, cq: Cq | None = None) -> None:
        self.driver, self.pd, self.type = driver, pd, qp_type
        self.cq = cq or Cq(driver)
        self.head, region = driver.region(3)
        base = abi.CmdCreateQp(pdn=pd, qp_type=qp_type, sq_sig_type=1, max_send_wr=DEPTH, max_send_sge=2,
                               send_cqn=self.cq.number, max_recv_wr=DEPTH, max_recv_sge=2, recv_cqn=self.cq.number,
                               max_inline_data=32)
        sq = abi.RingShape(depth=DEPTH, stride=STRIDE, offset=256)
        rq = abi.RingShape(depth=DEPTH, stride=STRIDE, offset=256 + DEPTH * STRIDE)
        request = abi.CmdCreateRingQp(base=base, region=region, sq=sq, rq=rq)
        self.number = driver.make(abi.CMD_CREATE_RING_QP, request, abi.RspCreateQp).qpn
        self.sent = self.received = 0

    def modify(self, mask: int, state: int | None = None, **attributes: Any) -> int:
        """Sends MODIFY_QP, and returns the status."""
        attr = abi.QpAttr(**attributes)
        if state is not None:
            mask |= abi.QP_STATE
            attr.qp_state = state
        request = abi.CmdModifyQp(qpn=self.number, attr_mask=mask, attr=attr)
        status = self.driver.command(abi.CMD_MODIFY_QP, request)[0]
        if state == abi.QPS_RESET and status == 0:
            self.sent = self.received = 0
            self.driver.set_word(self.head, 0)
            self.driver.set_word(self.head + 64, 0)
        return status

    def query(self) -> Any:
        """Sends QUERY_QP."""
        return self.driver.make(abi.CMD_QUERY_QP, abi.CmdQueryQp(qpn=self.number), abi.RspQueryQp).attr

    def init(self) -> None:
        """Leads an RC QP from RESET to INIT."""
        mask = abi.QP_PKEY_INDEX | abi.QP_PORT | abi.QP_ACCESS_FLAGS
        assert self.modify(mask, abi.QPS_INIT, port_num=1, qp_access_flags=RIGHTS) == 0

    def ready_to_receive(self, gid: bytes, peer: int, **attributes: Any) -> None:
        """Leads an RC QP from INIT to RTR."""
        route = abi.GlobalRoute(dgid=(ctypes.c_uint8 * 16)(*gid), hop_limit=64)
        mask = abi.QP_AV | abi.QP_PATH_MTU | abi.QP_DEST_QPN | abi.QP_RQ_PSN | abi.QP_MAX_DEST_RD_ATOMIC \
            | abi.QP_MIN_RNR_TIMER
        values = {"path_mtu": 3, "rq_psn": 7, "max_dest_rd_atomic": 4, "min_rnr_timer": 12, **attributes}
        assert self.modify(mask, abi.QPS_RTR, ah_attr=abi.AhAttr(grh=route, port_num=1, ah_flags=1), dest_qp_num=peer,
                           **values) == 0

    def ready_to_send(self, **attributes: Any) -> None:
        """Leads an RC QP from RTR to RTS."""
        mask = abi.QP_TIMEOUT | abi.QP_RETRY_CNT | abi.QP_RNR_RETRY | abi.QP_SQ_PSN | abi.QP_MAX_QP_RD_ATOMIC
        values = {"timeout": 8, "retry_cnt": 2, "rnr_retry": 7, "sq_psn": 7, "max_rd_atomic": 4, **attributes}
        assert self.modify(mask, abi.QPS_RTS, **values) == 0

    def datagrams(self, qkey: int) -> None:
        """Leads a UD QP from RESET to RTS."""
        mask = abi.QP_PKEY_INDEX | abi.QP_PORT | abi.QP_QKEY
        assert self.modify(mask, abi.QPS_INIT, port_num=1, qkey=qkey) == 0
        assert self.modify(0, abi.QPS_RTR) == 0
        assert self.modify(abi.QP_SQ_PSN, abi.QPS_RTS) == 0

    def send(self, opcode: int, sges: Any = (), inline: bytes | None = None, flags: int = abi.SEND_SIGNALED,
             **fields: Any) -> None:
        """Posts a send."""
        header = abi.RingSqWqe if self.type == abi.QPT_RC else abi.RingUdWqe
        if inline is not None:
            flags |= abi.SEND_INLINE
        wqe = header(wr_id=1000 + self.sent, opcode=opcode, num_sge=len(sges), send_flags=flags,
                     inline_len=len(inline or b""), **fields)
        place = self.head + 256 + self.sent % DEPTH * STRIDE
        self.driver.write(place, bytes(wqe) + b"".join(bytes(abi.Sge(*sge)) for sge in sges) + (inline or b""))
        self.sent += 1
        self._post(0, self.sent, abi.DOORBELL_SQ, 128)

    def receive(self, *sges: tuple[int, int, int]) -> None:
        """Posts a receive with SGEs of (address, length, key)."""
        wqe = abi.RqWqe(num_sge=len(sges), wr_id=2000 + self.received)
        place = self.head + 256 + (DEPTH + self.received % DEPTH) * STRIDE
        self.driver.write(place, bytes(wqe) + b"".join(bytes(abi.Sge(*sge)) for sge in sges))
        self.received += 1
        self._post(64, self.received, abi.DOORBELL_RQ, 132)

    def _post(self, producer: int, value: int, queue: int, wake: int) -> None:
        self.driver.set_word(self.head + producer, value)
        full_barrier()
        if self.driver.word(self.head + wake):
            self.driver.set_word(self.head + wake, 0)
            self.driver.ring((self.number, queue))
