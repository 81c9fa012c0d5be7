# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""What several pairs of user-mode Linux guests do at the same time, with several workers of their device, and what one
pair does where each thread has a processor of its own."""

import os
import signal
import statistics
import sys
import time

from virtio_rdma import guests
from virtio_rdma.bench import measure, plan, report
from virtio_rdma.common import BUILD, Failure, say
from virtio_rdma.guests.hosts import Hosts

# Seconds of all columns together. Starting and ending the guests of the last column comes on top.
BUDGET = {plan.SCALE: 228, plan.SCALE_HOSTS: 140}
NETWORKS = {plan.SCALE: guests.Network, plan.SCALE_HOSTS: Hosts}
# How often the points are measured that the limits of the machine or goals are about.
ROUNDS = 3
# The seconds of a load, as perftest takes them. In the first and in the last second, perftest counts nothing, so that
# all pairs have the load while one of them counts.
LOAD_SECONDS, MARGIN_SECONDS = 3, 1
COUNTED_SECONDS = LOAD_SECONDS - 2 * MARGIN_SECONDS
CACHELINE_SECONDS = 0.05
# MiB of a guest. It has one program, whose messages are small.
MEMORY = 256


class Scale:
    """Pairs of guests beside each other, one combination of pairs and workers after the other."""

    def __init__(self, vmm, options, found):
        self.vmm = vmm
        self.options = options
        self.found = found
        self.hang_seconds = measure.HANG_SECONDS[options.quick]
        self.deadline = time.monotonic() + BUDGET[vmm]
        self.alone, self.widest = plan.ENDS[vmm]
        every = [(each, self.points_of(each)) for each in self.by_importance(plan.combinations(vmm, found.processors))]
        self.columns = [(combination, points) for combination, points in every if points]

    def points_of(self, combination):
        """Returns the points that a run has in a column."""
        points = [point for point in plan.points(self.vmm, self.options.quick)
                  if point.column in ("", combination.name)]
        return plan.chosen(points, self.options.only, combination.name)

    def run(self):
        """Measures everything. A combination that fails is no reason to leave out the next."""
        for combination, _ in self.columns:
            if combination.threads > self.found.processors:
                self.found.note(f"{self.vmm} {combination.name}: {combination.threads} threads share "
                                f"{self.found.processors} processors")
        failures = []
        for combination, points in self.columns:
            try:
                self.column(combination, points)
            except Failure as failure:
                failures.append(f"{combination.name}: {failure}")
        if failures:
            raise Failure("; ".join(failures))

    def step(self, combination, text):
        left = max(0, self.deadline - time.monotonic())
        print(f"{f'{self.vmm} {combination.name}: {text}':<60}{left:6.0f} s left", file=sys.stderr, flush=True)

    def over(self):
        """Returns whether the time is over."""
        return time.monotonic() > self.deadline

    def column(self, combination, points):
        """Measures a combination, in guests of its own."""
        if self.over():
            self.explain(combination, points)
            return
        # With one CPU, no two threads of a guest want a processor.
        network = NETWORKS[self.vmm](guests.Options(
            vmm="uml", guests=2 * combination.pairs, rdma="virtio", kernel_dir=self.options.kernel[self.vmm],
            image=self.options.image, share=self.options.share, memory=MEMORY, cpus=1, workers=combination.workers))
        failed = True
        try:
            self.step(combination, f"boot {2 * combination.pairs} guests")
            network.boot()
            pairs = [measure.Pair(combination.name, server, client, client.link, self.hang_seconds)
                     for server, client in zip(network.guests[::2], network.guests[1::2])]
            limit = measure.Limit(os.path.join(BUILD, "bench", "guest", "limits"), network.memory_dir,
                                  self.hang_seconds)
            self.rounds(combination, points, pairs, limit)
            self.explain(combination, points)
            for number, line in network.reports()[:10]:
                self.found.note(f"{self.vmm} {combination.name}: guest {number} kernel log: {line}")
            failed = False
        finally:
            network.close(failed)
            if failed:
                say("logs: " + " ".join(network.logs()))

    def rounds(self, combination, points, pairs, limit):
        """Measures every point once, and again those that are compared with a limit or with another column."""
        for number in range(ROUNDS):
            for point in points:
                if point.kind == "least" or number and not self.again(combination, point):
                    continue
                if self.over():
                    return
                if number and not self.row(combination, point).samples:
                    continue  # it failed in the first round
                self.step(combination, f"{number + 1}: {point.tool} {point.size}")
                self.point(combination, points, pairs, point, number)
                if point.limit and combination == self.alone:
                    self.limit(point, limit, number)

    def row(self, combination, point):
        return self.found.row(self.vmm, combination.name, point.tool, point.size, point.qps, point.unit)

    def point(self, combination, points, pairs, point, number):
        """Measures one point in all pairs at the same time, or notes the reason why there is no figure."""
        row = self.row(combination, point)
        moment = combination.name, number, point.key
        least = next((other for other in points if other.key == point.companions[plan.LEAST]), None)
        try:
            # What one pair alone has needs no time in common.
            figures = [pairs[0].measure(point, COUNTED_SECONDS)] if point.column else together(pairs, point)
        except measure.Refused as error:
            print(f"  {error}", file=sys.stderr, flush=True)
            row.error = str(error).split("\n", maxsplit=1)[0]
            if least:
                self.row(combination, least).error = row.error
            return
        row.samples[moment] = sum(figures)
        if least:
            self.row(combination, least).samples[moment] = least_share(figures)

    def limit(self, point, limit, number):
        """Measures what the machine itself does, for as long as what stands beside it was counted."""
        row = self.found.row(self.vmm, *report.limit_key(point), point.unit)
        seconds = COUNTED_SECONDS if point.limit == "memcpy" else CACHELINE_SECONDS
        try:
            row.samples[(self.alone.name, number, point.key)] = limit.measure(point.limit, point.size, seconds)
        except measure.Refused as error:
            row.error = str(error)

    def explain(self, combination, points):
        """Notes that the time was over where there is neither a figure nor another reason."""
        for point in points:
            row = self.row(combination, point)
            row.error = row.error or "no time left"

    def by_importance(self, combinations):
        """Returns combinations in the order in which they are measured: what the goals need comes first."""
        return sorted(combinations, key=lambda each: each not in (self.alone, self.widest))

    def again(self, combination, point):
        """Returns whether a point is measured more than once in a column: where a goal needs a median."""
        if combination == self.widest:
            return point.size == plan.RATE_SIZE or self.vmm == plan.SCALE_HOSTS
        return combination == self.alone


def least_share(figures):
    """Returns what the least served of several has, by their mean."""
    return min(figures) / statistics.mean(figures)


def together(pairs, point):
    """Returns the figure of each pair in a load that all pairs have at the same time."""
    for _ in range(measure.CLOCK_TRIES):
        columns = columns_together(pairs, point)
        if all(columns):
            return [measure.throughput(point, each) for each in columns]
    raise measure.Refused(measure.NO_CLOCK)


def columns_together(pairs, point):
    """Returns perftest's result line of each pair, or None for a pair whose perftest could not measure the processor's
    clock."""
    commands = [pair.command(point, [*pair.depths(point), "-D", str(LOAD_SECONDS), "-f", str(MARGIN_SECONDS)])
                for pair in pairs]
    servers = serve_all(pairs, commands)
    clients = [pair.connect(command) for pair, command in zip(pairs, commands)]
    # Each is waited for, whatever becomes of the others: the next load needs all guests.
    results = [outcome(pair, *jobs) for pair, *jobs in zip(pairs, servers, clients)]
    for result in results:
        if isinstance(result, measure.Refused):
            raise result
    return [measure.result_columns(text, point.size) for text in results]


def serve_all(pairs, commands):
    """Starts the server of each pair. If one does not listen, the others end."""
    servers = []
    try:
        for pair, command in zip(pairs, commands):
            servers.append(pair.serve(command, measure.PERFTEST_PORT))
    except measure.Refused:
        for server in servers:
            server.kill(signal.SIGKILL)
        raise
    return servers


def outcome(pair, server, client):
    """Returns what the client of a pair says, or why it says nothing."""
    try:
        return pair.result(server, client)
    except measure.Refused as error:
        return error
