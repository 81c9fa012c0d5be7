# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The form that chapters have. Each rule yields what breaks it, as file:line: what is wrong."""

import errno
import re
from collections.abc import Iterator

from virtio_rdma.specification.chapters import (
    BOLD_NUMBER,
    INDEX,
    LIKE_NUMBER,
    NUMBER,
    SIDE_LEVEL,
    SIDES,
    Block,
    Chapter,
    Clause,
)
from virtio_rdma.specification.names import WORD, Names

# Chapters without requirements, for which only the rules of Markdown hold.
INFORMATIVE = (INDEX, "rfc.md", "linux.md", "vhost-user.md")
# Chapters in which a note may name what is particular to an implementation, and how a note begins.
WITH_NOTES = ("roce-v2.md",)
NOTE = "**Note:**"
FAMILIES = {"TERM", "MEM", "FEAT", "CFG", "INIT", "RST", "FAIL", "CTRL", "MR", "PORT", "RING", "WQE", "CQ", "QP", "RC",
            "UC", "UD", "GSI", "EVT", "SRQ", "XRC", "FRMR", "MW", "FLUSH", "AW", "MCAST", "CNT", "VLAN", "MOD", "VQ",
            "ROCE"}

SPDX = "<!-- SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause -->\n# "
KEYWORD = re.compile(r"\b(?:MUST|SHALL|SHOULD|MAY|REQUIRED|RECOMMENDED|OPTIONAL)\b")
ABOUT_KEYWORDS = re.compile(r"\bRFC\s+2119\b")
PARTICULAR = re.compile(r"\b(?:[Ll]inux|vhost|" + "|".join(errno.errorcode.values()) + r")\b")
CHAPTER_NUMBER = re.compile(r"\bchapters?\s+\d+")
CODE = re.compile(r"`([^`]+)`")
LIKE_SIDE = re.compile(r"(?:device|driver)s?'? requirements?", re.IGNORECASE)
UNWANTED = {"a footnote": re.compile(r"\[\^"), "an image": re.compile(r"!\["), "HTML": re.compile(r"</?[a-z]+[ />]"),
            "a link by reference": re.compile(r"\]\[|^\[[^]]+\]:", re.MULTILINE)}


def problem(chapter: Chapter, line: int, text: str) -> str:
    """Returns a line about what is wrong."""
    return f"{chapter.file}:{line}: {text}"


def headings(chapter: Chapter) -> Iterator[str]:
    """One title at the top, no level left out, and the two headings of requirements once in a section."""
    if not chapter.text.startswith(SPDX):
        yield problem(chapter, 1, "the SPDX line comes first, and the title behind it")
    level = 0
    seen: set[str] = set()
    for block in chapter.blocks:
        if not block.level:
            continue
        is_side = block.text in SIDES and block.level == SIDE_LEVEL
        if (block.level == 1) == bool(level) or (block.level > level + 1 and not is_side):
            yield problem(chapter, block.line, f'heading "{block.text}" has a wrong level')
        if LIKE_SIDE.fullmatch(block.text) and not is_side:
            yield problem(chapter, block.line, 'this heading is "### Device requirements" or "### Driver requirements"')
        if is_side and block.text in seen:
            yield problem(chapter, block.line, f'"{block.text}" is there twice in a section')
        if not is_side and block.level < SIDE_LEVEL:
            seen = set()
        if is_side:
            seen.add(block.text)
        else:
            level = block.level


def parts(chapter: Chapter) -> Iterator[str]:
    """Tables whose rows are whole, and no Markdown that LaTeX would not get."""
    for block in chapter.blocks:
        if block.kind == "text":
            if at := re.search(r"^\|", block.text, re.MULTILINE):
                yield problem(chapter, block.line_of(at.start()), "a table has an empty line before it")
            for what, pattern in UNWANTED.items():
                if found := pattern.search(block.words()):
                    yield problem(chapter, block.line_of(found.start()), f"{what} is not for chapters")
        elif block.kind == "table":
            yield from table(chapter, block)
    if chapter.text.count("\n```") % 2:
        yield problem(chapter, 1, "a block of code does not end")


def table(chapter: Chapter, block: Block) -> Iterator[str]:
    """A table with a head, and as many cells in each row."""
    rows = block.rows()
    if len(rows) < 2 or not all(re.fullmatch(r":?-+:?", cell) for cell in rows[1]):
        yield problem(chapter, block.line, "the second line of a table is |---|---|")
        return
    for at, (row, text) in enumerate(zip(rows, block.text.split("\n"))):
        if len(row) != len(rows[0]) or not re.fullmatch(r"\|.*\|", text):
            yield problem(chapter, block.line + at, f"a row has {len(row)} cells, and the head {len(rows[0])}")


def clauses(chapter: Chapter) -> Iterator[str]:
    """Clauses with a number of the right form, below the right heading, and with a keyword."""
    for clause in chapter.clauses:
        number = NUMBER.fullmatch(clause.number)
        if not number or number["family"] not in FAMILIES:
            yield problem(chapter, clause.line, f"{clause.number or 'an empty cell'} is no number of a clause")
        elif chapter.file in INFORMATIVE:
            yield problem(chapter, clause.line, f"{clause.number}: an informative chapter has no clauses")
        elif number["side"] != clause.side:
            heading = next(text for text, side in SIDES.items() if side == number["side"])
            yield problem(chapter, clause.line, f'{clause.number} does not stand below "### {heading}"')
        yield from form(chapter, clause)


def form(chapter: Chapter, clause: Clause) -> Iterator[str]:
    """What a clause that is a paragraph begins with, and what is in it."""
    if clause.row:
        return
    if not re.match(r"\*\*[^*]+\*\* \S", clause.text):
        yield problem(chapter, clause.line, f"{clause.number}: one space and a sentence follow the number")
    if not KEYWORD.search(Block("text", clause.line, clause.text).words()):
        yield problem(chapter, clause.line, f"{clause.number} has no keyword (MUST, SHOULD, MAY)")


def bold_numbers(chapter: Chapter) -> Iterator[str]:
    """Bold numbers at the beginning of paragraphs alone."""
    for block in chapter.blocks:
        for found in BOLD_NUMBER.finditer(block.words()):
            if found.start() or block.level:
                yield problem(chapter, block.line_of(found.start()), f"{found[1]}: a clause begins a paragraph")


def keywords(chapter: Chapter) -> Iterator[str]:
    """Keywords in clauses alone, and where it is said what they are."""
    for block in chapter.free:
        words = block.words()
        found = KEYWORD.search(words)
        if found and not ABOUT_KEYWORDS.search(words):
            yield problem(chapter, block.line_of(found.start()), f"{found[0]} is not in a clause")


def particular(chapter: Chapter) -> Iterator[str]:
    """Nothing that is particular to an implementation or a transport."""
    for block in chapter.blocks:
        if block.text.startswith(NOTE) and chapter.file in WITH_NOTES:
            continue
        for found in PARTICULAR.finditer(block.words()):
            yield problem(chapter, block.line_of(found.start()), f"{found[0]} is for informative chapters")
        for found in CHAPTER_NUMBER.finditer(block.words()):
            yield problem(chapter, block.line_of(found.start()), f"{found[0]}: chapters have no numbers, but links")


def names(chapter: Chapter, known: Names) -> Iterator[str]:
    """Names that layout.md has."""
    for block in chapter.blocks:
        if block.kind == "code":
            continue
        for found in WORD.finditer(block.words()):
            if not KEYWORD.fullmatch(found[0]) and not known.is_value(found[0]):
                yield problem(chapter, block.line_of(found.start()), f"{found[0]} is not in layout.md")
        for found in CODE.finditer(block.text):
            if not known.is_field(found[1]):
                yield problem(chapter, block.line_of(found.start()), f"`{found[1]}` is not in layout.md")


def index(chapters: list[Chapter]) -> Iterator[str]:
    """An index that names each chapter."""
    named = {file for chapter in chapters if chapter.file == INDEX for file in chapter.indexed()}
    for chapter in chapters:
        if chapter.file not in named and chapter.file != INDEX:
            yield problem(chapter, 1, f"{INDEX} does not name this chapter")


def numbers(chapters: list[Chapter]) -> Iterator[str]:
    """Each number once, and no reference to one that is not there."""
    first: dict[str, Clause] = {}
    for clause in (clause for chapter in chapters for clause in chapter.clauses):
        other = first.setdefault(clause.number, clause)
        if other is not clause:
            yield f"{clause.file}:{clause.line}: {clause.number} is in {other.file}:{other.line}, too"
    for chapter in chapters:
        for block in chapter.blocks:
            for found in LIKE_NUMBER.finditer(block.words()):
                if found[0] not in first:
                    yield problem(chapter, block.line_of(found.start()), f"there is no clause {found[0]}")


def check(chapters: list[Chapter], known: Names) -> list[str]:
    """Returns what is wrong with chapters."""
    found = [*index(chapters), *numbers(chapters)]
    for chapter in chapters:
        for rule in (headings, parts, clauses, bold_numbers):
            found += rule(chapter)
        if chapter.file in INFORMATIVE:
            continue
        for rule in (keywords, particular):
            found += rule(chapter)
        found += names(chapter, known)
    return found
