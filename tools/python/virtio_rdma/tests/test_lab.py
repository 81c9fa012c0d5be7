# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite lab: virtio-rdma-lab, as an ordinary user runs it on machines with other distributions, and in a container.

--lab-root names the roots of these machines. A program in one of them is the user nobody, has no new privileges, and
meets what a runtime for containers forbids: /proc is read-only, /dev/shm has 64 MB and is mounted noexec, and system
calls fail that the runtimes' profiles do not list.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import termios
import time

import pytest

from virtio_rdma.common import BUILD, TOP

# The bound on a program that hangs. On an idle machine no program takes a twentieth of it.
SECONDS = 240
NOBODY = 65534
LAB = "/home/lab/virtio-rdma-lab"
WORK = "/home/lab"
# The machines that have no rdma-core.
WITHOUT = ("slim",)
# Programs for these machines.
PROGRAMS = os.path.join(TOP, "tools/test/lab")
# A path MTU that fits in an Ethernet frame of this length.
MTU, FITS = 4200, 4096

CLONE_NEWNS = 0x20000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC = 1 << 14
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO = 0x7FFF0000, 0x00050000
# System calls of x86-64 that profiles of docker and podman do not allow: mount, umount2, pivot_root, swapon, swapoff,
# reboot, sethostname, setdomainname, iopl, ioperm, init_module, delete_module, quotactl, acct, settimeofday, add_key,
# request_key, keyctl, unshare, perf_event_open, open_by_handle_at, setns, finit_module, kexec_file_load, bpf,
# userfaultfd, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, io_uring_setup, _enter and _register.
FORBIDDEN = (165, 166, 155, 167, 168, 169, 170, 171, 172, 173, 175, 176, 179, 163, 164, 248, 249, 250, 272, 298, 304,
             308, 313, 320, 321, 323, 428, 429, 430, 431, 432, 433, 425, 426, 427)

libc = ctypes.CDLL(None, use_errno=True)


class Instruction(ctypes.Structure):
    """struct sock_filter."""

    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("len", ctypes.c_uint16), ("filter", ctypes.POINTER(Instruction)))


def checked(result):
    """Raises what a function of libc failed with."""
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mount(source, target, kind, flags, options=""):
    checked(libc.mount(*(text.encode() for text in (source, target, kind)), ctypes.c_ulong(flags), options.encode()))


def forbid():
    """Has the forbidden system calls fail with EPERM from now on, for this process and its children."""
    load, equal, answer = 0x20, 0x15, 0x06
    code = [Instruction(load, 0, 0, 0)]
    for left, number in zip(range(len(FORBIDDEN), 0, -1), FORBIDDEN, strict=True):
        code.append(Instruction(equal, left, 0, number))
    code += [Instruction(answer, 0, 0, SECCOMP_RET_ALLOW), Instruction(answer, 0, 0, SECCOMP_RET_ERRNO | errno.EPERM)]
    program = Program(len(code), (Instruction * len(code))(*code))
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    checked(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0))


class Machine:
    """A machine: a root, and a directory of it for the user's files."""

    def __init__(self, root, work):
        self.root, self.work = root, work
        shutil.copy(os.path.join(BUILD, "virtio-rdma-lab"), work)

    def enter(self):
        """Makes a child (preexec_fn) a program of the user on the machine."""
        os.unshare(CLONE_NEWNS)
        # What tests write to the root is gone with them.
        layers = os.path.join(self.work, ".layers")
        os.makedirs(layers, exist_ok=True)
        mount("tmpfs", layers, "tmpfs", 0, "mode=755")
        place = os.path.join(layers, "root")
        for name in ("files", "work", "root"):
            os.makedirs(os.path.join(layers, name))
        mount("overlay", place, "overlay", 0,
              f"lowerdir={self.root},upperdir={layers}/files,workdir={layers}/work")
        os.makedirs(place + WORK)
        # Each machine has this file; the roots have none.
        os.close(os.open(f"{place}/etc/hosts", os.O_WRONLY | os.O_CREAT, 0o644))
        mount(self.work, place + WORK, "none", MS_BIND)
        mount("/proc", f"{place}/proc", "none", MS_BIND | MS_REC)
        mount("none", f"{place}/proc", "none", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
        mount("/dev", f"{place}/dev", "none", MS_BIND | MS_REC)
        mount("shm", f"{place}/dev/shm", "tmpfs", MS_NOEXEC, "size=64m,mode=1777")
        os.chroot(place)
        os.chdir(WORK)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        forbid()

    @contextlib.contextmanager
    def start(self, *argv, preexec_fn=None, **options):
        """Runs a program of the user, which is killed at the end if it still runs."""
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin", "HOME": WORK, "LC_ALL": "C.UTF-8", "TERM": "dumb",
               "SHELL": "/bin/sh", "PS1": "prompt> "}
        with subprocess.Popen(argv, preexec_fn=preexec_fn or self.enter, env=env, **options) as process:  # noqa: PLW1509
            try:
                yield process
            finally:
                process.kill()

    def lab(self, *argv):
        """Runs the lab. Returns its exit status and its output."""
        with self.start(LAB, *argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                        encoding="utf-8", errors="replace") as process:
            try:
                text, _ = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                text, _ = process.communicate()
                pytest.fail(f"{' '.join(argv)}: no end after {SECONDS} s\n{text}", pytrace=False)
        return process.returncode, text

    def shell(self, line, *options, guests=1):
        """Runs a line of the shell in guests. Returns the exit status and the output."""
        return self.lab("run", "--guests", str(guests), *options, "--", "sh", "-c", line)


def roots(config):
    return dict(root.split("=", 1) for root in config.option.lab_root)


def pytest_generate_tests(metafunc):
    if "machine" in metafunc.fixturenames:
        wanted = metafunc.definition.get_closest_marker("machines")
        names = [name for name in roots(metafunc.config) if not wanted or name in wanted.args]
        metafunc.parametrize("machine", names, indirect=True)


@pytest.fixture
def machine(request, tmp_path):
    os.chown(tmp_path, NOBODY, NOBODY)
    return Machine(roots(request.config)[request.param], str(tmp_path))


one = pytest.mark.machines("bookworm")
developer = pytest.mark.machines("developer")


def test_guests(machine):
    """Each guest has a number, its peers, a device, and the files of the machine."""
    line = "echo $GUEST $PEERS $(ls /sys/class/infiniband) $(id -u); cat /etc/os-release; uname -n"
    status, text = machine.shell(line, guests=3)
    assert status == 0, text
    for number in (1, 2, 3):
        peers = " ".join(f"10.77.0.{peer}" for peer in (1, 2, 3) if peer != number)
        assert f"guest{number}: {number} {peers} virtio_rdma0 0\n" in text
        assert f"guest{number}: guest{number}\n" in text
    with open(os.path.join(machine.root, "etc/os-release"), encoding="utf-8") as file:
        for line in file:
            assert "guest1: " + line in text


def test_rdma(machine, request, results):
    """Programs of the machine, or those that the lab brings, exchange data, which they check. That begins soon."""
    start = time.monotonic()
    status, text = machine.lab("run", "--cmd1", "ibv_rc_pingpong -g 1 -c",
                               "--cmd2", "until ibv_rc_pingpong -g 1 -c $PEERS 2>err; do cat err; "
                                         "grep -q connect err || exit 1; done")
    results.note(f"{request.node.name}: {time.monotonic() - start:.1f} s from the start to the end")
    assert (status, text.count("1000 iters in")) == (0, 2), text


@one
def test_size(machine):
    assert os.path.getsize(os.path.join(machine.work, "virtio-rdma-lab")) < 40 << 20


@one
@pytest.mark.parametrize(("line", "expected"), [
    ("exit 3", 3), ("kill -9 $$", 137), ("exec not-there", 127), ("[ $GUEST = 1 ] || exit 4", 4),
    ("[ $GUEST = 2 ] || exit 5; exit 6", 5)])
def test_exit_status(line, expected, machine):
    status, text = machine.shell(line, guests=2)
    assert status == expected, text


@one
def test_failure(machine):
    """If a command fails, that of the other guest does not wait for ever, and its end is not the status."""
    line = "[ $GUEST = 1 ] || exit 3; trap 'echo got; exit 4' TERM; while :; do sleep 0.1; done"
    status, text = machine.shell(line, guests=2)
    assert status == 3, text
    assert "virtio-rdma-lab: guest2 has failed with status 3: the others get SIGTERM\n" in text
    assert "guest1: got\n" in text
    wait_until_gone()


@one
@pytest.mark.parametrize(("line", "expected"), [
    ("sleep 1000", ""),
    ("trap '' TERM; while :; do sleep 0.1; done",
     "".join(f"virtio-rdma-lab: guest{guest} still runs after SIGTERM, and is killed\n" for guest in (1, 2)))],
    ids=["SIGTERM", "SIGKILL"])
def test_timeout(line, expected, machine):
    """After --timeout, all guests end, also those whose commands ignore SIGTERM."""
    status, text = machine.shell(line, "--timeout", "10", guests=2)
    assert (status, text) == (124, "virtio-rdma-lab: the time is over: what still runs gets SIGTERM\n" + expected)
    wait_until_gone()


@one
@pytest.mark.parametrize(("argv", "why"), [
    (("run", "--guests", "2", "--cmd1", "true"), "guest 2 has no command"),
    (("run", "--guests", "1", "--cmd2", "true", "--", "true"), "--cmd2: there are 1 guests"),
    (("run", "--kernel-module", "none.ko", "--", "true"), "none.ko: No such file"),
    (("run", "--loss", "51", "--", "true"), "not between 0 and 50"),
    (("run", "--", "/none"), "/none: No such file"),
    (("run", "--guest", "2", "--", "true"), "unexpected argument '--guest'"),
    (("--guests", "2", "./my_test"), "`run` or `shell` comes first: virtio-rdma-lab run --guests 2 -- ./my_test"),
    (("shell", "--cmd1", "true"), "--cmd1: guest 1 has the shell"),
    (("shell",), "the standard input is no terminal")])
def test_mistake(argv, why, machine):
    """A mistake is named."""
    status, text = machine.lab(*argv)
    assert status in (2, 125, 127), text
    assert why in text


@one
def test_output(machine):
    """Lines of guests do not mix, standard error stays apart, and bytes arrive as they are."""
    line = ("i=0; while [ $i -lt 2000 ]; do echo line $i of $GUEST, which is long enough to show whether lines mix; "
            "i=$((i+1)); done; echo err >&2; printf end")
    with machine.start(LAB, "run", "--", "sh", "-c", line, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                       encoding="utf-8") as process:
        out, err = process.communicate(timeout=SECONDS)
    assert sorted(err.splitlines()) == ["guest1: err", "guest2: err"]
    for guest in (1, 2):
        lines = [line for line in out.splitlines() if line.startswith(f"guest{guest}: ")]
        text = ", which is long enough to show whether lines mix"
        expected = [f"guest{guest}: line {number} of {guest}{text}" for number in range(2000)]
        assert lines == [*expected, f"guest{guest}: end"]
    data = os.urandom(300000)
    with open(os.path.join(machine.work, "bytes"), "wb") as file:
        file.write(data)
    with machine.start(LAB, "run", "--guests", "1", "--", "cat", "bytes", stdout=subprocess.PIPE,
                       stdin=subprocess.DEVNULL) as process:
        out, _ = process.communicate(timeout=SECONDS)
    assert out == data


@one
@pytest.mark.parametrize("errors", ["2>err", "2>&1"])
def test_nobody_reads_the_output(errors, machine):
    """The lab ends by SIGPIPE then, as other programs do, says nothing, and leaves nothing behind."""
    line = f"TMPDIR=$PWD; export TMPDIR; {{ {LAB} run -- yes {errors}; echo $? >status; }} | head -n 1"
    with machine.start("sh", "-c", line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                       encoding="utf-8") as process:
        text, _ = process.communicate(timeout=SECONDS)
    assert re.fullmatch(r"guest[12]: y\n", text), text
    with open(os.path.join(machine.work, "status"), encoding="utf-8") as file:
        assert file.read() == f"{128 + signal.SIGPIPE}\n"
    if errors == "2>err":
        with open(os.path.join(machine.work, "err"), encoding="utf-8") as file:
            assert file.read() == ""
    assert [name for name in os.listdir(machine.work) if name.startswith("virtio-rdma-lab.")] == []
    wait_until_gone()


@one
def test_verbose(machine):
    """With -v, the kernel says how it boots, and complains about nothing that the lab gives it."""
    status, text = machine.lab("run", "-v", "--", "true")
    assert (status, text.count("Run /init as init process")) == (0, 2), text
    assert "epoll" not in text, text


@one
def test_files(machine):
    """What a guest writes is its own, but for the working directory if the user says so."""
    status, text = machine.shell("echo mine >file && cat file && rm -rf /usr/bin && ls /usr/bin; touch /tmp/x")
    assert "mine" in text
    assert not os.path.exists(os.path.join(machine.work, "file"))
    assert os.path.exists(os.path.join(machine.root, "usr/bin/cat"))
    status, text = machine.shell("echo ours >>file; mkdir d; echo deep >d/file; touch /home/other", "--share", guests=2)
    assert status in (0, 1), text
    with open(os.path.join(machine.work, "file"), encoding="utf-8") as file:
        assert file.read().count("ours") == 2
    assert os.stat(os.path.join(machine.work, "d/file")).st_uid == NOBODY
    wait_until_gone()


@one
@pytest.mark.parametrize(("options", "expected"), [
    ("cd /etc && {lab} --share -- cat hosts && wc -c <hosts", "::1 localhost\n10.77.0.1 guest1\n0\n"),
    ("cd / && {lab} --share -- true", "--share: the working directory is /"),
    ("TMPDIR=/none {lab} -- true", "TMPDIR, /none: "),
    ("cd /usr && {lab} -- ls -d local", "local\n")])
def test_directories(options, expected, machine):
    """Neither /etc, whose files the guest has in another form, nor an odd directory spoils the machine or a guest."""
    line = options.format(lab=f"{LAB} run --guests 1")
    with machine.start("sh", "-c", line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                       encoding="utf-8") as process:
        text, _ = process.communicate(timeout=SECONDS)
    assert expected in text


def wait_until_gone():
    """Waits until no process of the user is left."""
    deadline = time.monotonic() + SECONDS
    while processes := left():
        assert time.monotonic() < deadline, processes
        time.sleep(0.1)


def left():
    """Returns the processes of the user, as /proc/PID/stat shows them."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == NOBODY:
                with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                    found.append(file.read())
    return found


def reads_until(process, word):
    """Reads the output of a process until a word comes."""
    text = b""
    while word not in text:
        readable, _, _ = select.select([process.stdout], [], [], SECONDS)
        part = os.read(process.stdout.fileno(), 4096) if readable else b""
        assert part, text
        text += part


@one
def test_signal(machine):
    """A signal for the lab comes to the commands, which end as they like."""
    line = "trap 'echo got; exit $((GUEST + 6))' TERM; echo ready; while :; do sleep 0.1; done"
    with machine.start(LAB, "run", "--guests", "1", "--", "sh", "-c", line, stdout=subprocess.PIPE) as process:
        reads_until(process, b"ready")
        process.send_signal(signal.SIGTERM)
        reads_until(process, b"got")
        assert process.wait(SECONDS) == 7
    wait_until_gone()


@one
def test_killed(machine):
    """If the lab is killed, its guests and its device end as well."""
    with machine.start(LAB, "run", "--", "sh", "-c", "echo ready; sleep 1000", stdout=subprocess.PIPE) as process:
        reads_until(process, b"ready")
        process.kill()
    wait_until_gone()


@one
def test_mtu(machine):
    line = "cat /sys/class/net/vec0/mtu; ibv_devinfo | tr -d ' \t' | grep -o 'active_mtu:[0-9]*'"
    assert machine.shell(line, "--mtu", str(MTU)) == (0, f"{MTU}\nactive_mtu:{FITS}\n")


@developer
def test_loss(machine):
    """With --loss, a part of all packets is lost between guests, and messages arrive all the same."""
    shutil.copy(os.path.join(PROGRAMS, "datagrams.py"), machine.work)
    status, text = machine.lab("run", "--loss", "2", "--", "python3", "datagrams.py")
    assert status == 0, text
    assert re.fullmatch(r"guest1: 19\d\d datagrams came\n", text), text
    status, text = machine.lab("run", "--loss", "2", "--cmd1", "ibv_rc_pingpong -g 1 -c -s 65536",
                               "--cmd2", "until ibv_rc_pingpong -g 1 -c -s 65536 $PEERS 2>err; do cat err; "
                                         "grep -q connect err || exit 1; done")
    assert (status, text.count("1000 iters in")) == (0, 2), text


@one
def test_own_module(machine, request):
    """A module that somebody built for the kernel of the lab, as lab.md says, is loaded with its parameters."""
    shutil.copy(request.config.option.lab_module, os.path.join(machine.work, "my_ulp.ko"))
    status, text = machine.shell("cat /sys/module/late_pd/parameters/device", "--kernel-module",
                                 "./my_ulp.ko device=virtio_rdma0")
    assert (status, text) == (0, "virtio_rdma0\n")


@one
def test_kernel_module(machine):
    """A module is loaded behind those that it needs. If the kernel refuses one, the user is told."""
    release = machine.lab("run", "--guests", "1", "--", "uname", "-r")[1].strip()
    status, text = machine.shell("cat /usr/lib/modules/*/modules.dep | grep rdma_rxe")
    assert status == 0, text
    path = f"/usr/lib/modules/{release}/" + text.split(":", maxsplit=1)[0]
    machine.lab("run", "--guests", "1", "--share", "--", "cp", path, "my_module.ko")
    status, text = machine.shell("ls -d /sys/module/rdma_rxe", "--kernel-module", "./my_module.ko")
    assert (status, text) == (0, "/sys/module/rdma_rxe\n")
    with open(os.path.join(machine.work, "bad.ko"), "wb") as file:
        file.write(b"no module")
    status, text = machine.shell("true", "--kernel-module", "bad.ko")
    assert status == 125, text
    assert re.search("bad.ko: Exec format error", text), text


@one
@pytest.mark.parametrize("command", ["sleep 1000", "true"])
def test_shell(command, machine):
    """The shell has a terminal of the size of the user's, also when that changes, and its status is the lab's."""
    own, other = pty.openpty()
    fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))

    def enter():
        os.setsid()
        fcntl.ioctl(other, termios.TIOCSCTTY, 0)
        machine.enter()

    with machine.start(LAB, "shell", "--cmd2", command, preexec_fn=enter, stdin=other, stdout=other,
                       stderr=other) as process:
        os.close(other)
        text = ""

        def says(line, word):
            nonlocal text
            os.write(own, line.encode())
            while word not in text:
                readable, _, _ = select.select([own], [], [], SECONDS)
                assert readable, text
                text += os.read(own, 4096).decode()
            text = ""

        says("", "prompt> ")
        says("stty size\n", "33 99")
        fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 70, 0, 0))
        process.send_signal(signal.SIGWINCH)
        says("until stty size | grep '20 70'; do sleep 0.1; done; echo si''ze\n", "size")
        says("sleep 1000\n", "sleep 1000")
        says("\x03echo wo''ke $?\n", "woke 130")
        os.write(own, b"exit 9\n")
        assert process.wait(SECONDS) == 9
    os.close(own)
    wait_until_gone()


@developer
class TestDeveloper:
    """Programs that somebody has on the machine, or makes there (tools/test/lab)."""

    @pytest.fixture
    def machine(self, machine):
        shutil.copytree(PROGRAMS, machine.work, dirs_exist_ok=True)
        return machine

    def test_c(self, machine):
        """The machine's compiler, in the guest, makes a program of the machine's headers."""
        status, text = machine.shell("gcc -o /tmp/loopback loopback.c -libverbs && exec /tmp/loopback")
        assert (status, text) == (0, "from one end to the other\n")

    def test_pytest(self, machine):
        status, text = machine.lab("run", "--", "python3", "-m", "pytest", "-q", "test_device.py")
        assert (status, text.count("1 passed")) == (0, 2), text

    def test_ucx(self, machine):
        """UCX between two guests."""
        perf = "UCX_NET_DEVICES=virtio_rdma0:1 UCX_TLS=rc UCX_IB_GID_INDEX=0 ucx_perftest -P 0"
        status, text = machine.lab(
            "run", "--cmd1", perf,
            "--cmd2", f"until {perf} $PEERS -t tag_bw -s 4096 -n 2000 2>err; do grep -q refused err || exit 1; done")
        assert (status, bool(re.search(r"Final: +2000", text))) == (0, True), text

    def test_mpi(self, machine):
        """An MPI program with a process in each guest."""
        status, text = machine.shell("ssh-keygen -q -t ed25519 -N '' -f key", "--share")
        assert status == 0, text
        status, text = machine.shell("sh mpi.sh python3 $PWD/hello.py", guests=2)
        hellos = [f"hello from {rank} of 2 on guest{rank + 1}" in text for rank in (0, 1)]
        assert (status, hellos) == (0, [True, True]), text
