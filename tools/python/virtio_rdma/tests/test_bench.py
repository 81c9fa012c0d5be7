# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The benchmark's own arithmetic."""

import os
from typing import Any

import pytest

from virtio_rdma.bench import measure, plan, processor, report

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
        assert measure.cmtime_rate("step  avg/iter\nfull connect   20000  400000\nfull connect 1 1\n") == 50
        with pytest.raises(measure.Refused):
            measure.cmtime_rate("rdma_connect: Invalid argument\n")


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


class TestReport:
    def setup_method(self):
        self.report = report.Report(False)

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
        self.over_the_wire("rings", "ib_write_cpu", 1 << 20, 1, 3)
        self.over_the_wire("tcp", "tcp_cpu", 1 << 20, 2, 2)
        goal = self.goal("hosts: processor time of writes: of TCP's")
        assert (goal["value"], goal["reached"]) == (1, True)

    def test_goodput_is_that_of_the_same_round(self):
        self.samples("rings", "ib_write_bw_loss", 65536, 90, 9, vmm=plan.CABLE)
        self.samples("rings", "ib_write_bw", 65536, 100, 10, vmm=plan.CABLE)
        goal = self.goal("cable: writes at 1 % loss: of none")
        assert (goal["value"], goal["reached"]) == (0.9, True)
        lossy, whole = (point(tool, 65536, vmm=plan.CABLE) for tool in ("ib_read_bw_loss", "ib_read_bw"))
        assert lossy.beside == whole.beside == whole.key

    def test_every_goal_of_the_wire_has_a_point(self):
        points = {(vmm, *plan_point.key) for vmm in (plan.HOSTS, plan.CABLE) for plan_point in plan.points(vmm, False)}
        goals = list(self.report.wire_goals())
        assert all((goal["vmm"], *goal["load"]) in points for goal in goals)
        assert {(goal["vmm"], *goal["load"]) for goal in goals} >= {
            (plan.HOSTS, *plan_point.key) for plan_point in plan.points(plan.HOSTS, False)
            if plan_point.goal and not plan_point.tool.endswith("_rate")}

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


def test_only_takes_the_load_of_a_figure_of_the_device():
    every = plan.points("uml", False)
    assert plan.chosen(every, "") == every
    found = plan.chosen(every, "^ib_write_rate_core 64 1$")
    assert [point.key for point in found] == [("ib_write_rate", 64, 1), ("ib_write_rate_core", 64, 1)]
