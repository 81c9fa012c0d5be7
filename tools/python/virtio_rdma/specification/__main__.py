# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Checks the chapters of the specification and its manifest, or writes its LaTeX and its PDF."""

import argparse
import sys

from virtio_rdma.specification import chapters, latex, manifest, names, rules, tests, virtio


def problems(folder: str = chapters.FOLDER) -> list[str]:
    """Returns what is wrong with the chapters and the manifest."""
    found = chapters.read_all(folder)
    return [*rules.check(found, names.of_layout()),
            *manifest.check(found, manifest.read(), tests.Sources().is_test)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="specification", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="print what is wrong, and fail if something is")
    check.add_argument("folder", nargs="?", default=chapters.FOLDER, help="the chapters")
    make = commands.add_parser("latex", help='write LaTeX and a PDF; in the root "specification"')
    make.add_argument("out", help="the directory that gets them")
    make.add_argument("folder", nargs="?", default=chapters.FOLDER, help="the chapters")
    whole = commands.add_parser("virtio", help='put the LaTeX into VIRTIO\'s document; in the root "virtio"')
    whole.add_argument("out", help="the directory with the LaTeX")
    whole.add_argument("tree", help="a clone of VIRTIO's repository, which is changed")
    options = parser.parse_args()
    if options.command == "latex":
        latex.write(options.folder, options.out)
        return 0
    if options.command == "virtio":
        virtio.insert(options.out, options.tree)
        virtio.typeset(options.tree)
        return 0
    found = problems(options.folder)
    print("\n".join(found), end="\n" * bool(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
