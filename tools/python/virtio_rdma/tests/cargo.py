# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""What runs the tests of a cargo workspace, each of which is a result."""

import os
import re
import subprocess

from virtio_rdma.common import BUILD, TOP

DEVICE = os.path.join(TOP, "tools/virtio-rdmad")
# The environment of the tests of the device.
OF_DEVICE = {"CARGO_TARGET_DIR": os.path.join(BUILD, "cargo-virtio-rdmad")}
LIBTEST = re.compile(r"^test (\S.*?) \.\.\. (ok|FAILED|ignored)(?:, (.*))?$")
RUNNING = re.compile(r"^\s*(?:Running|Doc-tests) (?:unittests )?(\S+)(?: \(\S*/(\S+)-[0-9a-f]+\))?")
# Lines of a failed command that are shown.
LAST_LINES = 60


def run(results, label, argv, directory, env):
    """Runs a command that runs tests of cargo, and reports each of them."""
    with subprocess.Popen(argv, cwd=directory, env={**os.environ, **env, "CARGO_TERM_QUIET": "false"},
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          encoding="utf-8", errors="replace") as process:
        binary, before = label, results.failed
        last: list[str] = []
        for line in process.stdout or ():
            running, test = RUNNING.match(line), LIBTEST.match(line)
            if running:
                binary = f"{label}: {running[2] or running[1]}"
            elif test:
                skip = (test[3] or "no reason given") if test[2] == "ignored" else None
                results.result(f"{binary}: {test[1]}", test[2] != "FAILED", skip)
            else:
                last = last[-LAST_LINES:] + [line]
    if process.returncode:
        results.note("".join(last))
    assert results.failed > before or not process.returncode, f"{label}: {' '.join(argv)} ends early"
