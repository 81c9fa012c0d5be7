# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite conform: virtio-rdma-conform judges the device of this project, by each way of attaching, and the second
device, clause by clause. Its own tests show that it finds the planted defects of a device, and does not hang on a
device that talks nonsense or dies."""

import collections
import contextlib
import json
import os
import subprocess
import time

import pytest

from virtio_rdma.common import BUILD, TOP, die_with_parent
from virtio_rdma.tests import cargo

CONFORM = os.path.join(BUILD, "virtio-rdma-conform")
# The bound on a judgement, in seconds. On a machine with nothing else to do, none takes a tenth of it.
HANG_SECONDS = 1200
# The bound on the start of a device, in seconds.
START_SECONDS = 60
MEMBERS = ("a", "b")


def virtio_rdmad(transport, sockets, directory):
    """Returns the command of this project's device, with one guest for each socket."""
    command = [os.path.join(BUILD, "virtio-rdmad"), "--control", str(directory / "control")]
    for number, socket in enumerate(sockets, 1):
        command += ["--guest", f"name=member{number},{transport}={socket},mac=52:54:00:00:00:0{number}"]
    return command


def second_device(_transport, sockets, _directory):
    """Returns the command of the device that was written from the text alone."""
    command = [os.path.join(TOP, "tools/second-device/second-device")]
    for socket in sockets:
        command += ["--socket", socket]
    return command


# The devices, each with its command and the transport by which it is judged.
DEVICES = {
    "virtio-rdmad over vhost-user": (virtio_rdmad, "vhost-user"),
    "virtio-rdmad over vfio-user": (virtio_rdmad, "vfio-user"),
    "second device over vhost-user": (second_device, "vhost-user"),
}


@contextlib.contextmanager
def served(command, sockets, log):
    """Runs a device that listens at these sockets, and ends it."""
    with open(log, "wb") as file, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                                   preexec_fn=die_with_parent) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not all(os.path.exists(socket) for socket in sockets):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"{command[0]} does not start, see {log}", pytrace=False)
                time.sleep(0.01)
            yield
            assert process.poll() is None, f"{command[0]} ended with status {process.returncode}, see {log}"
        finally:
            process.terminate()


def judge(arguments, directory):
    """Runs virtio-rdma-conform. Returns what it found, of which its exit status has to tell."""
    found = directory / "found.json"
    done = subprocess.run([CONFORM, "device", *arguments, "--json", str(found)], check=False, timeout=HANG_SECONDS,
                          stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8")
    assert done.returncode in (0, 1), f"virtio-rdma-conform ends with status {done.returncode}: {done.stderr}"
    with open(found, encoding="utf-8") as file:
        findings = json.load(file)
    assert done.returncode == any(test["result"] == "fail" for test in findings["tests"])
    return findings


def report(results, label, found):
    """Reports each test that came to a judgement, and for each reason how many did not."""
    assert found["tests"], "no test ran"
    reasons: collections.Counter[str] = collections.Counter()
    for test in found["tests"]:
        if test["result"] == "not judged":
            reasons[test["reason"]] += 1
            continue
        if test["result"] == "fail":
            results.note(json.dumps(test["failure"], indent=1))
        results.result(f"{label}: {test['name']}", test["result"] == "pass")
    for reason, count in sorted(reasons.items()):
        results.result(f"{label}: {count} tests", skip=reason)


@pytest.mark.parametrize("label", DEVICES)
def test_device(label, results, tmp_path):
    """A device keeps all clauses that can be judged from outside."""
    command, transport = DEVICES[label]
    sockets = [str(tmp_path / name) for name in MEMBERS]
    with served(command(transport, sockets, tmp_path), sockets, tmp_path / "log"):
        report(results, label, judge([f"--{transport}", *sockets], tmp_path))


def test_device_in_process(results, tmp_path):
    """The device keeps them without a transport between it and the suite."""
    report(results, "in process", judge(["--in-process"], tmp_path))


def test_suite(results):
    """The suite's own tests: it judges planted defects, and devices that talk nonsense."""
    argv = ["cargo", "test", "--locked", "-p", "conform", "--no-fail-fast"]
    cargo.run(results, "conform", argv, cargo.DEVICE, cargo.OF_DEVICE)


def test_user_space_driver(tmp_path):
    """The suite's driver works by itself: an example of it connects two QPs of a device over vfio-user, and writes."""
    socket = str(tmp_path / "a")
    argv = ["cargo", "run", "--locked", "-p", "conform", "--example", "rdma_write", "--", socket]
    with served(virtio_rdmad("vfio-user", [socket], tmp_path), [socket], tmp_path / "log"):
        done = subprocess.run(argv, cwd=cargo.DEVICE, env={**os.environ, **cargo.OF_DEVICE}, check=False,
                              timeout=HANG_SECONDS, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout[-22:]) == (0, "and the data is right\n"), done.stdout + done.stderr
