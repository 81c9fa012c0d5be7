# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Reads headers of ABIs: names and values from their text, offsets, sizes and types from the compiler."""

import pathlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field

TOP = pathlib.Path(__file__).resolve().parents[2]
DEVICE = TOP / "include/uapi/linux/virtio_rdma.h"
USER = TOP / "include/uapi/rdma/virtio_rdma-abi.h"
# The first macro of each header, above which there are no values.
FIRST = {DEVICE: "#define VIRTIO_RDMA_DEVICE_ID", USER: "#define VIRTIO_RDMA_UVERBS_ABI_VERSION"}

# These match at the beginning of a line of a header.
DEFINE = re.compile(r"#define (?P<name>VIRTIO_RDMA_\w+)\s+(?P<value>\S.*)")
REQUIRES = re.compile(r"#define VIRTIO_RDMA_REQUIRES_(?P<name>\w+)\s+(?P<value>\S.*)")
ENUMERATOR = re.compile(r"\s*(?P<name>VIRTIO_RDMA_\w+)\s*=\s*(?P<value>\w+),")
BLOCK = re.compile(r"(?P<kind>enum|struct) (?P<name>virtio_rdma_\w+) \{\n(?P<body>.*?)^\};", re.DOTALL | re.MULTILINE)

# These match lines of pahole's output.
FIELD = re.compile(r"^(?P<decl>\w.*?)\s*;\s*/\*\s*(?P<offset>\d+)\s+(?P<size>\d+)\s*\*/$")
OPEN = re.compile(r"^(?P<kind>struct|union) \{$")
CLOSE = re.compile(r"^\}\s*(?P<name>\w*)\s*;\s*/\*\s*(?P<offset>\d+)\s+(?P<size>\d+)\s*\*/$")
SIZE = re.compile(r"/\* size: (\d+)")
# What pahole adds to a field of a type such as __aligned_u64.
ATTRIBUTE = re.compile(r"\s*__attribute__\(\(\w+\(\d+\)\)\)")


@dataclass
class Field:
    """A field of a structure: its offset from the beginning of the outermost structure, its size in bytes, its name
    with the brackets of an array, and its type. A struct or union without a tag has its fields in `fields`."""

    offset: int
    size: int
    name: str
    type: str
    fields: list = field(default_factory=list)

    def leaves(self, prefix=""):
        """Returns the fields that hold values: this one, or those in it, with their full names."""
        if not self.fields:
            return [Field(self.offset, self.size, prefix + self.name, self.type)]
        inner = f"{prefix}{self.name}." if self.name else prefix
        return [leaf for part in self.fields for leaf in part.leaves(inner)]


@dataclass
class Structure:
    """A structure with its size in bytes."""

    name: str
    size: int
    fields: list

    def leaves(self):
        """Returns the fields that hold values, with their full names."""
        return [leaf for part in self.fields for leaf in part.leaves()]


def text_of(header):
    """Returns the part of a header that has values and structures."""
    text = header.read_text()
    return text[text.index(FIRST[header]):]


def structures_of(header):
    """Returns the names of the structures of a header, in its order."""
    return re.findall(r"^struct (virtio_rdma_\w+) \{", text_of(header), re.MULTILINE)


def requirements(header):
    """Returns for each feature bit that requires others the names of these."""
    return {f"VIRTIO_RDMA_F_{match['name']}": re.findall(r"VIRTIO_RDMA_F_\w+", match["value"])
            for match in REQUIRES.finditer(text_of(header))}


def number(value):
    """Returns a value as text: flags in hexadecimal, unless names of bits make them, and other values in decimal."""
    plain = re.sub(r"(?<=\d)U?L*\b", "", value.strip("()"))
    if "<<" in plain and "VIRTIO_RDMA_" not in plain:
        one, shift = plain.split("<<")
        return f"{int(one, 0) << int(shift, 0):#x}"
    return plain


def _parse(text):
    """Returns the fields of a structure that pahole prints."""
    levels, kinds = [[]], []
    for line in text.splitlines()[1:]:
        line = ATTRIBUTE.sub("", line.strip())
        if match := OPEN.match(line):
            levels.append([])
            kinds.append(match["kind"])
        elif kinds and (match := CLOSE.match(line)):
            inner, kind = levels.pop(), kinds.pop()
            levels[-1].append(Field(int(match["offset"]), int(match["size"]), match["name"], kind, inner))
        elif match := FIELD.match(line):
            kind, name = match["decl"].rsplit(None, 1)
            levels[-1].append(Field(int(match["offset"]), int(match["size"]), name, " ".join(kind.split())))
    assert not kinds, text
    return levels[0]


def layouts(include, names):
    """Returns each structure as the compiler lays it out, by name. `include` is the text behind #include."""
    found = {}
    with tempfile.TemporaryDirectory() as tmp:
        source = pathlib.Path(tmp) / "abi.c"
        lines = [f"#include {include}", *(f"struct {name} the_{name};" for name in names)]
        source.write_text("\n".join(lines) + "\n")
        obj = source.with_suffix(".o")
        subprocess.run(["gcc", "-g", "-c", "-o", obj, source], check=True)
        for name in names:
            # Not check=True: pahole 1.30 prints the structure and then complains
            # of an object that holds one compilation unit alone.
            done = subprocess.run(["pahole", "-F", "dwarf", "-C", name, obj],
                                  text=True, capture_output=True, check=False)
            size = SIZE.search(done.stdout)
            if not size:
                sys.exit(f"pahole cannot show struct {name}: {done.stderr.strip()}")
            found[name] = Structure(name, int(size[1]), _parse(done.stdout))
    return found


def values(includes, names):
    """Returns the value that the compiler gives to each name."""
    with tempfile.TemporaryDirectory() as tmp:
        source = pathlib.Path(tmp) / "values.c"
        lines = [f"#include {include}" for include in ("<stdio.h>", *includes)] + ["int main(void)", "{"]
        lines += [f'printf("%lld\\n", (long long){name});' for name in names] + ["}"]
        source.write_text("\n".join(lines) + "\n")
        program = source.with_suffix("")
        subprocess.run(["gcc", "-o", program, source], check=True)
        done = subprocess.run([program], text=True, capture_output=True, check=True)
    return dict(zip(names, map(int, done.stdout.split())))
