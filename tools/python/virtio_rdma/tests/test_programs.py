# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite programs: what people run over RDMA, as the distribution has it, between two guests and within one: UCX,
Open MPI over UCX, libfabric, rsockets, qperf, fio and PyTorch RPC; as Python wheels have it: Mooncake, MPICH, Open MPI
and an initiator of NVMe over Fabrics; and kernel consumers as applications.md shows them.

Each program runs over virtio-rdma, and then over rxe in guests of the same kind. A result says what rxe did: a fact,
and no result of its own. A program that fails on both for the reason that its case names is a skip. rxe is slow, and
has RXE_SECONDS for all of it: first for what failed over virtio-rdma, then for one of each kind, then for the others.

ONLY in the environment is a regular expression that chooses programs by their names. The image of the platform has the
programs.
"""

import os
import re
import time

import pytest

from virtio_rdma import guests
from virtio_rdma.common import Failure
from virtio_rdma.tests import examples, networks, tools
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.tools import CM, TCP, Case, Outcome

# The bound on a program that hangs. On an idle machine no program takes a twentieth of it. What rxe does not do in its
# time fails nothing, and the suite is to end.
SECONDS = {"virtio": 240, "rxe": 15}
RXE_SECONDS = 150
# MiB of each guest: PyTorch takes most of it.
MEMORY = 2048
ONLY = re.compile(os.environ.get("ONLY", ""))

# Shows who uses the device, what each of its threads is at, and the QPs.
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

# What ucx_perftest does over one connection, and with how many bytes, how often.
UCX_TESTS = {"tags": ("tag_lat", "tag_bw", "tag_sync_lat"), "active messages": ("ucp_am_lat", "ucp_am_bw"),
             "streams": ("stream_lat", "stream_bw"), "put and get": ("ucp_put_lat", "ucp_put_bw", "ucp_get"),
             "atomics": ("ucp_add", "ucp_fadd", "ucp_swap", "ucp_cswap")}
UCX_SIZES = ((8, 100), (5000, 50), (300000, 5))


def ucx():
    """Yields ucx_perftest over RC, whose connections UCX makes by UD, and over UD."""
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
                           tool.format("{d2}") + " {a1}", f"{tests[-1]}_{sizes[-1][0]}", alone=alone)
    for transport, test, more in (("rc_verbs", "am_lat", "-D short -s 8"), ("rc_verbs", "get_bw", "-D zcopy -s 65536"),
                                  ("ud_verbs", "am_lat", "-D bcopy -s 1000")):
        tool = f"{UCX_GID} ucx_perftest -P 0 -d {{}}:1 -x {transport} -t {test} {more} -n 100 -w 10"
        yield Case(f"ucx_perftest {transport} {test}", tool.format("{d1}"), port, tool.format("{d2}") + " {a1}",
                   "Final:")


def libfabric():
    """Yields fi_pingpong, which looks at the data."""
    endpoints = (("verbs", "msg", ""), ("verbs;ofi_rxm", "rdm", ""), ("verbs", "dgram", "-dgram"))
    for provider, endpoint, suffix in endpoints:
        for alone in (False, True):
            tool = f"fi_pingpong -c -p '{provider}' -e {endpoint} -I 20"
            yield Case(f"fi_pingpong {provider} {endpoint}", f"{tool} -d {{d1}}{suffix}", TCP.format(47592),
                       f"{tool} -d {{d2}}{suffix} {{a1}}", "bytes", alone=alone)


def rsockets():
    """Yields programs of sockets over RDMA."""
    for size in (64, 65536):
        for name in ("rstream", "riostream"):
            tool = f"-T v -S {size} -C 20 -I 10"
            yield Case(f"{name}, {size} bytes", f"{name} -b {{a1}} {tool}", CM, f"{name} -s {{a1}} {tool}", "custom")


def qperf():
    """Yields qperf through the RDMA CM: without it qperf knows LIDs alone."""
    for test in ("rc_bw", "rc_rdma_read_bw", "rc_rdma_write_lat", "ver_rc_compare_swap"):
        yield Case(f"qperf {test}", "qperf --listen_port 19765", TCP.format(19765),
                   f"qperf --listen_port 19765 -t 1 -cm 1 {{a1}} {test}", " =  ", stays=True)
    for test in ("uc_bw", "ud_bw"):
        yield Case(f"qperf {test}", "qperf --listen_port 19765", TCP.format(19765),
                   f"timeout 20 qperf --listen_port 19765 -t 1 {{a1}} {test}", " =  ", stays=True,
                   limit=(r"failed|Invalid argument|timed out", "without the RDMA CM qperf knows no GRH"))


def mpi():
    """Yields Open MPI over UCX. Debian's leaves UCX out unless it is asked for by name, and Open MPI uses it for the
    devices of one vendor alone. User-mode Linux does not say how its processors are arranged, and then mpirun counts
    no processor."""
    chosen = "--allow-run-as-root --map-by node:OVERSUBSCRIBE --bind-to none --mca pml ucx --mca osc ucx " \
             "--mca pml_ucx_devices any --mca pml_ucx_tls any --mca btl ^tcp " \
             f"-x UCX_TLS=rc,self -x {UCX_GID} -x UCX_NET_DEVICES={{d1}}:1"
    ssh = f"--mca plm_ssh_args '{SSH}' --host {{a1}}:2,{{a2}}:2"
    places = (("two ranks in two guests", f"-np 2 {ssh}"), ("two ranks in one guest", "-np 2"),
              ("four ranks in two guests", f"-np 4 {ssh}"), ("four ranks in one guest", "-np 4"))
    for label, where in places:
        for part in ("point-to-point", "one-sided", "collectives"):
            yield Case(f"mpi_data.py {part}, {label}", "", "",
                       f"mpirun {chosen} {where} python3 /mnt/mpi_data.py {part}", "ranks agree", alone=True)
    two = places[0][1]
    yield Case("NPopenmpi", "", "", f"mpirun {chosen} {two} NPopenmpi -i -u 20000 -o /tmp/np", "Integrity check",
               alone=True)
    yield Case("mpi4py.bench ringtest", "", "", f"mpirun {chosen} {two} python3 -m mpi4py.bench ringtest -n 5000 -l 10",
               "time for", alone=True)


def fio():
    """Yields the engine of fio that Debian builds; fio_data.py looks at the data."""
    for verb, receives in (("write", "server"), ("read", "client"), ("send", "server")):
        tool = f"python3 /mnt/fio_data.py {{}} {verb}"
        yield Case(f"fio {verb}", tool.format("server"), CM, tool.format("client") + " {a1}",
                   f"{verb}: 16 blocks" * (receives == "client"))


def mooncake():
    """Yields the transfer engine of Mooncake. Its search for devices needs the processors' nodes in sysfs, which
    user-mode Linux does not have, and where it finds none, Mooncake uses TCP: a file names the device instead."""
    topology = "echo '{{{{\"cpu:0\": [[\"{0}\"], []]}}}}' >/tmp/topology"
    tool = topology + " && MC_FORCE_HCA=1 MC_CUSTOM_TOPO_JSON=/tmp/topology /opt/mooncake/bin/python3 -B " \
        "/mnt/mooncake_data.py {1} {0} 18801"
    yield Case("Mooncake in Python", tool.format("{d1}", "target") + " {a1}", TCP.format(18801),
               tool.format("{d2}", "initiator") + " {a2} {a1}", "initiator: all bytes are right")
    common = "/opt/mooncake/bin/transfer_engine_bench --metadata_server=P2PHANDSHAKE --device_name={} " \
             "--protocol=rdma --buffer_size=67108864 --threads=2"
    tests = ("read", "MC_GID_INDEX=1"), ("write", "MC_GID_INDEX=1"), ("read", "MC_NUM_QP_PER_EP=8")
    for port, (operation, environment) in enumerate(tests, 15428):
        yield Case(f"transfer_engine_bench {operation}, {environment}",
                   f"MC_MIN_RPC_PORT={port} MC_MAX_RPC_PORT={port} {environment} {common.format('{d1}')} --mode=target "
                   "--local_server_name={a1}", TCP.format(port),
                   f"{environment} {common.format('{d2}')} --mode=initiator --local_server_name={{a2}} "
                   f"--segment_id={{a1}}:{port} --operation={operation} --duration=2", "Test completed", stays=True)


def torch():
    """Yields PyTorch RPC over verbs alone, and with a peer that dies while it is called."""
    tool = "USE_LIBUV=0 TP_SOCKET_IFNAME=eth0 python3 /mnt/torch_rpc.py {} {} {{a1}}"
    yield Case("PyTorch RPC", tool.format(0, 29500), TCP.format(29500), tool.format(1, 29500), "rank 1: all elements")
    yield Case("PyTorch RPC, the peer is killed", tool.format(0, 29501) + " killed", TCP.format(29501),
               tool.format(1, 29501) + " killed; [ $? = 137 ]")


def wheels_of_mpi():
    """Yields MPICH and Open MPI from Python wheels, over the UCX in them."""
    environment = "UCX_TLS={} UCX_NET_DEVICES={{d1}}:1"
    mpich = "/opt/mpich/bin/mpiexec -launcher ssh -hosts {a1},{a2} -genv MPIR_CVAR_CH4_NETMOD ucx -n 2"
    open_mpi = "/opt/openmpi/bin/mpirun --prefix /opt/openmpi --allow-run-as-root --map-by node:OVERSUBSCRIBE " \
               f"--bind-to none --mca plm_ssh_args '{SSH}' --host {{a1}}:1,{{a2}}:1 --mca pml ucx --mca osc ucx " \
               "--mca pml_ucx_devices any --mca pml_ucx_tls any -x UCX_TLS -x UCX_NET_DEVICES -n 2"
    for name, program in (("mpich", mpich), ("openmpi", open_mpi)):
        for transport, part in (("rc", "point-to-point"), ("rc", "one-sided"), ("rc", "collectives"),
                                ("ud", "point-to-point")):
            yield Case(f"wheel-{name} {part}, {transport}", "", "",
                       f"{environment.format(transport + ',self')} {program} /opt/{name}/bin/python3 -B "
                       f"/mnt/mpi_data.py {part}", "ranks agree", alone=True)


CASES = [case for case in (*ucx(), *libfabric(), *rsockets(), *qperf(), *mpi(), *fio(), *mooncake(), *wheels_of_mpi(),
                           *torch()) if ONLY.search(str(case))]


def prepare(network, directories):
    """Gives the guests the virtual environments, and what mpirun wants: a login from guest to guest."""
    for guest in network.guests:
        for name, path in directories.items():
            guest.check(f"mkdir -p /opt/{name} && mount -t hostfs -o ro,hostfs={path} hostfs /opt/{name}", name)
    first, *others = network.guests
    key = first.check("mkdir -p ~/.ssh && ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/id_ed25519 && "
                      "cat ~/.ssh/id_ed25519.pub").strip()
    for guest in network.guests:
        guest.check(f"mkdir -p -m 700 ~/.ssh /run/sshd && echo '{key}' >~/.ssh/authorized_keys && ssh-keygen -A")
        guest.start("exec /usr/sbin/sshd -D")
        guest.check(f"until {TCP.format(22)}; do sleep 0.05; done", "sshd", HANG_SECONDS)
    for guest in others:
        first.check(f"ssh {SSH} {guest.address} true", "ssh between the guests", HANG_SECONDS)


def rate(outcome):
    """Returns what a program says of its own speed, for the notes of a run."""
    said = re.search("throughput .*", outcome.text)
    return f", {said.group()}" if said else ""


def sent(network):
    """Returns how many packets the devices of the guests have sent."""
    return sum(int(word) for guest in network.guests for word in guest.run(SENT)[1].split())


def run(case, network, driver, stuck=None):
    """Runs a case, and returns its Outcome. Packets must have gone out."""
    before = sent(network)
    outcome = tools.run(case, network.guests, tools.names_of(*network.guests), SECONDS[driver], stuck)
    if not outcome.failure and sent(network) <= before:
        outcome.failure = "nothing went over RDMA"
    return outcome


@pytest.fixture(scope="module")
def ours(request, results):
    """The outcomes of all cases over virtio-rdma, by their names."""
    (platform,) = request.config.option.platform
    outcomes = {}
    with networks.judged(results, "two guests", guests.Network(platform.options(guests=2, memory=MEMORY))) as network:
        def who_waits():
            for guest in network.guests:
                job = guest.start(WHO_WAITS)
                job.done.wait(HANG_SECONDS)
                results.note(f"guest {guest.number}:\n{job.text}")

        prepare(network, platform.directories)
        for case in CASES:
            start = time.monotonic()
            outcome = outcomes[str(case)] = run(case, network, "virtio", who_waits)
            tools.TRIES.add(outcome)
            results.note(f"{time.monotonic() - start:.1f} s: {case}{' fails' * bool(outcome.failure)}{rate(outcome)}")
        networks.agree(results, network)
    return outcomes


@pytest.fixture(scope="module")
def theirs(request, results, ours):
    """The outcomes over rxe of those cases for which there is time, by their names."""
    (platform,) = request.config.option.platform
    network = guests.Network(platform.options(guests=2, memory=MEMORY, rdma="rxe"))
    kinds = {case.kind: case for case in reversed(CASES)}
    order = sorted(CASES, key=lambda case: (not ours[str(case)].failure, case is not kinds[case.kind]))
    deadline = time.monotonic() + RXE_SECONDS
    outcomes = {}
    try:
        network.boot()
        prepare(network, platform.directories)
        for case in order:
            if ours[str(case)].failure or time.monotonic() < deadline:
                outcome = outcomes[str(case)] = run(case, network, "rxe")
                results.note(f"over rxe: {case}{' fails' * bool(outcome.failure)}{rate(outcome)}")
    except Failure as failure:
        results.note(f"rxe: {failure}")
    finally:
        for number, line in network.reports():
            results.note(f"rxe, guest {number}: {line}")
        network.close()
    return outcomes


@pytest.mark.xdist_group("programs")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_program(case, ours, theirs, results):
    mine, rxe = ours[str(case)], theirs.get(str(case), Outcome("no time"))
    if mine.failure:
        results.note(f"{mine.failure}\n{mine.text}\nrxe: {rxe.failure}\n{rxe.text}")
    if mine.failure and case.limit and all(re.search(case.limit[0], each.text) for each in (mine, rxe)):
        results.result(str(case), skip=f"{case.limit[1]}, with rxe as well")
    else:
        results.result(f"{case} (rxe: {rxe.brief()})", not mine.failure)


@pytest.mark.network("two guests with disks", guests=2, memory=MEMORY)
@pytest.mark.only(lambda _where: ONLY.search("applications.md"))
class TestApplications:
    """What the documentation tells to type."""

    @pytest.fixture(scope="class", autouse=True)
    def ready(self, network, platform):
        prepare(network, platform.directories)
        network.guests[1].check(examples.FS_DEFAULTS)

    @pytest.mark.parametrize("example", examples.examples(), ids=lambda example: example.title)
    def test_example(self, example, network, results):
        before = sent(network)
        failure = example.run(*network.guests)
        if not failure and sent(network) <= before:
            failure = "nothing went over RDMA"
        if failure:
            results.note(failure)
        results.result(f"applications.md: {example.title}", not failure)
