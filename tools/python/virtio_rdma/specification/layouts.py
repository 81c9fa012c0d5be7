# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The document about layouts in the form that VIRTIO's text has: each structure first as C."""

import re
import sys
from os import path

from virtio_rdma.common import TOP
from virtio_rdma.specification.names import LAYOUT

sys.path.insert(0, path.join(TOP, "tools", "abi"))
import header  # noqa: E402  pylint: disable=wrong-import-position

# What the document is called where it is no file.
NAME = "Values and layouts"
# Takes the place of what says how the document is made.
TITLE = f"# {NAME}\n\nOffsets and sizes are in bytes.\n\n"
STRUCTURE = re.compile(r"^### struct (\w+), .*$", re.MULTILINE)
# The table of a structure's fields, whose types the C has as well.
FIELDS = re.compile(r"^\| (\d+ \| \d+ \| `[^|]*` )\| [^|]* \|(.*)$", re.MULTILINE)
HEAD = re.compile(r"^\| offset \| size \| field \| type \|(.*)\n\|---\|---\|---\|---\|", re.MULTILINE)


def c_of(body: str) -> str:
    """Returns C with the types of VIRTIO's text."""
    body = re.sub(r"\b__(?=(?:le|be|u|s)\d)", "", body)
    return re.sub(r"(?<=\w)[ \t]+(?=\w+(?:\[|;))", " ", body).expandtabs(8).rstrip()


def structures() -> dict[str, str]:
    """Returns the C of each structure, by its name."""
    return {block["name"]: f"struct {block['name']} {{\n{c_of(block['body'])}\n}};"
            for block in header.BLOCK.finditer(header.text_of(header.DEVICE)) if block["kind"] == "struct"}


def text() -> str:
    """Returns the document in Markdown."""
    with open(LAYOUT, encoding="utf-8") as file:
        found = file.read()
    found = TITLE + found[found.index("## "):]
    shown = structures()
    found = STRUCTURE.sub(lambda match: f"{match[0]}\n\n```\n{shown[match[1]]}\n```", found)
    found = HEAD.sub(r"| offset | size | field |\1\n|---|---|---|", found)
    return FIELDS.sub(r"| \1|\2", found)
