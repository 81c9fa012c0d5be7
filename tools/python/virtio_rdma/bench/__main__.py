# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The benchmark behind "make bench", inside the build root; tools/bench/bench has its options."""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from virtio_rdma import guests
from virtio_rdma.bench import measure, plan, processor, report
from virtio_rdma.bench.restarts import Restarts
from virtio_rdma.bench.scale import Scale
from virtio_rdma.common import BUILD, CACHE, TOP, Failure, die_with_parent, end_on, say
from virtio_rdma.guests.cable import Cabled
from virtio_rdma.guests.hosts import Hosts

OUT = os.path.join(BUILD, "bench")
HISTORY = os.path.join(CACHE, "bench", "history.jsonl")
# What the guests run.
GUEST_DIR = os.path.join(TOP, "tools", "bench", "guest")
# Seconds of a whole run, by what they are for. Plots and a report come on top; all in all 20 and 2 minutes.
BUDGET = {False: {"uml": 560, "qemu": 430, plan.HOSTS: 170, plan.CABLE: 45},
          True: {"uml": 78, "qemu": 40, plan.HOSTS: 0, plan.CABLE: 0}}
# How long one measurement takes, apart from starting the programs.
SECONDS = {False: {"uml": 0.3, "qemu": 0.5, plan.HOSTS: 0.3, plan.CABLE: 0.3},
           True: {"uml": 0.3, "qemu": 0.3, plan.HOSTS: 0.3, plan.CABLE: 0.3}}
LIMIT_SECONDS = 0.05
# Times as long: samples of the usual time vary by a tenth, and the goals of copies are near.
THOROUGH = 3
# How often what goes by address is measured.
TIMES = {"cm": {False: 9, True: 3}, "nvme": {False: 3, True: 1}}
# Kept of the budget for what comes after the points.
RESERVE = {False: {"uml": 40, "qemu": 40, plan.HOSTS: 20, plan.CABLE: 5},
           True: {"uml": 10, "qemu": 10, plan.HOSTS: 0, plan.CABLE: 0}}
ROUNDS = 9
# The guests of a place other than one host.
NETWORKS = {plan.HOSTS: Hosts, plan.CABLE: Cabled}
# A path that fails in this way so often is not tried any more.
MOST_HANGS = 3
# The tables that are measured by a class of their own.
TABLES: dict[str, Any] = {plan.RESTARTS: Restarts, plan.SCALE: Scale, plan.SCALE_HOSTS: Scale}
# What a profile is taken of.
PROFILED = (("ib_write_bw", 65536, 1), ("ib_write_rate", 64, 1), ("ib_read_lat", 2, 1))
PROFILE_SECONDS = 3
# Lines of a profile that the report keeps.
SHARES = 6
PERF_HZ = 997


class Phase:
    """All measurements on the guests of one VMM."""

    def __init__(self, vmm, options, found):
        self.vmm = vmm
        self.options = options
        self.found = found
        self.seconds = SECONDS[options.quick][vmm]
        self.deadline = time.monotonic() + BUDGET[options.quick][vmm]
        self.points = plan.chosen(plan.by_importance(plan.points(vmm, options.quick)), options.only)
        self.paths = []
        self.limit: measure.Limit | None = None
        self.broken = {}
        self.hangs = {}
        self.hang_seconds = measure.HANG_SECONDS[options.quick]
        common = {"rdma": "virtio", "kernel_dir": options.kernel[vmm], "image": options.image,
                  "share": options.share}
        self.network: guests.Network
        if vmm in NETWORKS:
            self.network = NETWORKS[vmm](guests.Options(vmm="uml", guests=2, **common))
        else:
            rings = offers_rings()
            # With rings, guests 1 and 2 have them and 3 and 4 do without, served by the same device.
            self.network = guests.Network(guests.Options(
                vmm=vmm, guests=4 if rings else 2, no_rings=(3, 4) if rings else (), **common))

    def run(self):
        """Measures until there is nothing left to measure or the time is over."""
        if not self.points:
            return
        failed = True
        try:
            self.step(f"{self.vmm}: boot {len(self.network.guests)} guests")
            self.network.boot()
            self.bring_up()
            self.rounds()
            self.profile()
            self.rxe_alone()
            self.out_of_time()
            self.judge()
            # The logs of a path that broke are kept.
            failed = bool(self.broken)
        except KeyboardInterrupt:
            failed = False
            raise
        finally:
            self.network.close(failed)
            if failed:
                say("logs: " + " ".join(self.network.logs()))

    def step(self, text):
        left = max(0, self.deadline - time.monotonic())
        print(f"{text:<60}{left:6.0f} s left", file=sys.stderr, flush=True)

    # ---- paths

    def bring_up(self):
        """Finds what each pair of guests has. What only one driver may do comes before the other driver is there."""
        pairs = self.network.guests[:2], self.network.guests[2:]
        links = [pair[1].link for pair in pairs if pair]
        status = self.network.device_status()
        for pair, link in zip(pairs, links):
            path = "rings" if all(status[guest.name]["queues"] == "rings" for guest in pair) else "virtqueues"
            if path in (other.path for other in self.paths):
                self.found.note(f"{self.vmm}: the device offers rings and the driver does not take them")
                continue
            server, client = pair
            self.paths.append(measure.Pair(path, server, client, link, self.hang_seconds,
                                           measure.Daemon(os.path.join(self.network.dir, "control.sock"))))
        self.idle()
        self.by_address(self.paths)
        server, client = self.network.guests[:2]
        for guest in (server, client):
            link = self.network.rdma_up(guest, "rxe")
            if not link[0].startswith("rxe"):
                raise Failure(f"{link[0]} came up instead of rxe")
        rxe = "rxe", server, client, link, self.hang_seconds
        plain = [measure.Plain(path, server, client, self.hang_seconds) for path in ("tcp", "udp")
                 if any(point.tool_over(path) for point in self.points)]
        self.paths += [measure.RxeBetweenHosts(self.network, *rxe) if isinstance(self.network, Hosts)
                       else measure.Pair(*rxe), *plain]
        self.by_address(plain)
        self.limits()

    def limits(self):
        """Prepares what measures the machine itself."""
        self.limit = measure.Limit(os.path.join(OUT, "guest", "limits"), self.network.memory_dir, self.hang_seconds)
        if any(point.limit.startswith("taps") for point in self.points):
            measure.make_taps()

    def idle(self):
        """Measures what the device costs while no guest uses it."""
        point = next((point for point in self.points if point.kind == "idle"), None)
        if not point:
            return
        device = self.network.daemon.pid
        time.sleep(1)
        before, start = processor.Stat.of(device).own, time.monotonic()
        time.sleep(2)
        used = processor.Stat.of(device).own - before
        row = self.row(self.paths[0], point)
        row.samples[(0, point.key)] = 100 * used / (time.monotonic() - start)

    def rxe_alone(self):
        """Measures what goes by address over rxe, when our driver is gone."""
        rxe = next(path for path in self.paths if path.path == "rxe")
        points = [point for point in self.points if point.kind in plan.BY_ADDRESS and self.wanted(rxe, point)]
        if points and "rxe" not in self.broken:
            for guest in (rxe.server, rxe.client):
                guest.check(["rmmod", "virtio_rdma"], timeout=self.hang_seconds)
            self.by_address([rxe])

    def by_address(self, paths):
        """Measures what goes by address, several times in a row.

        One run of connections takes three times as long as another over any device where the guests have more CPUs than
        the machine has processors: a CPU that wakes another one holds a lock that the other one wants, and loses its
        processor to it.
        """
        for point in self.points:
            rounds = TIMES[point.kind][self.options.quick] if point.kind in plan.BY_ADDRESS else 0
            for path in paths if rounds else ():
                if not self.wanted(path, point):
                    continue
                self.step(f"{self.vmm}: {point.tool}" + (f" x{point.qps}" if point.qps > 1 else "") + f", {path.path}")
                for number in range(rounds):
                    self.measure(path, point, number)
                    if point.limit and path is self.paths[0]:
                        self.measure_own_disk(path, point, number)

    # ---- points

    def rounds(self):
        """Measures every point once, then those of the goals until there are three figures of each, then all again."""
        points = [point for point in self.points if point.kind in ("perftest", "cpu", "objects")]
        for number in range(ROUNDS):
            chosen = points if number == 0 or number > 2 else [point for point in points if point.goal]
            for point in chosen:
                if time.monotonic() > self.deadline - RESERVE[self.options.quick][self.vmm]:
                    return
                self.step(f"{self.vmm} {number + 1}: {point.tool} {report.size_text(point.size)}"
                          + (f" x{point.qps}" if point.qps > 1 else ""))
                self.point(point, number)
            if self.options.only and number == 2:
                return

    def point(self, point, number):
        """Measures one point over every path."""
        for path in self.paths:
            if time.monotonic() > self.deadline:
                return
            if not self.wanted(path, point):
                continue
            self.measure(path, point, number)
            if path is self.paths[0] and point.limit:
                self.measure_limit(point, number)

    def wanted(self, path, point):
        """Returns whether this run has that point over that path."""
        if path is self.paths[0]:
            return True
        if point.kind == "idle" or not point.tool_over(path.path):
            return False
        return point.compared or not self.options.quick

    def row(self, path, point):
        tool, size, qps = report.Report.where(point, path.path)
        return self.found.row(self.vmm, path.path, tool, size, qps, point.unit)

    def measure(self, path, point, number):
        """Measures one figure, or notes the reason why there is no figure."""
        row = self.row(path, point)
        if path.path in self.broken:
            row.error = row.error or self.broken[path.path]
            return
        if number and not row.samples:
            return  # it failed in the first round
        start = time.monotonic()
        try:
            with self.cable(point, number):
                row.samples[(number, point.beside)] = path.measure(point, self.seconds_of(point))
            self.record_device(path, point, number)
        except (measure.Refused, Failure) as error:
            row.error = str(error).split("\n", maxsplit=1)[0]
            for _, other in self.of_device(path, point):
                self.row(path, other).error = row.error
            self.failure(path, row, time.monotonic() - start)

    @contextlib.contextmanager
    def cable(self, point, number):
        """Has the cable lose packets meanwhile, if a point wants it to: others in each round."""
        if not point.loss:
            yield
            return
        assert isinstance(self.network, Cabled)
        self.network.cable.impair(seed=number, loss=point.loss)
        try:
            yield
        finally:
            counted = self.network.cable.impair()
        if not counted["lost"]:
            raise measure.Refused("the cable lost nothing")

    def of_device(self, path, point):
        """Yields the points that come with another from the device: the ends of their names, and they."""
        for end, key in point.companions.items():
            yield from ((end, other) for other in self.points if other.key == key and self.wanted(path, other))

    def record_device(self, path, point, number):
        """Keeps the figures that came with another."""
        for end, other in self.of_device(path, point):
            row = self.row(path, other)
            if end in path.of_device:
                row.samples[(number, other.key)] = path.of_device[end]
            else:
                row.error = "over before the device had been asked often enough"

    def failure(self, path, row, seconds):
        """Decides whether the path is worth another try."""
        print(f"  {path.path}: {row.error}", file=sys.stderr, flush=True)
        self.hangs[path.path] = self.hangs.get(path.path, 0) + (seconds >= self.hang_seconds)
        if self.network.daemon.poll() is not None:
            lost = "virtio-rdmad died"
        elif self.hangs[path.path] >= MOST_HANGS:
            lost = f"given up after {MOST_HANGS} measurements that did not end"
        else:
            lost = path.lost()
        if lost:
            self.broken[path.path] = lost
            self.found.note(f"{self.vmm} {path.path}: {lost}")

    def is_thorough(self, point):
        """Returns whether a point is a copy that a goal is about, in a run that has the time to look closely."""
        return point.goal and point.limit == "memcpy" and not self.options.quick

    def seconds_of(self, point):
        """Returns how many seconds a point is measured."""
        return self.seconds * point.longer * (THOROUGH if self.is_thorough(point) else 1)

    def measure_limit(self, point, number):
        # A mean covers as long a time as the mean that it is compared with, and processes that share processors take
        # turns of milliseconds.
        seconds = self.seconds_of(point) if point.limit.startswith(("memcpy", "taps")) else LIMIT_SECONDS
        names = [point.limit] + (["memcpy-pages"] if self.is_thorough(point) else [])
        for name in names:
            row = self.found.row(self.vmm, *report.limit_key(point, name), point.unit)
            assert self.limit
            try:
                row.samples[(number, point.key)] = self.limit.measure(name, point.size, seconds)
            except measure.Refused as error:
                row.error = str(error)

    def measure_own_disk(self, path, point, number):
        """Measures what the guest itself does with a disk that is not behind a network."""
        row = self.found.row(self.vmm, *report.limit_key(point), point.unit)
        try:
            row.samples[(number, point.key)] = measure.own_disk_reads(path.client, path.hang_seconds, point.qps)
        except (measure.Refused, Failure) as error:
            row.error = str(error)

    def out_of_time(self):
        """Notes that the time was over where there is neither a figure nor another reason."""
        for point in self.points:
            for path in self.paths:
                if self.wanted(path, point):
                    row = self.row(path, point)
                    row.error = row.error or "no time left"

    def judge(self):
        """Adds what the guests' kernels reported to the report."""
        for number, line in self.network.reports()[:10]:
            self.found.note(f"{self.vmm}: guest {number} kernel log: {line}")

    # ---- profile

    def profiled(self):
        """Returns tools, sizes and QPs whose load is to be profiled: those of the goals that were missed, unless the
        run is quick, and what was asked for."""
        missed = [goal["load"] for goal in self.found.goals() if goal["reached"] is False and goal["vmm"] == self.vmm]
        asked = self.options.profile
        chosen = (missed if asked or not self.options.quick else []) + (list(PROFILED) if asked else [])
        return dict.fromkeys((plan.load_of(tool), size, qps) for tool, size, qps in chosen)

    def profile(self):
        """Finds where the time of all processors goes under the loads whose goals were missed."""
        path = self.paths[0]
        for key in self.profiled() if os.environ.get("BENCH_ROOT") else ():
            point = next((point for point in self.points
                          if point.key == key and point.kind not in plan.BY_ADDRESS), None)
            if not point or path.path in self.broken:
                continue
            name = f"profile-{self.vmm}-{path.path}-{point.tool}-{point.size}-{point.qps}"
            self.step(f"{self.vmm}: {name}")
            data = os.path.join(OUT, name + ".data")
            perf = bench_root(["perf", "record", "-q", "-a", "-e", "cpu-clock", "-F", str(PERF_HZ), "-o", data])
            try:
                with self.cable(point, 0):
                    path.measure(point, PROFILE_SECONDS)
            except (measure.Refused, Failure) as error:
                self.found.note(f"{name}: {error}")
            perf.send_signal(signal.SIGINT)
            _, errors = perf.communicate(timeout=self.hang_seconds)
            try:
                self.found.profiles[(self.vmm, *key)] = perf_shares(data)
                with open(os.path.join(OUT, name + ".txt"), "w", encoding="utf-8") as file:
                    file.write(perf_report(data, "overhead,comm,dso,symbol"))
            except measure.Refused as error:
                self.found.note(f"no profile: {error}: {measure.last_line(errors)}")
                return


def perf_report(data, fields, *options):
    """Returns what perf says of its data."""
    report_of = bench_root(["perf", "report", "--stdio", "-q", "-F", fields, *options, "-i", data])
    text, errors = report_of.communicate()
    if report_of.returncode or not text.strip():
        raise measure.Refused(f"perf report: {measure.last_line(errors)}")
    return text


def perf_shares(data):
    """Returns the largest shares of the processors' time: percent, thread, program or library."""
    rows = (line.split(";") for line in perf_report(data, "overhead,comm,dso", "--field-separator=;").splitlines())
    shares = [(float(row[0].strip().rstrip("%")), *(field.strip() for field in row[1:]))
              for row in rows if len(row) == 3]
    return sorted(shares, reverse=True)[:SHARES]


def offers_rings():
    """Returns whether this virtio-rdmad can be told to offer rings or not."""
    program = os.path.join(BUILD, "virtio-rdmad")
    return "rings=" in subprocess.run([program, "--help"], capture_output=True, check=True, encoding="utf-8").stdout


def bench_root(argv):
    """Starts a program in the root with perf and matplotlib, with this checkout at the path that it has here."""
    script = """root=$1; shift
        for dir in /proc /sys "$TOP"; do mkdir -p "$root$dir"; mount --rbind "$dir" "$root$dir"; done
        exec chroot "$root" "$@" """
    return subprocess.Popen(
        ["unshare", "--mount", "--propagation", "unchanged", "sh", "-ec", script, "sh",
         os.environ["BENCH_ROOT"], *argv],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace",
        env={**os.environ, "TOP": TOP, "HOME": "/tmp", "MPLCONFIGDIR": "/tmp"},
        preexec_fn=die_with_parent)


def stage():
    """Fills what the guests see as /mnt. Nothing of an earlier run stays."""
    shutil.rmtree(OUT, ignore_errors=True)
    directory = os.path.join(OUT, "guest")
    shutil.copytree(GUEST_DIR, directory, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(os.path.join(BUILD, "cargo-bench", "release", "limits"), directory)
    shutil.copy(os.path.join(BUILD, "connections"), directory)


def finish(found, options):
    """Writes report, history and plots."""
    before = report.last_run(HISTORY, found)
    with open(os.path.join(OUT, "report.json"), "w", encoding="ascii") as file:
        json.dump(found.json(), file, indent=1)
    print(found.table(lambda vmm: plan.points(vmm, options.quick), before))
    if not options.only:
        report.append_history(HISTORY, found.history())
    if os.path.exists(HISTORY):
        shutil.copy(HISTORY, OUT)
    plots = ""
    if os.environ.get("BENCH_ROOT"):
        plot = bench_root(["python3", "-B", os.path.join(os.path.dirname(__file__), "plot.py"), OUT])
        plots, errors = plot.communicate()
        if plot.returncode:
            say(f"no plots: {measure.last_line(errors)}")
    print("\nin build/bench: report.json " + " ".join(["history.jsonl", *plots.split()]))


def parse():
    parser = argparse.ArgumentParser(prog="bench", allow_abbrev=False)
    parser.add_argument("--kernel", action="append", required=True, metavar="VMM=DIR")
    parser.add_argument("--image", required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    options.share = os.path.join(OUT, "guest")
    # By VMM, in the order in which they come.
    options.kernel = dict(pair.split("=", 1) for pair in options.kernel)
    return options


def tables(options, kind):
    """Returns the tables of a run. One of everything has those of scale only on a machine with many processors."""
    return [vmm for vmm in options.kernel if vmm not in plan.ENDS or kind == plan.MANY or not options.whole]


def main():
    options = parse()
    end_on(signal.SIGTERM, signal.SIGHUP)
    stage()
    found = report.Report(options.quick)
    say(found.kind_line())
    status = 0
    try:
        for vmm in tables(options, found.kind):
            try:
                TABLES.get(vmm, Phase)(vmm, options, found).run()
            except Failure as failure:
                found.note(f"{vmm}: {failure}")
                status = 1
        finish(found, options)
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
