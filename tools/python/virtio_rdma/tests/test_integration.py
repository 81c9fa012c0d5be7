# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""What managers of virtual machines run for virtio-rdmad: the hooks in tools/virtio-rdmad/examples. virtio-rdmad and
the programs of the managers are scripts here, which write down how they are called."""

import json
import os
import re
import shlex
import subprocess
import xml.etree.ElementTree as ET

import pytest
import yaml

from virtio_rdma.common import TOP

EXAMPLES = os.path.join(TOP, "tools/virtio-rdmad/examples")
CONTROL = "/run/virtio-rdmad/control/socket"
# As libvirt makes the JSON of a domain's XML.
DEVICE = '{"driver":"vfio-user-pci","id":"rdma0","socket":{"type":"unix","path":"/run/virtio-rdmad/vm1.sock"}}'
GUEST = """<rdma:guest xmlns:rdma="http://virtio-rdma.org/libvirt/1.0">
  vfio-user=/run/virtio-rdmad/vm1.sock,mac=52:54:00:12:34:01
</rdma:guest>"""
SPEC = "vfio-user=/run/virtio-rdmad/vm1.sock,mac=52:54:00:12:34:01"
QEMU = "{http://libvirt.org/schemas/domain/qemu/1.0}"
# It runs what is behind "--", as the user's own runuser does.
RUNUSER = 'printf "%s " runuser "$1" "$2" "$(umask)" >>"$CALLS"; shift 3; exec "$@"'
VIRTIO_RDMAD = 'echo virtio-rdmad "$@" >>"$CALLS"; echo "$SAYS" >&2; exit "$STATUS"'
# One that refuses to add a guest until somebody has asked for the status, by which the guest of before leaves.
LEAVES = """echo virtio-rdmad "$@" >>"$CALLS"
case "$1" in
add) [ -e "$CALLS.asked" ] || { echo "the name vm1 is taken" >&2; exit 1; } ;;
status) touch "$CALLS.asked"; echo '{"guests": [{"name": "vm1", "leaving": true}]}' ;;
esac"""
NET = "boot: order=scsi0\nnet0: virtio=52:54:00:12:34:01,bridge=vmbr0\nnet1: virtio=52:54:00:12:34:02,bridge=vmbr1\n"


class Programs:
    """The programs that a hook finds, and what it has called."""

    def __init__(self, directory):
        self.directory = directory
        self.calls_path = directory / "calls"
        self.status, self.says = 0, ""
        for name, body in (("runuser", RUNUSER), ("virtio-rdmad", VIRTIO_RDMAD)):
            self.add(name, body)

    def add(self, name, body):
        """Makes a program, which is a script of the shell."""
        path = self.directory / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def run(self, hook, *arguments, text=""):
        """Runs a hook. Returns what has become of it."""
        # The locale is that in which libvirt runs its hooks.
        env = os.environ | {"PATH": f"{self.directory}:{os.environ['PATH']}", "CALLS": str(self.calls_path),
                            "STATUS": str(self.status), "SAYS": self.says, "LC_ALL": "C"}
        return subprocess.run([os.path.join(EXAMPLES, hook), *arguments], env=env, input=text, check=False,
                              capture_output=True, encoding="utf-8", timeout=60)

    @property
    def calls(self):
        """The calls of virtio-rdmad, each with the user and the umask that it has."""
        return self.calls_path.read_text().splitlines() if self.calls_path.exists() else []


@pytest.fixture
def programs(tmp_path):
    return Programs(tmp_path)


def domain(metadata="", device=DEVICE):
    """The XML of a domain, as libvirt gives it to its hooks."""
    return f"""<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>vm1</name>
  <title>Gäste, 客人</title>
  <metadata>{metadata}</metadata>
  <qemu:commandline>
    <qemu:arg value='-device'/>
    <qemu:arg value='{device}'/>
  </qemu:commandline>
</domain>
"""


def libvirt(programs, operation, part, text, name="vm1"):
    return programs.run("libvirt/virtio-rdma", name, operation, part, "-", text=text)


@pytest.mark.parametrize(("operation", "source"), [("migrate", "another host"), ("restore", "a file")])
def test_libvirt_does_not_take_in_a_device_without_its_state(operation, source, programs):
    done = libvirt(programs, operation, "begin", domain(GUEST))
    assert (done.returncode, done.stdout, programs.calls) == (1, "", [])
    assert done.stderr == (f"virtio-rdma: vm1: the domain comes from {source}, and QEMU does not save the state of its "
                           "vfio-user-pci; see managers.md in /usr/share/doc/virtio-rdmad\n")


@pytest.mark.parametrize("text", [
    domain(GUEST, device='{"driver":"virtio-rng-pci"}'), domain(device="vfio-pci,host=01:00.0"),
    "<domain type='kvm'><name>vm1</name></domain>",
], ids=["detached", "vfio", "no arguments"])
@pytest.mark.parametrize("operation", ["migrate", "restore"])
def test_libvirt_takes_in_a_domain_without_the_device(operation, text, programs):
    done = libvirt(programs, operation, "begin", text)
    # What a hook prints for these takes the place of the domain's XML.
    assert (done.returncode, done.stdout, done.stderr, programs.calls) == (0, "", "", [])


def test_libvirt_finds_the_device_in_the_older_syntax(programs):
    done = libvirt(programs, "migrate", "begin", domain(device="vfio-user-pci,socket.type=unix"))
    assert done.returncode == 1


def test_libvirt_adds_and_removes_a_guest(programs):
    added = libvirt(programs, "prepare", "begin", domain(GUEST))
    removed = libvirt(programs, "release", "end", domain(GUEST))
    for done in (added, removed):
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    # The group of the daemon may connect to the socket, which root has made.
    access = "owner=virtio-rdmad:virtio-rdmad,mode=0660"
    add, remove = programs.calls
    assert add == f"virtio-rdmad add --control {CONTROL} --guest name=vm1,{SPEC},{access}"
    assert re.fullmatch(f"runuser -u virtio-rdmad [0-7]+ virtio-rdmad remove --control {CONTROL} --drain vm1", remove)


def test_libvirt_gives_a_socket_to_whom_the_domain_names(programs):
    done = libvirt(programs, "prepare", "begin", domain(GUEST.replace("mac=", "owner=vm1,mode=0600,mac=")))
    spec = SPEC.replace("mac=", "owner=vm1,mode=0600,mac=")
    assert (done.returncode, programs.calls) == (0, [f"virtio-rdmad add --control {CONTROL} --guest name=vm1,{spec}"])


@pytest.mark.parametrize(("operation", "part"), [("prepare", "begin"), ("release", "end")])
def test_libvirt_leaves_a_guest_of_the_configuration_alone(operation, part, programs):
    done = libvirt(programs, operation, part, domain())
    assert (done.returncode, done.stderr, programs.calls) == (0, "", [])


@pytest.mark.parametrize(("operation", "part"), [
    ("start", "begin"), ("started", "begin"), ("stopped", "end"), ("reconnect", "begin"), ("attach", "begin"),
])
def test_libvirt_does_nothing_at_other_times(operation, part, programs):
    # libvirt may give no XML for an operation that comes in a later release.
    done = libvirt(programs, operation, part, "")
    assert (done.returncode, done.stdout, done.stderr, programs.calls) == (0, "", "", [])


def test_libvirt_says_what_virtio_rdmad_says(programs):
    programs.status, programs.says = 1, "virtio-rdmad: the name vm1 is taken"
    done = libvirt(programs, "prepare", "begin", domain(GUEST))
    assert (done.returncode, done.stderr) == (1, "virtio-rdma: vm1: virtio-rdmad: the name vm1 is taken\n")


def test_libvirt_waits_for_a_guest_that_leaves(programs):
    programs.add("virtio-rdmad", LEAVES)
    done = libvirt(programs, "prepare", "begin", domain(GUEST))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [call.split()[1] for call in programs.calls] == ["add", "status", "add"]


@pytest.mark.parametrize(("name", "text", "error"), [
    ("vm1,qps=9", domain(GUEST), "the name of a domain with rdma:guest has no comma"),
    ("vm1", domain(GUEST * 2), "the domain has more than one element rdma:guest"),
    ("vm1", "<domain>", "no element found: line 1, column 8"),
], ids=["comma", "two guests", "no XML"])
def test_libvirt_refuses_bad_domains(name, text, error, programs):
    done = libvirt(programs, "prepare", "begin", text, name)
    assert (done.returncode, done.stderr, programs.calls) == (1, f"virtio-rdma: {name}: {error}\n", [])


def define(programs, text):
    """Returns the domain that KubeVirt's hook makes of another."""
    done = programs.run("kubevirt/on-define-domain", "--vmi", "{}", "--domain", text)
    assert (done.returncode, done.stderr) == (0, "")
    return ET.fromstring(done.stdout)


def test_kubevirt_defines_a_domain_with_the_device(programs):
    found = define(programs, "<domain type='kvm'><name>default_vm1</name><title>客人</title>"
                             "<devices><disk/></devices></domain>")
    assert (found.findtext("name"), found.findtext("title")) == ("default_vm1", "客人")
    assert found.find("devices/disk") is not None
    assert found.find("memoryBacking/source").attrib == {"type": "memfd"}
    assert found.find("memoryBacking/access").attrib == {"mode": "shared"}
    option, device = (argument.get("value") for argument in found.iter(f"{QEMU}arg"))
    assert option == "-device"
    assert json.loads(device)["driver"] == "vfio-user-pci"


def test_kubevirt_keeps_what_the_domain_has(programs):
    found = define(programs, f"""<domain type='kvm' xmlns:qemu='{QEMU[1:-1]}'>
  <memoryBacking><hugepages/></memoryBacking>
  <qemu:commandline><qemu:arg value='-no-user-config'/></qemu:commandline>
</domain>""")
    # Hugepages are a file already, of which libvirt makes no memfd.
    assert [each.tag for each in found.find("memoryBacking")] == ["hugepages", "access"]
    assert len(found.findall(f"{QEMU}commandline")) == 1
    assert [argument.get("value") for argument in found.iter(f"{QEMU}arg")][:2] == ["-no-user-config", "-device"]


def test_kubevirt_manifest_fits_the_hook(programs):
    with open(os.path.join(EXAMPLES, "kubevirt/vm.yaml"), encoding="utf-8") as file:
        volume, claim, machine = yaml.safe_load_all(file)
    assert [each["kind"] for each in (volume, claim, machine)] == [
        "PersistentVolume", "PersistentVolumeClaim", "VirtualMachine"]
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert volume["spec"]["claimRef"] == claim["metadata"]
    template = machine["spec"]["template"]
    sidecar, = json.loads(template["metadata"]["annotations"]["hooks.kubevirt.io/hookSidecars"])
    assert sidecar["pvc"]["name"] == claim["metadata"]["name"]
    assert os.path.exists(os.path.join(EXAMPLES, "kubevirt", sidecar["configMap"]["key"]))
    device = json.loads([argument.get("value") for argument in define(programs, "<domain/>").iter(f"{QEMU}arg")][1])
    assert os.path.dirname(device["socket"]["path"]) == sidecar["pvc"]["sharedComputePath"]


def proxmox(programs, phase, config=NET):
    programs.add("qm", f"[ \"$*\" = 'config 101 --current 1' ] && printf %s {shlex.quote(config)}")
    return programs.run("proxmox/virtio-rdma", "101", phase)


def test_proxmox_adds_and_removes_a_guest(programs):
    for phase in ("pre-start", "post-start", "pre-stop", "post-stop"):
        done = proxmox(programs, phase)
        assert done.returncode == 0, done.stderr
    by = "runuser -u virtio-rdmad 0007 virtio-rdmad"
    spec = "name=vm101,vfio-user=/run/virtio-rdmad/vm101.sock,mac=52:54:00:12:34:01"
    assert programs.calls == [f"{by} add --control {CONTROL} --guest {spec}",
                              f"{by} remove --control {CONTROL} --drain vm101"]


def test_proxmox_does_not_start_a_guest_that_is_refused(programs):
    programs.status = 1
    assert proxmox(programs, "pre-start").returncode == 1


def test_proxmox_needs_an_address(programs):
    done = proxmox(programs, "pre-start", "net1: virtio=52:54:00:12:34:02,bridge=vmbr1\n")
    assert (done.returncode, programs.calls) == (1, [])
    assert done.stderr == "virtio-rdma: VM 101 has no net0 with a MAC address\n"
