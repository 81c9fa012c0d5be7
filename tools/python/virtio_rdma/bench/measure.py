# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Runs one measurement: a program of the stock RDMA tools between two guests, or the machine's limit."""

import dataclasses
import json
import math
import os
import re
import signal
import socket
import subprocess
import threading
import time

from virtio_rdma.bench import plan, processor
from virtio_rdma.common import Failure, die_with_parent
from virtio_rdma.guests import hosts

PERFTEST_PORT = 18515
TCP_PORT = 18516
# A program that takes so many seconds is broken, not slow: in a run of 20 minutes (False), and in one of 2 (True).
HANG_SECONDS = {False: 20, True: 15}
# Bounds of the number of iterations. perftest accepts no fewer, and more do not fit its tables.
FEWEST, MOST_BW, MOST_LAT = 5, 5_000_000, 200_000
# What objects.py is told to make.
OBJECTS = {"reg_mr": "mr", "reg_mr_huge": "mr-huge", "qp_to_rts": "qp"}
# Words of tools that fail.
COMPLAINT = re.compile(r"fail|error|unable|cannot|couldn't|can't|unexpected|status \d", re.I)
# Columns of perftest, after the size and the number of iterations.
BW_RATE = LAT_TYPICAL = 2
# The statuses with which timeout(1) says that it ended a program.
ENDED = (124, 137)
# perftest's queue depths where nothing bounds them.
SEND_DEPTH, RECV_DEPTH = 128, 512
# How many runs there are at most until one is long enough.
RUNS = 5
# perftest compares two clocks first, and prints 0 or inf where the scheduler came between. A run that took longer than
# CLOCK_SECONDS is not tried again: three times 8 MiB over rxe were a fifth of the benchmark's time.
CLOCK_TRIES = 3
CLOCK_SECONDS = 5
NO_CLOCK = "perftest cannot measure the processor's clock: the machine is too busy"
# Messages that processor time is measured of: few, and many. It is counted in hundredths of a second a process.
CPU_COUNTS = (8, 520)
# The taps between which limits sends datagrams.
TAPS = ("ping1", "ping2")
ATTRIBUTES = ("max_qp", "max_cqe", "max_qp_wr")
# How many connections a run makes, with the first ones, which are not counted.
CONNECTIONS = 72
# How long NVMe over Fabrics is measured, after a second that is not counted.
NVME_SECONDS = 2
# Entries of the CQ of QP 1: IB_MAD_QP_SEND_SIZE and IB_MAD_QP_RECV_SIZE (drivers/infiniband/core/mad_priv.h).
MAD_CQE = 128 + 512


class Refused(Exception):
    """A measurement that gives no figure; the text goes into the report."""


class Endless(Refused):
    """A program that was ended because it took too long."""


class Pair:
    """Two guests and one RDMA device in each: one path of the report. Nothing may take longer than
    hang_seconds. device: what is behind the RDMA devices, if it can be asked."""

    def __init__(self, path, server, client, link, hang_seconds, device=None):
        self.path = path
        self.daemon = device
        # What the device gives of the last measurement, by plan.OF_DEVICE; nothing if that was too short.
        self.of_device: dict[str, float] = {}
        self.hang_seconds = hang_seconds
        self.server = server
        self.client = client
        self.device, self.index = link
        self.limits = self.attributes()
        # Point.program, qps and loss -> {size: seconds a message takes}
        self.known = {}

    def attributes(self):
        """Returns the limits that the device reports, by name."""
        text = self.client.check(["ibv_devinfo", "-v", "-d", self.device])
        return {name: int(value) for name, value in re.findall(r"^\s*(\w+):\s+(\d+)", text, re.M) if name in ATTRIBUTES}

    def measure(self, point, seconds):
        """Returns the figure of a point, in its unit."""
        if point.kind == "perftest":
            return self.perftest(point, seconds)
        if point.kind == "cpu":
            return self.processor_time(point)
        if point.kind == "objects":
            what = [OBJECTS[point.tool], *([str(point.size)] if point.size else [])]
            return last_number(self.client, self.hang_seconds, [
                "python3", "-B", "/mnt/objects.py", self.device, str(self.index), *what, str(seconds)])
        if self.limits["max_cqe"] < MAD_CQE:
            raise Refused(f"no connection manager: the kernel's MADs want a CQ of {MAD_CQE}, "
                          f"the device has {self.limits['max_cqe']}")
        if point.kind == "nvme":
            return nvme_reads(self.server, self.client, self.hang_seconds, "rdma", point.qps)
        return self.connections(point)

    def lost(self):
        """Returns why nothing can be measured here any more, or ""."""
        for guest in (self.server, self.client):
            if guest.process.poll() is not None:
                return f"guest {guest.number} died"
            if guest.run(["ibv_devinfo", "-d", self.device], timeout=self.hang_seconds)[0]:
                line = last_line(guest.run(["sh", "-c", "dmesg | grep 'virtio_rdma virtio.*failed'"])[1])
                return f"guest {guest.number} has lost its device: {line}"
        return ""

    # ---- perftest

    def perftest(self, point, seconds):
        """Returns the figure of a run of about so many seconds. The first run of a path is a guess, and is repeated if
        it was short: the time of few messages is that of the first of them, and not the rate."""
        depths = self.depths(point)
        known = self.known_of(point)
        endless = 0
        for _ in range(RUNS):
            count = self.iterations(point, seconds)
            try:
                value, one = self.perftest_once(point, depths, count)
            except Endless:
                # Where programs that spin share the processors, a run takes twenty times as long as another.
                endless += 1
                if endless > 1:
                    raise
                known[point.size] = self.hang_seconds / count
                continue
            known[point.size] = one
            if count * point.qps * one >= seconds / 4:
                break
        return value

    def known_of(self, point):
        """Returns how long messages of loads like a point's take, by their sizes."""
        return self.known.setdefault((point.program, point.qps, point.loss), {})

    def processor_time(self, point):
        """Returns the processor time of a GiB, in programs that sleep while they wait."""
        verb = point.program.split("_")[1]
        argv = ["python3", "-B", "/mnt/sleeping.py", self.device, str(self.index), verb, str(point.size)]
        return processor_time(lambda count: self.both([*argv, str(count)], PERFTEST_PORT), point.size)

    def perftest_once(self, point, depths, count):
        """Returns the figure, and the seconds that one message takes."""
        argv = self.command(point, [*depths, "-n", str(count)])
        with Observer(self.daemon if point.observed else None) as observer:
            columns = self.columns(argv, point.size)
        self.of_device = observer.figures()
        if point.program.endswith("_lat"):
            value = columns[LAT_TYPICAL]
            # perftest prints half of a round trip, except for operations whose answer is a part of them.
            return value, value * (2e-6 if point.program in ("ib_send_lat", "ib_write_lat") else 1e-6)
        return throughput(point, columns), 1e-6 / columns[BW_RATE]

    def command(self, point, arguments):
        """Returns the command line of perftest for a point."""
        argv = [point.program, "-F", "-d", self.device, "-x", str(self.index), *arguments, *point.arguments]
        if not point.program.startswith("ib_atomic"):
            argv += ["-s", str(point.size)]
        if point.program.endswith("_bw"):
            # To find the peak, perftest takes the square of the number of messages.
            argv.append("--noPeak")
        if point.qps > 1:
            argv += ["-q", str(point.qps)]
        return argv

    def depths(self, point):
        """Returns perftest's options for queue depths that the device has room for. A bandwidth test has one CQ for
        all its QPs. Where the tool's defaults fit, they stay."""
        room = max(self.limits["max_cqe"] // point.qps, 1)
        if point.qps > self.limits["max_qp"] - 1:
            raise Refused(f"the device has {self.limits['max_qp']} QPs")
        wanted = min(room, self.limits["max_qp_wr"])
        arguments = []
        if point.program.endswith("_bw") and wanted < SEND_DEPTH:
            arguments += ["-t", str(wanted)]
        if point.program.startswith("ib_send"):
            # The send queue's completions and the receive queue's have a CQ each.
            wanted = min(wanted, self.limits["max_qp_wr"] // 2)
            if wanted < RECV_DEPTH:
                arguments += ["-r", str(max(wanted - 1, 1))]
        return arguments

    def iterations(self, point, seconds):
        """Returns how many messages take about so long, from what is known of this size or a smaller one."""
        known = self.known_of(point)
        smaller = [size for size in known if size <= point.size]
        if smaller:
            size = max(smaller)
            one = known[size] * max(1, point.size / max(size, 4096))
            if one * FEWEST * point.qps > self.hang_seconds / 4:
                raise Refused(f"too slow: a message takes about {one:.1f} s")
        else:
            # A first guess, safe for the slowest path: 25 MiB/s and 10 ms a message, a tick of user-mode Linux, which
            # rxe takes there now and then.
            one = max(point.size / (25 << 20), 1e-2)
        most = MOST_LAT if point.program.endswith("_lat") else MOST_BW
        count = max(FEWEST, min(most, int(seconds / max(one, 1e-9) / point.qps)))
        # perftest accepts whole lists only.
        return -(-count // point.list) * point.list

    def columns(self, argv, size):
        """Returns the result line of perftest without size and iterations."""
        for _ in range(CLOCK_TRIES):
            start = time.monotonic()
            columns = result_columns(self.both(argv, PERFTEST_PORT), size)
            if columns:
                return columns
            if time.monotonic() - start > CLOCK_SECONDS:
                break
        raise Refused(NO_CLOCK)

    def both(self, argv, port):
        """Runs a tool's server in one guest and its client in the other, and returns the client's output."""
        server = self.serve(argv, port)
        return self.result(server, self.connect(argv))

    def serve(self, argv, port):
        """Starts a tool's server, and waits until it listens."""
        ready = threading.Event()
        server = self.server.start(["/mnt/serve", str(port), "timeout", str(self.hang_seconds), *argv],
                                   sink=lambda text: ready.set() if "ready\n" in text else None)
        end = time.monotonic() + self.hang_seconds
        while not ready.wait(0.05):
            if server.status is not None:
                raise Refused("server: " + last_line(server.text))
            if time.monotonic() > end:
                server.kill(signal.SIGKILL)
                raise Refused("server: it does not listen")
        return server

    def connect(self, argv):
        """Starts a tool's client."""
        return self.client.start(["timeout", str(self.hang_seconds), *argv, self.server.address])

    def result(self, server, client):
        """Waits for the end of both, and returns the client's output."""
        status = client.wait(2 * self.hang_seconds)
        if status:
            server.kill(signal.SIGKILL)
            server.wait(self.hang_seconds)
            kind = Endless if status in ENDED else Refused
            raise kind(f"client: {reason(status)}{complaint(client.text)}; server: {complaint(server.text)}")
        if server.wait(2 * self.hang_seconds):
            raise Refused(f"server: {reason(server.status)}{complaint(server.text)}")
        return client.text

    # ---- others

    def connections(self, point):
        """Returns the connections a second of the RDMA connection manager, from ID to ID, that programs make which
        sleep while they wait: one after the other, or some at a time."""
        program = ["timeout", str(self.hang_seconds), "/mnt/connections"]
        counts = [str(CONNECTIONS), str(point.qps)]
        # The RDMA core may miss that the kernel has found a neighbour, and waits for as long as it may then (20 s).
        self.client.check(["ping", "-c", "1", "-w", "5", self.server.address], timeout=self.hang_seconds)
        server = self.server.start([*program, "server", *counts])
        try:
            # A client that is there before the server waits for it.
            return last_number(self.client, self.hang_seconds, [
                *program, "client", self.server.address, *counts, str(point.qps)])
        except (Refused, Failure):
            server.kill(signal.SIGKILL)
            raise
        finally:
            server.wait(2 * self.hang_seconds)


class RxeBetweenHosts(Pair):
    """rxe in guests whose packets of RoCE v2 else go to the device of their host."""

    def __init__(self, network, *arguments):
        super().__init__(*arguments)
        self.network = network

    def measure(self, point, seconds):
        self.network.redirect(False)
        try:
            return super().measure(point, seconds)
        finally:
            self.network.redirect(True)


class Plain:
    """What the same two guests do without RDMA, by plain system calls. path: "tcp" or "udp"."""

    def __init__(self, path, server, client, hang_seconds):
        self.path = path
        self.server = server
        self.client = client
        self.hang_seconds = hang_seconds
        self.job = server.start(["/mnt/limits", f"{path}-serve"])
        if not self.job.shows("listening", hang_seconds):
            raise Failure(f"limits {path}-serve: {self.job.text}")

    def lost(self):
        """Returns why nothing can be measured here any more, or ""."""
        return "" if self.job.status is None else f"limits {self.path}-serve: {last_line(self.job.text)}"

    def measure(self, point, seconds):
        """Returns the figure of a point, in its unit."""
        if point.kind == "nvme":
            return nvme_reads(self.server, self.client, self.hang_seconds, self.path, point.qps)
        if point.kind == "cpu":
            return processor_time(lambda count: self.program("tcp-count", point.size, count), point.size)
        return self.program(point.tool_over(self.path).replace("_", "-"), point.size, seconds)

    def program(self, name, size, how_much):
        """Returns the number that a program of limits prints."""
        return last_number(self.client, self.hang_seconds, [
            "/mnt/limits", name, self.server.address, str(size), str(how_much)])


class Limit:
    """The limits of the machine itself."""

    path = "limit"

    def __init__(self, program, memory_dir, hang_seconds):
        self.program = program
        self.hang_seconds = hang_seconds
        self.memory_dir = memory_dir

    def measure(self, name, size, seconds):
        if name == "cacheline_rate":
            # Round trips in a microsecond: a rate of messages by this one is messages in a round trip.
            return 1 / self.measure("cacheline", size, seconds)
        argv = [self.program, name.replace("_", "-")]
        if name.startswith("memcpy"):
            argv += [str(size), str(seconds), self.memory_dir]
        elif name.startswith("taps"):
            argv += [*TAPS, str(size), str(seconds)]
        else:
            argv += [str(seconds)]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, encoding="utf-8",
                              timeout=self.hang_seconds, preexec_fn=die_with_parent)
        if done.returncode:
            raise Refused(done.stderr.strip())
        return float(done.stdout)


def result_columns(text, size):
    """Returns the result line of perftest without size and iterations. If perftest could not measure the processor's
    clock, returns None."""
    match = re.search(rf"^[ \t]*{size}[ \t]+\d+((?:[ \t]+[-+\w.]+)+)[ \t]*$", text, re.M)
    if not match:
        raise Refused("no result: " + last_line(text))
    columns = [float(word) for word in match[1].split()]
    return columns if all(map(math.isfinite, columns)) and columns[LAT_TYPICAL] else None


def throughput(point, columns):
    """Returns the rate or the bandwidth of perftest's result line, in the unit of a point. In perftest's own column of
    bandwidth, small messages leave no digits."""
    rate = columns[BW_RATE]
    return rate if point.unit == plan.MPPS else 1e6 * rate * point.size / 2**20


def make_taps():
    """Puts the two taps of the limits on the bridge of the guests, each as the uplink of a guest whose interface has
    the address of that end: a datagram takes the way of a packet of RoCE v2."""
    for number, tap in enumerate(TAPS, 1):
        port = f"{tap}guest"
        hosts.uplink("up", "bridge", tap, "root", "1500")
        for argv in (f"ip link add {port} type veth peer name {tap}end", f"ip link set {tap}end up",
                     f"ip link set {port} master bridge up",
                     f"bridge fdb add 02:00:00:00:00:{number:02x} dev {port} master static"):
            subprocess.run(argv.split(), check=True)
        hosts.uplink("guest", port, tap)


def processor_time(run, size):
    """Returns the seconds of all processors that a GiB takes, in messages of a size. run: moves a number of messages.
    What it takes to start and to end programs is measured with few messages, and taken off."""
    def taken(messages):
        before = processor.used(os.getpid(), processor.every())
        run(messages)
        return processor.used(os.getpid(), processor.every()) - before

    few, many = (taken(count) for count in CPU_COUNTS)
    if many <= few:
        raise Refused("too short for the clock of processor time")
    return (many - few) / ((CPU_COUNTS[1] - CPU_COUNTS[0]) * size / 2**30)


def nvme_reads(server, client, hang_seconds, transport, depth):
    """Returns random reads of 4 KiB a second, `depth` at a time, of a namespace in the other guest's memory."""
    try:
        server.check(["/mnt/nvme", "up", transport, server.address], timeout=hang_seconds)
        return last_number(client, hang_seconds, ["/mnt/nvme", "read", transport, server.address,
                                                  str(NVME_SECONDS), str(depth)])
    finally:
        server.run(["/mnt/nvme", "down"], timeout=hang_seconds)


def own_disk_reads(guest, hang_seconds, depth):
    """Returns reads a second of a disk in the guest's own memory, as nvme_reads() does of the other guest's."""
    return last_number(guest, hang_seconds, ["/mnt/nvme", "local", str(NVME_SECONDS), str(depth)])


def last_number(guest, hang_seconds, argv):
    """Returns the number that a program in a guest prints last."""
    status, text = guest.run(["timeout", str(hang_seconds), *argv], timeout=2 * hang_seconds)
    if status:
        raise Refused(reason(status) + last_line(text))
    return float(text.split()[-1])


def reason(status):
    return "does not end: " if status in ENDED else f"exit status {status}: "


def last_line(text):
    """Returns what a tool said last, without the frame that perftest draws."""
    lines = [line.strip() for line in text.split("\n") if line.strip(" -\r")]
    return lines[-1][:200] if lines else "no output"


def complaint(text):
    """Returns what a tool that failed said of it, which stands before what it had not written out until then."""
    lines = [line for line in text.split("\n") if COMPLAINT.search(line)]
    return last_line(lines[-1] if lines else text)


@dataclasses.dataclass(frozen=True)
class Sample:
    """What the device has counted until some time: messages, doorbells, and seconds of its workers: those in which they
    worked, and those in which they had a processor."""

    time: float
    messages: int
    bells: int
    work: float
    busy: float

    COUNTERS = ("send_messages", "write_messages", "read_messages", "atomic_messages")

    @classmethod
    def of(cls, status):
        """Returns what a status tells."""
        counters = [guest["counters"] for guest in status["guests"]]
        work, poll = (sum(worker[f"{what}_seconds"] for worker in status["workers"]) for what in ("work", "poll"))
        return cls(time.monotonic(), sum(each[name] for each in counters for name in cls.COUNTERS),
                   sum(each["doorbells"] for each in counters), work, work + poll)


class Observer:
    """Looks at the device while a program runs: how many messages there were, and how long its workers worked for
    them. The time that others have of the processors, and the time in which a worker finds no work, is not in that."""

    # A status of 2,000 QPs takes 8 ms of the processors that are measured.
    PERIOD = 0.2

    def __init__(self, daemon):
        self.daemon = daemon
        self.samples = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self):
        if self.daemon:
            self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        if self.daemon:
            self.thread.join()

    def watch(self):
        while not self.ended.wait(self.PERIOD):
            self.samples.append(Sample.of(self.daemon.status()))

    def figures(self):
        """Returns plan.OF_DEVICE between the first sample under way and the last with progress. Before that,
        connections are made."""
        moved = [(one, two) for one, two in zip(self.samples, self.samples[1:]) if one.messages < two.messages]
        if len(moved) < 3:
            return {}
        first, last = moved[1][0], moved[-1][0]
        messages = last.messages - first.messages
        figures = {plan.WORKER: 100 * (last.busy - first.busy) / (last.time - first.time),
                   plan.BELLS: (last.bells - first.bells) / messages}
        if last.work > first.work:
            figures[plan.CORE] = messages / (last.work - first.work) / 1e6
        return figures


def read_message(stream):
    """Reads a message of Varlink, which ends with a NUL byte, from a socket."""
    message = b""
    while not message.endswith(b"\0"):
        part = stream.recv(1 << 16)
        if not part:
            raise Refused("virtio-rdmad closed the control socket")
        message += part
    return message[:-1]


class Daemon:
    """A running virtio-rdmad."""

    def __init__(self, control):
        self.control = control

    def status(self):
        """Returns its status."""
        with socket.socket(socket.AF_UNIX) as stream:
            stream.connect(self.control)
            stream.sendall(b'{"method":"org.virtio-rdma.Daemon.Status"}\0')
            return json.loads(read_message(stream))["parameters"]
