# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Whether there is a test of a name. Nothing is built or run: the sources tell."""

import functools
import os
import re
from collections.abc import Iterator

from virtio_rdma.common import TOP

CRATES = "tools/virtio-rdmad/crates"
# Where the tests of these kinds are; those of any other kind are in the crate of that name.
PROVIDER, SELFTESTS, DRIVER, PACKAGE, CONFORM = (
    "tools/provider", "selftests/virtio_rdma", "rust/virtio_rdma", "tools/python/virtio_rdma/tests",
    f"{CRATES}/conform")

RUST_TEST = re.compile(r"#\[test\]\s*(?:#\[[^\]]*\]\s*)*(?:pub(?:\([^)]*\))?\s+)?fn (\w+)\(")
INLINE = re.compile(r"\bmod (\w+) \{")
# How a function of a selftest begins, by the ending of its file.
FUNCTIONS = {".py": re.compile(r"^def (\w+)\(", re.MULTILINE), ".sh": re.compile(r"^(\w+)\(\)", re.MULTILINE),
             ".c": re.compile(r"\bKUNIT_CASE(?:_PARAM)?\((\w+)")}
SUITE = re.compile(r"kunit_tests\(virtio_rdma_(\w+)\)")
CLASS_OR_FUNCTION = re.compile(r"^(?:class|\s*def) (\w+)", re.MULTILINE)
QUOTED_NUMBER = re.compile(r'"([DV]-[A-Z]+-\d+)"')


class Sources:
    """The sources of a checkout, which have tests. Each is read once, whatever is asked."""

    def __init__(self, top: str = TOP):
        self.top = top
        self.rust = functools.cache(self._rust)
        self.selftests = functools.cache(self._selftests)
        self.kunit = functools.cache(self._kunit)
        self.package = functools.cache(self._package)
        self.conform = functools.cache(self._conform)

    def read(self, directory: str, ending: str) -> Iterator[tuple[str, str]]:
        """Yields the path below a directory, and the text, of each source there."""
        whole = os.path.join(self.top, directory)
        for folder, folders, names in os.walk(whole):
            folders[:] = [name for name in folders if name not in ("target", "build")]
            for name in names:
                if name.endswith(ending):
                    with open(os.path.join(folder, name), encoding="utf-8") as file:
                        yield os.path.relpath(file.name, whole), file.read()

    def _rust(self, directory: str) -> dict[str, list[list[str]]]:
        """Returns the modules that may have each test of a crate, as paths, by the test's name."""
        found: dict[str, list[list[str]]] = {}
        for path, text in self.read(directory, ".rs"):
            own = re.sub(r"(?:/mod|/lib|/main)?\.rs$", "", path).split("/")
            modules = [own, *([*own, inner] for inner in INLINE.findall(text))]
            for name in RUST_TEST.findall(text):
                found.setdefault(name, []).extend(modules)
        return found

    def _selftests(self) -> set[str]:
        """Returns the functions of the selftests: FILE.FUNCTION."""
        return {f"{os.path.basename(path).removesuffix(ending)}.{name}" for ending, start in FUNCTIONS.items()
                for path, text in self.read(SELFTESTS, ending) for name in start.findall(text)}

    def _kunit(self) -> set[str]:
        """Returns the driver's KUnit tests: SUITE.FUNCTION, the suite without virtio_rdma_."""
        return {f"{suite[1]}.{name}" for _, text in self.read(DRIVER, ".rs") for suite in SUITE.finditer(text)
                for name in RUST_TEST.findall(text, suite.end())}

    def _package(self) -> dict[str, set[str]]:
        """Returns the classes and functions of each module of tests in Python."""
        return {path.removesuffix(".py"): set(CLASS_OR_FUNCTION.findall(text))
                for path, text in self.read(PACKAGE, ".py")}

    def _conform(self) -> set[str]:
        """Returns the clauses that the conformance suite names."""
        return {number for _, text in self.read(CONFORM, ".rs") for number in QUOTED_NUMBER.findall(text)}

    def is_rust(self, directory: str, name: str) -> bool:
        """Returns whether a crate has a test whose path ends with a name: MODULE::FUNCTION."""
        *modules, function = name.split("::")
        return any(found[len(found) - len(modules):] == modules for found in self.rust(directory).get(function, []))

    def is_package(self, name: str) -> bool:
        """Returns whether a suite has a test: MODULE.FUNCTION or MODULE.CLASS.FUNCTION."""
        module, *names = name.split(".")
        return bool(names) and set(names) <= self.package().get(module, set())

    def is_test(self, name: str, number: str) -> bool:
        """Returns whether there is a test of a name, which has its kind before a colon, for a clause."""
        kind, _, rest = name.partition(": ")
        if kind == "kernel":
            return rest in self.selftests()
        if kind == "kunit":
            return rest in self.kunit()
        if kind == "suite":
            return self.is_package(rest)
        if kind == "conform":
            return rest == number and rest in self.conform()
        return self.is_rust(PROVIDER if kind == "provider" else f"{CRATES}/{kind}", rest)
