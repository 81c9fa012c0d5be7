# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite host: unit, property and fuzz tests of the device and the provider, and the checks of the sources. The
tests of this package belong to it as well. The checks that need the kernel for user-mode Linux are last: where nothing
is built yet, the suite begins before that kernel is there."""

import os
import re
import subprocess

import pytest

from virtio_rdma.common import BUILD, TOP
from virtio_rdma.tests import cargo
from virtio_rdma.tests.cargo import LAST_LINES

# Fuzz targets, and with how many inputs each is run here: some seconds' worth.
FUZZ = {"engine": 4000, "image": 4000, "nic": 20000, "ring": 20000, "roce": 100000, "vfio_user": 12000,
        "vhost_user": 8000, "vxlan": 100000, "wire": 4000}
# What the kernel's checkpatch.pl looks at.
KERNEL_C = ["rust/helpers/helpers.c", "rust/helpers/trace.c", "include/virtio_rdma_bindings.h",
            "include/virtio_rdma_helpers.h", "include/uapi/linux/virtio_rdma.h", "include/uapi/rdma/virtio_rdma-abi.h",
            *(f"selftests/virtio_rdma/kverbs/{name}" for name in (
                "kverbs.h", "main.c", "objects.c", "contexts.c", "data.c", "memory.c", "states.c", "srq.c",
                "late_pd.c", "slow_poll.c"))]
# Trace events have a layout of their own, which --strict does not know.
TRACE_EVENTS = "include/virtio_rdma_trace.h"
# How many turns "make test" has.
TURNS = 10
LIMITS = os.path.join(TOP, "tools/bench/limits")
PYTHON = os.path.join(TOP, "tools/python")
# Programs in Python whose names do not say that.
HOOKS = [os.path.join(cargo.DEVICE, "examples", name) for name in ("libvirt/virtio-rdma", "kubevirt/on-define-domain")]
# The workspaces, each with the command that runs its tests, its directory and its environment.
CARGO = {
    # The suite conform has the tests of that crate.
    "device": (["cargo", "test", "--locked", "--workspace", "--exclude", "conform", "--no-fail-fast"],
               cargo.DEVICE, cargo.OF_DEVICE),
    # The devices of these tests lose all that they know, and take it up again, whenever they rest.
    "upgrades": (["cargo", "test", "--locked", "-p", "engine", "--lib", "--", "tests::image", "tests::schedules"],
                 cargo.DEVICE, cargo.OF_DEVICE | {"UPGRADES": "1", "SCHEDULES": "0..200"}),
    "provider": (["make", "-s", "-C", "tools/provider", "test"], TOP, {}),
    "limits": (["cargo", "test", "--locked"], LIMITS, {"CARGO_TARGET_DIR": os.path.join(BUILD, "cargo-bench")}),
}


def succeeds(argv, directory=TOP, env=None, quiet=False):
    """Checks that a command succeeds, and prints nothing where quiet."""
    done = subprocess.run(argv, cwd=directory, env={**os.environ, **(env or {})}, check=False,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          encoding="utf-8", errors="replace")
    if done.returncode or (quiet and done.stdout.strip()):
        last = "\n".join(done.stdout.split("\n")[-LAST_LINES:])
        pytest.fail(f"{' '.join(argv)}: status {done.returncode}\n{last}", pytrace=False)


@pytest.mark.parametrize("workspace", CARGO)
def test_cargo(workspace, results):
    cargo.run(results, workspace, *CARGO[workspace])


@pytest.mark.parametrize("target", FUZZ)
def test_fuzz(target, tmp_path):
    """A fuzz target with its corpus and inputs made of it, the same each time."""
    package = os.path.join(cargo.DEVICE, "fuzz")
    found = os.path.join(BUILD, "fuzz")
    os.makedirs(found, exist_ok=True)
    subprocess.run(["corpus/pack", "-u", target, tmp_path], cwd=package, check=True)
    # A failure names its input; again: make fuzz F=TARGET INPUT=build/fuzz/TARGET-...
    succeeds(["cargo", "run", "--release", "--locked", "--bin", target, "--", f"-runs={FUZZ[target]}", "-seed=1",
              "-timeout=120", f"-artifact_prefix={found}/{target}-", str(tmp_path)], package,
             {"CARGO_TARGET_DIR": os.path.join(BUILD, "cargo-fuzz")})


@pytest.mark.parametrize("arguments", [["Documentation/layout.md"], ["--user", "Documentation/user-abi.md"],
                                       ["--python", "selftests/virtio_rdma/verbs/abi.py"]],
                         ids=lambda arguments: arguments[-1])
def test_file_says_what_the_headers_say(arguments):
    *options, file = arguments
    succeeds(["tools/abi/layout", *options, "--check", file])


def test_floors():
    succeeds(["tools/test/floors"], quiet=True)


@pytest.mark.parametrize(("sources", "found"), [
    ({"low.rs": "", "high.rs": "use crate::low;\nfn f() {}"}, []),
    ({"low.rs": "use crate::{high::Name, low};\nfn f() {}", "high.rs": ""},
     ["low.rs:1: high::Name is on a floor above"]),
    ({"low.rs": "fn f() {}\n#[cfg(test)]\nmod tests { use crate::high; }",
      "high.rs": "use super::low::{self, Name};\nfn f() {}"}, []),
    ({"low.rs": "", "high/mod.rs": "pub mod a;\npub mod b;", "high/a.rs": "use super::b;\nfn g() {}",
      "high/b.rs": "fn f() { crate::high::a::g() }"},
     ["high/a.rs:1: high::b is in a circle of 2 files", "high/b.rs:1: high::a::g is in a circle of 2 files"]),
    ({"low.rs": "", "high/mod.rs": "pub mod a;\npub mod b;\nfn h() {}",
      "high/a.rs": "use super::b::{self as other};\nfn g() { other::f() }",
      "high/b.rs": "use crate::high;\nfn f() { high::a::g() }"},
     ["high/a.rs:1: high::b is in a circle of 2 files", "high/b.rs:2: high::a::g is in a circle of 2 files"]),
    ({"low/mod.rs": "mod a;\npub use a::Name;\nfn f() { a::g() }",
      "low/a.rs": "use super::Name;\nfn g() {}",
      "high.rs": ""}, []),
    ({"low/mod.rs": "mod a;\nmod b;\npub use a::Name;", "low/a.rs": "use super::b::Other;\nstruct Name;",
      "low/b.rs": "use crate::low::Name;\nstruct Other;", "high.rs": ""},
     ["low/a.rs:1: low::b::Other is in a circle of 2 files", "low/b.rs:1: low::Name is in a circle of 2 files"]),
    ({"low.rs": "mod below;\nfn f() { below::g() }", "low/below.rs": "fn g() { super::f() }", "high.rs": ""},
     ["low.rs:2: low::below::g is in a circle of 2 files", "low/below.rs:1: low::f is in a circle of 2 files"]),
], ids=["down", "up", "tests", "circle", "module brought in", "own name by the module above", "re-exported", "below"])
def test_floors_finds_what_is_planted(sources, found, tmp_path):
    root = "//! * [`low`]\n//! * [`high`]\nmod low;\nmod high;\n"
    for name, text in {"lib.rs": root, **sources}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    done = subprocess.run(["tools/test/floors", str(tmp_path / "lib.rs")], cwd=TOP, check=False,
                          stdout=subprocess.PIPE, encoding="utf-8")
    assert done.stdout.splitlines() == [f"{os.path.relpath(tmp_path, TOP)}/{line}" for line in found]
    assert done.returncode == bool(found)


def test_links_of_documents():
    succeeds(["tools/test/links"], quiet=True)


def test_figures_of_the_readme():
    """Each figure that the README gives is in the document that it links. Blocks are output of "make run"."""
    with open(os.path.join(TOP, "README.md"), encoding="utf-8") as file:
        text = " ".join(line for line in file.read().splitlines() if not line.startswith("    "))
    with open(os.path.join(TOP, "Documentation/benchmark.md"), encoding="utf-8") as file:
        numbers = set(re.findall(r"\d+(?:\.\d+)?", file.read()))
    figures = re.findall(r"(\d+(?:\.\d+)?)(?: to (\d+(?:\.\d+)?))? (?:µs|times|of the bandwidth)", text)
    assert figures
    assert {number for figure in figures for number in figure if number} - numbers == set()


def test_deny():
    succeeds(["make", "-s", "deny"])


def test_manual_pages():
    """mandoc has nothing to say of the manual pages, as lintian has not."""
    pages = subprocess.run(["git", "-c", f"safe.directory={TOP}", "ls-files", "*.[1-9]"], cwd=TOP, check=True,
                           stdout=subprocess.PIPE, encoding="utf-8").stdout.split()
    succeeds(["mandoc", "-T", "lint", "-W", "warning", *pages], quiet=True)


def test_shellcheck():
    scripts = subprocess.run(
        ["git", "-c", f"safe.directory={TOP}", "grep", "-lE", "^#!/bin/(ba)?sh"], cwd=TOP, check=True,
        stdout=subprocess.PIPE, encoding="utf-8").stdout.split()
    succeeds(["shellcheck", "-x", "-S", "warning", "-e", "SC1090,SC1091,SC2034,SC2154", *scripts])


@pytest.mark.parametrize("tool", [
    ["ruff", "check", "--no-cache", "../vm", "../test", "../bench", "../second-device", *HOOKS], ["mypy"],
], ids=lambda tool: tool[0])
def test_python(tool):
    """The checks of this package, of what guests run for it, of hooks, and of the second device."""
    succeeds(["python3", "-m", *tool, "virtio_rdma"], PYTHON)


def test_types_of_the_second_device():
    """It is checked by itself, because it has a module "driver" outside of a package."""
    succeeds(["python3", "-m", "mypy", "../second-device"], PYTHON)


def test_second_device():
    succeeds(["python3", "-B", "tools/second-device/tests/smoke.py"])


def turn(count):
    """Returns the name and the share of what is in turn at a commit, and its suites with their variables."""
    first, *lines = subprocess.run(["tools/test/turn", str(count)], cwd=TOP, check=True, stdout=subprocess.PIPE,
                                   encoding="utf-8").stdout.splitlines()
    return first.split(" (")[0], [[word.strip() for word in line.split(";")] for line in lines]


def test_each_suite_has_its_turn():
    """Ten commits in a row have all turns, and a turn all its shares in as many rounds. Each suite that "make test"
    does not have is in one."""
    rounds = [[turn(count) for count in range(first, first + TURNS)] for first in range(0, 10 * TURNS, TURNS)]
    for each in rounds:
        assert len({name.split(",")[0] for name, _ in each}) == TURNS
    chosen = dict(share for each in rounds for share in each)
    with open(os.path.join(TOP, "tools/test/turns"), encoding="ascii") as file:
        lines = [line for line in file if not line.startswith(("#", "\n"))]
    assert sum(map(len, chosen.values())) == len(lines)
    suites = subprocess.run(["tools/test/run", "--list"], cwd=TOP, check=True, stdout=subprocess.PIPE,
                            encoding="utf-8").stdout.split()
    in_turn = {suite for share in chosen.values() for suite, *_ in share}
    assert set(suites) - in_turn == {"host", "conform", "uml", "stock", "debug"}
    variables = {word.split("=")[0] for share in chosen.values() for _, *words in share for word in words}
    assert variables == {"FAULTS", "K", "ONLY", "VMM"}


@pytest.fixture(scope="session")
def kernel():
    """The directory of the kernel for user-mode Linux, once it is there."""
    return subprocess.run(["tools/vm/kernel", "um"], cwd=TOP, check=True, stdout=subprocess.PIPE,
                          encoding="utf-8").stdout.strip()


def test_checkpatch(kernel):
    checkpatch = [os.path.join(kernel, "source/scripts/checkpatch.pl"), "--no-tree", "--quiet"]
    succeeds([*checkpatch, "--strict", "-f", *KERNEL_C], quiet=True)
    succeeds([*checkpatch, "-f", TRACE_EVENTS], quiet=True)


@pytest.mark.usefixtures("kernel")
def test_module_builds_for_um_without_a_warning():
    # Elsewhere than the module that guests load, which is built already, so that it would say nothing.
    succeeds(["bash", "-c", "rm -rf build/modules/warnings && tools/vm/module um MO=$PWD/build/modules/warnings "
              ">/dev/null"], quiet=True)


@pytest.mark.usefixtures("kernel")
def test_the_driver_in_a_kernel_tree():
    succeeds(["tools/vm/in-tree", "m"])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("target", ["clippy", "rustfmtcheck", "rustdoc"])
def test_make(target):
    succeeds(["make", "-s", target])
