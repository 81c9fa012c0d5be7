# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Writes the chapters as LaTeX in the form of VIRTIO's device types, and a PDF that has them alone.

pandoc reads Markdown and writes LaTeX. In between, a document has the form that pandoc calls JSON: a list of blocks,
each of which is a dictionary with its kind in "t" and what it holds in "c". What follows changes headings, clauses,
code, links and tables."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from virtio_rdma.common import TOP, Failure
from virtio_rdma.specification import chapters, layouts, tables
from virtio_rdma.specification.chapters import NUMBER, SIDE_LEVEL, SIDES
from virtio_rdma.specification.rules import INFORMATIVE
from virtio_rdma.specification.texts import Node, escaped, plain, raw, text_of

TEMPLATES = os.path.join(TOP, "tools", "specification")
# Where the files of a device type are in VIRTIO's repository.
DEVICE_TYPE = "device-types/rdma"
WHOLE = "virtio-rdma"
LAYOUT = "layout.md"
# The label of the device's section, which labels in it begin with.
DEVICE = "Device Types / RDMA Device"
# The commands of headings, from that of the device on. A chapter is one level below the device.
COMMANDS = ("section", "subsection", "subsubsection", "paragraph", "subparagraph")
# The title of a section whose requirements are those of the whole chapter.
OF_CHAPTER = "Requirements"
NORMATIVE = {"D": "devicenormative", "V": "drivernormative"}
# The files that list where requirements are, and the word in their title.
CONFORMANCE = {"D": ("device-conformance.tex", "Device", "An RDMA device"),
               "V": ("driver-conformance.tex", "Driver", "An RDMA driver")}
IDENTIFIER = re.compile(r"(?:(?:struct|enum) )?[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*(?:\[\w*\])?")
# Powers, and two signs that LaTeX would take for a quotation mark.
FORMULA = re.compile(r"(\d+\^\d+|<<|>>)")
# Often enough for numbers of pages in the table of contents.
RUNS = 3


def pandoc(text: str, source: str, target: str) -> str:
    """Returns a text in another form."""
    return subprocess.run(["pandoc", "-f", source, "-t", target, "--wrap=preserve"], input=text, check=True,
                          stdout=subprocess.PIPE, encoding="utf-8").stdout


@dataclass
class Document:
    """A chapter that pandoc has read: its blocks, and the label of each heading by its anchor, where "" is the anchor
    of the chapter."""

    file: str
    blocks: list[Node]
    labels: dict[str, str] = field(default_factory=dict)


def side_of(block: Node) -> str:
    """Returns whose requirements follow a heading: D, V, or nothing."""
    return SIDES.get(text_of(block["c"][2]), "") if block["t"] == "Header" and block["c"][0] == SIDE_LEVEL else ""


def is_for_chapter(blocks: list[Node], at: int) -> bool:
    """Returns whether a heading only says that the requirements behind it are those of the chapter."""
    level, _, title = blocks[at]["c"]
    return level == 2 and text_of(title) == OF_CHAPTER and at + 1 < len(blocks) and bool(side_of(blocks[at + 1]))


def read(file: str, text: str) -> Document:
    """Reads a chapter."""
    document = Document(file, json.loads(pandoc(text, "gfm+smart", "json"))["blocks"])
    path: list[str] = []
    for block in document.blocks:
        if block["t"] == "Header" and not side_of(block):
            level, (anchor, _, _), title = block["c"]
            path = [*path[:level - 1], text_of(title)]
            document.labels[anchor] = label_of(path)
            document.labels.setdefault("", document.labels[anchor])
    return document


class Writer:
    """Turns documents into LaTeX. `normative` has the labels of requirements, by whose they are."""

    def __init__(self, documents: list[Document]):
        self.labels = {document.file: document.labels for document in documents}
        self.normative: dict[str, list[str]] = {"D": [], "V": []}
        self.document = documents[0]

    def write(self, document: Document) -> str:
        """Returns the LaTeX of a document."""
        self.document = document
        blocks = list(self.headings(document.blocks))
        text = pandoc(json.dumps({"pandoc-api-version": [1, 23, 1], "meta": {}, "blocks": blocks}), "json", "latex")
        # VIRTIO's preamble does not have pandoc's own commands.
        return re.sub(r"\\tightlist\n|\\def\\labelenumi\{[^\n]*\n", "", text)

    def headings(self, blocks: list[Node]) -> Iterator[Node]:
        """Yields blocks as LaTeX has them. A heading names its label; one of requirements names its section."""
        path: list[str] = []
        for at, block in enumerate(blocks):
            if block["t"] != "Header":
                yield from self.block(block)
            elif side := side_of(block):
                # Requirements are those of a section, not of a part of it.
                yield self.requirements(side, path[:2])
            elif is_for_chapter(blocks, at):
                path = path[:1]
            else:
                level, _, title = block["c"]
                path = [*path[:level - 1], text_of(title)]
                yield {"t": "Plain", "c": [raw(f"\\{COMMANDS[level]}{{"), *self.inlines(title),
                                           raw(f"}}\\label{{sec:{label_of(path)}}}")]}

    def requirements(self, side: str, path: list[str]) -> Node:
        """Returns the heading of the requirements of a chapter or a section, whose title is the last of the path."""
        label = label_of(path)
        self.normative[side].append(label)
        return raw_block(f"\\{NORMATIVE[side]}{{\\{COMMANDS[len(path) + 1]}}}{{{escaped(path[-1])}}}{{{label}}}")

    def blocks(self, blocks: list[Node]) -> list[Node]:
        """Returns what takes the place of blocks without headings."""
        return [part for block in blocks for part in self.block(block)]

    def block(self, block: Node) -> Iterator[Node]:
        """Yields what takes the place of a block."""
        kind: str = block["t"]
        inner: Any = block.get("c")
        if kind in ("Para", "Plain"):
            yield {"t": kind, "c": self.paragraph(inner)}
        elif kind == "CodeBlock":
            yield raw_block(f"\\begin{{lstlisting}}\n{inner[1]}\n\\end{{lstlisting}}")
        elif kind == "Table":
            yield tables.longtable(inner, self.inlines)
        elif kind in ("BulletList", "OrderedList"):
            items = inner if kind == "BulletList" else inner[1]
            changed = [self.blocks(item) for item in items]
            yield {"t": kind, "c": changed if kind == "BulletList" else (inner[0], changed)}
        elif kind == "BlockQuote":
            yield {"t": kind, "c": self.blocks(inner)}
        elif kind != "RawBlock":
            raise Failure(f"{self.document.file}: a block of the kind {kind} has no form in LaTeX")

    def paragraph(self, inlines: list[Node]) -> list[Node]:
        """Returns a paragraph as LaTeX has it, with the number that it may begin with as that of a clause."""
        if inlines and inlines[0]["t"] == "Strong" and NUMBER.fullmatch(text_of(inlines[0]["c"])):
            return [raw(f"\\clause{{{text_of(inlines[0]['c'])}}}"), *self.inlines(inlines[1:])]
        return self.inlines(inlines)

    def inlines(self, inlines: list[Node]) -> list[Node]:
        """Returns parts of a paragraph as LaTeX has them."""
        found: list[Node] = []
        for place, inline in enumerate(inlines):
            before = inlines[place - 1] if place else {}
            if inline["t"] == "Code" and before.get("t") == "Str" and before["c"].endswith("^"):
                # An exponent.
                found[-1] = plain(before["c"][:-1])
                found.append(raw(f"\\textsuperscript{{{code(inline['c'][1])}}}"))
            else:
                found += self.inline(inline)
        return found

    def inline(self, inline: Node) -> list[Node]:
        """Returns what takes the place of a part of a paragraph."""
        kind: str = inline["t"]
        inner: Any = inline.get("c")
        if kind == "Code":
            return [raw(code(inner[1]))]
        if kind == "Str":
            # VIRTIO's document has no such file.
            parts = FORMULA.split(inner.replace(LAYOUT, layouts.NAME))
            return [raw(formula(part)) if FORMULA.fullmatch(part) else plain(part) for part in parts]
        if kind == "Link":
            return self.link(self.inlines(inner[1]), inner[2][0])
        if kind in ("Strong", "Emph"):
            return [{"t": kind, "c": self.inlines(inner)}]
        if kind == "Quoted":
            return [{"t": kind, "c": [inner[0], self.inlines(inner[1])]}]
        return [] if kind == "RawInline" else [inline]

    def link(self, text: list[Node], target: str) -> list[Node]:
        """Returns a link to a heading, or its text alone if the heading is not in LaTeX."""
        if re.match(r"https?:", target):
            return [raw(f"\\href{{{target}}}{{"), *text, raw("}")]
        file, _, anchor = target.partition("#")
        label = self.labels.get(os.path.basename(file) or self.document.file, {}).get(anchor)
        return [raw(f"\\hyperref[sec:{label}]{{"), *text, raw("}")] if label else text


def label_of(path: list[str]) -> str:
    """Returns the label of a heading below others. VIRTIO's labels have no underscores."""
    return " / ".join([DEVICE, *path]).replace("_", "-")


def formula(text: str) -> str:
    """Returns what matches FORMULA."""
    base, caret, power = text.partition("^")
    return f"${base}^{{{power}}}$" if caret else "\\null".join(map(escaped, text))


def code(text: str) -> str:
    """Returns what stands between back quotes: a field or a structure, or something else."""
    command = "field" if IDENTIFIER.fullmatch(text) else "texttt"
    return f"\\{command}{{{escaped(' '.join(text.split()))}}}"


def raw_block(text: str) -> Node:
    """Returns a block of LaTeX."""
    return {"t": "RawBlock", "c": ["latex", text]}


def conformance(side: str, labels: list[str]) -> str:
    """Returns the list of all requirements of a side."""
    _, word, subject = CONFORMANCE[side]
    title = f"RDMA {word} Conformance"
    lines = [f"\\conformance{{\\subsection}}{{{title}}}\\label{{sec:Conformance / {word} Conformance / {title}}}", "",
             f"{subject} MUST conform to the following normative statements:", ""]
    if labels:
        items = [f"\\item \\ref{{{NORMATIVE[side]}:{label}}}" for label in labels]
        lines += ["\\begin{itemize}", *items, "\\end{itemize}"]
    return "\n".join(lines) + "\n"


def documents_of(folder: str) -> list[Document]:
    """Reads the chapters that have a place in VIRTIO's text, and the layouts."""
    found = [chapter for chapter in chapters.read_all(folder) if chapter.file not in INFORMATIVE]
    return [*(read(chapter.file, chapter.text) for chapter in found), read(LAYOUT, layouts.text())]


def write(folder: str, out: str) -> None:
    """Writes the files of the device type, and the PDF."""
    directory = os.path.join(out, DEVICE_TYPE)
    os.makedirs(directory, exist_ok=True)
    documents = documents_of(folder)
    writer = Writer(documents)
    parts = [writer.write(document) for document in documents]
    with open(os.path.join(TEMPLATES, "introduction.tex"), encoding="ascii") as file:
        introduction = file.read()
    files = {"description.tex": "\n".join([introduction, *parts]),
             **{CONFORMANCE[side][0]: conformance(side, labels) for side, labels in writer.normative.items()}}
    for name, text in files.items():
        with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
            file.write(text)
    shutil.copy(os.path.join(TEMPLATES, f"{WHOLE}.tex"), out)
    typeset(out)


def typeset(out: str) -> None:
    """Makes the PDF, and fails if a reference in it leads nowhere."""
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", f"{WHOLE}.tex"]
    for _ in range(RUNS):
        done = subprocess.run(command, cwd=out, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              encoding="utf-8", errors="replace")
        if done.returncode:
            raise Failure(f"pdflatex fails, see {out}/{WHOLE}.log\n{done.stdout[-2000:]}")
    lost = re.findall(r"^LaTeX Warning: (?:Hyper r|R)eference `.*", done.stdout, re.MULTILINE)
    if lost:
        raise Failure("\n".join(lost))
