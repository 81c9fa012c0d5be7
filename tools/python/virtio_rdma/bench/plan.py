# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""What the benchmark measures: a list of points.

A point is measured over every path, one path after the other, with the machine's own limit for it in between,
so that what disturbs the machine disturbs all of them.
"""

import dataclasses
import re

PATHS = ("rings", "virtqueues", "rxe", "tcp", "udp", "limit")
# Those of virtio-rdma.
OURS = ("rings", "virtqueues")

VMMS = ("uml", "qemu")
# User-mode Linux guests, each as on a host of its own: what they say goes over taps and a bridge.
HOSTS = "hosts"
# The same on both sides of a network cable that loses packets.
CABLE = "cable"
LOSS = 0.01
# The device's process ends, and another one goes on.
RESTARTS = "restarts"
# What each guest has meanwhile: QPs, and MRs.
HELD_QPS, HELD_MRS = 1000, 10_000
# Pairs of user-mode Linux guests beside each other, behind a device that has some workers.
SCALE = "scale"
# The same, each guest as on a host of its own.
SCALE_HOSTS = "scale-hosts"
# Where a bandwidth is one of a network.
OVER_THE_WIRE = (HOSTS, CABLE, SCALE_HOSTS)
SIZES = (2, 64, 512, 4096, 65536, 1 << 20, 8 << 20)
# An emulated guest takes seconds to start a program, so the sizes that add least to a curve are left out.
UML_ONLY_SIZES = (64, 512)
# Points that the goals are about.
GOAL_SIZES = {"bw": (65536, 1 << 20), "lat": (2,), "rate": (64,)}
RATE_SIZE = 64
RATE_QPS = (1, 16, 64, 1000)
ATOMIC_SIZE = 8
# How many connections of the RDMA connection manager there are at a time.
CONNECTIONS_AT_A_TIME = (1, 8)
# Reads of NVMe over Fabrics at a time: on one host, and between two.
NVME_DEPTH, NVME_DEPTH_OF_HOSTS = 16, 32
REGISTRATIONS = (4096, 1 << 20, 64 << 20)
# The size of an MR whose pages are huge.
HUGE_REGISTRATION = 64 << 20

# Kinds whose programs name the other end by its address: only one driver at a time may have a device with it.
BY_ADDRESS = ("cm", "nvme")

# A machine has many processors if a program may use so many.
MANY_FROM = 8
FEW, MANY, BOTH = "few", "many", "both"

MIBS, US, MS, MPPS, PER_SECOND, PERCENT, S_PER_GIB = "MiB/s", "us", "ms", "M/s", "1/s", "%", "s/GiB"
PER_MESSAGE, OF_MEAN = "1/msg", "/mean"

# The ends of the names of figures that the device gives of a load: messages by the second that its workers worked,
# which share of a processor they had, and doorbells for each message.
CORE, WORKER, BELLS = "_core", "_worker", "_bells"
OF_DEVICE = {CORE: MPPS, WORKER: PERCENT, BELLS: PER_MESSAGE}
# The end of the name of what the least served pair of guests has of a load, by the mean of the pairs.
LEAST = "_least"


@dataclasses.dataclass(frozen=True)
class Combination:
    """One column of the table of scale: pairs of guests that all have the same load, and workers of their device."""

    pairs: int
    workers: int

    @property
    def name(self):
        return f"{self.pairs}x{self.workers}"

    @property
    def threads(self):
        """How many threads poll: a program in each guest, and the workers."""
        return 2 * self.pairs + self.workers


COMBINATIONS = tuple(Combination(*numbers) for numbers in ((1, 1), (1, 2), (2, 2), (2, 4), (4, 4), (4, 8)))
# What the limits of the machine stand beside, and what is compared with that.
ALONE, WIDEST = COMBINATIONS[1], COMBINATIONS[-1]
# Between hosts, one worker has one pair, and then each worker has a pair.
ALONE_OF_HOSTS, WIDEST_OF_HOSTS = COMBINATIONS[0], COMBINATIONS[4]
ENDS = {SCALE: (ALONE, WIDEST), SCALE_HOSTS: (ALONE_OF_HOSTS, WIDEST_OF_HOSTS)}
# What a machine that has few processors is asked for at most.
FEW_COMBINATIONS = COMBINATIONS[:3]
# The columns stand in the place of paths.
COLUMNS = tuple(each.name for each in COMBINATIONS)


@dataclasses.dataclass(frozen=True)
class Point:
    """One line of the report.

    tool: its name there. kind: who runs it ("perftest", "cpu", "objects", "cm", "nvme", "idle"; "device" and "least"
    come with another figure; "restart"). size: bytes of a message or a registration. arguments: beyond device, size and
    count.
    limit: tool of the limit with the same unit, or "". tcp, udp: what the row of TCP and that of UDP is called, or
    "". loss: the share of the packets that the cable loses. goal: repeated until there is a median. longer: of the
    usual time. list: work requests a post.
    observed: whether figures of the device come with it. column: the only column of the table of scale that has it, or
    "".
    vmms: the guests on which it is measured; quick: those of a short run.
    """

    tool: str
    size: int
    unit: str
    qps: int = 1
    kind: str = "perftest"
    program: str = ""
    arguments: tuple = ()
    limit: str = ""
    tcp: str = ""
    udp: str = ""
    loss: float = 0
    goal: bool = False
    longer: float = 1
    list: int = 1
    observed: bool = False
    column: str = ""
    quick: tuple = ()
    vmms: tuple = VMMS

    @property
    def key(self):
        return (self.tool, self.size, self.qps)

    @property
    def companions(self):
        """The keys of the figures that may come with that of this load, by the ends of their names."""
        return {end: (self.tool + end, self.size, self.qps) for end in (*OF_DEVICE, LEAST)}

    @property
    def beside(self):
        """The key of the point that its samples are taken beside: its own, or that of the same load without loss."""
        return (self.program, self.size, self.qps) if self.loss else self.key

    def tool_over(self, path):
        """Returns what the row of a path is called, or "" if that path has none."""
        if path in OURS:
            return self.tool
        if path in ("tcp", "udp"):
            return getattr(self, path)
        return "" if self.kind in ("idle", "device", "cpu") else self.tool

    @property
    def compared(self):
        """Whether a short run measures it over more than the first path: where the goals compare paths."""
        return self.goal and self.unit != MPPS and self.size in (2, GOAL_SIZES["bw"][0]) and not self.arguments


def sized(size):
    """Returns the VMMs on whose guests a curve has a point at this size."""
    return ("uml",) if size in UML_ONLY_SIZES else VMMS


def machine_kind(processors):
    """Returns which goals apply where a program may use so many processors."""
    return MANY if processors >= MANY_FROM else FEW


def combinations(vmm, processors):
    """Returns the columns of a table of scale: those in which each thread has a processor of its own. A machine with
    few processors has the first ones, in which threads may share processors."""
    if machine_kind(processors) == FEW:
        return FEW_COMBINATIONS
    every = COMBINATIONS if vmm == SCALE else (*FEW_COMBINATIONS, WIDEST_OF_HOSTS)
    return tuple(each for each in every if each.threads <= processors)


def load_of(tool):
    """Returns the name of the load that a figure comes with: its own, if it comes with no other."""
    for end in (*OF_DEVICE, LEAST):
        tool = tool.removesuffix(end)
    return tool


def bandwidth():
    for verb in ("write", "read", "send"):
        for size in SIZES:
            goal = size in GOAL_SIZES["bw"]
            observed = (verb, size) == ("send", 65536)
            yield Point(f"ib_{verb}_bw", size, MIBS, program=f"ib_{verb}_bw", limit="memcpy",
                        tcp="tcp_bw" if verb == "send" else "", goal=goal, vmms=sized(size), observed=observed,
                        quick=VMMS if (verb, size) == ("write", 65536) else ("uml",) if goal else ())
            if observed:
                yield Point(f"ib_{verb}_bw{WORKER}", size, PERCENT, kind="device", vmms=("uml",))
    yield Point("ib_atomic_bw", ATOMIC_SIZE, MPPS, program="ib_atomic_bw")


def latency():
    for verb in ("read", "send", "write"):
        # A message cannot take less than a memcpy of it and the way of one or two cache lines.
        for size in SIZES:
            small = size in GOAL_SIZES["lat"]
            yield Point(f"ib_{verb}_lat", size, US, program=f"ib_{verb}_lat",
                        limit="cacheline" if small else "", tcp="tcp_lat" if verb == "send" else "",
                        goal=small and verb != "write", vmms=sized(size),
                        quick=VMMS if small and verb == "read" else ("uml",) if small and verb == "send" else ())
    yield Point("ib_atomic_lat", ATOMIC_SIZE, US, program="ib_atomic_lat", limit="cacheline")
    for verb in ("send", "read"):
        yield Point(f"ib_{verb}_lat_events", 2, US, program=f"ib_{verb}_lat", arguments=("-e",), limit="eventfd",
                    goal=verb == "send", quick=("uml",) if verb == "send" else ())


def of_device(tool, qps, goal, quick, vmms):
    """Yields what the device gives of a load of small messages."""
    for end, unit in OF_DEVICE.items():
        yield Point(tool + end, RATE_SIZE, unit, qps, kind="device", goal=goal and end == CORE, quick=quick,
                    vmms=vmms)


def rates():
    for verb in ("write", "send"):
        for qps in RATE_QPS:
            goal = qps in (1, 1000)
            # A thousand connections over an emulated guest's TCP take longer than the measurement.
            yield Point(f"ib_{verb}_rate", RATE_SIZE, MPPS, qps, program=f"ib_{verb}_bw", goal=goal, longer=4,
                        observed=True, quick=("uml",) if goal else (), vmms=("uml", "qemu") if qps < 1000 else ("uml",))
            yield from of_device(f"ib_{verb}_rate", qps, goal, ("uml",) if goal else (),
                                 ("uml", "qemu") if qps < 1000 else ("uml",))
        # Many work requests a post: the device's rate when the program costs less.
        yield Point(f"ib_{verb}_rate_list", RATE_SIZE, MPPS, program=f"ib_{verb}_bw", arguments=("-l", "16"), list=16)


def objects():
    for size in REGISTRATIONS:
        yield Point("reg_mr", size, PER_SECOND, 0, kind="objects", goal=True, quick=VMMS if size == 4096 else ())
    # User-mode Linux has no huge pages.
    yield Point("reg_mr_huge", HUGE_REGISTRATION, PER_SECOND, 0, kind="objects", goal=True, vmms=("qemu",))
    yield Point("qp_to_rts", 0, PER_SECOND, kind="objects", goal=True, quick=VMMS)
    for at_a_time in CONNECTIONS_AT_A_TIME:
        yield Point("rdma_connect", 0, PER_SECOND, at_a_time, kind="cm", goal=True,
                    quick=VMMS if at_a_time == 1 else ())
    yield Point("nvme_read", 4096, PER_SECOND, NVME_DEPTH, kind="nvme", goal=True, tcp="nvme_read", limit="own_disk",
                vmms=("uml",))
    yield Point("idle_device", 0, PERCENT, 0, kind="idle", quick=VMMS)


def over_the_wire():
    """Yields what is measured between two hosts, beside rxe and TCP over the same bridge."""
    for verb in ("write", "read"):
        for size in GOAL_SIZES["bw"]:
            yield Point(f"ib_{verb}_bw", size, MIBS, program=f"ib_{verb}_bw", tcp="tcp_bw", goal=True, vmms=(HOSTS,))
    # perftest says how long a WRITE takes one way, and a READ there and back.
    for verb, way, tcp in (("write", "lat", "tcp_lat"), ("read", "rtt", "")):
        yield Point(f"ib_{verb}_lat", 2, US, program=f"ib_{verb}_lat", tcp=tcp, udp=f"udp_{way}", limit=f"taps_{way}",
                    goal=True, vmms=(HOSTS,))
    for verb in ("write", "read"):
        # Programs that poll use all of a processor whatever they move, so nobody polls.
        yield Point(f"ib_{verb}_cpu", 1 << 20, S_PER_GIB, kind="cpu", program=f"ib_{verb}_bw", tcp="tcp_cpu",
                    goal=True, vmms=(HOSTS,))
    for verb in ("write", "send"):
        yield Point(f"ib_{verb}_rate", RATE_SIZE, MPPS, program=f"ib_{verb}_bw", goal=True, longer=4, observed=True,
                    vmms=(HOSTS,))
        yield from of_device(f"ib_{verb}_rate", 1, True, (), (HOSTS,))
    yield Point("nvme_read", 4096, PER_SECOND, NVME_DEPTH_OF_HOSTS, kind="nvme", goal=True, tcp="nvme_read",
                vmms=(HOSTS,))


def over_the_cable():
    """Yields what is measured over a network cable, as it is and where it loses packets."""
    for verb in ("write", "read"):
        for end, loss in (("", 0), ("_loss", LOSS)):
            yield Point(f"ib_{verb}_bw{end}", GOAL_SIZES["bw"][0], MIBS, program=f"ib_{verb}_bw", loss=loss, goal=True,
                        longer=4, vmms=(CABLE,))


def restarts():
    """Yields what is measured while the device's process ends and another one goes on."""
    for tool, qps in (("pause", 0), ("pause_full", HELD_QPS), ("recovery", 0)):
        yield Point(tool, 0, MS, qps, kind="restart", goal=qps > 0, vmms=(RESTARTS,), quick=(RESTARTS,))


def scale():
    """Yields what pairs of guests do beside each other, and what one pair does beside the limits of the machine."""
    for tool, verb, size, column in (
            ("ib_write_rate", "write", RATE_SIZE, ""), ("ib_send_rate", "send", RATE_SIZE, ""),
            ("ib_write_bw", "write", 65536, ""), ("ib_send_bw", "send", 65536, ""),
            ("ib_write_bw", "write", 1 << 20, ""), ("ib_send_bw", "send", 1 << 20, ALONE.name),
            ("ib_write_bw", "write", 8 << 20, ALONE.name)):
        small = size == RATE_SIZE
        yield Point(tool, size, MPPS if small else MIBS, program=f"ib_{verb}_bw", goal=True, column=column,
                    limit="cacheline_rate" if small else "memcpy", vmms=(SCALE,))
        if not column:
            yield Point(tool + LEAST, size, OF_MEAN, kind="least", vmms=(SCALE,))
    for verb in ("read", "write"):
        yield Point(f"ib_{verb}_lat", 2, US, program=f"ib_{verb}_lat", limit="cacheline", goal=True, column=ALONE.name,
                    vmms=(SCALE,))


def scale_of_hosts():
    """Yields what pairs of guests do beside each other if each guest is on a host of its own."""
    for verb, size in (("write", 65536), ("read", 65536), ("write", RATE_SIZE)):
        small = size == RATE_SIZE
        tool = f"ib_{verb}_{'rate' if small else 'bw'}"
        yield Point(tool, size, MPPS if small else MIBS, program=f"ib_{verb}_bw", goal=True, vmms=(SCALE_HOSTS,))
        yield Point(tool + LEAST, size, OF_MEAN, kind="least", vmms=(SCALE_HOSTS,))


def points(vmm, quick):
    """Returns the points of a run, in the order of the report."""
    groups = (bandwidth, latency, rates, objects, over_the_wire, over_the_cable, restarts, scale, scale_of_hosts)
    return [point for group in groups for point in group()
            if vmm in (point.quick if quick else point.vmms)]


def by_importance(every):
    """Returns points in the order in which they are measured: what the goals need comes first, with the loads over many
    QPs last. To connect these takes longer than all objects of a short run."""
    return sorted(every, key=lambda point: (not point.goal, not point.quick, point.qps > 1))


def chosen(every, only, column=""):
    """Returns the points whose "TOOL BYTES QPS" a regular expression matches, or all points if the expression is empty.
    In the table of scale, the name of the column follows. A load that matching figures come with is among them."""
    keys = {point.key for point in every
            if re.search(only, " ".join(filter(None, (point.tool, str(point.size), str(point.qps), column))))}
    return [point for point in every if point.key in keys or not keys.isdisjoint(point.companions.values())]
