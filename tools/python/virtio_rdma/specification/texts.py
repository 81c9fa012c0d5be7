# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Text in the form that pandoc calls JSON, and as LaTeX."""

import re
from typing import Any

# A block or a part of a paragraph.
Node = dict[str, Any]

SPECIAL = {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}",
           "<": "\\textless{}", ">": "\\textgreater{}", "|": "\\textbar{}", **{each: f"\\{each}" for each in "&%$#_{}"}}


def escaped(text: str) -> str:
    """Returns the LaTeX of plain text."""
    return re.sub(r"[\\~^<>|&%$#_{}]", lambda found: SPECIAL[found[0]], text)


def raw(text: str) -> Node:
    """Returns a part of a paragraph that is LaTeX."""
    return {"t": "RawInline", "c": ["latex", text]}


def plain(text: str) -> Node:
    """Returns a part of a paragraph that is a word."""
    return {"t": "Str", "c": text}


def text_of(inlines: list[Node]) -> str:
    """Returns the plain text of parts of a paragraph."""
    found: list[str] = []
    for inline in inlines:
        kind: str = inline["t"]
        inner: Any = inline.get("c")
        if kind in ("Space", "SoftBreak", "LineBreak"):
            found.append(" ")
        elif kind in ("Strong", "Emph"):
            found.append(text_of(inner))
        elif kind in ("Link", "Quoted"):
            found.append(text_of(inner[1]))
        else:
            found.append(inner if kind == "Str" else inner[1])
    return "".join(found)
