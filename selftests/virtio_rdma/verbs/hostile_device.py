# SPDX-License-Identifier: GPL-2.0
"""The device that misbehaves, for the tests of hostile.py: orders for it, what the driver counts and logs, and the way
back to a device that works."""

import contextlib
import errno
import functools
import glob
import json
import os
import re
import subprocess
import sys

import abi
import ktap
import rc
import uverbs
from rc import PD, Pair, complete, e, empty, fails_with, kernel_log, rdma, remote, sge

DEVICES = "/sys/bus/virtio/devices"
DRIVER = "/sys/bus/virtio/drivers/virtio_rdma"
MODULE = "/run/vr/virtio_rdma.ko"
TRANSPORT = os.environ.get("HOSTILE_TRANSPORT")
VFIO = TRANSPORT == "vfio-user"
WRITE, SEND = e.IBV_WR_RDMA_WRITE, e.IBV_WR_SEND
# A rule that holds as often as something happens.
ALWAYS = 2**40


def patch(field, value):
    """Returns what the device is told to write into a field of a structure: its offset, and the bytes."""
    return [field.offset, value.to_bytes(field.size, "little").hex()]


def in_reply(field, value):
    """Returns what the device is told to write into a field of a reply, which is behind the status."""
    offset, data = patch(field, value)
    return [1 + offset, data]


def order(**what):
    """Tells the device what to do wrong; returns how often a rule has held so far."""
    print("@" + json.dumps(what), flush=True)
    answer = json.loads(sys.stdin.readline())
    if "error" in answer:
        raise AssertionError(f"the device does not understand {what}: {answer['error']}")
    return answer["hits"]


def honest():
    """Tells the device to do nothing wrong any more; returns how often a rule has held so far."""
    return order(honest=True)


def hits():
    """Returns how often a rule has held so far."""
    return order(interrupt="control", times=0)


def spoil(command, **what):
    """Spoils replies to a command."""
    return order(on="control", command=command, **what)


def refuse(command, status, **what):
    """Makes the device reply to a command with a status alone, after it has done what the command asks for."""
    return spoil(command, write=[[0, f"{status:02x}"]], used=1, **what)


def poke(kind, field, number):
    """Makes the device write a number into the head of the ring of a CQ, QP or SRQ."""
    offset, data = patch(field, number)
    order(poke=kind, at=offset, bytes=data)


def virtio_device():
    """Returns the name of the virtio device that is bound, or None."""
    bound = glob.glob(DRIVER + "/virtio*")
    return os.path.basename(bound[0]) if bound else None


NAME = virtio_device()


def was_reset():
    """Returns whether the device has been reset and not made ready since: it touches no memory of the guest."""
    with open(f"{DEVICES}/{NAME}/status", encoding="ascii") as file:
        return int(file.read(), 16) == 0


def write_driver(file):
    """Writes the name of the device to a file of the driver in sysfs."""
    handle = os.open(f"{DRIVER}/{file}", os.O_WRONLY)
    try:
        os.write(handle, NAME.encode())
    finally:
        os.close(handle)


def bind():
    """Binds the device to the driver."""
    write_driver("bind")


def unbind():
    """Unbinds the device from the driver."""
    write_driver("unbind")


def rebind():
    """Binds a device that does nothing wrong."""
    if virtio_device():
        unbind()
    honest()
    bind()


def reload_module(*parameters, recover=False):
    """Unloads the module and loads it with these parameters. Unless it is to recover devices, those that have failed stay
    as they are."""
    honest()
    subprocess.run(["rmmod", "virtio_rdma"], check=True)
    subprocess.run(["insmod", MODULE, f"recover={int(recover)}", *parameters], check=True)


def rdma_devices():
    """Returns the names of the RDMA devices of the virtio device. They stand below it, or below its PCI function."""
    return [os.path.basename(path) for parent in (NAME, NAME + "/..") for path in
            glob.glob(f"{DEVICES}/{parent}/infiniband/*")]


def rdma_device():
    """Returns the name of the RDMA device."""
    (name,) = rdma_devices()
    return name


# Whether driver and device agreed on VIRTIO_RDMA_F_RINGS, and the commands that differ by it.
RINGS = bool(NAME) and uverbs.has_rings(rdma_device())
CREATE_CQ, CREATE_QP = ((abi.CMD_CREATE_RING_CQ, abi.CMD_CREATE_RING_QP) if RINGS else
                        (abi.CMD_CREATE_CQ, abi.CMD_CREATE_QP))


def device():
    """Opens the device under test, once its port and its GID are there: the network interface brings these, after the
    device is registered."""
    found = rc.Device(rdma_device())
    while not found.usable():
        os.sched_yield()
        found.refresh()
    return found


def counters():
    """Returns the counters of the driver by name."""
    return rdma("statistic", "show")[0]


class Watch:
    """What the driver counts and logs from now on."""

    def __init__(self):
        self.log = len(kernel_log())
        self.before = counters() if virtio_device() else {}

    def lines(self, pattern):
        """Returns the lines of the kernel log that match."""
        return [line for line in kernel_log()[self.log:] if re.search(pattern, line)]

    def has_failed(self):
        """Returns whether the driver has taken the device out of service."""
        return bool(self.lines("the device has failed"))

    def wait(self, name, times):
        """Waits until a counter that the interrupt increments has gone up by this much."""
        while counters()[name] - self.before[name] < times:
            os.sched_yield()

    def misbehaviours(self, now=None):
        """Returns the counters of misbehaviour that went up, among those that were read `now`."""
        now = now or counters()
        return [key for key, value in now.items() if key.startswith("bad_") and value != self.before[key]]

    def silent(self):
        """Fails the test if the driver counted or logged a misbehaviour."""
        ktap.equal(self.misbehaviours(), [], "counters")
        ktap.equal(self.lines("misbehaves|has failed"), [], "lines")

    def counted(self, name, times=None):
        """Fails the test unless this counter went up (by this much), and no other one of misbehaviour; the driver logs
        the first of a kind, once."""
        now = counters()
        difference = now[name] - self.before[name]
        if times is None:
            ktap.equal(difference > 0, True, f"{name} goes up")
        else:
            ktap.equal(difference, times, f"{name} goes up by")
        logged = self.lines("the device misbehaves")
        ktap.equal(len(logged) <= 1, True, f"at most one line: {logged}")
        ktap.equal([key for key in self.misbehaviours(now) if key != name], [], "other counters that went up")

    def failed(self, why):
        """Fails the test unless the driver took the device out of service, with one line that says why."""
        lines = self.lines("the device has failed")
        ktap.equal(len(lines), 1, f"lines that say so: {lines}")
        ktap.equal(why in lines[0], True, f"{lines[0]} says: {why}")


def data_flows():
    """Moves data over a new pair of QPs."""
    with Pair(device()) as pair:
        here, there = pair.a.memory(8192, data=bytes(range(256)) * 32), pair.b.memory(8192)
        pair.b.post_recv([sge(there, 0, 4096)])
        pair.a.post_send(WRITE, [sge(here)], remote=remote(there))
        pair.a.post_send(SEND, [sge(here, 0, 4096)])
        complete(pair.a.send_cq, 2)
        complete(pair.b.recv_cq)
        ktap.same_bytes(there.read(8192, 0), bytes(range(256)) * 32, "data")


def recovers():
    """Fails the test unless the device can be unbound, and works when it is bound again."""
    rebind()
    data_flows()


@contextlib.contextmanager
def lost_device():
    """Gives the device and a PD to code that makes the device unfit for use; binds it again behind that."""
    found = device()
    pd = PD(found.context)
    yield found, pd
    pd.close()
    found.context.close()
    recovers()


@contextlib.contextmanager
def lost_pair(**options):
    """Gives a connected pair of QPs to code that makes the device unfit for use; binds it again behind that."""
    found = device()
    pair = Pair(found, **options)
    yield pair
    pair.a.close()
    pair.b.close()
    found.context.close()
    recovers()


def isolated(test):
    """Returns the test with an end that gives the next one a fresh device if this one fails."""
    @functools.wraps(test)
    def run(rng):
        try:
            test(rng)
        except (Exception, ktap.Stuck):
            rebind()
            raise
    return run


def spoilt_create(command, create, counter, **what):
    """Fails the test unless a command that creates an object fails with EIO and is counted while its reply is spoilt,
    and works then."""
    watch = Watch()
    before = spoil(command, **what)
    fails_with(errno.EIO, create)
    ktap.equal(honest() - before, 1, "spoilt replies")
    watch.counted(counter, 1)
    create().close()


def wrong_number(command, field, number, create):
    """Fails the test unless a wrong number in the reply to a command that creates an object takes the device out of
    service."""
    watch = Watch()
    spoil(command, write=[in_reply(field, number)])
    fails_with(errno.EIO, create)
    watch.counted("bad_handle", 1)
    watch.failed("it gives objects wrong numbers")


def polled_to_its_end(cq):
    """Polls a CQ of a device that has failed until that returns an error."""
    try:
        while True:
            empty(cq)
            os.sched_yield()
    except rc.PyverbsError:
        pass


def forge_event(event, handle=0, used=None, times=1):
    """Makes the device use buffers of the event queue."""
    data = bytes(abi.Event(event, handle))
    order(forge="event", bytes=data.hex(), used=len(data) if used is None else used, times=times)
