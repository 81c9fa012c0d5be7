# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The back end's side of the vhost-user protocol (docs/interop/vhost-user.rst of QEMU).

The specification does not say what a reset is over vhost-user. Here it is each of these: the status 0 (SET_STATUS),
RESET_DEVICE, RESET_OWNER, SET_FEATURES, the stop of the last queue (GET_VRING_BASE), and the end of the connection.
"""

import os
import socket
import struct
import sys
from collections.abc import Callable

from .device import Device
from .loop import Loop
from .memory import Fault, Region

F_PROTOCOL_FEATURES = 30
PROTOCOL_F_MQ, PROTOCOL_F_REPLY_ACK, PROTOCOL_F_CONFIG = 0, 3, 9
PROTOCOL_F_RESET_DEVICE, PROTOCOL_F_CONFIGURE_MEM_SLOTS, PROTOCOL_F_STATUS = 13, 15, 16
PROTOCOL_FEATURES = sum(1 << bit for bit in (PROTOCOL_F_MQ, PROTOCOL_F_REPLY_ACK, PROTOCOL_F_CONFIG,
                                             PROTOCOL_F_RESET_DEVICE, PROTOCOL_F_CONFIGURE_MEM_SLOTS,
                                             PROTOCOL_F_STATUS))
VERSION, VERSION_MASK, FLAG_REPLY, FLAG_NEED_REPLY = 1, 3, 4, 8
MAX_PAYLOAD, MAX_REGIONS = 4096, 32
VRING_INDEX_MASK, VRING_NO_FD = 0xff, 0x100
REGION = struct.Struct("<QQQQ")


class Refused(Exception):
    """A message asks for what cannot be."""


def _region(payload: bytes, at: int, fd: int) -> Region:
    guest, size, user, offset = REGION.unpack_from(payload, at)
    return Region(guest, size, user, offset, fd)


class Connection:
    """The connection of a device instance with its front end."""

    def __init__(self, stream: socket.socket, device: Device, loop: Loop, closed: Callable[[], None]) -> None:
        self.stream, self.device, self.loop, self.closed = stream, device, loop, closed
        self.kicks: dict[int, int] = {}
        self.protocol_features = 0
        stream.settimeout(5)
        loop.watch(stream, self.message)

    def message(self) -> None:
        """Reads a message and answers it. A connection that breaks the protocol is closed."""
        fds: list[int] = []
        try:
            header, fds, _, _ = socket.recv_fds(self.stream, 12, MAX_REGIONS)
            header += self._read(12 - len(header)) if header else b""
            request, flags, size = struct.unpack("<III", header)
            if flags & VERSION_MASK != VERSION or size > MAX_PAYLOAD:
                raise Refused
            self._answer(request, flags, self._read(size), fds)
        except (OSError, struct.error, Refused) as error:
            self.close(error)
        finally:
            for fd in fds:
                os.close(fd)

    def close(self, error: Exception | None = None) -> None:
        """Ends the connection, which resets the device instance."""
        if error is not None and not isinstance(error, struct.error | OSError):
            print(f"second-device: the front end broke the protocol: {error!r}", file=sys.stderr)
        for index in list(self.kicks):
            self._drop_kick(index)
        self.loop.unwatch(self.stream)
        self.stream.close()
        self.device.disconnect()
        self.closed()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.stream.recv(size - len(data))
            if not part:
                raise OSError("the connection ended")
            data += part
        return data

    def _answer(self, request: int, flags: int, payload: bytes, fds: list[int]) -> None:
        reply, failed = None, 0
        try:
            if request not in REQUESTS:
                raise Refused(f"unknown request {request}")
            reply = REQUESTS[request](self, payload, fds)
        except (Refused, Fault, ValueError, struct.error, OSError) as error:
            failed = 1
            print(f"second-device: request {request}: {error!r}", file=sys.stderr)
            if not self._acknowledged(flags):
                raise Refused from error
        if reply is None and self._acknowledged(flags):
            reply = struct.pack("<Q", failed)
        if reply is not None:
            self.stream.sendall(struct.pack("<III", request, VERSION | FLAG_REPLY, len(reply)) + reply)

    def _acknowledged(self, flags: int) -> bool:
        return bool(flags & FLAG_NEED_REPLY and self.protocol_features >> PROTOCOL_F_REPLY_ACK & 1)

    # ---- features, status, configuration

    def get_features(self, _payload: bytes, _fds: list[int]) -> bytes:
        """GET_FEATURES"""
        return struct.pack("<Q", self.device.offered | 1 << F_PROTOCOL_FEATURES)

    def set_features(self, payload: bytes, _fds: list[int]) -> None:
        """SET_FEATURES: a driver agrees on features after a reset only. FEATURES_OK says whether they are possible."""
        features, = struct.unpack("<Q", payload)
        status = self.device.status
        self._reset()
        for queue in self.device.queues:
            queue.enabled = not features >> F_PROTOCOL_FEATURES & 1
        self.device.agree(features & ~(1 << F_PROTOCOL_FEATURES))
        self.device.set_status(status)

    def get_protocol_features(self, _payload: bytes, _fds: list[int]) -> bytes:
        """GET_PROTOCOL_FEATURES"""
        return struct.pack("<Q", PROTOCOL_FEATURES)

    def set_protocol_features(self, payload: bytes, _fds: list[int]) -> None:
        """SET_PROTOCOL_FEATURES"""
        self.protocol_features = struct.unpack("<Q", payload)[0] & PROTOCOL_FEATURES

    def get_status(self, _payload: bytes, _fds: list[int]) -> bytes:
        """GET_STATUS"""
        return struct.pack("<Q", self.device.status)

    def set_status(self, payload: bytes, _fds: list[int]) -> None:
        """SET_STATUS"""
        status, = struct.unpack("<Q", payload)
        if status == 0:
            self._reset()
        self.device.set_status(status)

    def get_config(self, payload: bytes, _fds: list[int]) -> bytes:
        """GET_CONFIG: an empty payload is an error."""
        offset, size, _ = struct.unpack("<III", payload[:12])
        config = bytes(self.device.config)
        if offset + size > len(config):
            return payload[:4] + struct.pack("<II", 0, 0)
        return payload[:12] + config[offset:offset + size]

    def get_queue_num(self, _payload: bytes, _fds: list[int]) -> bytes:
        """GET_QUEUE_NUM"""
        return struct.pack("<Q", len(self.device.queues))

    def reset(self, _payload: bytes, _fds: list[int]) -> None:
        """RESET_DEVICE, RESET_OWNER"""
        self._reset()

    def nothing(self, _payload: bytes, _fds: list[int]) -> None:
        """SET_OWNER; SET_CONFIG, which the device ignores (D-CFG-02); SET_VRING_ERR"""

    # ---- memory

    def set_mem_table(self, payload: bytes, fds: list[int]) -> None:
        """SET_MEM_TABLE"""
        count, = struct.unpack("<I", payload[:4])
        if count != len(fds):
            raise Refused("there is not one file descriptor for each region")
        self.device.set_regions([_region(payload, 8 + 32 * i, fd) for i, fd in enumerate(fds)])

    def get_max_mem_slots(self, _payload: bytes, _fds: list[int]) -> bytes:
        """GET_MAX_MEM_SLOTS"""
        return struct.pack("<Q", MAX_REGIONS)

    def add_mem_reg(self, payload: bytes, fds: list[int]) -> None:
        """ADD_MEM_REG"""
        if len(fds) != 1 or len(self.device.memory.regions) >= MAX_REGIONS:
            raise Refused("a region has one file descriptor, and there are not too many regions")
        self.device.set_regions([*self.device.memory.regions, _region(payload, 8, fds[0])])

    def rem_mem_reg(self, payload: bytes, _fds: list[int]) -> None:
        """REM_MEM_REG"""
        which = REGION.unpack_from(payload, 8)[:3]
        left = [region for region in self.device.memory.regions if (region.guest, region.size, region.user) != which]
        if len(left) == len(self.device.memory.regions):
            raise Refused("there is no such region")
        self.device.set_regions(left)

    # ---- queues

    def set_vring_num(self, payload: bytes, _fds: list[int]) -> None:
        """SET_VRING_NUM"""
        index, size = self._state(payload)
        if size == 0 or size & (size - 1) or size > 32768:
            raise Refused(f"a queue of {size} entries")
        self.device.queues[index].size = size

    def set_vring_addr(self, payload: bytes, _fds: list[int]) -> None:
        """SET_VRING_ADDR"""
        index, _, descriptors, used, available, _ = struct.unpack("<IIQQQQ", payload)
        self.device.queues[self._index(index)].set_addresses(descriptors, available, used)

    def set_vring_base(self, payload: bytes, _fds: list[int]) -> None:
        """SET_VRING_BASE"""
        index, base = self._state(payload)
        self.device.queues[index].next_available = base & 0xffff

    def get_vring_base(self, payload: bytes, _fds: list[int]) -> bytes:
        """GET_VRING_BASE, which stops the queue"""
        index, _ = self._state(payload)
        self._drop_kick(index)
        queue = self.device.queues[index]
        if queue.started:
            queue.started = False
            if not any(other.started for other in self.device.queues):
                self._reset()
        return struct.pack("<II", index, queue.next_available)

    def set_vring_kick(self, payload: bytes, fds: list[int]) -> None:
        """SET_VRING_KICK, which starts the queue"""
        index, fd = self._descriptor(payload, fds)
        self._drop_kick(index)
        if fd is None:
            raise Refused("the device does not poll a queue")
        try:
            self.loop.watch(fd, lambda: self._kicked(index, fd))
        except OSError:
            os.close(fd)
            raise
        self.kicks[index] = fd
        queue = self.device.queues[index]
        queue.started, queue.broken = True, False
        self.device.kick(index)

    def set_vring_call(self, payload: bytes, fds: list[int]) -> None:
        """SET_VRING_CALL"""
        index, fd = self._descriptor(payload, fds)
        self._drop_call(index)
        self.device.queues[index].call = fd

    def set_vring_enable(self, payload: bytes, _fds: list[int]) -> None:
        """SET_VRING_ENABLE"""
        index, enabled = self._state(payload)
        self.device.queues[index].enabled = bool(enabled)
        self.device.kick(index)

    def _kicked(self, index: int, fd: int) -> None:
        try:
            if not os.read(fd, 8):
                self._drop_kick(index)
        except BlockingIOError:
            pass  # Another reader was faster.
        self.device.kick(index)

    def _descriptor(self, payload: bytes, fds: list[int]) -> tuple[int, int | None]:
        value, = struct.unpack("<Q", payload)
        index = self._index(value & VRING_INDEX_MASK)
        if value & VRING_NO_FD:
            return index, None
        if len(fds) != 1:
            raise Refused("there is not one file descriptor")
        return index, os.dup(fds[0])

    def _state(self, payload: bytes) -> tuple[int, int]:
        index, value = struct.unpack("<II", payload)
        return self._index(index), value

    def _index(self, index: int) -> int:
        if index >= len(self.device.queues):
            raise Refused(f"there is no queue {index}")
        return index

    def _drop_kick(self, index: int) -> None:
        fd = self.kicks.pop(index, None)
        if fd is not None:
            self.loop.unwatch(fd)
            os.close(fd)

    def _drop_call(self, index: int) -> None:
        queue = self.device.queues[index]
        if queue.call is not None:
            os.close(queue.call)
            queue.call = None

    def _reset(self) -> None:
        for index in list(self.kicks):
            self._drop_kick(index)
        self.device.reset()


REQUESTS: dict[int, Callable[[Connection, bytes, list[int]], bytes | None]] = {
    1: Connection.get_features,
    2: Connection.set_features,
    3: Connection.nothing,
    4: Connection.reset,
    5: Connection.set_mem_table,
    8: Connection.set_vring_num,
    9: Connection.set_vring_addr,
    10: Connection.set_vring_base,
    11: Connection.get_vring_base,
    12: Connection.set_vring_kick,
    13: Connection.set_vring_call,
    14: Connection.nothing,
    15: Connection.get_protocol_features,
    16: Connection.set_protocol_features,
    17: Connection.get_queue_num,
    18: Connection.set_vring_enable,
    24: Connection.get_config,
    25: Connection.nothing,
    34: Connection.reset,
    36: Connection.get_max_mem_slots,
    37: Connection.add_mem_reg,
    38: Connection.rem_mem_reg,
    39: Connection.set_status,
    40: Connection.get_status,
}


class Listener:
    """The socket of a device instance. It serves one front end at a time; the others wait."""

    def __init__(self, path: str, device: Device, loop: Loop) -> None:
        self.device, self.loop = device, loop
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if os.path.exists(path):
            os.unlink(path)
        self.socket.bind(path)
        self.socket.listen()
        self.listen()

    def listen(self) -> None:
        """Waits for a front end."""
        self.loop.watch(self.socket, self.accept)

    def accept(self) -> None:
        """Takes a front end, and no other until it is gone."""
        self.loop.unwatch(self.socket)
        Connection(self.socket.accept()[0], self.device, self.loop, self.listen)
