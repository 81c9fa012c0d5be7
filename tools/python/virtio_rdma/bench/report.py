# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""What the benchmark found: rows, goals, a table, JSON and the history."""

import dataclasses
import json
import os
import platform
import statistics
import subprocess
import time

from virtio_rdma.bench import plan
from virtio_rdma.common import TOP, say

# Lines of the history that are kept.
HISTORY = 50
# The smallest change of a figure between two runs that the table shows: less is noise of the machine.
CHANGE = 0.15


@dataclasses.dataclass
class Row:
    """One figure. samples: by the moment at which they were taken, so that a ratio compares what was measured side by
    side."""

    vmm: str
    path: str
    tool: str
    size: int
    qps: int
    unit: str
    samples: dict = dataclasses.field(default_factory=dict)
    error: str = ""

    @property
    def value(self):
        return round(statistics.median(self.samples.values()), 6) if self.samples else None

    @property
    def key(self):
        return (self.vmm, self.path, self.tool, self.size, self.qps)

    def json(self):
        row = {"vmm": self.vmm, "path": self.path, "tool": self.tool, "size": self.size, "qps": self.qps,
               "unit": self.unit, "value": self.value, "samples": list(self.samples.values())}
        return row | ({"error": self.error} if self.value is None else {})


class Report:
    def __init__(self, quick):
        self.rows = {}
        self.quick = quick
        self.notes = []
        # Where the processors' time went under a load: percent, thread, program; by VMM, tool, size and QPs.
        self.profiles = {}
        self.start = time.time()
        self.machine = machine()

    def row(self, vmm, path, tool, size, qps, unit):
        row = Row(vmm, path, tool, size, qps, unit)
        return self.rows.setdefault(row.key, row)

    def get(self, *key):
        return self.rows.get(key)

    def note(self, text):
        self.notes.append(text)
        say(text)

    # ---- goals

    @property
    def processors(self):
        """How many processors the programs may use."""
        return self.machine["usable_cpus"]

    @property
    def kind(self):
        """Which goals apply."""
        return plan.machine_kind(self.processors)

    def kind_line(self):
        """Returns which goals apply, and why."""
        return f"{self.processors} processors: goals of {self.kind} processors"

    def measured(self, vmm, path=None):
        """Returns whether there are figures of these guests, and of that path."""
        return any(row.vmm == vmm and path in (None, row.path) and row.samples for row in self.rows.values())

    def goals(self):
        """Returns the goals that apply to this machine, for the best path of virtio-rdma that was measured; on
        user-mode Linux unless they say otherwise."""
        every = ((plan.BOTH, self.copy_goals()), (plan.BOTH, self.small_goals()), (plan.FEW, self.shared_goals()),
                 (plan.MANY, self.alone_goals()), (plan.MANY, self.wide_goals()),
                 (plan.MANY, self.wide_wire_goals()),
                 (plan.BOTH, self.goals_beside_others()), (plan.BOTH, self.wire_goals()),
                 (plan.BOTH, self.object_goals()), (plan.BOTH, self.restart_goals()))
        return [goal | {"processors": which} for which, group in every if which in (plan.BOTH, self.kind)
                for goal in group]

    @property
    def ours(self):
        """The best path of virtio-rdma."""
        return "virtqueues" if self.measured("uml", "virtqueues") and not self.measured("uml", "rings") else "rings"

    def at(self, tool, size, qps=1, path="", vmm="uml"):
        """Returns the key of a row."""
        return (vmm, path or self.ours, tool, size, qps)

    def over(self, name, target, above, below, least=True):
        """Returns the goal that a ratio of two rows is at least, or at most, the target."""
        mine = below if below[1] in plan.OURS and above[1] not in plan.OURS else above
        return self.goal(name, mine, target, self.ratio(above, below), least)

    def figure(self, name, target, key, least=True):
        """Returns the goal that a row is at least, or at most, the target."""
        row = self.get(*key)
        return self.goal(name, key, target, row.value if row else None, least)

    def copy_goals(self):
        """Yields what WRITEs and READs in one piece are to be of a copy."""
        for verb in ("write", "read"):
            for size in plan.GOAL_SIZES["bw"]:
                yield self.copy_goal(f"{verb} of {size_words(size)}: of memcpy", 0.9, verb, size)

    def copy_goal(self, name, target, verb, size):
        """Returns the goal of messages in one piece beside a copy."""
        copied = self.at(f"ib_{verb}_bw", size)
        goal = self.over(name, target, copied, self.at("memcpy", size, path="limit"))
        # The device cannot make up for what the places of the guests' pages cost.
        pages = self.ratio(copied, self.at("memcpy-pages", size, path="limit"))
        return goal | ({"of_scattered_pages": round(pages, 4)} if pages else {})

    def shared_goals(self):
        """Yields what SENDs are to be by the clock, where two programs and the device share the processors."""
        for size, target in zip(plan.GOAL_SIZES["bw"], (0.5, 0.6), strict=True):
            yield self.copy_goal(f"send of {size_words(size)}: of memcpy", target, "send", size)
        yield self.figure("64-byte sends, one QP: M/s by the clock", 3, self.at("ib_send_rate", plan.RATE_SIZE))
        for name, tool, size in (("send of 64 KiB", "ib_send_bw", 65536),
                                 ("64-byte sends", "ib_send_rate", plan.RATE_SIZE)):
            key = self.at(tool + plan.WORKER, size)
            row = self.get(*key)
            # In percent of one processor, while the three threads can use no more than three.
            share = row.value / 100 / min(self.processors, 3) if row and row.value is not None else None
            yield self.goal(f"{name}: the worker's share of the processors", key, 0.3, share, True)

    def alone_goals(self):
        """Yields what one pair of guests is to do where each thread has a processor of its own."""
        def at(tool, size, path=plan.ALONE.name):
            return self.at(tool, size, path=path, vmm=plan.SCALE)

        place = f"scale {plan.ALONE.name}:"
        for verb, target in (("write", 2), ("send", 1.5)):
            yield self.over(f"{place} 64-byte {verb}s a cache line round trip", target,
                            at(f"ib_{verb}_rate", plan.RATE_SIZE), at("cacheline_rate", 0, "limit"))
        for verb, size, target in (("send", 65536, 0.85), ("send", 1 << 20, 0.85), ("write", 1 << 20, 2),
                                   ("write", 8 << 20, 2)):
            yield self.over(f"{place} {verb} of {size_words(size)}: of memcpy", target, at(f"ib_{verb}_bw", size),
                            at("memcpy", size, "limit"))
        for verb, target in (("read", 4), ("write", 3)):
            yield self.over(f"{place} {verb} of 2 bytes: cache line round trips", target, at(f"ib_{verb}_lat", 2),
                            at("cacheline", 0, "limit"), False)

    def wide_goals(self):
        """Yields what four pairs of guests are to do of one pair, where each thread has a processor of its own."""
        def at(tool, column):
            return self.at(tool, plan.RATE_SIZE, path=column.name, vmm=plan.SCALE)

        place = f"scale {plan.WIDEST.name}: 64-byte"
        for verb in ("write", "send"):
            tool = f"ib_{verb}_rate"
            yield self.over(f"{place} {verb}s: of {plan.ALONE.name}", 3.9, at(tool, plan.WIDEST), at(tool, plan.ALONE))
            yield self.figure(f"{place} {verb}s: least pair of the mean", 0.95, at(tool + plan.LEAST, plan.WIDEST))

    def wide_wire_goals(self):
        """Yields what four pairs of guests on hosts of their own are to do of one pair, with a worker for each pair."""
        for verb, size in (("write", 65536), ("read", 65536), ("write", plan.RATE_SIZE)):
            tool = f"ib_{verb}_{'rate' if size == plan.RATE_SIZE else 'bw'}"
            wide, alone = (self.at(tool, size, path=column.name, vmm=plan.SCALE_HOSTS)
                           for column in (plan.WIDEST_OF_HOSTS, plan.ALONE_OF_HOSTS))
            name = f"{plan.SCALE_HOSTS} {plan.WIDEST_OF_HOSTS.name}: {verb} of {size_text(size)}"
            yield self.over(f"{name}: of {plan.ALONE_OF_HOSTS.name}", 3.5, wide, alone)

    def small_goals(self):
        """Yields what small messages are to take."""
        read = self.at("ib_read_lat", 2)
        yield self.over("read of 2 bytes: cache line round trips", 4, read, self.at("cacheline", 0, path="limit"),
                        least=False)
        yield self.figure("read of 2 bytes: us", 0.5, read, False)
        for verb, target in (("write", 15), ("send", 10)):
            yield self.figure(f"64-byte {verb}s, one QP: M/s a device core", target,
                              self.at(f"ib_{verb}_rate{plan.CORE}", 64))
        for verb in ("write", "send"):
            yield self.over(f"64-byte {verb}s, 1,000 QPs: of one QP", 0.95,
                            self.at(f"ib_{verb}_rate{plan.CORE}", 64, 1000), self.at(f"ib_{verb}_rate{plan.CORE}", 64))

    def goals_beside_others(self):
        """Yields what messages are to be beside other ways between two guests of a host."""
        for verb in ("write", "read"):
            yield self.over(f"{verb} of 64 KiB: times rxe", 100, self.at(f"ib_{verb}_bw", 65536),
                            self.at(f"ib_{verb}_bw", 65536, path="rxe"))
        for verb in ("read", "send"):
            yield self.over(f"{verb} of 2 bytes: times faster than rxe", 10, self.at(f"ib_{verb}_lat", 2, path="rxe"),
                            self.at(f"ib_{verb}_lat", 2))
        yield self.over("send of 2 bytes with events: of two eventfd hops", 1.5, self.at("ib_send_lat_events", 2),
                        self.at("eventfd", 0, path="limit"), False)
        # Neither can be reached where the guest's own disk is not faster than this.
        for path, target in (("tcp", 5), ("rxe", 8)):
            reads = "nvme_read", 4096, plan.NVME_DEPTH
            yield self.over(f"NVMe-oF, random reads of 4 KiB: times {path}", target, self.at(*reads),
                            self.at(*reads, path))

    def wire_goals(self):
        """Yields what messages over the wire are to be."""
        def at(tool, size, path="rings", vmm=plan.HOSTS):
            return self.at(tool, size, 1, path, vmm)

        for verb in ("write", "read"):
            for size in plan.GOAL_SIZES["bw"]:
                here, name = at(f"ib_{verb}_bw", size), f"hosts: {verb} of {size_text(size)}"
                yield self.over(f"{name}: times rxe", 5, here, at(f"ib_{verb}_bw", size, "rxe"))
                yield self.over(f"{name}: times TCP", 3 if size == 65536 else 2, here, at("tcp_bw", size, "tcp"))
        for verb, way in (("write", "lat"), ("read", "rtt")):
            here, name = at(f"ib_{verb}_lat", 2), f"hosts: {verb} of 2 bytes"
            yield self.over(f"{name}: of UDP over two taps", 2, here, at(f"taps_{way}", 2, "limit"), False)
            yield self.over(f"{name}: of UDP between guests", 1.5, here, at(f"udp_{way}", 2, "udp"), False)
        for verb in ("write", "send"):
            yield self.figure(f"hosts: 64-byte {verb}s: M/s a device core", 2,
                              at(f"ib_{verb}_rate{plan.CORE}", plan.RATE_SIZE))
        for verb in ("write", "read"):
            yield self.over(f"hosts: processor time of {verb}s: of TCP's", 0.6, at(f"ib_{verb}_cpu", 1 << 20),
                            at("tcp_cpu", 1 << 20, "tcp"), False)
        for verb in ("write", "read"):
            lossy, whole = (at(f"ib_{verb}_bw{end}", 65536, vmm=plan.CABLE) for end in ("_loss", ""))
            yield self.over(f"cable: {verb}s at 1 % loss: of none", 0.95, lossy, whole)
        reads = "nvme_read", 4096, plan.NVME_DEPTH_OF_HOSTS
        yield self.over("hosts: NVMe-oF, random reads of 4 KiB: times TCP", 3,
                        *(self.at(*reads, path=path, vmm=plan.HOSTS) for path in ("rings", "tcp")))

    def object_goals(self):
        """Yields what making objects is to be beside rxe."""
        for vmm in plan.VMMS:
            for tool, size, qps in (*(("reg_mr", size, 0) for size in plan.REGISTRATIONS), ("qp_to_rts", 0, 1),
                                    *(("rdma_connect", 0, at_a_time) for at_a_time in plan.CONNECTIONS_AT_A_TIME)):
                name = f"{vmm}: {tool} {size_text(size)}".rstrip() + (f" x{qps}" if qps > 1 else "")
                yield self.over(f"{name}: times rxe", 1.5,
                                self.at(tool, size, qps, vmm=vmm), self.at(tool, size, qps, "rxe", vmm))

            if vmm == "qemu":
                huge = "reg_mr_huge", plan.HUGE_REGISTRATION, 0
                yield self.over(f"{vmm}: {huge[0]} {size_text(huge[1])}: times rxe", 3, self.at(*huge, vmm=vmm),
                                self.at(*huge, "rxe", vmm))

    def restart_goals(self):
        """Yields how long guests are to wait."""
        yield self.figure("restart with 1,000 QPs and 10,000 MRs a guest: pause in ms", 200,
                          self.at("pause_full", 0, plan.HELD_QPS, "rings", plan.RESTARTS), False)

    def goal(self, name, key, target, value, least):
        """Returns one goal. key: the row of the load that it is about."""
        vmm, path, *load = key
        reached = None if value is None else (value >= target if least else value <= target)
        # How much of the goal is reached: 1 or more is all of it.
        ratio = None if not value else round(value / target if least else target / value, 3)
        row = self.get(*key)
        is_wire = row and row.value and row.unit == plan.MIBS and vmm in plan.OVER_THE_WIRE
        profile = self.profiles.get((vmm, plan.load_of(load[0]), *load[1:]), []) if reached is False else []
        return {"goal": name, "vmm": vmm, "path": path, "load": load, "target": target,
                "at": "least" if least else "most", "value": None if value is None else round(value, 4),
                "ratio": ratio, "reached": reached,
                "gbit_per_s": round(row.value * 8 * 2**20 / 1e9, 3) if is_wire else None,
                "profile": [{"percent": percent, "thread": thread, "in": where} for percent, thread, where in profile]}

    def ratio(self, above, below):
        """Returns the median of the ratios of two rows, of what was measured side by side."""
        above, below = self.get(*above), self.get(*below)
        if not (above and below and above.samples and below.samples):
            return None
        both = above.samples.keys() & below.samples.keys()
        if both:
            return statistics.median(above.samples[moment] / below.samples[moment] for moment in both)
        # These are points of different places in the run, such as 1 and 1,000 QPs.
        return above.value / below.value

    # ---- output

    def json(self):
        return {"machine": self.machine, "quick": self.quick, "seconds": round(time.time() - self.start, 1),
                "notes": self.notes, "goals": self.goals(), "rows": [row.json() for row in self.rows.values()]}

    def table(self, points, before):
        """Returns everything as text. before: what the last comparable run found, by key."""
        lines = []
        for vmm in dict.fromkeys(row.vmm for row in self.rows.values()):
            paths = [path for path in (*plan.PATHS, *plan.COLUMNS) if path != "limit"
                     and any(row.vmm == vmm and row.path == path for row in self.rows.values())]
            lines += ["", f"{vmm:<20}{'size':>9}{'QPs':>6}" + "".join(f"{path:>13}" for path in paths)
                      + f"{'limit':>13}  {'unit':<6}{'of limit':>9}  change"]
            lines += filter(None, (self.line(vmm, paths, point, before) for point in points(vmm)))
        lines += ["", *self.errors(), "", *self.goal_lines(before)]
        return "\n".join(lines)

    def line(self, vmm, paths, point, before):
        rows = [self.get(vmm, path, *self.where(point, path)) for path in paths]
        if not any(rows):
            return ""
        limit = self.get(vmm, *limit_key(point)) if point.limit else None
        text = f"{point.tool:<20}{size_text(point.size):>9}{point.qps or '':>6}"
        text += "".join(f"{number(row):>13}" for row in [*rows, limit]) + f"  {point.unit:<6}"
        first = next((row for row in rows if row and row.value and row.path not in ("tcp", "udp")), None)
        share = ""
        if first and limit and limit.value:
            beside = next((row for row in rows if row and row.samples.keys() & limit.samples.keys()), first)
            share = f"{self.ratio(beside.key, limit.key):.2f}"
        return text + f"{share:>9}  " + self.change(first, before)

    @staticmethod
    def where(point, path):
        return (point.tool_over(path), point.size, point.qps)

    @staticmethod
    def change(row, before):
        """Returns the change of a figure since the last run, if it is large."""
        old = before.get(" ".join(map(str, row.key))) if row else None
        if not old or not row.value or abs(row.value / old - 1) < CHANGE:
            return ""
        return f"{100 * (row.value / old - 1):+.0f} %"

    def errors(self):
        """Returns why figures are missing: a line for each reason."""
        reasons: dict[tuple, list] = {}
        for row in self.rows.values():
            if row.value is None:
                reasons.setdefault((row.vmm, row.path, row.error), []).append(
                    f"{row.tool} {size_text(row.size)}" + (f" x{row.qps}" if row.qps > 1 else ""))
        return [f"no figure: {vmm} {path}: {', '.join(dict.fromkeys(which))}: {error}"
                for (vmm, path, error), which in reasons.items()]

    def goal_lines(self, before):
        goals = [goal for goal in self.goals() if self.measured(goal["vmm"])]
        lines = [self.kind_line(), f"{'goal (user-mode Linux)':<50}{'target':>11}{'reached':>11}{'':>4}before"]
        for goal in goals:
            word = {True: "yes", False: "NO", None: "-"}[goal["reached"]]
            sign = {"least": ">=", "most": "<="}[goal["at"]]
            value = "-" if goal["value"] is None else f"{goal['value']:.3g}"
            old = before.get("goal " + goal["goal"])
            lines.append(f"{goal['goal']:<50}{sign + ' ' + format(goal['target'], 'g'):>11}{value:>11} {word:>3}"
                         + (f"  {old:.3g}" if old else ""))
            if goal["reached"] is False and "of_scattered_pages" in goal:
                lines.append(f"    of memcpy between pages that lie anywhere: {goal['of_scattered_pages']:.3g}")
            if goal["gbit_per_s"]:
                lines.append(f"    {goal['gbit_per_s']:.3g} Gbit/s")
            if goal["profile"]:
                lines.append("    time of all processors: " + ", ".join(
                    f"{part['thread']} in {part['in']} {part['percent']:.0f} %" for part in goal["profile"]))
        return [*lines, f"(path: {self.ours})"] if goals else lines[:1]

    def history(self):
        """Returns what the history keeps of this run."""
        figures = {" ".join(map(str, row.key)): row.value for row in self.rows.values() if row.value is not None}
        figures |= {"goal " + goal["goal"]: goal["value"] for goal in self.goals() if goal["value"] is not None}
        return {"date": self.machine["date"], "commit": self.machine["commit"], "quick": self.quick,
                "cpu": self.machine["cpu"], "figures": figures}


def limit_key(point, name=""):
    """Returns the key of the limit of a point, or of another limit. memcpy and taps have a size, other limits do
    not."""
    return ("limit", name or point.limit, point.size if point.limit.startswith(("memcpy", "taps")) else 0, 1)


def last_run(path, report):
    """Returns the figures of the last run of the same kind on the same processor."""
    for run in reversed(read_history(path)):
        if run["quick"] == report.quick and run["cpu"] == report.machine["cpu"]:
            return run["figures"]
    return {}


def read_history(path):
    if not os.path.exists(path):
        return []
    with open(path, encoding="ascii") as file:
        return [json.loads(line) for line in file]


def append_history(path, run):
    """Adds a run to the history, whole or not at all: another run may end at the same time."""
    runs = [*read_history(path), run][-HISTORY:]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="ascii") as file:
        file.writelines(json.dumps(run) + "\n" for run in runs)
    os.rename(temporary, path)


def machine():
    git = ["git", "-c", f"safe.directory={TOP}", "-C", TOP]
    commit = output([*git, "describe", "--always", "--dirty", "--abbrev=12"])
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": commit,
            "cpu": names[0] if names else platform.machine(), "cpus": os.cpu_count(),
            "usable_cpus": len(os.sched_getaffinity(0)),
            "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
            "kernel": platform.release(), "load_before": round(os.getloadavg()[0], 2)}


def output(argv):
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, encoding="utf-8")
    return done.stdout.strip() or "unknown"


def size_text(size):
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size or "")


def size_words(size):
    """Returns a size that is a multiple of 1 KiB, in words."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def number(row):
    """Returns a figure with three digits, or a dash where there is no figure."""
    if row is None:
        return ""
    if row.value is None:
        return "-"
    value = row.value
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
