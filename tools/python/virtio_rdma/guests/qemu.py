# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""QEMU's guests, with the device behind a root port (vfio-user)."""

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import tempfile
import time

from virtio_rdma.common import CACHE, die_with_parent, say
from virtio_rdma.guests import tsc
from virtio_rdma.guests.guest import KUNIT, Guest


@dataclasses.dataclass
class Machine:
    """What of QEMU's command line is an architecture's own: the program, its machine, the processor that it
    emulates, the kernel's console, and options for the kernel."""

    program: str
    machine: str
    processor: str
    console: str
    append: str = ""


# By architecture (Guest.architecture).
# no5lvl: with five levels of page tables, KASAN takes every address of the direct map for a wild one while
# identify_cpu() (arch/x86/kernel/cpu/common.c) has cleared the CPU's capabilities, LA57 among them. A timer interrupt
# at that moment of the boot ends in a false report.
# hpet=off: with an HPET, one boot in 60 hangs for ever on a busy host with Linux 7.2. Until the kernel has chosen a
# clock, watchdog_wait_seq() (kernel/time/clocksource.c) measures its time-out in jiffies, with interrupts off on the
# processor that counts them. If the other processor already stands still for stop_machine(), with which
# clocksource_done_booting() makes that choice, both wait for each other.
# pauth-impdef: QEMU signs pointers with a hash of its own in place of the architecture's cipher, whose emulation is
# slow (QEMU's documentation of Arm CPU features).
MACHINES = {
    "amd64": Machine("qemu-system-x86_64", "q35,hpet=off", "max", "ttyS0", "no5lvl"),
    "arm64": Machine("qemu-system-aarch64", "virt,gic-version=3", "max,pauth-impdef=on", "ttyAMA0"),
}


# Where QEMU has the device of the pluggable memory.
PLUG = "/machine/peripheral/plug"
# How much memory it gives or takes at a time. QEMU counts a DMA region for each block, of which the device has 1,024.
BLOCK = "32M"


class QemuGuest(Guest):
    """QEMU with the device behind a root port. Guest 1's QEMU is the hub of the network: the others connect to it
    over unix sockets."""

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

    @contextlib.contextmanager
    def qmp(self):
        """Connects to QEMU, for ask()."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(self.monitor)
            with connection.makefile("rw", encoding="utf-8") as stream:
                stream.readline()
                ask(stream, "qmp_capabilities")
                yield stream

    def plug(self, mib):
        """Asks the guest to have so much of its pluggable memory."""
        with self.qmp() as stream:
            ask(stream, "qom-set", path=PLUG, property="requested-size", value=mib << 20)

    def plugged(self):
        """Returns how much of its pluggable memory the guest has, in MiB."""
        with self.qmp() as stream:
            return ask(stream, "qom-get", path=PLUG, property="size") >> 20

    def whereabouts(self):
        """Returns also where the processors are, three times, as addresses of the kernel, if QEMU answers."""
        try:
            with self.qmp() as stream:
                places = []
                for _ in range(3):
                    registers = ask(stream, "human-monitor-command", **{"command-line": "info registers -a"})
                    places.append(" ".join(re.findall(r"\b(?:RIP|PC)=(\w+)", registers)))
                    time.sleep(0.1)
        except (OSError, ValueError, KeyError) as error:
            places = [f"QEMU does not say ({error})"]
        return f"processors: {', '.join(places)}; {super().whereabouts()}"

    def net_socket(self, number):
        """Returns the socket over which guest 1 and another exchange frames."""
        return os.path.join(self.network.dir, f"net{number}.sock")

    def prepare_network(self):
        """Makes the tap on the bridge that is the guest's port."""
        subprocess.run(["ip", "link", "delete", f"{self.name}b"], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "tuntap", "add", f"{self.name}b", "mode", "tap"], check=True)
        subprocess.run(["ip", "link", "set", f"{self.name}b", "mtu", str(self.options.mtu), "master",
                        self.network.bridge_of(self), "up"], check=True)

    def netdevs(self):
        """Returns the network's part of the command line."""
        if self.network.has_bridge:
            return ["-netdev", f"tap,id=nic,ifname={self.name}b,script=no,downscript=no"]
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

    @staticmethod
    def directory(tag, path, readonly="off"):
        """Returns the part of the command line that gives the guest a directory of the host."""
        return ["-fsdev", f"local,id={tag},path={path},security_model=none,readonly={readonly}",
                "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]

    def swap_disk(self):
        """Returns the part of the command line for the swap space, and makes its file."""
        if not self.options.swap:
            return []
        path = f"{self.network.dir}/swap{self.number}"
        with open(path, "wb") as file:
            file.truncate(self.options.memory << 20)
        return ["-drive", f"if=none,id=swap,format=raw,file={path}", "-device", "virtio-blk-pci,drive=swap"]

    def pluggable_memory(self):
        """Returns the part of the command line for memory that the guest can get while it runs."""
        size = self.options.pluggable
        if not size:
            return []
        return ["-object", f"memory-backend-memfd,id=more,size={size}M,share=on,reserve=off",
                "-device", f"virtio-mem-pci,id=plug,memdev=more,requested-size=0,block-size={BLOCK}"]

    def iommu(self):
        """Returns the part of the command line for the virtual IOMMU, which comes before the devices behind it."""
        return ["-device", "intel-iommu,intremap=on,caching-mode=on"] if self.options.iommu else []

    def rdma_device(self):
        """Returns the part of the command line for the RDMA device."""
        if self.options.rdma != "virtio":
            return []
        return ["-device", json.dumps({
            "driver": "vfio-user-pci", "id": "rdma", "bus": "rp0",
            "socket": {"type": "unix", "path": self.rdma_socket},
        })]

    def channel_device(self):
        """Returns the part of the command line for the agent's channel. A port of virtio_console is fast, but
        after a freeze Linux 7.3 believes that its host has closed the port (virtcons_restore() asks before it has a
        buffer for the answer)."""
        if self.is_serial:
            return ["-serial", "chardev:agent"]
        return ["-device", "virtio-serial-pci", "-device", "virtserialport,chardev=agent,name=vr"]

    def machine(self, append):
        """Returns the beginning of the command line: the machine, its kernel, which gets the options append, the
        kernel's console, and QMP."""
        options = self.options
        machine = MACHINES[self.architecture]
        if self.architecture == "amd64" and is_emulated(options, machine):
            append = f"{emulated_timers()} {append}"
        return [
            machine.program, "-nodefaults", "-no-user-config", "-display", "none",
            "-machine", f"{machine.machine},memory-backend=ram", *accelerator(options, machine),
            "-smp", str(options.cpus),
            "-m", f"{options.memory}" + f",maxmem={options.memory + options.pluggable}M" * bool(options.pluggable),
            "-object", f"memory-backend-memfd,id=ram,size={options.memory}M,share=on"
                       + (",hugetlb=on,hugetlbsize=2M" if options.hugetlb else ""),
            *kernel(options),
            "-append", f"console={machine.console} root=/dev/vda {machine.append} {append}",
            "-serial", "stdio",
            "-qmp", f"unix:{self.monitor},server=on,wait=off",
        ]

    def command(self, channel):
        options = self.options
        # kmemleak=off: nothing here reads its reports, and a stack trace of each allocation takes half of the time
        # of an emulated guest with the debug kernel.
        append = f"ro init=/usr/sbin/stage1 vr.share=9p kmemleak=off quiet loglevel=5 {KUNIT}"
        if options.swap:
            append += " resume=/dev/vdb"
        if options.iommu:
            append += f" {options.iommu}"
        command = [
            *self.machine(append),
            *self.iommu(),
            "-drive", f"if=none,id=root,format=raw,readonly=on,file.locking=off,file={options.image}",
            "-device", "virtio-blk-pci,drive=root",
            *self.swap_disk(),
            *self.pluggable_memory(),
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


def ask(stream, command, **arguments):
    """Returns QEMU's answer to a command of QMP, past the events before it. Raises KeyError if it refuses."""
    print(json.dumps({"execute": command, "arguments": arguments}), file=stream, flush=True)
    while True:
        answer = json.loads(stream.readline())
        if "event" not in answer:
            return answer["return"]


def kernel(options):
    """Returns what QEMU boots: a kernel of Debian's with an initrd that mounts the guest's disk, or a kernel that
    was built here."""
    stock = os.path.join(options.kernel_dir, "vmlinuz")
    if os.path.exists(stock):
        return ["-kernel", stock, "-initrd", os.path.join(options.kernel_dir, "initrd")]
    return ["-kernel", os.path.join(options.kernel_dir, "arch/x86/boot/bzImage")]


def emulated_timers():
    """Returns the options of an emulated x86 guest's kernel for its timers. Its TSC is this machine's.
    no_timer_check: a kernel whose first ticks are late, as on a busy host, panics because its timer does not work
    (timer_irq_works()). Under KVM it does not look.
    tsc_early_khz: a kernel that measures the TSC's frequency on a busy host can be wrong by a factor of ten.
    tsc=nowatchdog: Linux 7.2 compares the TSC with the ACPI timer, over less than 1 ms when the comparison before was
    late (clocksource_watchdog()). It takes a delay of the host for an error of the TSC, and goes by the ACPI timer from
    then on. That timer wraps every 4.7 s, and time is lost when the guest does not read it for half as long."""
    khz = tsc.frequency_khz()
    return "no_timer_check" + (f" tsc_early_khz={khz} tsc=nowatchdog" if khz else "")


def accelerator(options, machine):
    """Returns the options of KVM where a kernel really boots under it, and of TCG elsewhere and for processors
    of another architecture than this machine's."""
    if is_emulated(options, machine):
        return ["-accel", "tcg,thread=multi", "-cpu", machine.processor]
    return ["-accel", "kvm", "-cpu", "host"]


def is_emulated(options, machine):
    """Returns whether QEMU emulates the processor of a machine."""
    return machine is not MACHINES["amd64"] or not kvm_works(options)


def kvm_works(options):
    """Returns whether a kernel reaches init under KVM. This is tried once a boot of this machine, because /dev/kvm
    may exist and still fail."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        answer = os.path.join(CACHE, "kvm-" + file.read().strip())
    if not os.path.exists(answer):
        works = try_kvm(options)
        say("KVM works" if works else "no usable KVM: emulating with TCG")
        with tempfile.NamedTemporaryFile("w", dir=CACHE, delete=False) as new:
            new.write("yes" if works else "no")
        os.rename(new.name, answer)
    with open(answer, encoding="ascii") as file:
        return file.read() == "yes"


def try_kvm(options):
    """Boots a kernel whose init returns at once, as stage1 does without a share, and returns whether it got
    there."""
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
