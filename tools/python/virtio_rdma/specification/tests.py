# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Whether there is a test of a name. Nothing is built or run: the sources tell."""

import functools
import os
import re

from virtio_rdma.common import TOP
from virtio_rdma.specification.chapters import NUMBER

CRATES = "tools/virtio-rdmad/crates"
# Where the tests of these kinds are; those of any other kind are in the crate of that name.
PROVIDER, SELFTESTS, DRIVER, PACKAGE, CONFORM = (
    "tools/provider", "selftests/virtio_rdma", "rust/virtio_rdma", "tools/python/virtio_rdma/tests",
    f"{CRATES}/conform")

RUST_TEST = r"#\[test\]\s*(?:#\[[^\]]*\]\s*)*(?:pub(?:\([^)]*\))?\s+)?fn {}\("
INLINE = re.compile(r"\bmod (\w+) \{")
# How a function that is a test begins, by the ending of its file.
FUNCTIONS = {".py": r"^def {}\(", ".sh": r"^{}\(\)", ".c": r"\bKUNIT_CASE(?:_PARAM)?\({}\b"}


class Sources:
    """The sources of a checkout, which have tests."""

    def __init__(self, top: str = TOP):
        self.top = top
        self.sources = functools.cache(self._sources)

    def _sources(self, directory: str, ending: str) -> dict[str, str]:
        """Returns the text of each source below a directory, by its path there."""
        found = {}
        for folder, folders, names in os.walk(os.path.join(self.top, directory)):
            folders[:] = [name for name in folders if name not in ("target", "build")]
            for name in names:
                if name.endswith(ending):
                    with open(os.path.join(folder, name), encoding="utf-8") as file:
                        found[os.path.relpath(file.name, os.path.join(self.top, directory))] = file.read()
        return found

    def rust(self, directory: str, name: str) -> bool:
        """Returns whether a crate has a test whose path ends with a name: MODULE::FUNCTION."""
        *modules, function = name.split("::")
        for path, text in self.sources(directory, ".rs").items():
            own = re.sub(r"(?:/mod|/lib|/main)?\.rs$", "", path).split("/")
            wholes = [own, *([*own, inner] for inner in INLINE.findall(text))]
            if (any(whole[len(whole) - len(modules):] == modules for whole in wholes)
                    and re.search(RUST_TEST.format(function), text)):
                return True
        return False

    def selftest(self, name: str) -> bool:
        """Returns whether a program of the selftests has a test: FILE.FUNCTION."""
        file, _, function = name.partition(".")
        return any(os.path.basename(path) == file + ending and re.search(start.format(function), text, re.MULTILINE)
                   for ending, start in FUNCTIONS.items() for path, text in self.sources(SELFTESTS, ending).items())

    def kunit(self, name: str) -> bool:
        """Returns whether the driver has a KUnit test: SUITE.FUNCTION, the suite without virtio_rdma_."""
        suite, _, function = name.partition(".")
        mark = re.compile(rf"kunit_tests\(virtio_rdma_{suite}\)")
        return any(re.search(RUST_TEST.format(function), text[found.end():])
                   for text in self.sources(DRIVER, ".rs").values() if (found := mark.search(text)))

    def package(self, name: str) -> bool:
        """Returns whether the tests of a suite have one: MODULE.FUNCTION or MODULE.CLASS.FUNCTION."""
        module, *names = name.split(".")
        text = self.sources(PACKAGE, ".py").get(f"{module}.py", "")
        *classes, function = names or [""]
        starts = [*(rf"^class {each}\b" for each in classes), rf"^\s*def {function}\("]
        return bool(function) and all(re.search(start, text, re.MULTILINE) for start in starts)

    def conform(self, number: str) -> bool:
        """Returns whether the conformance suite names a clause."""
        return any(f'"{number}"' in text for text in self.sources(CONFORM, ".rs").values())

    def is_test(self, name: str, number: str) -> bool:
        """Returns whether there is a test of a name, which has its kind before a colon, for a clause."""
        kind, _, rest = name.partition(": ")
        if not re.fullmatch(r"[\w.:-]+", rest):
            return False
        if kind == "conform":
            return rest == number and bool(NUMBER.fullmatch(rest)) and self.conform(rest)
        kinds = {"kernel": self.selftest, "kunit": self.kunit, "suite": self.package,
                 "provider": lambda rest: self.rust(PROVIDER, rest)}
        return kinds.get(kind, lambda rest: self.rust(f"{CRATES}/{kind}", rest))(rest)
