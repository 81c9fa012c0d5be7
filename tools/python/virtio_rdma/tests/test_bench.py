# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The benchmark's own arithmetic."""

import json
import os
import types
from typing import Any
from unittest import mock

import pytest

from virtio_rdma.bench import measure, plan, processor, report, scale
from virtio_rdma.bench.__main__ import tables

BW = """ #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]
 64         100              0.23               0.25               0.003826
---------------------------------------------------------------------------------------
"""
LAT = """ #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]
 2       300          1.10           9.00         2.50                 2.60             0.10
"""
NO_CLOCK = " 2       300          inf            inf          inf               inf         -nan           inf     inf\n"  # noqa: E501


def pair(outputs, **limits):
    """A pair of guests whose tools print these texts, one a run."""
    one: Any = measure.Pair.__new__(measure.Pair)
    one.known, one.hang_seconds, one.device, one.index = {}, 40, "rdma0", 1
    one.daemon = None
    one.limits = {"max_qp": 21, "max_cqe": 255, "max_qp_wr": 254} | limits
    one.argv = []
    texts = iter(outputs)

    def both(argv, _):
        one.argv.append(argv)
        return next(texts)

    one.both = both
    return one


def point(tool, size, qps=1, vmm="uml"):
    return next(point for point in plan.points(vmm, False) if point.key == (tool, size, qps))


class TestPerftest:
    def test_rate_has_more_digits_than_bandwidth(self):
        value = pair([BW]).perftest(point("ib_write_bw", 64), 0.002)
        assert value == pytest.approx(3826 * 64 / 2**20)

    def test_short_first_run_is_repeated(self):
        one = pair([BW, BW])
        assert one.perftest(point("ib_write_rate", 64), 10) == 0.003826
        assert [argv[argv.index("-n") + 1] for argv in one.argv] == ["1000", "38260"]

    def test_what_the_device_gives(self):
        observer = measure.Observer(None)
        assert not observer.figures()
        # Setting up, four looks under way, and two after the end.
        looks = ((0, 0.0), (0, 0.5), (10, 0.6), (30, 0.8), (50, 1.0), (70, 1.2), (70, 1.2), (70, 1.3))
        observer.samples = [measure.Sample(time=10.0 + 2 * place, messages=messages, bells=3 * messages, work=work,
                                           busy=3 * work) for place, (messages, work) in enumerate(looks)]
        assert observer.figures() == pytest.approx({plan.CORE: 100e-6, plan.WORKER: 100 * 1.8 / 6, plan.BELLS: 3})

    def test_latency_is_the_typical_one(self):
        assert pair([LAT]).perftest(point("ib_read_lat", 2), 2e-05) == 2.5

    def test_endless_run_is_repeated_with_less(self):
        one = pair([BW])
        one.hang_seconds = 40
        counts = []

        def both(argv, port, finished=one.both):
            counts.append(int(argv[argv.index("-n") + 1]))
            if len(counts) == 1:
                raise measure.Endless("client: does not end")
            return finished(argv, port)

        one.both = both
        one.known = {("ib_write_bw", 1, 0): {64: 1e-5}}
        assert one.perftest(point("ib_write_rate", 64), 0.002) == 0.003826
        assert counts == [200, measure.FEWEST]

    def test_no_clock(self):
        assert pair([NO_CLOCK, LAT]).perftest(point("ib_read_lat", 2), 2e-05) == 2.5
        with pytest.raises(measure.Refused, match="clock"):
            pair([NO_CLOCK] * measure.CLOCK_TRIES).perftest(point("ib_read_lat", 2), 2e-5)

    def test_no_result(self):
        with pytest.raises(measure.Refused, match="Couldn't"):
            pair(["---\nCouldn't get context\n"]).perftest(point("ib_read_lat", 2), 1)

    def test_complaint_before_what_was_buffered(self):
        assert measure.complaint("Completion with error at client\n #bytes #iterations\n") == \
            "Completion with error at client"
        assert measure.complaint("one\ntwo\n----\n") == "two"

    def test_depths_fit_the_device(self):
        one = pair([])
        assert one.depths(point("ib_write_bw", 64)) == []
        assert one.depths(point("ib_write_rate", 64, 16)) == ["-t", "15"]
        assert one.depths(point("ib_send_bw", 64)) == ["-r", "126"]
        with pytest.raises(measure.Refused, match="21 QPs"):
            one.depths(point("ib_write_rate", 64, 64))

    def test_too_slow(self):
        one = pair([])
        one.known[("ib_write_bw", 1, 0)] = {65536: 1.0}
        with pytest.raises(measure.Refused, match="too slow"):
            one.iterations(point("ib_write_bw", 8 << 20), 0.3)

    def test_a_guess_is_no_reason_to_refuse(self):
        one = pair([])
        one.hang_seconds = measure.HANG_SECONDS[True]
        assert one.iterations(point("ib_write_rate", 64, 1000), 0.3) == measure.FEWEST

    def test_loss_has_rates_of_its_own(self):
        one = pair([])
        one.known_of(point("ib_write_bw", 65536, vmm=plan.CABLE))[65536] = 1 / 1024
        assert one.iterations(point("ib_write_bw", 65536, vmm=plan.CABLE), 0.5) == 512
        # The first guess is 10 ms a message.
        assert one.iterations(point("ib_write_bw_loss", 65536, vmm=plan.CABLE), 0.3) == 30

    def test_connections(self):
        made = "8 connections made and ended\n16 connections made and ended\n"
        for status, text in ((0, made + "connections a second: 123.4\n"), (1, "rdma_connect: Invalid argument\n")):
            one = pair([], max_cqe=measure.MAD_CQE)
            one.server, one.client = server, client = mock.Mock(address="192.0.2.1"), mock.Mock()
            client.run.return_value = status, text
            job = server.start.return_value
            if status:
                with pytest.raises(measure.Refused, match="Invalid argument"):
                    one.measure(point("rdma_connect", 0, 8), 1)
            else:
                assert one.measure(point("rdma_connect", 0, 8), 1) == 123.4
            # A server that waits for connections that nobody makes is ended.
            assert (job.kill.call_count, job.wait.call_count) == (status, 1)
            count = str(measure.CONNECTIONS)
            assert server.start.call_args[0][0][-3:] == ["server", count, "8"]
            assert client.run.call_args[0][0][-5:] == ["client", "192.0.2.1", count, "8", "8"]


class TestProcessorTime:
    def test_names_with_spaces_and_parentheses(self):
        ticks = os.sysconf("SC_CLK_TCK")
        stat = processor.Stat.parse(f"7 (a) b (c)) S 3 {'0 ' * 9}{ticks} {2 * ticks} {3 * ticks} {4 * ticks} 20 0")
        assert stat == processor.Stat("a) b (c)", 3, 3, 7)

    def test_what_this_one_has_started_and_the_softirqs(self):
        stats = {number: processor.Stat(name, parent, own, ended) for number, name, parent, own, ended in (
            (1, "init", 0, 100, 100), (2, "kthreadd", 0, 100, 0), (3, "ksoftirqd/0", 2, 1, 0), (10, "bench", 1, 50, 50),
            (11, "virtio-rdmad", 10, 2, 0), (12, "linux", 10, 4, 8), (13, "program", 12, 16, 0),
            (14, "another", 1, 100, 0))}
        assert processor.used(10, stats) == 31

    def test_of_this_process(self):
        stats = processor.every()
        assert os.getpid() in processor.started_by(os.getppid(), stats)
        assert processor.Stat.of(os.getpid()).parent == os.getppid()

    def test_start_and_end_of_programs_are_taken_off(self, monkeypatch):
        spent, counts = [0.0], []

        def run(count):
            counts.append(count)
            spent[0] += 0.1 + 0.002 * count

        monkeypatch.setattr(processor, "used", lambda *_: spent[0])
        # A message of 1 MiB takes 2 ms, so a GiB takes two seconds.
        assert measure.processor_time(run, 1 << 20) == pytest.approx(2.048)
        assert tuple(counts) == measure.CPU_COUNTS

    def test_too_short(self, monkeypatch):
        monkeypatch.setattr(processor, "used", lambda *_: 1)
        with pytest.raises(measure.Refused, match="too short"):
            measure.processor_time(lambda _: None, 1)

    def test_programs_that_sleep_and_no_rxe(self, monkeypatch):
        spent = iter(range(100))
        monkeypatch.setattr(processor, "used", lambda *_: next(spent) ** 2)
        chosen = point("ib_read_cpu", 1 << 20, vmm=plan.HOSTS)
        one = pair(["", ""])
        assert one.measure(chosen, 0.01) == 8
        assert [argv[2:] for argv in one.argv] == [["/mnt/sleeping.py", "rdma0", "1", "read", "1048576", str(count)]
                                                   for count in measure.CPU_COUNTS]
        assert (chosen.tool_over("tcp"), chosen.tool_over("rxe"), chosen.tool_over("udp")) == ("tcp_cpu", "", "")


def report_of(processors):
    """A report of a machine of which programs may use so many processors."""
    found = report.Report(False)
    found.machine["usable_cpus"] = processors
    return found


class TestReport:
    def setup_method(self):
        self.report = report_of(2)

    def samples(self, path, tool, size, *values, qps=1, vmm="uml"):
        row = self.report.row(vmm, path, tool, size, qps, "")
        row.samples = dict(enumerate(values))
        return row

    def goal(self, name):
        return next(goal for goal in self.report.goals() if goal["goal"] == name)

    def test_ratio_of_what_was_side_by_side(self):
        # The machine was slow in the middle: each ratio is 0.5 all the same.
        self.samples("rings", "ib_write_bw", 65536, 100, 10, 50)
        self.samples("limit", "memcpy", 65536, 200, 20, 100)
        goal = self.goal("write of 64 KiB: of memcpy")
        assert (goal["value"], goal["reached"], goal["ratio"], goal["path"]) == (0.5, False, 0.556, "rings")

    def test_of_scattered_pages(self):
        self.samples("rings", "ib_write_bw", 1 << 20, 70)
        self.samples("limit", "memcpy", 1 << 20, 100)
        assert "of_scattered_pages" not in self.goal("write of 1 MiB: of memcpy")
        self.samples("limit", "memcpy-pages", 1 << 20, 80)
        assert self.goal("write of 1 MiB: of memcpy")["of_scattered_pages"] == 0.875
        text = self.report.table(lambda vmm: plan.points(vmm, False), {})
        assert "between pages that lie anywhere: 0.875" in text

    def test_at_most(self):
        self.samples("rings", "ib_read_lat", 2, 0.5)
        goal = self.goal("read of 2 bytes: us")
        assert (goal["value"], goal["reached"], goal["ratio"]) == (0.5, True, 1.0)

    def test_objects_of_both_kinds_of_guests(self):
        self.samples("rings", "qp_to_rts", 0, 300, 200)
        self.samples("rxe", "qp_to_rts", 0, 100, 100)
        for vmm, value, reached in (("uml", 2.5, True), ("qemu", None, None)):
            goal = self.goal(f"{vmm}: qp_to_rts: times rxe")
            assert (goal["vmm"], goal["value"], goal["reached"]) == (vmm, value, reached)

    def over_the_wire(self, path, tool, size, *values):
        return self.samples(path, tool, size, *values, vmm=plan.HOSTS)

    def test_latency_beside_udp(self):
        for verb, way, ours in (("write", "lat", 30), ("read", "rtt", 50)):
            self.over_the_wire("rings", f"ib_{verb}_lat", 2, ours)
            self.over_the_wire("limit", f"taps_{way}", 2, 20)
            self.over_the_wire("udp", f"udp_{way}", 2, 40)
        figures = [(goal["value"], goal["reached"]) for verb in ("write", "read") for goal in (
            self.goal(f"hosts: {verb} of 2 bytes: of UDP over two taps"),
            self.goal(f"hosts: {verb} of 2 bytes: of UDP between guests"))]
        assert figures == [(1.5, True), (0.75, True), (2.5, False), (1.25, True)]

    def test_processor_time_beside_tcp(self):
        self.over_the_wire("rings", "ib_write_cpu", 1 << 20, 0.6, 1.4)
        self.over_the_wire("tcp", "tcp_cpu", 1 << 20, 2, 2)
        goal = self.goal("hosts: processor time of writes: of TCP's")
        assert (goal["value"], goal["reached"]) == (0.5, True)

    def test_goodput_is_that_of_the_same_round(self):
        self.samples("rings", "ib_write_bw_loss", 65536, 96, 9.6, vmm=plan.CABLE)
        self.samples("rings", "ib_write_bw", 65536, 100, 10, vmm=plan.CABLE)
        goal = self.goal("cable: writes at 1 % loss: of none")
        assert (goal["value"], goal["reached"]) == (0.96, True)
        lossy, whole = (point(tool, 65536, vmm=plan.CABLE) for tool in ("ib_read_bw_loss", "ib_read_bw"))
        assert lossy.beside == whole.beside == whole.key

    def test_every_goal_of_the_wire_has_a_point(self):
        points = {(vmm, *plan_point.key) for vmm in (plan.HOSTS, plan.CABLE) for plan_point in plan.points(vmm, False)}
        goals = list(self.report.wire_goals())
        assert all((goal["vmm"], *goal["load"]) in points for goal in goals)
        assert {(goal["vmm"], *goal["load"]) for goal in goals} >= {
            (plan.HOSTS, *plan_point.key) for plan_point in plan.points(plan.HOSTS, False)
            if plan_point.goal and not plan_point.tool.endswith("_rate")}

    def test_share_of_the_worker(self):
        self.samples("rings", "ib_send_bw_worker", 65536, 50)
        self.samples("rings", "ib_send_rate_worker", 64, 66)
        goals = [self.goal(f"{load}: the worker's share of the processors")
                 for load in ("send of 64 KiB", "64-byte sends")]
        assert [(goal["value"], goal["reached"]) for goal in goals] == [(0.25, False), (0.33, True)]
        # There are three threads, so a third of three processors is all that the worker can have of more.
        self.report.machine["usable_cpus"] = 6
        assert self.goal("64-byte sends: the worker's share of the processors")["value"] == 0.22

    def test_only_goals_of_what_was_measured(self):
        self.over_the_wire("rings", "ib_write_lat", 2, 30)
        text = self.report.table(lambda vmm: plan.points(vmm, False), {})
        assert "hosts: write of 2 bytes: of UDP over two taps" in text
        assert "memcpy" not in text
        assert "cable:" not in text

    def test_without_rings(self):
        self.samples("virtqueues", "ib_read_lat", 2, 20)
        self.samples("rxe", "ib_read_lat", 2, 400)
        goal = self.goal("read of 2 bytes: times faster than rxe")
        assert (goal["path"], goal["value"], goal["reached"]) == ("virtqueues", 20, True)

    def test_nothing_measured(self):
        assert all(goal["reached"] is None for goal in self.report.goals())

    def test_table(self):
        self.samples("rings", "ib_read_lat", 2, 0.5)
        self.report.row("uml", "rxe", "ib_read_lat", 2, 1, "us").error = "no time left"
        before = {"uml rings ib_read_lat 2 1": 1.0}
        text = self.report.table(lambda vmm: plan.points(vmm, False), before)
        assert "-50 %" in text
        assert "no figure: uml rxe: ib_read_lat 2: no time left" in text

    def test_history_is_short(self, tmp_path):
        path = str(tmp_path / "new" / "history.jsonl")
        assert report.last_run(path, self.report) == {}
        self.samples("rings", "ib_read_lat", 2, 0.5)
        for _ in range(report.HISTORY + 1):
            report.append_history(path, self.report.history())
        assert len(report.read_history(path)) == report.HISTORY
        assert report.last_run(path, self.report)["uml rings ib_read_lat 2 1"] == 0.5


class TestMachine:
    def goals(self, processors):
        return {goal["goal"]: goal for goal in report_of(processors).goals()}

    def test_which_goals_apply(self):
        few, many = self.goals(7), self.goals(8)
        assert {goal["processors"] for goal in few.values()} == {plan.BOTH, plan.FEW}
        assert {goal["processors"] for goal in many.values()} == {plan.BOTH, plan.MANY}
        assert {goal["vmm"] for goal in many.values() if goal["processors"] == plan.MANY} == set(plan.ENDS)
        of_both = {name for name, goal in few.items() if goal["processors"] == plan.BOTH}
        assert few.keys() & many.keys() == of_both
        assert {name for name in of_both if "device core" in name} == {
            name for name in few.keys() | many.keys() if "device core" in name}

    def test_targets(self):
        few, many = self.goals(2), self.goals(16)
        assert [few[name]["target"] for name in (
            "send of 64 KiB: of memcpy", "64-byte sends, one QP: M/s by the clock",
            "64-byte sends: the worker's share of the processors")] == [0.5, 3, 0.3]
        of_many = [(name, goal) for name, goal in many.items() if goal["processors"] == plan.MANY]
        assert {name: (goal["at"], goal["target"]) for name, goal in of_many} == {
            "scale 1x2: 64-byte writes a cache line round trip": ("least", 2),
            "scale 1x2: 64-byte sends a cache line round trip": ("least", 1.5),
            "scale 1x2: send of 64 KiB: of memcpy": ("least", 0.85),
            "scale 1x2: send of 1 MiB: of memcpy": ("least", 0.85),
            "scale 1x2: write of 1 MiB: of memcpy": ("least", 2),
            "scale 1x2: write of 8 MiB: of memcpy": ("least", 2),
            "scale 1x2: read of 2 bytes: cache line round trips": ("most", 4),
            "scale 1x2: write of 2 bytes: cache line round trips": ("most", 3),
            "scale 4x8: 64-byte writes: of 1x2": ("least", 3.9),
            "scale 4x8: 64-byte writes: least pair of the mean": ("least", 0.95),
            "scale 4x8: 64-byte sends: of 1x2": ("least", 3.9),
            "scale 4x8: 64-byte sends: least pair of the mean": ("least", 0.95),
            "scale-hosts 4x4: write of 64K: of 1x1": ("least", 3.5),
            "scale-hosts 4x4: read of 64K: of 1x1": ("least", 3.5),
            "scale-hosts 4x4: write of 64: of 1x1": ("least", 3.5)}

    def test_says_which_and_why(self):
        for processors, kind in ((2, "few"), (16, "many")):
            found = report_of(processors)
            line = f"{processors} processors: goals of {kind} processors"
            assert found.kind_line() == line
            assert line in found.table(lambda vmm: plan.points(vmm, False), {})

    def test_counts_what_programs_may_use(self):
        assert report.Report(False).processors == len(os.sched_getaffinity(0))

    def test_tables(self):
        def names(whole, kind):
            kernel = {"uml": "", plan.SCALE: "", plan.SCALE_HOSTS: ""}
            return tables(types.SimpleNamespace(kernel=kernel, whole=whole), kind)

        assert names(True, plan.FEW) == ["uml"]
        assert names(True, plan.MANY) == names(False, plan.FEW) == ["uml", plan.SCALE, plan.SCALE_HOSTS]


class TestScale:
    def scale(self, processors, only="", quick=False, vmm=plan.SCALE):
        return scale.Scale(vmm, types.SimpleNamespace(only=only, quick=quick), report_of(processors))

    def columns(self, *arguments):
        return [combination.name for combination, _ in self.scale(*arguments).columns]

    def test_combinations_that_fit(self):
        every = ["1x1", "1x2", "2x2", "2x4", "4x4", "4x8"]
        for processors, count in ((8, 4), (11, 4), (12, 5), (15, 5), (16, 6), (64, 6)):
            fitting = plan.combinations(plan.SCALE, processors)
            assert [combination.name for combination in fitting] == every[:count]
            assert all(combination.threads <= processors for combination in fitting)
        # Threads share processors here, but for 1x1 and 1x2 on four and more.
        for processors in (1, 2, 7):
            for vmm in plan.ENDS:
                assert [combination.name for combination in plan.combinations(vmm, processors)] == every[:3]
        of_hosts = [[combination.name for combination in plan.combinations(plan.SCALE_HOSTS, processors)]
                    for processors in (8, 16)]
        assert of_hosts == [["1x1", "1x2", "2x2"], ["1x1", "1x2", "2x2", "4x4"]]

    def test_goals_come_first(self):
        assert self.columns(16) == ["1x2", "4x8", "1x1", "2x2", "2x4", "4x4"]
        assert self.columns(16, "", False, plan.SCALE_HOSTS) == ["1x1", "4x4", "1x2", "2x2"]

    def test_chosen_columns(self):
        assert self.columns(16, "^ib_write_rate 64 1 4x") == ["4x8", "4x4"]
        assert self.columns(2, "_lat") == ["1x2"]
        [(_, points)] = self.scale(16, "^ib_send_rate_least 64 1 2x4$").columns
        assert [chosen.key for chosen in points] == [("ib_send_rate", 64, 1), ("ib_send_rate_least", 64, 1)]

    def test_says_what_a_network_carries(self):
        one = self.scale(16, vmm=plan.SCALE_HOSTS)
        combination, points = one.columns[0]
        one.row(combination, points[0]).samples[0] = 1000.0
        goals = {goal["goal"]: goal["gbit_per_s"] for goal in one.found.goals()}
        assert goals["scale-hosts 4x4: read of 64K: of 1x1"] is None
        row = one.found.row(plan.SCALE_HOSTS, "4x4", "ib_write_bw", 65536, 1, plan.MIBS)
        row.samples[0] = 1000.0
        goals = {goal["goal"]: goal["gbit_per_s"] for goal in one.found.goals()}
        assert goals["scale-hosts 4x4: write of 64K: of 1x1"] == 8.389

    def test_short_runs_have_none(self):
        assert not self.scale(16, "", True).columns

    def test_says_that_threads_share_processors(self, monkeypatch):
        one = self.scale(4)
        monkeypatch.setattr(one, "column", lambda *_: None)
        one.run()
        assert one.found.json()["notes"] == ["scale 2x2: 6 threads share 4 processors"]

    def test_least_served(self):
        assert scale.least_share([2, 2, 2, 2]) == 1
        assert scale.least_share([1, 3, 2, 2]) == 0.5

    def test_rows(self, monkeypatch):
        one = self.scale(16)
        figures = {"1x2": [3.0], "4x8": [1.5, 3.0, 3.0, 2.5]}
        monkeypatch.setattr(scale, "together", lambda pairs, _: figures[pairs[0]])
        for combination, points in one.columns[:2]:
            one.point(combination, points, [combination.name], points[0], 0)
        assert [(row["path"], row["tool"], row["size"], row["unit"], row["value"])
                for row in one.found.json()["rows"]] == [
            ("1x2", "ib_write_rate", 64, "M/s", 3), ("1x2", "ib_write_rate_least", 64, "/mean", 1),
            ("4x8", "ib_write_rate", 64, "M/s", 10), ("4x8", "ib_write_rate_least", 64, "/mean", 0.6)]
        goals = {goal["goal"]: (goal["value"], goal["reached"]) for goal in one.found.goals()}
        assert goals["scale 4x8: 64-byte writes: of 1x2"] == (3.3333, False)
        assert goals["scale 4x8: 64-byte writes: least pair of the mean"] == (0.6, False)
        lines = one.found.table(lambda vmm: plan.points(vmm, False), {}).splitlines()
        assert next(line for line in lines if line.startswith("scale ")).split()[3:5] == ["1x2", "4x8"]

    def test_rounds(self, monkeypatch):
        one = self.scale(16)
        counts: dict[tuple, int] = {}

        def measured(combination, _, __, load, number):
            counts[(combination.name, *load.key[:2])] = number + 1
            if load.tool != "ib_send_bw":
                one.row(combination, load).samples[number] = 1

        monkeypatch.setattr(one, "point", measured)
        monkeypatch.setattr(one, "limit", lambda *_: None)
        for combination, points in one.columns[:3]:
            one.rounds(combination, points, [], None)
        # Goals are about these. What fails at first is not tried again.
        assert {key[1:] for key, count in counts.items() if key[0] == "1x2" and count == 1} == {
            ("ib_send_bw", 65536), ("ib_send_bw", 1 << 20)}
        assert {key[1:] for key, count in counts.items() if key[0] == "4x8" and count == scale.ROUNDS} == {
            ("ib_write_rate", 64), ("ib_send_rate", 64)}
        assert {count for key, count in counts.items() if key[0] == "1x1"} == {1}

    def test_messages_a_round_trip(self, monkeypatch):
        one = self.scale(16)
        limit = measure.Limit("limits", "", 20)
        monkeypatch.setattr(measure.subprocess, "run", lambda argv, **_: types.SimpleNamespace(
            returncode=0, stdout={"cacheline": "0.5", "memcpy": "4000"}[argv[1]]))
        figures = {64: [6.0], 1 << 20: [9000.0]}
        monkeypatch.setattr(scale, "together", lambda _, load: figures[load.size])
        points = one.points_of(plan.ALONE)
        for tool, size in (("ib_write_rate", 64), ("ib_write_bw", 1 << 20)):
            chosen = point(tool, size, vmm=plan.SCALE)
            one.point(plan.ALONE, points, [], chosen, 0)
            one.limit(chosen, limit, 0)
            # Another column comes first in the table, but the machine's limit was not measured beside it.
            one.found.row(plan.SCALE, "1x1", tool, size, 1, chosen.unit).samples[("1x1", 0, chosen.key)] = 1
        goals = {goal["goal"]: goal["value"] for goal in one.found.goals()}
        assert goals["scale 1x2: 64-byte writes a cache line round trip"] == 3
        assert goals["scale 1x2: write of 1 MiB: of memcpy"] == 2.25
        assert "3.00" in one.found.line(plan.SCALE, ["1x1", "1x2"], point("ib_write_rate", 64, vmm=plan.SCALE), {})

    def test_every_goal_has_a_point(self):
        goals = [goal for goal in report_of(16).goals() if goal["vmm"] == plan.SCALE]
        points = {(combination.name, *chosen.key) for combination, chosen_points in self.scale(16).columns
                  for chosen in chosen_points}
        assert goals
        assert all((goal["path"], *goal["load"]) in points for goal in goals)

    def test_machine_is_in_the_report(self):
        machine = json.loads(json.dumps(self.scale(16).found.json()))["machine"]
        assert machine["cpu"]
        assert (machine["cpus"], machine["usable_cpus"]) == (os.cpu_count(), 16)


class Party:
    """A pair of guests that notes what it is told to do."""

    def __init__(self, name, told, outcome=BW):
        self.name, self.told, self.outcome = name, told, outcome

    def depths(self, _):
        return ["-r", "126"]

    def command(self, _, arguments):
        return arguments

    def serve(self, command, _):
        self.told.append(("serve", self.name, *command))

    def connect(self, _):
        self.told.append(("connect", self.name))

    def result(self, *_):
        self.told.append(("result", self.name))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class TestTogether:
    def test_all_servers_before_the_first_client(self):
        told: list[tuple] = []
        figures = scale.together([Party(name, told) for name in "ab"], point("ib_send_rate", 64, vmm=plan.SCALE))
        assert figures == [0.003826, 0.003826]
        arguments = ("-r", "126", "-D", "3", "-f", "1")
        assert told == [("serve", "a", *arguments), ("serve", "b", *arguments), ("connect", "a"), ("connect", "b"),
                        ("result", "a"), ("result", "b")]

    def test_tries_again_without_a_clock(self):
        told: list[tuple] = []
        parties = [Party("a", told), Party("b", told, NO_CLOCK.replace(" 2 ", " 64 "))]
        with pytest.raises(measure.Refused, match="clock"):
            scale.together(parties, point("ib_write_rate", 64, vmm=plan.SCALE))
        assert told.count(("connect", "a")) == told.count(("connect", "b")) == measure.CLOCK_TRIES

    def test_waits_for_all_if_one_fails(self):
        told: list[tuple] = []
        with pytest.raises(measure.Refused, match="first"):
            scale.together([Party("a", told, measure.Refused("first")), Party("b", told)],
                           point("ib_write_rate", 64, vmm=plan.SCALE))
        assert told[-1] == ("result", "b")


def test_only_takes_the_load_of_a_figure_of_the_device():
    every = plan.points("uml", False)
    assert plan.chosen(every, "") == every
    found = plan.chosen(every, "^ib_write_rate_core 64 1$")
    assert [point.key for point in found] == [("ib_write_rate", 64, 1), ("ib_write_rate_core", 64, 1)]
