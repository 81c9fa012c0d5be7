# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Puts the device type into VIRTIO's own document, and makes the PDF of the whole."""

import os
import re
import shutil
import subprocess

from virtio_rdma.common import Failure
from virtio_rdma.specification.latex import DEVICE, DEVICE_TYPE

# Lines of VIRTIO's text, the last of which the device type's line follows.
INPUT = r"^\\input\{device-types/\w+/%s\.tex\}\n"
# The last of the clauses of conformance that a driver or a device chooses one of.
LAST_TARGET = r" or\n(\\ref\{sec:Conformance / (Driver|Device) Conformance / [^}]*\})\.$"
# What the log says of labels that are not there, or there more than once.
WRONG_LABEL = re.compile(r"^LaTeX Warning: (?:(?:Hyper r|R)eference|Label) `([^']*)'", re.MULTILINE)


def with_input(text: str, name: str) -> str:
    """Returns a text that reads a file of the device type after the same file of all other types."""
    ends = [found.end() for found in re.finditer(INPUT % name, text, re.MULTILINE)]
    if not ends:
        raise Failure(f"VIRTIO's text reads no {name}.tex of another device type")
    return f"{text[:ends[-1]]}\\input{{{DEVICE_TYPE}/{name}.tex}}\n{text[ends[-1]:]}"


def with_targets(text: str) -> str:
    """Returns a text in which the device type's clauses of conformance are among those to choose from."""
    new = r",\n\1 or\n\\ref{sec:Conformance / \2 Conformance / RDMA \2 Conformance}."
    changed, count = re.subn(LAST_TARGET, new, text, flags=re.MULTILINE)
    if count != 2:
        raise Failure("VIRTIO's list of the targets of conformance has another form")
    return changed


def content(text: str) -> str:
    """Returns VIRTIO's content.tex with the device type."""
    return with_input(text, "description")


def conformance(text: str) -> str:
    """Returns VIRTIO's conformance.tex with the device type."""
    return with_targets(with_input(with_input(text, "driver-conformance"), "device-conformance"))


def insert(out: str, tree: str) -> None:
    """Puts the files of the device type, which are in `out`, into a work tree of VIRTIO's repository."""
    shutil.copytree(os.path.join(out, DEVICE_TYPE), os.path.join(tree, DEVICE_TYPE), dirs_exist_ok=True)
    for name, change in (("content.tex", content), ("conformance.tex", conformance)):
        with open(os.path.join(tree, name), "r+", encoding="utf-8") as file:
            text = change(file.read())
            file.seek(0)
            file.write(text)


def wrong_labels(log: str) -> list[str]:
    """Returns the labels of the device type that are not there, or there twice, by a log of LaTeX."""
    return sorted({label for label in WRONG_LABEL.findall(log) if DEVICE in label})


def typeset(tree: str) -> None:
    """Makes the PDF by VIRTIO's own script, and fails if labels of the device type are not there, or there twice."""
    with open(os.path.join(tree, "REVISION"), encoding="ascii") as file:
        document = os.path.join(tree, file.read().strip())
    # The log breaks no lines.
    environment = {**os.environ, "max_print_line": "1000"}
    subprocess.run(["./makepdf.sh"], cwd=tree, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL, env=environment)
    if not os.path.exists(f"{document}.pdf"):
        raise Failure(f"makepdf.sh fails, see {document}.log")
    with open(f"{document}.log", encoding="utf-8", errors="replace") as log:
        wrong = wrong_labels(log.read())
    if wrong:
        raise Failure("\n".join(wrong))
