# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The names that chapters may use: those of the ABI, which layout.md has, and a few of others."""

import os
import re

from virtio_rdma.common import TOP

LAYOUT = os.path.join(TOP, "Documentation", "layout.md")
# Names that VIRTIO defines. Those that begin with VIRTIO_F_ are VIRTIO's as well.
VIRTIO = {"DEVICE_NEEDS_RESET", "DRIVER_OK", "FEATURES_OK"}
# Words in capitals that no value of the ABI is called.
WORDS = {"CNP", "CQE", "DDR", "EDR", "FDR", "FREE", "HDR", "IBA", "ICRC", "IEEE", "IOVA", "NAK", "NDR", "NOT", "PCI",
         "QDR", "RDMA", "RFC", "RNR", "ROM", "SDR", "SGE", "UDP", "VALID", "VIRTIO", "XDR"}

# A word in capitals: no part of a longer word, of the number of a clause, or of a name such as C9-88.
WORD = re.compile(r"(?<![\w-])[A-Z][A-Z0-9_]+(?![\w-])")
# A name of a field or a structure between back quotes.
FIELD = re.compile(r"(?:struct |enum )?([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*)")
# What these begin with stands for structures with longer names.
SHORT = re.compile(r"(?:cmd|rsp)_\w+")
# What stands for any command.
ANY = re.compile(r"(?:virtio_rdma_)?(?:cmd|rsp)_x")


class Names:
    """The names that a text about layouts has."""

    def __init__(self, layout: str):
        whole = set(re.findall(r"VIRTIO_RDMA_[A-Z0-9_]*[A-Z0-9]", layout))
        parts = [name.split("_") for name in whole]
        self.values = {"_".join(words[at:]) for words in parts for at in range(len(words))}
        self.structures = set(re.findall(r"\bvirtio_rdma_[a-z0-9_]*[a-z0-9]\b", layout))
        quoted = re.findall(r"`([a-z][a-z0-9_.]*)(?:\[\w*\])?`", layout)
        self.fields = {part for name in quoted for part in name.split(".")} | {"config"}

    def is_value(self, word: str) -> bool:
        """Returns whether a word in capitals is known. One of letters and digits, such as A14, is not looked at."""
        if "_" not in word and re.search(r"\d", word):
            return True
        return word in self.values or word in VIRTIO or word in WORDS or word.startswith("VIRTIO_F_")

    def is_field(self, code: str) -> bool:
        """Returns whether what stands between back quotes is known, or is no name of a field or a structure."""
        name = FIELD.fullmatch(code)
        if not name or not re.search(r"[_.]", name[1]) or ANY.fullmatch(name[1]):
            return True
        if SHORT.fullmatch(name[1]):
            return f"virtio_rdma_{name[1]}" in self.structures
        first, *others = name[1].split(".")
        return (first in self.fields or first in self.structures) and all(part in self.fields for part in others)


def of_layout(path: str = LAYOUT) -> Names:
    """Returns the names of the document about layouts."""
    with open(path, encoding="utf-8") as file:
        return Names(file.read())
