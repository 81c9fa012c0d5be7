# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The manifest, which says which chapters are not converted: these have their old form, without clauses."""

import os
import tomllib
from collections.abc import Iterator

from virtio_rdma.common import TOP
from virtio_rdma.specification.chapters import Chapter

PATH = os.path.join(TOP, "tools", "specification", "manifest.toml")
# What the table of a chapter has, with false, that is not converted.
CONVERTED = "converted"


def read(path: str = PATH) -> dict[str, dict]:
    """Returns the table of each chapter, by the chapter's name."""
    with open(path, "rb") as file:
        return tomllib.load(file)


def not_converted(manifest: dict[str, dict]) -> set[str]:
    """Returns the names of the chapters that are not converted."""
    return {name for name, entries in manifest.items() if entries.get(CONVERTED) is False}


def of_chapters(chapters: list[Chapter], manifest: dict[str, dict]) -> Iterator[str]:
    """Tables of chapters that there are, and that are not converted if the table says so."""
    found = {chapter.name: chapter for chapter in chapters}
    for name, entries in manifest.items():
        if name not in found:
            yield f"manifest.toml: {name} is no chapter"
        elif CONVERTED in entries and (entries != {CONVERTED: False} or found[name].is_converted):
            yield f'manifest.toml: {name} is converted, so "{CONVERTED}" goes'


def check(chapters: list[Chapter], manifest: dict[str, dict]) -> list[str]:
    """Returns what is wrong with a manifest."""
    return [*of_chapters(chapters, manifest)]
