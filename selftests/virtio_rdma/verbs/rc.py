# SPDX-License-Identifier: GPL-2.0
"""Pairs of QPs in loopback on one RoCE device, which the tests share. They are RC if a test says nothing else.

RDMA_DEVICE in the environment names the device; without it the first one
with an active port and a RoCE v2 GID is taken.
"""

import errno
import glob
import json
import os
import struct
import subprocess

import ktap

try:
    import pyverbs.enums as e
    from pyverbs.addr import AH, AHAttr, GlobalRoute  # noqa: F401 tests import all of these from here
    from pyverbs.cq import CQ, CompChannel
    from pyverbs.device import Context, get_device_list
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError
    from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
    from pyverbs.wr import SGE, RecvWR, SendWR
except ImportError as missing:
    ktap.skip_all(f"pyverbs is not installed ({missing})")

PORT = 1
ALL_ACCESS = (e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE |
              e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC)
SIGNALED = e.IBV_SEND_SIGNALED

STATUS = {getattr(e, name): name[len("IBV_WC_"):] for name in dir(e)
          if name.startswith("IBV_WC_") and (name.endswith("_ERR") or name == "IBV_WC_SUCCESS")}


def status_name(status):
    """Returns the name of a wc.status."""
    return STATUS.get(status, str(status))


class Device:
    """An open context and what the tests need to know of its port."""

    def __init__(self, name):
        self.name = name
        self.context = Context(name=name)
        self.attr = self.context.query_device()
        self.is_rxe = name.startswith("rxe")
        self.refresh()

    def refresh(self):
        """Reads what may change: the port and its GIDs."""
        self.port = self.context.query_port(PORT)
        self.gid = self._roce_v2_gid()

    def usable(self):
        """Returns whether RC QPs can be connected here."""
        return self.port.state == e.IBV_PORT_ACTIVE and self.gid is not None

    def has_feature(self, bit):
        """Returns whether driver and device agreed on a feature bit, and True for a device that is not virtio."""
        parent = f"/sys/class/infiniband/{self.name}/device"
        # The virtio device is the parent, or stands beside the RDMA device below its PCI function.
        for path in glob.glob(f"{parent}/features") + glob.glob(f"{parent}/virtio*/features"):
            with open(path, encoding="ascii") as file:
                return file.read()[bit] == "1"
        return True

    def objects(self):
        """Returns how many objects of each kind the device has, the kernel's own among them."""
        link, = [link for link in rdma("resource", "show") if link["ifname"] == self.name]
        return {kind: count for kind, count in link.items() if not kind.startswith("if")}

    def skip_on_rxe(self, reason):
        """Skips the test on the kernel's software RoCE, where it deviates from IBA."""
        if self.is_rxe:
            raise ktap.Skip(reason)

    def _roce_v2_gid(self):
        """Returns an entry of the GID table, with an IPv4 address if there is such an entry, or None."""
        entries = [entry for entry in self.context.query_gid_table(self.port.gid_tbl_len)
                   if entry.port_num == PORT and entry.gid_type == e.IBV_GID_TYPE_ROCE_V2]
        mapped = [entry for entry in entries if ":ffff:" in entry.gid_str()]
        return next(iter(mapped + entries), None)


def open_device():
    """Opens the device under test. Ends the program with a skip if this machine has no RDMA device, and with a failure if
    it has one, or RDMA_DEVICE names one, that cannot be opened and used."""
    wanted = os.environ.get("RDMA_DEVICE")
    names = [wanted] if wanted else sorted(device.name.decode() for device in get_device_list())
    for name in names:
        try:
            device = Device(name)
        except PyverbsError as error:
            ktap.fail_all(f"cannot open {name}: {error}")
        if device.usable():
            return device
    if names:
        return ktap.fail_all(f"no active port with a RoCE v2 GID on {', '.join(names)}")
    # The kernel has devices that libibverbs does not show if their provider does not load.
    hidden = ", ".join(sorted(os.path.basename(path) for path in glob.glob("/sys/class/infiniband/*")))
    return ktap.fail_all(f"libibverbs does not show {hidden}") if hidden else ktap.skip_all("no RDMA device")


def rdma(*arguments):
    """Returns what rdma(8) shows, as JSON."""
    return json.loads(subprocess.run(["rdma", "-j", *arguments], check=True, stdout=subprocess.PIPE).stdout)


def kernel_log():
    """Returns the lines of the kernel log."""
    return subprocess.run(["dmesg"], check=True, stdout=subprocess.PIPE,
                          encoding="utf-8", errors="replace").stdout.splitlines()


def pinned():
    """Returns how many pages the kernel has pinned."""
    # Each CPU counts for itself; this adds up what they have counted.
    with open("/proc/sys/vm/stat_refresh", encoding="ascii") as file:
        file.read()
    with open("/proc/vmstat", encoding="ascii") as file:
        values = dict(line.split() for line in file)
    return int(values["nr_foll_pin_acquired"]) - int(values["nr_foll_pin_released"])


def fails_with(number, function, *args, **options):
    """Fails the test unless the call, of pyverbs or of the system, fails with this error number."""
    try:
        function(*args, **options)
    except (OSError, PyverbsRDMAError) as error:
        found = error.errno if isinstance(error, OSError) else error.error_code
        ktap.equal(errno.errorcode.get(found, found), errno.errorcode[number], "error")
        return
    raise AssertionError(f"no error, expected {errno.errorcode[number]}")


def pointer(thing, size, is_it):
    """Returns the address of the C structure of an object of pyverbs, which does not tell it: the word of the object
    that points to `size` bytes for which is_it() is true."""
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        words = os.pread(memory.fileno(), type(thing).__basicsize__, id(thing))
        for word, in struct.iter_unpack("Q", words):
            try:
                found = os.pread(memory.fileno(), size, word)
            except (OSError, OverflowError):
                continue
            if len(found) == size and is_it(found):
                return word
    raise AssertionError(f"no C structure of {thing}")


def descriptors():
    """The numbers of this process's open files."""
    return {int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}


class Endpoint:
    """A QP with its own CQs and its own PD."""

    def __init__(self, device, depth=64, cqe=None, max_sge=16, sig_all=False, channel=False,
                 vector=0, inline=0, qp_type=e.IBV_QPT_RC, cq=None, srq=None):
        """`cq`: the CQ of another endpoint for sends and receives, which that one closes; `srq`: the SRQ to receive
        from."""
        self.device = device
        self.pd = PD(device.context)
        self.channel = self.channel_fd = None
        if channel:
            # pyverbs does not tell the descriptor: it is the new one.
            before = descriptors()
            self.channel = CompChannel(device.context)
            (self.channel_fd,) = descriptors() - before
        max_sge = min(max_sge, device.attr.max_sge)
        self.own_cqs = [CQ(device.context, cqe or depth, None, self.channel, vector)
                        for _ in range(0 if cq else 2)]
        self.send_cq, self.recv_cq = self.own_cqs or (cq, cq)
        cap = QPCap(max_send_wr=depth, max_recv_wr=0 if srq else depth, max_send_sge=max_sge,
                    max_recv_sge=0 if srq else max_sge, max_inline_data=inline)
        self.init_attr = QPInitAttr(qp_type=qp_type, scq=self.send_cq, rcq=self.recv_cq, srq=srq,
                                    cap=cap, sq_sig_all=int(sig_all))
        self.qp = QP(self.pd, self.init_attr)
        self.mrs = []

    def memory(self, length, access=ALL_ACCESS, data=None, pd=None):
        """Registers new memory that holds `data`; returns the MR."""
        region = MR(pd or self.pd, length, access)
        if data is not None:
            region.write(data, len(data))
        self.mrs.append(region)
        return region

    def attributes(self, peer, **changes):
        """Returns attributes that connect the QP to the QP number `peer`."""
        attr = QPAttr(port_num=PORT)
        attr.qp_access_flags = ALL_ACCESS
        attr.path_mtu = self.device.port.active_mtu
        attr.dest_qp_num = peer
        attr.rq_psn = attr.sq_psn = 0x123456
        attr.max_dest_rd_atomic = min(16, self.device.attr.max_qp_rd_atom)
        attr.max_rd_atomic = min(16, self.device.attr.max_qp_init_rd_atom)
        attr.min_rnr_timer = 1
        attr.timeout = 14
        attr.retry_cnt = attr.rnr_retry = 7
        route = GlobalRoute(dgid=self.device.context.query_gid(PORT, self.device.gid.gid_index),
                            sgid_index=self.device.gid.gid_index, hop_limit=64)
        attr.ah_attr = AHAttr(port_num=PORT, is_global=1, gr=route)
        for name, value in changes.items():
            setattr(attr, name, value)
        return attr

    def connect(self, peer, **changes):
        """Brings the QP from RESET to RTS."""
        self.qp.to_rts(self.attributes(peer, **changes))

    def move(self, state):
        """Brings the QP to RESET, ERR or SQD, and back from SQD or SQE to RTS."""
        move(self.qp, state)

    def state(self):
        """Returns the QP's state as the device reports it."""
        return self.qp.query(e.IBV_QP_STATE)[0].qp_state

    def post_recv(self, sges, wr_id=0):
        """Posts one receive request."""
        post(self.qp.post_recv, [recv_wr(sges, wr_id)])

    def post_send(self, opcode, sges, wr_id=0, **options):
        """Posts one send request."""
        post(self.qp.post_send, [send_wr(opcode, sges, wr_id, **options)])

    def close(self):
        """Destroys everything, each object before those that it uses."""
        self.qp.close()
        for region in self.mrs:
            region.close()
        for thing in (*self.own_cqs, self.channel, self.pd):
            if thing:
                thing.close()


class Pair:
    """Two connected endpoints, `a` and `b`."""

    def __init__(self, device, a=None, b=None, **options):
        """`a`, `b`: attributes of the QPs that differ from the defaults."""
        self.a = Endpoint(device, **options)
        self.b = Endpoint(device, **options)
        self.attributes = (a or {}, b or {})
        self.connect()

    def connect(self):
        """Brings both QPs from RESET to RTS."""
        self.a.connect(self.b.qp.qp_num, **self.attributes[0])
        self.b.connect(self.a.qp.qp_num, **self.attributes[1])

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            self.a.close()
            self.b.close()
        except PyverbsError:
            # If the test has failed already, its error is the one to see.
            if kind is None:
                raise


def move(qp, state):
    """Brings a QP to a state for which it needs no other attribute."""
    attr = QPAttr()
    attr.qp_state = state
    qp.modify(attr, e.IBV_QP_STATE)


def recv_wr(sges, wr_id=0):
    """Returns a receive request. pyverbs wants an SGE also for a request without SGEs."""
    wr = RecvWR(wr_id, max(1, len(sges)), sges or [SGE(0, 0, 0)])
    wr.num_sge = len(sges)
    return wr


def send_wr(opcode, sges, wr_id=0, flags=SIGNALED, imm=0, remote=None, atomic=None):
    """Returns a send request. `remote`: (address, rkey); `atomic`: (compare_add, swap)."""
    wr = SendWR(wr_id, opcode, max(1, len(sges)), imm, sges or [SGE(0, 0, 0)], flags)
    wr.num_sge = len(sges)
    if atomic:
        wr.set_wr_atomic(remote[1], remote[0], *atomic)
    elif remote:
        wr.set_wr_rdma(remote[1], remote[0])
    return wr


def post(verb, wrs, bad_wr=None):
    """Posts requests as one list, and frees them."""
    for wr, following in zip(wrs, wrs[1:]):
        wr.next_wr = following
    try:
        verb(wrs[0], bad_wr)
    finally:
        for wr in wrs:
            wr.close()


def sge(region, offset=0, length=None):
    """Returns an SGE for a part of an MR, by default for all that follows `offset`."""
    return SGE(region.buf + offset, region.length - offset if length is None else length, region.lkey)


def remote(region, offset=0):
    """Returns the address and the rkey of a place in an MR, for the peer."""
    return region.buf + offset, region.rkey


def poll(cq, count):
    """Polls until there are `count` completions with any status; returns them."""
    completions = []
    while len(completions) < count:
        polled, more = cq.poll(count - len(completions))
        completions += more
        if not polled:
            os.sched_yield()
    return completions


def complete(cq, count=1, status=e.IBV_WC_SUCCESS):
    """Polls `count` completions, which must all have this status; returns them."""
    completions = poll(cq, count)
    ktap.equal([status_name(wc.status) for wc in completions], [status_name(status)] * count, "status")
    return completions


def empty(cq):
    """Fails the test if the CQ holds a completion."""
    ktap.equal([(wc.wr_id, status_name(wc.status)) for wc in cq.poll(1)[1]], [], "completions")


def pieces(rng, length, count):
    """Returns `count` random lengths, some perhaps 0, whose sum is `length`."""
    cuts = sorted(rng.randint(0, length) for _ in range(count - 1))
    return [end - start for start, end in zip([0] + cuts, cuts + [length])]
