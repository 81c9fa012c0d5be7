# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The manifest: for each clause the tests that decide whether a side keeps it, or why there is no such test."""

import os
import tomllib
from collections.abc import Callable, Iterator

from virtio_rdma.common import TOP
from virtio_rdma.specification.chapters import Chapter

PATH = os.path.join(TOP, "tools", "specification", "manifest.toml")
# What a reason begins with.
REASON = "no test: "


def read(path: str = PATH) -> dict[str, dict]:
    """Returns the entries of each chapter, by the chapter's name."""
    with open(path, "rb") as file:
        return tomllib.load(file)


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
    entries = {number: (name, entry) for name, table in manifest.items() for number, entry in table.items()}
    names = {chapter.name for chapter in chapters}
    found = [f"manifest.toml: {name} is no chapter" for name in manifest if name not in names]
    found += [f"manifest.toml has no entry for {number}" for number in places if number not in entries]
    for number, (name, entry) in entries.items():
        if places.get(number) != name:
            found.append(f"manifest.toml: {number} is no clause of {name}.md")
        found += of_entry(number, entry, is_test)
    return found
