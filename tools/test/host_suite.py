# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite host: unit, property and fuzz tests of the device and the provider,
those under a model of memory, and the checks of the sources. Runs inside the build root."""

import os
import re
import subprocess
import sys
import tempfile

import ktap

# Fuzz targets, and with how many inputs each is run here: some seconds' worth.
FUZZ = {"engine": 4000, "ring": 20000, "vfio_user": 12000, "vhost_user": 8000}
# What the kernel's checkpatch.pl looks at.
KERNEL_C = ["rust/helpers/helpers.c", "include/virtio_rdma_bindings.h", "include/virtio_rdma_helpers.h",
            "include/uapi/linux/virtio_rdma.h", "include/uapi/rdma/virtio_rdma-abi.h",
            *(f"selftests/virtio_rdma/kverbs/{name}" for name in (
                "kverbs.h", "main.c", "objects.c", "contexts.c", "data.c", "memory.c", "states.c", "srq.c"))]
TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIBTEST = re.compile(r"^test (\S.*?) \.\.\. (ok|FAILED|ignored)(?:, (.*))?$")
RUNNING = re.compile(r"^\s*(?:Running|Doc-tests) (?:unittests )?(\S+)(?: \(\S*/(\S+)-[0-9a-f]+\))?")


class Host:
    def __init__(self):
        self.report = ktap.Report()

    def command(self, name, argv, directory=TOP, env=None, quiet=False):
        """One result: the command succeeds, and prints nothing where quiet."""
        done = subprocess.run(argv, cwd=directory, env={**os.environ, **(env or {})}, check=False,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, encoding="utf-8", errors="replace")
        passed = done.returncode == 0 and not (quiet and done.stdout.strip())
        if not passed:
            self.report.note("\n".join(done.stdout.split("\n")[-60:]))
        self.report.result(name, passed)
        return passed

    def cargo_test(self, name, argv, directory, env):
        """Every test of a cargo workspace as a result of its own."""
        process = subprocess.Popen(argv, cwd=directory, env={**os.environ, **env, "CARGO_TERM_QUIET": "false"},
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, encoding="utf-8", errors="replace")
        binary, tail, before = name, [], self.report.failed
        for line in process.stdout:
            running, test = RUNNING.match(line), LIBTEST.match(line)
            if running:
                binary = f"{name}: {running[2] or running[1]}"
            elif test:
                skip = (test[3] or "no reason given") if test[2] == "ignored" else None
                self.report.result(f"{binary}: {test[1]}", test[2] != "FAILED", skip)
            else:
                tail = tail[-80:] + [line]
        status = process.wait()
        if status:
            self.report.note("".join(tail))
        if status and self.report.failed == before:
            self.report.result(f"{name}: cargo test", False)

    def fuzz(self):
        """Each fuzz target with its corpus and inputs made of it, the same each time."""
        package = os.path.join(TOP, "tools/virtio-rdmad/fuzz")
        env = {"CARGO_TARGET_DIR": os.path.join(TOP, "build/cargo-fuzz")}
        found = os.path.join(TOP, "build/fuzz")
        os.makedirs(found, exist_ok=True)
        for target, runs in FUZZ.items():
            with tempfile.TemporaryDirectory() as corpus:
                subprocess.run(["corpus/pack", "-u", target, corpus], cwd=package, check=True)
                passed = self.command(f"fuzz: {target}", [
                    "cargo", "run", "--release", "--locked", "--bin", target, "--", f"-runs={runs}", "-seed=1",
                    "-timeout=120", f"-artifact_prefix={found}/{target}-", corpus], package, env)
            if not passed:
                self.report.note(f"The input is named above; again: make fuzz F={target} INPUT=build/fuzz/{target}-...")

    def run(self):
        device = os.path.join(TOP, "tools/virtio-rdmad")
        target = {"CARGO_TARGET_DIR": os.path.join(TOP, "build/cargo-virtio-rdmad")}
        self.cargo_test("device", ["cargo", "test", "--locked", "--workspace", "--no-fail-fast"], device, target)
        self.cargo_test("provider", ["make", "-s", "-C", "tools/provider", "test"], TOP, {})
        self.cargo_test("limits", ["cargo", "test", "--locked"], os.path.join(TOP, "tools/bench/limits"),
                        {"CARGO_TARGET_DIR": os.path.join(TOP, "build/cargo-bench")})
        self.cargo_test("loom", ["make", "-s", "loom"], TOP, {})
        self.command("bench", ["python3", "-B", "-m", "unittest", "test_bench"], os.path.join(TOP, "tools/bench"))
        # Elsewhere than the module that guests load, which is built already, so that it would say nothing.
        self.command("module builds for um without a warning", [
            "bash", "-c", "rm -rf build/modules/warnings && tools/vm/module um MO=$PWD/build/modules/warnings >/dev/null"],
            quiet=True)
        self.fuzz()
        kernel = subprocess.run(["tools/vm/kernel", "um"], cwd=TOP, check=True, stdout=subprocess.PIPE,
                                encoding="utf-8").stdout.strip()
        self.command("checkpatch", [os.path.join(kernel, "source/scripts/checkpatch.pl"), "--no-tree", "--strict",
                                    "--quiet", "-f", *KERNEL_C], quiet=True)
        self.command("Documentation/layout.md says what the header says", [
            "tools/abi/layout", "--check", "Documentation/layout.md"])
        self.command("Documentation/user-abi.md says what the header says", [
            "tools/abi/layout", "--user", "--check", "Documentation/user-abi.md"])
        self.command("selftests/virtio_rdma/verbs/abi.py says what the headers say", [
            "tools/abi/layout", "--python", "--check", "selftests/virtio_rdma/verbs/abi.py"])
        self.command("the driver in a kernel tree", ["tools/vm/in-tree", "m"])
        self.command("the engine's floors", ["tools/test/floors"], quiet=True)
        self.command("clippy", ["make", "-s", "clippy"])
        self.command("rustfmt", ["make", "-s", "rustfmtcheck"])
        self.command("rustdoc", ["make", "-s", "rustdoc"])
        scripts = subprocess.run(
            ["git", "-c", f"safe.directory={TOP}", "grep", "-lE", "^#!/bin/(ba)?sh"], cwd=TOP, check=True,
            stdout=subprocess.PIPE, encoding="utf-8").stdout.split()
        self.command("shellcheck", ["shellcheck", "-x", "-S", "warning", "-e", "SC1090,SC1091,SC2034,SC2154", *scripts])
        return self.report.end()


if __name__ == "__main__":
    ktap.main_guard(lambda _: Host().run())
