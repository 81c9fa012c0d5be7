# SPDX-License-Identifier: GPL-2.0
"""A device that fails and works again, for hostile.py: the driver resets it and takes it into service by itself."""

import errno
import functools
import os
import re
import select
import subprocess

import abi
import ktap
from hostile_device import (ALWAYS, VFIO, Watch, data_flows, device, honest, order, rdma_device, rdma_devices, rebind,
                            reload_module, spoil, unbind, virtio_device)
from rc import PD, Pair, PyverbsError, e, fails_with, pinned, rdma, sge

GIDS = "/sys/class/infiniband/{}/ports/1/gids"


class Before:
    """The RDMA device before it fails."""

    def __init__(self):
        self.name = device().name
        self.index = self._index()
        self.gids = self._gids()
        self.watch = Watch()

    def _index(self):
        found = [link["ifindex"] for link in rdma("dev", "show") if link["ifname"] == self.name]
        return found[0] if found else None

    def _gids(self):
        """Returns the GIDs that are set, without their places."""
        path = GIDS.format(self.name)
        try:
            gids = {open(f"{path}/{index}", encoding="ascii").read() for index in os.listdir(path)}
        except OSError:
            return None
        return {gid for gid in gids if gid.strip("0:\n")}

    def wait_back(self):
        """Waits for another RDMA device of this name with the same GIDs, and moves data over it."""
        while self._index() in (None, self.index) or self._gids() != self.gids:
            os.sched_yield()
        ktap.equal(rdma_device(), self.name, "name")
        data_flows()

    def delays(self):
        """Returns the seconds that the driver says that it waits, in their order."""
        lines = self.watch.lines("takes the device that has failed into service again")
        return [int(re.search(r"in (\d+) s", line)[1]) for line in lines]

    def wait_delays(self, count):
        """Waits until the driver has said that it waits this many times."""
        while len(self.delays()) < count:
            os.sched_yield()


def fail():
    """Makes the device fail at the next command, CREATE_PD."""
    spoil(abi.CMD_CREATE_PD, id=0xffff)
    found = device()
    fails_with(errno.EIO, PD, found.context)
    found.context.close()


def flushed_to_its_end(cq):
    """Polls a CQ of a device that has failed until that returns an error. Work requests may be flushed before that."""
    try:
        while True:
            for wc in cq.poll(1)[1]:
                ktap.equal(wc.status, e.IBV_WC_WR_FLUSH_ERR, "status")
            os.sched_yield()
    except PyverbsError:
        pass


def fail_always():
    """Makes the device fail now, and whenever it is registered again."""
    spoil(abi.CMD_QUERY_PORT, id=0xffff, times=ALWAYS)
    try:
        device()
    except PyverbsError:
        return
    raise AssertionError("the port was queried")


def recovers(*parameters):
    """Returns what runs a test with a module that recovers devices, loaded with these parameters."""
    def wrap(test):
        @functools.wraps(test)
        def run(rng):
            reload_module(*parameters, recover=True)
            try:
                test(rng)
            finally:
                reload_module()
        return run
    return wrap


@recovers()
def comes_back(_rng):
    before = Before()
    fail()
    before.wait_back()
    before.watch.failed("the control queue broke")
    ktap.equal(before.delays(), [0], "delays")
    ktap.equal(len(before.watch.lines("in service again")), 1, "lines that say that it is back")


@recovers()
def comes_back_from_a_reset_that_it_asks_for(_rng):
    if not VFIO:
        raise ktap.Skip("vhost-user cannot say it")
    before = Before()
    order(needs_reset=1)
    before.wait_back()
    before.watch.failed("asks for a reset")


@recovers("command_timeout=1")
def comes_back_from_silence(_rng):
    before = Before()
    found = device()
    spoil(abi.CMD_CREATE_PD, keep=True)
    fails_with(errno.EIO, PD, found.context)
    found.context.close()
    before.wait_back()
    before.watch.failed("CREATE_PD has no reply")


@recovers()
def under_a_program(_rng):
    """A program is told that the device has failed, and its memory is unpinned in the end."""
    before = Before()
    pages = pinned()
    found = device()
    pair = Pair(found, channel=True)
    region = pair.a.memory(1 << 20)
    pair.a.post_recv([sge(region, 0, 64)])
    pair.a.recv_cq.req_notify()
    ktap.equal(pinned() - pages >= 256, True, "1 MiB is pinned")
    spoil(abi.CMD_CREATE_PD, id=0xffff)
    fails_with(errno.EIO, PD, found.context)
    # A program that waits for a completion is woken.
    select.select([pair.a.channel_fd], [], [])
    flushed_to_its_end(pair.a.recv_cq)
    event = found.context.get_async_event()
    ktap.equal(event.event_type, e.IBV_EVENT_DEVICE_FATAL, "event")
    event.ack()
    before.wait_back()
    fails_with(errno.EIO, PD, found.context)
    ktap.equal(pinned() - pages <= 0, True, "pages that are pinned when the device is back")
    for end in (pair.a, pair.b):
        end.close()
    found.context.close()


@recovers()
def keeps_a_name_that_was_given(_rng):
    subprocess.run(["rdma", "dev", "set", rdma_device(), "name", "renamed"], check=True)
    before = Before()
    ktap.equal(before.name, "renamed", "name")
    fail()
    before.wait_back()


@recovers()
def fails_again_and_again(_rng):
    """The driver tries again, later and later, until the device works."""
    before = Before()
    fail_always()
    before.wait_delays(4)
    honest()
    before.wait_back()
    ktap.equal(before.delays()[:4], [0, 1, 2, 4], "delays")


@recovers()
def asks_again_and_again(_rng):
    if not VFIO:
        raise ktap.Skip("vhost-user cannot say it")
    before = Before()
    order(needs_reset=4)
    before.wait_delays(4)
    before.wait_back()
    ktap.equal(before.delays(), [0, 1, 2, 4], "delays")


@recovers()
def unbound_while_it_waits(_rng):
    before = Before()
    fail_always()
    before.wait_delays(4)
    unbind()
    ktap.equal(virtio_device(), None, "bound device")
    rebind()
    data_flows()


@recovers()
def module_unloads_while_it_waits(_rng):
    before = Before()
    fail_always()
    before.wait_delays(4)
    reload_module(recover=True)
    data_flows()


@recovers()
def unbound_at_any_time(rng):
    """The device is unbound while it is reset and registered again, somewhere."""
    for _ in range(10):
        fail()
        for _ in range(rng.randrange(2000)):
            os.sched_yield()
        rebind()
        data_flows()


def stays_as_it_is(_rng):
    """A parameter of the module leaves a device that has failed out of service."""
    before = Before()
    fail()
    before.watch.failed("the control queue broke")
    ktap.equal(before.delays(), [], "delays")
    ktap.equal(rdma_devices(), [before.name], "RDMA devices")
    rebind()
    data_flows()


TESTS = [comes_back, comes_back_from_a_reset_that_it_asks_for, comes_back_from_silence, under_a_program,
         keeps_a_name_that_was_given, fails_again_and_again, asks_again_and_again, unbound_while_it_waits,
         module_unloads_while_it_waits, unbound_at_any_time, stays_as_it_is]
