# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite programs: what people run over RDMA, as the distribution has it,
between two guests and within one: UCX, Open MPI over UCX, libfabric, rsockets
and qperf; and kernel consumers as applications.md shows them. Runs inside the build root.

Each program runs over virtio-rdma, and then over rxe in guests of the same kind,
and a result says what rxe did: a fact, and no result. A program that fails on both
for the reason that its case names is a skip. rxe is slow, and has RXE_SECONDS for
all of it: first for what failed over virtio-rdma, then for one of each kind, then
for the others.

Arguments: as for guest_suite.py, with an image that has the programs. ONLY in
the environment: a regular expression that chooses cases by their names.
"""

import dataclasses
import os
import re
import signal
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../vm"))
import guests  # noqa: E402  pylint: disable=wrong-import-position
import examples  # noqa: E402  pylint: disable=wrong-import-position
import guest_suite  # noqa: E402  pylint: disable=wrong-import-position
import ktap  # noqa: E402  pylint: disable=wrong-import-position
from tools_suite import CM, NOT_YET, ATTEMPTS, TCP  # noqa: E402  pylint: disable=wrong-import-position

# The bound on a program that hangs; on an idle machine none of them takes a twentieth of it. What rxe does not
# do in its time is said of it and fails nothing, and the suite is to end.
HANG_SECONDS = {"virtio": 240, "rxe": 15}
RXE_SECONDS = 150
ONLY = re.compile(os.environ.get("ONLY", ""))

# Who uses the device, what each of its threads is at, and the QPs.
WHO_WAITS = r"""
for process in /proc/[0-9]*; do
	ls -l "$process/fd" 2>/dev/null | grep -q /dev/infiniband/uverbs || continue
	echo "process ${process#/proc/}: $(tr '\0' ' ' <"$process/cmdline")"
	timeout 20 eu-stack -p "${process#/proc/}" 2>/dev/null | grep -v '^TID 0'
done
rdma resource show qp
rdma resource show cm_id
ps --ppid 2 --deselect -o pid,stat,wchan:20,time,args
"""
# Packets that the device has sent, as each driver counts them.
SENT = "cat /sys/class/infiniband/*/ports/1/{counters/port_xmit_packets,hw_counters/sent_pkts} 2>/dev/null"
# UCX before 1.19 drops each UD datagram that came by IPv4 from any device but mlx5: it takes the IP version from
# wc.sl. The GID with index 0 is of IPv6.
UCX_GID = "UCX_IB_GID_INDEX=0"
SSH = "-o StrictHostKeyChecking=no -o LogLevel=ERROR"


@dataclasses.dataclass
class Case:
    """One program: what the serving guest runs, what tells that it is ready, and
    what the other guest, or the same one, runs. Both must end with status 0, and
    packets must have gone out. {d1} {g1} {a1} are device, GID index and address
    of the guest that serves, {d2} {g2} {a2} those of the other. expect: what the
    client's output must hold. alone: both run in one guest. stays: the server
    serves until it is told to end. server may be empty. limit: (pattern, reason):
    where the outputs of both drivers match, this is no program for either."""

    name: str
    server: str
    ready: str
    client: str
    expect: str = ""
    alone: bool = False
    stays: bool = False
    limit: tuple = ()

    @property
    def kind(self):
        """What it is one of."""
        return self.name.split()[0]

    def __str__(self):
        return self.name + (", within one guest" if self.alone and self.server else "")


# What ucx_perftest does over one connection, and with how many bytes, how often.
UCX_TESTS = {"tags": ("tag_lat", "tag_bw", "tag_sync_lat"), "active messages": ("ucp_am_lat", "ucp_am_bw"),
             "streams": ("stream_lat", "stream_bw"), "put and get": ("ucp_put_lat", "ucp_put_bw", "ucp_get"),
             "atomics": ("ucp_add", "ucp_fadd", "ucp_swap", "ucp_cswap")}
UCX_SIZES = ((8, 100), (5000, 50), (300000, 5))


def ucx():
    """ucx_perftest over RC, whose connections UCX makes by UD, and over UD."""
    port = TCP.format(13337)
    for transport in ("rc", "ud"):
        for group, tests in UCX_TESTS.items():
            sizes = UCX_SIZES[:1] if group == "atomics" else UCX_SIZES
            lines = "".join(f"{test}_{size} -t {test} -s {size} -n {count} -w 10\\n"
                            for test in tests for size, count in sizes)
            tool = f"printf '{lines}' >/tmp/batch && UCX_TLS={transport} {UCX_GID} UCX_NET_DEVICES={{}}:1 " \
                   "ucx_perftest -P 0 -b /tmp/batch"
            for alone in (False, True) if group in ("tags", "put and get") else (False,):
                yield Case(f"ucx_perftest {transport} {group}", tool.format("{d1}"), port,
                           tool.format("{d2}") + " {a1}", f"{tests[-1]}_{sizes[-1][0]}", alone)
    for transport, test, more in (("rc_verbs", "am_lat", "-D short -s 8"), ("rc_verbs", "get_bw", "-D zcopy -s 65536"),
                                  ("ud_verbs", "am_lat", "-D bcopy -s 1000")):
        tool = f"{UCX_GID} ucx_perftest -P 0 -d {{}}:1 -x {transport} -t {test} {more} -n 100 -w 10"
        yield Case(f"ucx_perftest {transport} {test}", tool.format("{d1}"), port, tool.format("{d2}") + " {a1}",
                   "Final:")


def libfabric():
    """fi_pingpong with a look at the data."""
    endpoints = (("verbs", "msg", ""), ("verbs;ofi_rxm", "rdm", ""), ("verbs", "dgram", "-dgram"))
    for provider, endpoint, suffix in endpoints:
        for alone in (False, True):
            tool = f"fi_pingpong -c -p '{provider}' -e {endpoint} -I 20"
            yield Case(f"fi_pingpong {provider} {endpoint}", f"{tool} -d {{d1}}{suffix}", TCP.format(47592),
                       f"{tool} -d {{d2}}{suffix} {{a1}}", "bytes", alone)


def rsockets():
    """Programs of sockets over RDMA."""
    for size in (64, 65536):
        for name in ("rstream", "riostream"):
            tool = f"-T v -S {size} -C 20 -I 10"
            yield Case(f"{name}, {size} bytes", f"{name} -b {{a1}} {tool}", CM, f"{name} -s {{a1}} {tool}", "custom")


def qperf():
    """Through the RDMA CM: without it qperf knows LIDs alone."""
    for test in ("rc_bw", "rc_rdma_read_bw", "rc_rdma_write_lat", "ver_rc_compare_swap"):
        yield Case(f"qperf {test}", "qperf --listen_port 19765", TCP.format(19765),
                   f"qperf --listen_port 19765 -t 1 -cm 1 {{a1}} {test}", " =  ", stays=True)
    for test in ("uc_bw", "ud_bw"):
        yield Case(f"qperf {test}", "qperf --listen_port 19765", TCP.format(19765),
                   f"timeout 20 qperf --listen_port 19765 -t 1 {{a1}} {test}", " =  ", stays=True,
                   limit=(r"failed|Invalid argument|timed out", "without the RDMA CM qperf knows no GRH"))


def mpi():
    """Open MPI over UCX. Debian's leaves UCX out unless it is asked for by name, and Open MPI takes it for the
    devices of one vendor alone. User-mode Linux does not say how its processors are arranged, without which
    mpirun counts none."""
    chosen = "--allow-run-as-root --map-by node:OVERSUBSCRIBE --bind-to none --mca pml ucx --mca osc ucx " \
             "--mca pml_ucx_devices any --mca pml_ucx_tls any --mca btl ^tcp " \
             f"-x UCX_TLS=rc,self -x {UCX_GID} -x UCX_NET_DEVICES={{d1}}:1"
    ssh = f"--mca plm_ssh_args '{SSH}' --host {{a1}}:2,{{a2}}:2"
    places = (("two ranks in two guests", f"-np 2 {ssh}"), ("two ranks in one guest", "-np 2"),
              ("four ranks in two guests", f"-np 4 {ssh}"), ("four ranks in one guest", "-np 4"))
    for label, where in places:
        for part in ("point-to-point", "one-sided", "collectives"):
            yield Case(f"mpi_data.py {part}, {label}", "", "",
                       f"mpirun {chosen} {where} python3 /mnt/mpi_data.py {part}", "ranks agree", True)
    two = places[0][1]
    yield Case("NPopenmpi", "", "", f"mpirun {chosen} {two} NPopenmpi -i -u 20000 -o /tmp/np", "Integrity check", True)
    yield Case("mpi4py.bench ringtest", "", "", f"mpirun {chosen} {two} python3 -m mpi4py.bench ringtest -n 5000 -l 10",
               "time for", True)


def all_cases():
    cases = [*ucx(), *libfabric(), *rsockets(), *qperf(), *mpi()]
    return [case for case in cases if ONLY.search(str(case))]


@dataclasses.dataclass
class Outcome:
    """What a case came to: why it failed, if it did, and what both sides said."""

    failure: str = ""
    text: str = ""

    def brief(self):
        """In some words."""
        line = self.failure.split("\n")[0]
        return "passes" if not line else "does not end in time" if "does not end" in line else line


class Programs(guest_suite.Suite):
    """The cases, one after the other, over one driver and then over the other."""

    driver = "virtio"

    def __init__(self, options, report):
        super().__init__(options, report)
        self.ours = []  # cases and their outcomes, in order
        self.theirs = {}  # outcomes of rxe, by the case's name

    def prepare(self):
        """An IPv6 address for the GID with index 0, and a login from guest to guest, as mpirun wants."""
        first, *others = self.network.guests
        key = first.check("mkdir -p ~/.ssh && ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/id_ed25519 && "
                          "cat ~/.ssh/id_ed25519.pub").strip()
        for guest in self.network.guests:
            guest.check(f"mkdir -p -m 700 ~/.ssh /run/sshd && echo '{key}' >~/.ssh/authorized_keys && ssh-keygen -A")
            guest.start("exec /usr/sbin/sshd -D")
            guest.check(f"until {TCP.format(22)}; do sleep 0.05; done", "sshd", guest_suite.HANG_SECONDS)
        for guest in others:
            first.check(f"ssh {SSH} {guest.address} true", "ssh between the guests", guest_suite.HANG_SECONDS)

    def sent(self):
        """Packets that the devices of the guests have sent."""
        return sum(int(word) for guest in self.network.guests for word in guest.run(SENT)[1].split())

    def attempt(self, case):
        """Runs both sides once."""
        first = self.network.guests[0]
        second = first if case.alone else self.network.guests[1]
        names = {"a1": first.address, "a2": self.network.guests[1].address}
        (names["d1"], names["g1"]), (names["d2"], names["g2"]) = first.link, second.link
        limit, before, jobs = HANG_SECONDS[self.driver], self.sent(), []
        outcome = Outcome()
        try:
            if case.server:
                jobs.append(first.start(case.server.format(**names)))
                self.listens(first, case, jobs[0], limit)
            jobs.append(second.start(case.client.format(**names)))
            outcome.failure = self.judge(case, jobs, limit)
            if not outcome.failure and self.sent() <= before:
                outcome.failure = "nothing went over RDMA"
        except guests.Failure as failure:
            outcome.failure = str(failure)
            if self.driver == "virtio":
                self.who_waits()
        self.end(jobs)
        outcome.text = "".join(f"guest {job.guest.number}: {job.what}\n{job.text}\n" for job in jobs)
        return outcome

    @staticmethod
    def listens(guest, case, server, limit):
        """Waits until a server is ready, or has ended before it was."""
        waiter = guest.start(f"until {case.ready}; do sleep 0.05; done")
        deadline = time.monotonic() + limit
        while not waiter.done.wait(0.05) and server.status is None and time.monotonic() < deadline:
            pass
        if waiter.status is None:
            waiter.kill(signal.SIGKILL)
            raise guests.Failure("the server does not listen" if server.status is None else
                                 f"the server ends with status {server.status}")

    @staticmethod
    def judge(case, jobs, limit):
        """Waits for what runs; why it failed."""
        client = jobs[-1]
        if client.wait(limit):
            return f"the client ends with status {client.status}"
        if case.expect not in client.text:
            return f"the client does not say \"{case.expect}\""
        for server in jobs[:-1]:
            if case.stays:
                server.kill(signal.SIGTERM)
            status = server.wait(limit)
            if status not in ((0, 128 + signal.SIGTERM) if case.stays else (0,)):
                return f"the server ends with status {status}"
        return ""

    @staticmethod
    def end(jobs):
        """What still runs does not for long."""
        for job in jobs:
            if job.status is None:
                job.kill(signal.SIGKILL)
                job.done.wait(guest_suite.HANG_SECONDS)

    def who_waits(self):
        for guest in self.network.guests:
            job = guest.start(WHO_WAITS)
            job.done.wait(guest_suite.HANG_SECONDS)
            self.report.note(f"guest {guest.number}:\n{job.text}")

    def outcome(self, case):
        """Runs a case. Where a server says that it listens before it does, both sides begin again."""
        for _ in range(ATTEMPTS):
            outcome = self.attempt(case)
            if not outcome.failure or not NOT_YET.search(outcome.text):
                break
        return outcome

    def over_virtio(self):
        """All cases with virtio-rdma."""
        self.prepare()
        for case in all_cases():
            start = time.monotonic()
            self.ours.append((case, self.outcome(case)))
            self.report.note(f"{time.monotonic() - start:.1f} s: {case}{' fails' * bool(self.ours[-1][1].failure)}")

    def examples(self):
        """What the documentation tells to type."""
        examples.run_all(self.report, *self.network.guests)

    def over_rxe(self):
        """Those of which there is time with rxe, in guests of the same kind."""
        options = guests.dataclasses.replace(self.options, guests=2, rdma="rxe")
        self.driver, self.network = "rxe", guests.Network(options)
        deadline = time.monotonic() + RXE_SECONDS
        kinds = {}
        for case, _ in reversed(self.ours):
            kinds[case.kind] = case
        order = sorted(self.ours, key=lambda pair: (not pair[1].failure, pair[0] is not kinds[pair[0].kind]))
        try:
            self.network.boot()
            self.prepare()
            for case, outcome in order:
                if outcome.failure or time.monotonic() < deadline:
                    self.theirs[str(case)] = self.outcome(case)
        except guests.Failure as failure:
            self.report.note(f"rxe: {failure}")
        finally:
            for number, line in self.network.reports():
                self.report.note(f"rxe, guest {number}: {line}")
            self.network.close()

    def results(self):
        """One of each case, and what rxe did."""
        for case, outcome in self.ours:
            theirs = self.theirs.get(str(case), Outcome("no time"))
            if outcome.failure:
                self.report.note(f"{outcome.failure}\n{outcome.text}\nrxe: {theirs.failure}\n{theirs.text}")
            if outcome.failure and case.limit and all(re.search(case.limit[0], each.text)
                                                      for each in (outcome, theirs)):
                self.report.result(str(case), skip=f"{case.limit[1]}, with rxe as well")
            else:
                self.report.result(f"{case} (rxe: {theirs.brief()})", not outcome.failure)


def main(arguments):
    signal.signal(signal.SIGTERM, guest_suite.interrupt)
    suite = Programs(guest_suite.options(*arguments), ktap.Report())
    try:
        suite.part("two guests", 2, suite.over_virtio, suite.agrees)
        if ONLY.search("applications.md"):
            suite.part("two guests with disks", 2, suite.examples)
        suite.over_rxe()
        suite.results()
    except KeyboardInterrupt:
        return 130
    return suite.report.end()


if __name__ == "__main__":
    ktap.main_guard(main)
