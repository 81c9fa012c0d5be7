# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The manifest: for each clause the tests that decide whether a side keeps it, or why there is no such test. It also
says which chapters are not converted: these have their old form, without clauses."""

import os
import tomllib
from collections.abc import Callable, Iterator

from virtio_rdma.common import TOP
from virtio_rdma.specification.chapters import Chapter

PATH = os.path.join(TOP, "tools", "specification", "manifest.toml")
# What a reason begins with.
REASON = "no test: "
# What the table of a chapter has, with false, that is not converted.
CONVERTED = "converted"


def read(path: str = PATH) -> dict[str, dict]:
    """Returns the entries of each chapter, by the chapter's name."""
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


def of_entry(number: str, entry: object, is_test: Callable[[str, str], bool]) -> Iterator[str]:
    """An entry that is a reason, or a list of tests that there are."""
    if isinstance(entry, str):
        if not entry.removeprefix(REASON).strip() or not entry.startswith(REASON):
            yield f'manifest.toml: {number}: a reason begins with "{REASON}"'
    elif not isinstance(entry, list) or not entry or not all(isinstance(name, str) for name in entry):
        yield f'manifest.toml: {number} has a list of tests, or "{REASON}" and the reason'
    else:
        yield from (f"manifest.toml: {number}: there is no test {name}" for name in entry if not is_test(name, number))


def check(chapters: list[Chapter], manifest: dict[str, dict], is_test: Callable[[str, str], bool]) -> list[str]:
    """Returns what is wrong with a manifest: each clause has an entry in the table of its chapter, and nothing else has
    one. `is_test` says whether there is a test of a name, for a clause."""
    places = {clause.number: chapter.name for chapter in chapters for clause in chapter.clauses}
    entries = {number: (name, entry) for name, table in manifest.items() for number, entry in table.items()
               if number != CONVERTED}
    found = [*of_chapters(chapters, manifest)]
    found += [f"manifest.toml has no entry for {number}" for number in places if number not in entries]
    for number, (name, entry) in entries.items():
        if places.get(number) != name:
            found.append(f"manifest.toml: {number} is no clause of {name}.md")
        found += of_entry(number, entry, is_test)
    return found
