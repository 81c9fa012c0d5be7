# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Tables as VIRTIO's text has them, with columns as wide as their text needs."""

import re
from collections.abc import Callable

from virtio_rdma.specification.chapters import CLAUSE_COLUMN
from virtio_rdma.specification.texts import Node, raw, text_of

# Sizes of type, and how many small letters of each a line has.
SIZES = (("small", 94), ("footnotesize", 106), ("scriptsize", 120))
# The distance between columns, in parts of a line.
GAP = 0.027
# How much of a line is left, at least, when the widest words have their room.
LEFT = 0.25
# From how many columns on type is smaller, however short their text is.
MANY = 4


def width(text: str) -> float:
    """Returns how wide a text is, in small letters."""
    return sum(1.45 if letter.isupper() or letter in "_" else 1.0 for letter in text)


def shares(columns: list[list[str]], letters: int, words: str) -> list[float] | None:
    """Returns how wide each column is, in parts of a line of so many letters, or nothing if too little room is left
    beside the parts of the text that are not broken. `words` is what matches these."""
    space = letters * (1 - GAP * len(columns))
    # The widest parts, and the widest cells.
    least = [max((width(word) for cell in column for word in re.findall(words, cell)), default=1) + 0.5
             for column in columns]
    most = [max(max(map(width, column)) + 0.5, lowest) for column, lowest in zip(columns, least)]
    if sum(most) <= space:
        return [each / letters for each in most]
    left = space - sum(least)
    if left < space * LEFT:
        return None
    # A column that needs four times as much of what is left gets twice as much.
    wanted = [(each - lowest) ** 0.5 for each, lowest in zip(most, least)]
    return [(lowest + left * share / sum(wanted)) / letters for lowest, share in zip(least, wanted)]


def size_of(columns: list[list[str]]) -> tuple[str, list[float]]:
    """Returns the largest type in which the words of a table fit, and how wide its columns are. If there is none, words
    are broken behind underscores in the smallest type."""
    for name, letters in SIZES[0 if len(columns) < MANY else 1:]:
        if widths := shares(columns, letters, r"\S+"):
            return name, widths
    name, letters = SIZES[-1]
    even = [(1 - GAP * len(columns)) / len(columns)] * len(columns)
    return name, shares(columns, letters, r"[^\s_]+_?") or even


def cells_of(row: list) -> list[list[Node]]:
    """Returns the text of each cell of a row."""
    return [[inline for block in cell[4] for inline in block["c"]] for cell in row[1]]


def row_of(cells: list[list[Node]]) -> list[Node]:
    """Returns a row whose cells are LaTeX."""
    parted = [[raw(" & "), *cell] if at else cell for at, cell in enumerate(cells)]
    return [*(inline for cell in parted for inline in cell), raw(" \\\\\n\\hline\n")]


def longtable(table: list, inlines: Callable[[list[Node]], list[Node]]) -> Node:
    """Returns a table as one block, whose cells `inlines` turns into LaTeX."""
    head = cells_of(table[3][1][0])
    rows = [cells_of(row) for body in table[4] for row in body[3]]
    columns = [[text_of(row[at]) for row in (head, *rows)] for at in range(len(head))]
    size, widths = size_of(columns)
    shape = "|".join(f">{{\\raggedright\\arraybackslash}}p{{{share:.3f}\\textwidth}}" for share in widths)
    titles = [[raw("\\textbf{"), *inlines(cell), raw("}")] for cell in head]
    found = [raw(f"{{\\{size}\n\\begin{{longtable}}{{|{shape}|}}\n\\hline\n"), *row_of(titles), raw("\\endhead\n")]
    for first, *others in rows:
        number = columns[0][0] == CLAUSE_COLUMN
        found += row_of([[raw(f"\\clause{{{text_of(first)}}}")] if number else inlines(first), *map(inlines, others)])
    return {"t": "Plain", "c": [*found, raw("\\end{longtable}}")]}
