# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Reads the chapters: their headings, their clauses, and what stands between these."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from virtio_rdma.common import TOP

FOLDER = os.path.join(TOP, "Documentation", "specification")
INDEX = "README.md"
# The headings above clauses, and whose clauses they are.
SIDES = {"Device requirements": "D", "Driver requirements": "V"}
SIDE_LEVEL = 3
# What the first column of a table is called that has a clause in each row.
CLAUSE_COLUMN = "clause"

HEADING = re.compile(r"(#+) +(.*)")
# What looks like the number of a clause, and what is one.
LIKE_NUMBER = re.compile(r"(?<![\w-])[DV]-[A-Z0-9]+-\w+")
NUMBER = re.compile(r"(?P<side>[DV])-(?P<family>[A-Z]+)-(?:[0-9]{2}|[1-9][0-9]{2})")
# What a clause begins with, whether or not the number is one.
BOLD_NUMBER = re.compile(r"\*\*([DV]-[^*\n]*)\*\*")
# What is no text: code, the target of a link, a comment.
NO_TEXT = re.compile(r"(`+)(?:(?!`)[\s\S])+?\1|(?<=\])\([^)\s]*\)|<!--[\s\S]*?-->")
CELL_END = re.compile(r"(?<!\\)\|")
LINK = re.compile(r"\]\(([\w.-]+\.md)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Block:
    """A heading, a block of code, a table, or other lines between two empty ones. `level` is 0 if it is no heading."""

    kind: str
    line: int
    text: str
    level: int = 0

    def words(self) -> str:
        """Returns the text without code and targets of links, with all places as they were."""
        if self.kind == "code":
            return re.sub(r"[^\n]", " ", self.text)
        return NO_TEXT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), self.text)

    def line_of(self, at: int) -> int:
        """Returns the line of a place in the text."""
        return self.line + self.text.count("\n", 0, at)

    def rows(self) -> list[list[str]]:
        """Returns the cells of a table, the second row of which divides it."""
        return [[cell.strip() for cell in CELL_END.split(row.strip())[1:-1]] for row in self.text.split("\n")]


@dataclass(frozen=True)
class Clause:
    """A clause: its number, where it stands, and whose requirements it is among: D, V, or nothing. `row` says that it
    is a row of a table."""

    number: str
    file: str
    line: int
    side: str
    text: str
    row: bool = False


@dataclass
class Chapter:
    """A chapter. `free` has the blocks that belong to no clause, and `owned` those that do."""

    file: str
    text: str
    blocks: list[Block] = field(default_factory=list)
    clauses: list[Clause] = field(default_factory=list)
    free: list[Block] = field(default_factory=list)
    owned: list[Block] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name without its ending."""
        return self.file.removesuffix(".md")

    def indexed(self) -> list[str]:
        """Returns the files of the chapters that the tables of an index name, in their order."""
        return [file for block in self.blocks if block.kind == "table" for file in LINK.findall(block.text)]


def kind_of(lines: list[str]) -> str:
    """Returns the kind of lines that stand between two empty ones."""
    if lines[0].lstrip().startswith("```"):
        return "code"
    return "table" if lines[0].startswith("|") else "text"


def blocks_of(text: str) -> Iterator[Block]:
    """Yields the blocks of a text."""
    lines: list[str] = []
    fence = False
    for number, line in enumerate([*text.split("\n"), ""], 1):
        edge = line.lstrip().startswith("```")
        heading = None if fence or edge else HEADING.fullmatch(line)
        # A fence begins a block, and the one that closes it is the last line of the block.
        if lines and not fence and (edge or heading or not line.strip()):
            yield Block(kind_of(lines), number - len(lines), "\n".join(lines))
            lines = []
        if heading:
            yield Block("heading", number, heading[2].strip(), len(heading[1]))
        elif fence or line.strip():
            lines.append(line)
        if edge and fence:
            yield Block("code", number - len(lines) + 1, "\n".join(lines))
            lines = []
        fence ^= edge


def clauses_of(block: Block, file: str, side: str) -> list[Clause]:
    """Returns the clauses that begin with a block: one that the block begins with, or the rows of a table."""
    if bold := BOLD_NUMBER.match(block.text):
        return [Clause(bold[1], file, block.line, side, block.text)]
    if block.kind != "table":
        return []
    head, *rows = block.rows()
    if head[:1] != [CLAUSE_COLUMN]:
        return []
    lines = block.text.split("\n")
    return [Clause(cells[0] if cells else "", file, block.line + at, side, lines[at], True)
            for at, cells in enumerate(rows[1:], 2)]


def read(text: str, file: str) -> Chapter:
    """Returns the chapter that a text is."""
    chapter = Chapter(file, text)
    side, within = "", False
    for block in blocks_of(text):
        chapter.blocks.append(block)
        if block.level:
            side = SIDES.get(block.text, "") if block.level == SIDE_LEVEL else ""
            within = False
        found = [] if block.level else clauses_of(block, file, side)
        chapter.clauses += found
        # A clause outside of the requirements owns nothing.
        within = bool(side) and (within or bool(found))
        (chapter.owned if within else chapter.free).append(block)
    return chapter


def read_all(folder: str = FOLDER) -> list[Chapter]:
    """Returns all chapters of a folder in the order in which the index names them, the index first. Those that it does
    not name come last."""
    found = {}
    for file in sorted(name for name in os.listdir(folder) if name.endswith(".md")):
        with open(os.path.join(folder, file), encoding="utf-8") as opened:
            found[file] = read(opened.read(), file)
    named = found[INDEX].indexed() if INDEX in found else []
    order = dict.fromkeys([INDEX, *named, *found])
    return [found[file] for file in order if file in found]
