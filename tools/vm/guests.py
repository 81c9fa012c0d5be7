# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Boots guests and runs commands in them; the library below tools/vm/vm.

Everything here runs inside the build root, in a mount and a network namespace
of its own, as root of at least a user namespace.

    with Network(Options(vmm="qemu", guests=2, rdma="rxe")) as network:
        network.boot()
        job = network.guests[0].start(["ibv_devinfo"])
        status = job.wait()
"""

import contextlib
import ctypes
import dataclasses
import glob
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

VM_DIR = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(VM_DIR))
CACHE = os.environ.get("VR_CACHE", "")

# What a kernel log must not contain. The first kind ends a guest.
PANIC = re.compile(r"Kernel panic - not syncing")
REPORT = re.compile(
    r"\bBUG: |\bWARNING: |\bKASAN: |\bKCSAN: |INFO: (rcu|task|possible|trying)|"
    r"general protection fault|Oops[: ]|kernel BUG at|suspicious RCU usage|"
    r"ODEBUG: |DMA-API: .*(error|device driver)|unreferenced object|"
    r"refcount_t: |possible circular locking|inconsistent lock state|panicked at"
)
# Modules with KUnit tests run them when they are loaded.
KUNIT = "kunit.enable=1 kunit.autorun=1"
# How long a guest may take from its start to its first message. A bound on a
# guest that hangs, not an expectation.
BOOT_SECONDS = 300


@dataclasses.dataclass
class Machine:
    """What of QEMU's command line is an architecture's own: the program, its machine, the processor that it
    emulates, the kernel's console, options for the kernel, and the Rust target of what runs in the guest."""

    program: str
    machine: str
    processor: str
    console: str
    append: str = ""
    target: str = ""


# By the name that Debian gives to the architecture. A directory without a file "architecture" has a kernel that was
# built here.
# no5lvl: with five levels of page tables, KASAN takes every address of the direct map for a wild one while
# identify_cpu() (arch/x86/kernel/cpu/common.c) has cleared the CPU's capabilities, LA57 among them: a timer interrupt
# at that moment of the boot ends in a false report.
# pauth-impdef: QEMU signs pointers with a hash of its own in place of the architecture's cipher, whose emulation is slow
# (QEMU's documentation of Arm CPU features).
MACHINES = {
    "amd64": Machine("qemu-system-x86_64", "q35", "max", "ttyS0", "no5lvl"),
    "arm64": Machine("qemu-system-aarch64", "virt,gic-version=3", "max,pauth-impdef=on", "ttyAMA0", target="aarch64"),
}


def architecture_of(kernel_dir):
    """Of a kernel, as Debian calls it."""
    try:
        with open(os.path.join(kernel_dir, "architecture"), encoding="ascii") as file:
            return file.read().strip()
    except FileNotFoundError:
        return "amd64"


class Failure(Exception):
    """What the user is told, without a traceback."""


@dataclasses.dataclass
class Options:
    """How to boot.

    vmm: "qemu" or "uml". rdma: "virtio", "rxe" or "none". kernel: "stock" or its
    like, "plain" or "debug". memory: MiB a guest. image, kernel_dir: from tools/vm/guest and
    tools/vm/kernel. share: a directory for /mnt, or "". keep: leave the run
    directory behind (it is left behind after a failure in any case). no_rings:
    numbers of the guests to which the device does not offer rings. workers: of
    the device; 0 leaves their number to it. hugetlb: QEMU's guests have their
    memory in huge pages of 2 MiB, of which the machine has enough. swap: QEMU's
    guests have an empty disk for swap space, /dev/vdb, and resume from it. serial: QEMU's guests
    of amd64 answer over their second serial line, which guests that sleep need. others: options
    that some guests have of their own, by their numbers; such as their image and kernel_dir.
    """

    vmm: str = "qemu"
    guests: int = 1
    rdma: str = "virtio"
    kernel: str = "plain"
    image: str = ""
    kernel_dir: str = ""
    share: str = ""
    mtu: int = 1500
    memory: int = 1024
    cpus: int = 2
    keep: bool = False
    no_rings: tuple = ()
    workers: int = 0
    hugetlb: bool = False
    swap: bool = False
    serial: bool = False
    others: dict = dataclasses.field(default_factory=dict)


def say(text):
    print(f"vm: {text}", file=sys.stderr, flush=True)


def die_with_parent():
    """In a child: die when this program dies, however it dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    os.setpgid(0, 0)  # Ctrl-C on the terminal is for this program alone


class Job:
    """A command in a guest. `text` is its whole output so far."""

    def __init__(self, guest, number, what, sink):
        self.guest = guest
        self.what = what
        self.number = number
        self.sink = sink
        self.chunks = []
        self.status = None
        self.done = threading.Event()
        self.news = threading.Condition()

    @property
    def text(self):
        return "".join(self.chunks)

    def output(self, text):
        with self.news:
            self.chunks.append(text)
            self.news.notify_all()
        if self.sink:
            self.sink(text)

    def finish(self, status):
        with self.news:
            self.status = status
            self.done.set()
            self.news.notify_all()

    def shows(self, text, timeout=None):
        """Waits until the output holds a text; False if the command ends, or the time, before it does."""
        with self.news:
            self.news.wait_for(lambda: text in self.text or self.status is not None, timeout)
            return text in self.text

    def wait(self, timeout=None):
        """Its exit status, or 128 + signal. A guest that dies or restarts
        under it gives 255."""
        if not self.done.wait(timeout):
            raise Failure(f"guest {self.guest.number}: {self.what} does not end; so far:\n{self.text}")
        return self.status

    def kill(self, number=signal.SIGTERM):
        self.guest.send(id=self.number, kill=int(number))

    def type(self, text):
        self.guest.send(id=self.number, input=text)


class Guest:
    """One virtual machine: its process, kernel log and agent."""

    def __init__(self, network, number):
        self.network = network
        self.options = dataclasses.replace(network.options, **network.options.others.get(number, {}))
        self.architecture = architecture_of(self.options.kernel_dir)
        self.number = number
        self.name = f"g{number}"
        self.mac = f"52:54:00:12:34:{number:02x}"
        self.address = f"10.0.0.{number}"
        self.dir = os.path.join(network.dir, self.name)
        self.log = os.path.join(network.dir, f"guest{number}.log")
        self.rdma_socket = os.path.join(network.dir, f"{self.name}.sock")
        self.process = None
        self.channel = None
        self.jobs = {}
        self.next_id = 1
        self.lock = threading.Lock()
        self.boots = 0
        self.booted = threading.Condition()
        self.panicked = False
        self.link = None  # (RDMA device, index of its RoCE v2 GID)
        self.threads = []

    def prepare(self):
        """Fill the directory that the guest sees as /run/vr."""
        os.makedirs(self.dir)
        for name in ("init", "agent.py", "rdma-up"):
            shutil.copy(os.path.join(VM_DIR, "guest.d", name), self.dir)
        if self.architecture == "amd64":
            shutil.copy("/proc/cpuinfo", os.path.join(self.dir, "cpuinfo"))
        self.install_built()
        hosts = "".join(
            f"10.0.0.{n} guest{n}\\n" for n in range(1, self.options.guests + 1)
        )
        env = {
            "GUEST": self.number,
            "MAC": self.mac,
            "MTU": self.options.mtu,
            "HOSTS": hosts,
            **self.channel_env(),
        }
        with open(os.path.join(self.dir, "guest.env"), "w", encoding="ascii") as file:
            for key, value in env.items():
                file.write(f"{key}='{value}'\n")

    def install_built(self):
        """What this tree builds, into the guest's run directory."""
        name = os.path.basename(self.options.kernel_dir).rsplit("-", 1)[0].removeprefix("kernel-")
        module = os.path.join(TOP, "build", "modules", name, "virtio_rdma.ko")
        if os.path.exists(module):
            shutil.copy(module, self.dir)
        provider = os.path.join(self.dir, "provider")
        os.mkdir(provider)
        for pattern in ("*.so", "*.driver"):
            for path in glob.glob(os.path.join(TOP, "build", "provider", MACHINES[self.architecture].target, pattern)):
                shutil.copy(path, provider)

    def start_process(self):
        self.channel, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            self.command(theirs.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            preexec_fn=die_with_parent,
            env={**os.environ, "TMPDIR": self.network.memory_dir},
        )
        theirs.close()
        self.threads = [threading.Thread(target=self.read, daemon=True),
                        threading.Thread(target=self.copy_log, daemon=True)]
        for thread in self.threads:
            thread.start()

    def read(self):
        """Thread: messages of the agent, until the guest is gone."""
        try:
            with self.channel.makefile("rb") as stream:
                for line in stream:
                    self.message(line)
        except OSError:
            pass
        self.abandon()
        with self.booted:
            self.booted.notify_all()

    def message(self, line):
        try:
            message = json.loads(line)
        except ValueError:
            return  # what the terminal echoed before the agent made it raw
        if "ready" in message:
            self.abandon()
            with self.booted:
                self.boots += 1
                self.booted.notify_all()
            return
        with self.lock:
            job = self.jobs.get(message["id"])
        if not job:
            return
        if "out" in message:
            job.output(message["out"])
        else:
            with self.lock:
                self.jobs.pop(message["id"], None)
            job.finish(message["exit"])

    def abandon(self):
        """The jobs of a guest that died or restarted will not answer."""
        with self.lock:
            jobs, self.jobs = self.jobs, {}
        for job in jobs.values():
            job.finish(255)

    def copy_log(self):
        """Thread: the console into the log. A panic ends the guest, which
        would otherwise hang for ever."""
        with open(self.log, "wb", buffering=0) as log:
            for line in self.process.stdout:
                log.write(line)
                if PANIC.search(line.decode("latin-1")):
                    self.panicked = True
                    threading.Timer(1, self.process.kill).start()  # after its report

    def wait_ready(self, boots):
        """Wait until the agent has answered for the boots-th time."""
        deadline = time.monotonic() + BOOT_SECONDS
        with self.booted:
            while self.boots < boots:
                if self.process.poll() is not None:
                    raise Failure(f"guest {self.number} died while booting, see {self.log}")
                if time.monotonic() > deadline:
                    raise Failure(f"guest {self.number} does not boot, see {self.log}; {self.whereabouts()}")
                self.booted.wait(0.5)

    def whereabouts(self):
        """What a guest that hangs is at, as far as that can be told from outside."""
        waits = "".join(f" {name}:{place}" for name, place in wait_channels(self.process.pid))
        return f"threads wait in{waits}"

    def send(self, **message):
        data = json.dumps(message).encode() + b"\n"
        try:
            with self.lock:
                self.channel.sendall(data)
        except OSError as error:
            raise Failure(f"guest {self.number} is gone, see {self.log}") from error

    def new_job(self, what, sink):
        with self.lock:
            job = Job(self, self.next_id, what, sink)
            self.jobs[job.number] = job
            self.next_id += 1
        return job

    def start(self, argv, env=None, sink=None, typed=False):
        """Start a command; sink gets its output as it comes. Typed: it reads
        what Job.type() gives it."""
        if isinstance(argv, str):
            argv = ["bash", "-c", argv]
        job = self.new_job(" ".join(argv), sink)
        self.send(id=job.number, run=argv, env=self.network.env(self) | (env or {}), typed=typed)
        return job

    def run(self, argv, env=None, sink=None, timeout=None):
        """Run a command; (status, output)."""
        job = self.start(argv, env, sink)
        return job.wait(timeout), job.text

    def check(self, argv, what=None, timeout=None):
        """Run a command that must succeed; its output."""
        status, text = self.run(argv, timeout=timeout)
        if status:
            raise Failure(f"guest {self.number}: {what or argv} failed ({status}):\n{text}")
        return text

    def reboot(self):
        """Restart the guest from inside, and wait until it is back."""
        boots = self.boots
        self.send(end="reboot")
        self.wait_ready(boots + 1)

    def stop(self):
        """End the guest: ask it, then insist."""
        if self.process is None:
            return
        if self.process.poll() is None and self.boots:
            try:
                self.send(end="off")
                self.process.wait(20)
            except (Failure, subprocess.TimeoutExpired):
                pass
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for thread in self.threads:
            thread.join()

    def reports(self):
        """Lines of the kernel log that report a defect."""
        if not os.path.exists(self.log):
            return []
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return [line.rstrip() for line in file if REPORT.search(line) or PANIC.search(line)]

    def log_after(self, line, count):
        """A line of the kernel log and what follows it: the whole of a report."""
        with open(self.log, encoding="utf-8", errors="replace") as file:
            lines = [text.rstrip() for text in file]
        start = lines.index(line)
        return lines[start:start + count]


class QemuGuest(Guest):
    """QEMU with the device behind a root port. Guest 1's QEMU is the
    hub of the network: the others connect to it over unix sockets."""

    @property
    def is_serial(self):
        """Whether the agent answers over a serial line."""
        return self.options.serial and self.architecture == "amd64"

    def channel_env(self):
        return {
            "CONTROL": "/dev/ttyS1" if self.is_serial else "port:vr",
            "KERNEL_MODULES": "modules",
            "SHARE": "share" if self.options.share else "",
        }

    @property
    def monitor(self):
        """QEMU's socket for QMP."""
        return f"{self.network.dir}/qmp{self.number}.sock"

    def whereabouts(self):
        """The same, and where its processors are, three times: addresses of the kernel, if QEMU answers."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(5)
                connection.connect(self.monitor)
                with connection.makefile("rw", encoding="utf-8") as stream:
                    stream.readline()
                    ask(stream, "qmp_capabilities")
                    places = []
                    for _ in range(3):
                        registers = ask(stream, "human-monitor-command", **{"command-line": "info registers -a"})
                        places.append(" ".join(re.findall(r"\b(?:RIP|PC)=(\w+)", registers)))
                        time.sleep(0.1)
        except (OSError, ValueError, KeyError) as error:
            places = [f"QEMU does not say ({error})"]
        return f"processors: {', '.join(places)}; {super().whereabouts()}"

    def net_socket(self, number):
        return os.path.join(self.network.dir, f"net{number}.sock")

    def netdevs(self):
        if self.number > 1:
            return ["-netdev", "stream,id=nic,server=off,reconnect-ms=100,"
                    f"addr.type=unix,addr.path={self.net_socket(self.number)}"]
        arguments = ["-netdev", "hubport,id=nic,hubid=0"]
        for number in range(2, self.options.guests + 1):
            arguments += [
                "-netdev", f"stream,id=to{number},server=on,addr.type=unix,"
                f"addr.path={self.net_socket(number)}",
                "-netdev", f"hubport,id=port{number},hubid=0,netdev=to{number}",
            ]
        return arguments

    def directory(self, tag, path, readonly="off"):
        return ["-fsdev", f"local,id={tag},path={path},security_model=none,readonly={readonly}",
                "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]

    def swap_disk(self):
        if not self.options.swap:
            return []
        path = f"{self.network.dir}/swap{self.number}"
        with open(path, "wb") as file:
            file.truncate(self.options.memory << 20)
        return ["-drive", f"if=none,id=swap,format=raw,file={path}", "-device", "virtio-blk-pci,drive=swap"]

    def rdma_device(self):
        if self.options.rdma != "virtio":
            return []
        return ["-device", json.dumps({
            "driver": "vfio-user-pci", "id": "rdma", "bus": "rp0",
            "socket": {"type": "unix", "path": self.rdma_socket},
        })]

    def channel_device(self):
        """Where the agent answers. A port of virtio_console is fast, but Linux 7.3 takes its host for one that has
        closed it after a freeze (virtcons_restore() asks before it has a buffer for the answer)."""
        if self.is_serial:
            return ["-serial", "chardev:agent"]
        return ["-device", "virtio-serial-pci", "-device", "virtserialport,chardev=agent,name=vr"]

    def command(self, channel):
        options = self.options
        # kmemleak=off: nobody asks it, and a stack trace of each allocation
        # takes half of the time of an emulated guest with the debug kernel.
        machine = MACHINES[self.architecture]
        append = (f"console={machine.console} root=/dev/vda ro init=/usr/sbin/stage1 vr.share=9p {machine.append} "
                  f"kmemleak=off quiet loglevel=5 {KUNIT}")
        if options.swap:
            append += " resume=/dev/vdb"
        command = [
            machine.program, "-nodefaults", "-no-user-config", "-display", "none",
            "-machine", f"{machine.machine},memory-backend=ram", *accelerator(options, machine),
            "-smp", str(options.cpus), "-m", str(options.memory),
            "-object", f"memory-backend-memfd,id=ram,size={options.memory}M,share=on"
                       + (",hugetlb=on,hugetlbsize=2M" if options.hugetlb else ""),
            *kernel(options), "-append", append,
            "-serial", "stdio",
            "-qmp", f"unix:{self.monitor},server=on,wait=off",
            "-drive", f"if=none,id=root,format=raw,readonly=on,file.locking=off,file={options.image}",
            "-device", "virtio-blk-pci,drive=root",
            *self.swap_disk(),
            *self.netdevs(),
            "-device", f"virtio-net-pci,netdev=nic,mac={self.mac},host_mtu={options.mtu},romfile=",
            "-chardev", f"socket,id=agent,fd={channel}",
            *self.channel_device(),
            "-device", "pcie-root-port,id=rp0,chassis=1,slot=1",
            *self.directory("vr", self.dir),
            *self.directory("modules", f"{options.kernel_dir}/install/lib/modules", "on"),
            *self.rdma_device(),
        ]
        if options.share:
            command += self.directory("share", options.share)
        return command


class UmlGuest(Guest):
    """User-mode Linux, in a process namespace of its own so that nothing of it
    survives; veth and a bridge in this network namespace."""

    def channel_env(self):
        return {
            "CONTROL": "/dev/ttyS0",
            "KERNEL_MODULES": f"{self.options.kernel_dir}/install/lib/modules",
            "SHARE": self.options.share,
        }

    def prepare_network(self):
        subprocess.run(["ip", "link", "delete", self.name], check=False, stderr=subprocess.DEVNULL)
        for argv in (
            f"link add {self.name} mtu {self.options.mtu} type veth peer name {self.name}b",
            f"link set {self.name}b mtu {self.options.mtu} master bridge up",
            f"link set {self.name} up",
        ):
            subprocess.run(["ip", *argv.split()], check=True)

    def command(self, channel):
        options = self.options
        kernel = [
            f"{options.kernel_dir}/linux", f"mem={options.memory}M", f"ncpus={options.cpus}",
            "seccomp=on", f"ubd0r={options.image}", "root=/dev/ubda", "ro",
            "init=/usr/sbin/stage1", f"vr.share={self.dir}", "quiet", "loglevel=5",
            *KUNIT.split(),
            "con=null", "con0=null,fd:1", "ssl=null", f"ssl0=fd:{channel}",
            f"vec0:transport=raw,ifname={self.name},depth=64,gro=1,mtu={self.options.mtu},mac={self.mac}",
        ]
        if options.rdma == "virtio":
            kernel.append(f"virtio_uml.device={self.rdma_socket}:42")
        # The shell is process 1 of the namespace; the kernel would not take its own fatal signals there.
        # As the leader of a process group (set -m) the kernel fails to make itself a session, and should:
        # sched_autogroup makes of a session a group of the scheduler, user-mode Linux hands its processors from
        # thread to thread a hundred thousand times a second, and Linux 6.18 forgets what a group has had whenever
        # that is empty for a moment. All others starved, for a minute and longer.
        return ["unshare", "--pid", "--fork", "--kill-child", "bash", "-c", 'set -m; "$@" & wait $!', "bash", *kernel]


def ask(stream, command, **arguments):
    """QEMU's answer to a command of QMP, past the events before it. KeyError: it refuses."""
    print(json.dumps({"execute": command, "arguments": arguments}), file=stream, flush=True)
    while True:
        answer = json.loads(stream.readline())
        if "event" not in answer:
            return answer["return"]


def wait_channels(pid):
    """The threads of a process by name, and where in the kernel each waits (0: nowhere)."""
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/comm", encoding="utf-8") as file:
                name = file.read().strip()
            with open(f"/proc/{pid}/task/{task}/wchan", encoding="utf-8") as file:
                yield name, file.read().strip()
        except OSError:
            pass


@contextlib.contextmanager
def uninterrupted():
    """Ends what it started, and nobody hurries it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


class Network:
    """Guests of one network and, with rdma="virtio", their one device."""

    # What kind of guests they are, if not the VMM's.
    guest_kind = None

    def __init__(self, options):
        self.options = options
        build = os.path.join(TOP, "build")
        os.makedirs(build, exist_ok=True)
        self.dir = tempfile.mkdtemp(prefix="vm.", dir=build)
        self.memory_dir = os.path.join(self.dir, "memory")
        self.daemon = None
        kind = self.guest_kind or (QemuGuest if options.vmm == "qemu" else UmlGuest)
        self.guests = [kind(self, number) for number in range(1, options.guests + 1)]

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        self.close(failed=kind is not None)

    def env(self, guest):
        """GUEST and PEERS, for every command in a guest."""
        peers = " ".join(other.address for other in self.guests if other is not guest)
        return {"GUEST": str(guest.number), "PEERS": peers}

    def device_command(self):
        transport = "vfio-user" if self.options.vmm == "qemu" else "vhost-user"
        command = [os.path.join(TOP, "build", "virtio-rdmad"),
                   "--control", os.path.join(self.dir, "control.sock")]
        if self.options.workers:
            command += ["--workers", str(self.options.workers)]
        for guest in self.guests:
            rings = ",rings=off" if guest.number in self.options.no_rings else ""
            command += ["--guest", f"name={guest.name},{transport}={guest.rdma_socket},mac={guest.mac}{rings}"]
        return command

    def start_daemon(self):
        log = os.path.join(self.dir, "virtio-rdmad.log")
        with open(log, "wb") as file:
            self.daemon = subprocess.Popen(
                self.device_command(), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                preexec_fn=die_with_parent)
        deadline = time.monotonic() + 20
        while not all(os.path.exists(guest.rdma_socket) for guest in self.guests):
            if self.daemon.poll() is not None or time.monotonic() > deadline:
                raise Failure(f"virtio-rdmad does not start, see {log}")
            time.sleep(0.01)

    def device_status(self):
        """What the device tells of its guests, by their names (virtio-rdmad status)."""
        command = [os.path.join(TOP, "build", "virtio-rdmad"), "status", "--json",
                   "--control", os.path.join(self.dir, "control.sock")]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
        return {guest["name"]: guest for guest in json.loads(answer)["guests"]}

    def mount_memory(self):
        """Where the guests' memory is: in huge pages, if this kernel has them. The device reaches the memory of
        thousands of QPs through far fewer entries of the TLB then."""
        for huge in (",huge=within_size", ""):
            done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=90%,exec" + huge, "tmpfs", self.memory_dir],
                                  check=not huge, stderr=subprocess.DEVNULL if huge else None)
            if done.returncode == 0:
                break

    def boot(self, links=True):
        """Start everything, and wait until every guest has its RDMA link, or
        without links until every guest takes commands."""
        os.mkdir(self.memory_dir)
        self.mount_memory()
        if self.options.rdma == "virtio":
            self.start_daemon()
        if self.options.vmm == "uml":
            # There may be one of an earlier network in this namespace.
            subprocess.run(["ip", "link", "delete", "bridge"], check=False, stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "link", "add", "bridge", "type", "bridge"], check=True)
            subprocess.run(["ip", "link", "set", "bridge", "up"], check=True)
            for guest in self.guests:
                guest.prepare_network()
        for guest in self.guests:
            guest.prepare()
            guest.start_process()
        for guest in self.guests:
            guest.wait_ready(1)
        for guest in self.guests if links and self.options.rdma != "none" else []:
            self.rdma_up(guest, self.options.rdma)

    @staticmethod
    def rdma_up(guest, kind):
        """Load a driver in a guest and wait for the link and its GIDs: the
        device's name and the index of its RoCE v2 GID."""
        device, index = guest.check(["/run/vr/rdma-up", kind], f"setting up {kind}", 300).split()[-2:]
        guest.link = (device, int(index))
        return guest.link

    def reports(self):
        """(guest number, line) of every defect in the kernel logs."""
        return [(guest.number, line) for guest in self.guests for line in guest.reports()]

    def close(self, failed=False):
        """End all guests, then the device; remove the run directory unless
        something failed."""
        with uninterrupted():
            stops = [threading.Thread(target=guest.stop) for guest in self.guests]
            for thread in stops:
                thread.start()
            for thread in stops:
                thread.join()
            self.stop_daemon()
            if os.path.ismount(self.memory_dir):
                subprocess.run(["umount", "-l", self.memory_dir], check=False)
            if not (failed or self.options.keep):
                shutil.rmtree(self.dir, ignore_errors=True)

    def stop_daemon(self):
        """Ask it to end, then insist."""
        if not self.daemon or self.daemon.poll() is not None:
            return
        self.daemon.terminate()
        try:
            self.daemon.wait(20)
        except subprocess.TimeoutExpired:
            self.daemon.kill()
            self.daemon.wait()

    def logs(self):
        """The logs that there are, to be named after a failure."""
        return sorted(glob.glob(os.path.join(self.dir, "*.log")))


def kernel(options):
    """What QEMU boots: a kernel of Debian's with what mounts the guest's disk, or one that was built here."""
    stock = os.path.join(options.kernel_dir, "vmlinuz")
    if os.path.exists(stock):
        return ["-kernel", stock, "-initrd", os.path.join(options.kernel_dir, "initrd")]
    return ["-kernel", os.path.join(options.kernel_dir, "arch/x86/boot/bzImage")]


def accelerator(options, machine):
    """KVM where a kernel really boots under it, TCG elsewhere, and for processors that are not this machine's."""
    if machine is MACHINES["amd64"] and kvm_works(options):
        return ["-accel", "kvm", "-cpu", "host"]
    return ["-accel", "tcg,thread=multi", "-cpu", machine.processor]


def kvm_works(options):
    """Whether a kernel reaches init under KVM: tried once a boot of this
    machine, because /dev/kvm may exist and still fail."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        answer = os.path.join(CACHE, "kvm-" + file.read().strip())
    if not os.path.exists(answer):
        works = try_kvm(options)
        say("KVM works" if works else "no usable KVM: emulating with TCG")
        with tempfile.NamedTemporaryFile("w", dir=CACHE, delete=False) as file:
            file.write("yes" if works else "no")
        os.rename(file.name, answer)
    with open(answer, encoding="ascii") as file:
        return file.read() == "yes"


def try_kvm(options):
    """Boot a kernel whose init returns at once, as stage1 does without a share; see whether it got there."""
    command = [
        "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-machine", "q35", "-accel", "kvm", "-cpu", "host", "-m", "512", "-smp", "2",
        *kernel(options),
        "-append", "console=ttyS0 root=/dev/vda ro init=/bin/true panic=-1",
        "-serial", "stdio",
        "-drive", f"if=none,id=root,format=raw,readonly=on,file.locking=off,file={options.image}",
        "-device", "virtio-blk-pci,drive=root",
    ]
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True,
                                timeout=30, check=False, preexec_fn=die_with_parent)
    except subprocess.TimeoutExpired:
        return False
    return b"Attempted to kill init" in result.stdout
