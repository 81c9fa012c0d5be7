# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The specification has the form that its tools ask for, and each of its clauses has tests or a reason. The tools find
what is planted in a small specification, and turn it into LaTeX."""

import os
import re

import pytest

from virtio_rdma.common import TOP, Failure
from virtio_rdma.specification import __main__ as program
from virtio_rdma.specification import chapters, latex, layouts, manifest, rules, tables, virtio
from virtio_rdma.specification.names import Names
from virtio_rdma.specification.tests import Sources

SPDX = "<!-- SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause -->\n"
LAYOUT = """
| `VIRTIO_RDMA_CMD_QUERY_PORT` | 1 |
| `VIRTIO_RDMA_STATUS_INVAL` | 2 |
| `VIRTIO_RDMA_QPS_RESET` | 0 |
| `VIRTIO_RDMA_CMD_DESTROY_QP` | 14 |

### struct virtio_rdma_cmd_query_port, 1 bytes
| 0 | 1 | `port` | __u8 |
| 8 | 4 | `wr.rdma.rkey` | __le32 |
| 12 | 8 | `reserved_c[8]` | __u8 |
"""
INDEX = SPDX + "# The device\n\nMUST is a keyword.\n\n| chapter | about |\n|---|---|\n| [Rings](rings.md) | rings |\n"
RINGS = SPDX + """# Rings

A ring has entries, which `cmd_query_port` and `wr.rdma` do not know. `npages` is QUERY_PORT's.

## Posting

The producer writes an entry, then the index. [Posting](#posting) is 2^32 times the same, see D-RING-02.

### Device requirements

These hold for all rings.

**D-RING-01** A device MUST NOT look at the rings of a QP in RESET, or
answer INVAL.

It MAY look later.

- A list that belongs to it SHOULD be short.

| clause | command | effect |
|---|---|---|
| D-RING-02 | QUERY_PORT | a \\| b |

### Driver requirements

**V-RING-01** A driver MUST post.

```
MUST NOT /* be read as text, D-RING-09 */
```
"""


def specification(changes=(), **others):
    """Returns a small specification. In its chapter on rings, the second text of a pair takes the first one's place."""
    text = RINGS
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    files = {"README.md": INDEX, "rings.md": text, **others}
    return [chapters.read(text, file) for file, text in files.items()]


def wrong(found):
    """Returns what is wrong with chapters, with their names and lines left out."""
    return [re.sub(r"^\S+:\d+: ", "", line) for line in rules.check(found, Names(LAYOUT))]


def test_the_specification():
    assert program.problems() == []


def test_clauses_are_read():
    rings = specification()[1]
    assert [(clause.number, clause.line, clause.side, clause.row) for clause in rings.clauses] == [
        ("D-RING-01", 14, "D", False), ("D-RING-02", 23, "D", True), ("V-RING-01", 27, "V", False)]
    assert [block.text for block in rings.owned if block.kind == "text"][1:3] == [
        "It MAY look later.", "- A list that belongs to it SHOULD be short."]
    assert rings.name == "rings"


@pytest.mark.parametrize(("changes", "found"), [
    ([], []),
    ([("**V-RING-01**", "**V-RING-1**")], ["V-RING-1 is no number of a clause"]),
    ([("**V-RING-01**", "**V-WHAT-01**")], ["V-WHAT-01 is no number of a clause"]),
    ([("**V-RING-01**", "**D-RING-01**")],
     ["D-RING-01 is in rings.md:14, too", 'D-RING-01 does not stand below "### Device requirements"']),
    ([("### Driver requirements", "### Drivers")],
     ['V-RING-01 does not stand below "### Driver requirements"', "MUST is not in a clause"]),
    ([("### Driver", "#### Driver")],
     ['this heading is "### Device requirements" or "### Driver requirements"',
      'heading "Driver requirements" has a wrong level',
      'V-RING-01 does not stand below "### Driver requirements"', "MUST is not in a clause"]),
    ([("### Driver", "### Device")],
     ['"Device requirements" is there twice in a section', 'V-RING-01 does not stand below "### Driver requirements"']),
    ([("see D-RING-02", "see D-RING-03")], ["there is no clause D-RING-03"]),
    ([("**V-RING-01** A driver MUST post", "**V-RING-01** A driver posts")],
     ["V-RING-01 has no keyword (MUST, SHOULD, MAY)"]),
    ([("**V-RING-01** A", "**V-RING-01**: A")], ["V-RING-01: one space and a sentence follow the number"]),
    ([("**V-RING-01**", "- **V-RING-01**")],
     ["V-RING-01: a clause begins a paragraph", "there is no clause V-RING-01", "MUST is not in a clause"]),
    ([("The producer writes", "The producer MUST write")], ["MUST is not in a clause"]),
    ([("These hold", "These MAY hold")], ["MAY is not in a clause"]),
    ([("The producer writes", "MUST is that of RFC 2119. The producer writes")], []),
    ([("The producer writes", "The Linux driver writes")], ["Linux is for informative chapters"]),
    ([("The producer writes", "vhost-user, or EINVAL, writes")],
     ["vhost is for informative chapters", "EINVAL is for informative chapters", "EINVAL is not in layout.md"]),
    ([("The producer writes", "By chapter 13, it writes")], ["chapter 13: chapters have no numbers, but links"]),
    ([("answer INVAL", "answer INVALID")], ["INVALID is not in layout.md"]),
    ([("answer INVAL", "answer VIRTIO_RDMA_STATUS_INVAL or STATUS_INVAL")], []),
    ([("`wr.rdma`", "`wr.atomic`")], ["`wr.atomic` is not in layout.md"]),
    ([("`cmd_query_port`", "`cmd_query_ports`")], ["`cmd_query_ports` is not in layout.md"]),
    ([("a \\| b |", "a | b |")], ["a row has 4 cells, and the head 3"]),
    ([("\n\n| clause", "\n| clause")],
     ["there is no clause D-RING-02", "there is no clause D-RING-02", "a table has an empty line before it"]),
    ([("## Posting", "#### Posting")], ['heading "Posting" has a wrong level']),
    ([("# Rings", "## Rings")], ["the SPDX line comes first, and the title behind it",
                                 'heading "Rings" has a wrong level']),
    ([("entries, which", "entries[^1], which")], ["a footnote is not for chapters"]),
], ids=lambda value: str(value[0][1])[:40] if value and isinstance(value[0], tuple) else "")
def test_rules_find_what_is_planted(changes, found):
    assert sorted(wrong(specification(changes))) == sorted(found)


def test_the_index_names_each_chapter():
    assert wrong(specification(**{"new.md": SPDX + "# New\n"})) == ["README.md does not name this chapter"]


@pytest.mark.parametrize("file", ["rfc.md", "linux.md", "vhost-user.md"])
def test_rules_of_informative_chapters(file):
    index = INDEX + f"| [An annex]({file}) | an annex |\n"
    annex = SPDX + "# An annex\n\nLinux MUST answer EIO over vhost-user, in chapter 5.\n"
    assert not wrong(specification(**{"README.md": index, file: annex}))
    annex += "\n### Device requirements\n\n**D-CQ-01** A device MAY.\n"
    assert wrong(specification(**{"README.md": index, file: annex})) == [
        "D-CQ-01: an informative chapter has no clauses"]


@pytest.mark.parametrize(("entries", "found"), [
    ({"rings": {"D-RING-01": ["a", "b"], "D-RING-02": "no test: nobody sees it", "V-RING-01": ["a"]}}, []),
    ({"rings": {"D-RING-01": ["a", "c"], "D-RING-02": "nobody sees it", "V-RING-01": []}},
     ["D-RING-01: there is no test c", 'D-RING-02: a reason begins with "no test: "',
      'V-RING-01 has a list of tests, or "no test: " and the reason']),
    ({"rings": {"D-RING-01": ["a"], "D-RING-02": ["a"], "D-RING-03": ["a"]}},
     ["manifest.toml has no entry for V-RING-01", "D-RING-03 is no clause of rings.md"]),
    ({"rings": {"D-RING-01": ["a"], "D-RING-02": ["a"]}, "README": {"V-RING-01": ["a"]}},
     ["V-RING-01 is no clause of README.md"]),
    ({"rings": {"D-RING-01": ["a"], "D-RING-02": ["a"], "V-RING-01": ["a"]}, "old": {}}, ["old is no chapter"]),
], ids=["whole", "entries", "left out", "elsewhere", "no chapter"])
def test_the_manifest_is_checked(entries, found):
    problems = manifest.check(specification(), entries, lambda name, _: name in ("a", "b"))
    assert [line.removeprefix("manifest.toml: ") for line in problems] == found


SOURCES = {
    "tools/virtio-rdmad/crates/engine/src/tests/rc.rs": "#[test]\npub fn drains() {}\nfn helper() {}\n",
    "tools/virtio-rdmad/crates/engine/src/qp/mod.rs": "mod tests {\n #[test]\n #[ignore]\n fn bounds() {}\n}\n",
    "tools/virtio-rdmad/crates/conform/src/lib.rs": '("D-CTRL-12", ask)',
    "tools/provider/src/ring.rs": "pub(crate) mod tests {\n    #[test]\n    fn wraps() {}\n}\n",
    "selftests/virtio_rdma/verbs/hostile.py": "def no_reply(_rng):\n    pass\n",
    "selftests/virtio_rdma/reset.sh": "reset_loop()\n{\n}\n",
    "selftests/virtio_rdma/kverbs/data.c": "\tKUNIT_CASE(moves),\n",
    "rust/virtio_rdma/ib/qp.rs": "#[kunit_tests(virtio_rdma_ib_qp)]\nmod tests {\n    #[test]\n    fn states() {}\n}\n",
    "tools/python/virtio_rdma/tests/test_x.py": "class TestY:\n    def test_z(self):\n        pass\n",
}
FOUND = ["engine: rc::drains", "engine: tests::rc::drains", "engine: qp::tests::bounds", "engine: bounds",
         "conform: D-CTRL-12", "provider: ring::tests::wraps", "kernel: hostile.no_reply", "kernel: reset.reset_loop",
         "kernel: data.moves", "kunit: ib_qp.states", "suite: test_x.TestY.test_z", "suite: test_x.test_z"]
LOST = ["engine: rc::helper", "engine: qp::drains", "engine: rc::drain", "fabric: rc::drains", "conform: D-CTRL-13",
        "provider: wq::wraps", "kernel: hostile.reply", "kernel: data.no_reply", "kunit: qp.states",
        "suite: test_x.TestZ.test_z", "suite: test_x", "engine: ", "drains", "engine: (x"]


def test_tests_are_found(tmp_path):
    for path, text in SOURCES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    tests = Sources(str(tmp_path))
    assert [name for name in FOUND if not tests.is_test(name, "D-CTRL-12")] == []
    assert [name for name in LOST if tests.is_test(name, "D-CTRL-12")] == []
    assert not tests.is_test("conform: D-CTRL-12", "D-CTRL-11")


def words(text):
    """Returns a text as pandoc has it."""
    found = []
    for word in text.split():
        found += [{"t": "Space"}, {"t": "Str", "c": word}]
    return found[1:]


def heading(level, text):
    return {"t": "Header", "c": [level, [text.lower().replace(" ", "-"), [], []], words(text)]}


def para(*inlines):
    return {"t": "Para", "c": list(inlines)}


def strong(text):
    return {"t": "Strong", "c": words(text)}


def latex_of(blocks):
    """Returns the LaTeX of each block, with words as they are, and where requirements are."""
    labels = {"": f"{latex.DEVICE} / Rings", "posting": f"{latex.DEVICE} / Rings / Posting"}
    writer = latex.Writer([latex.Document("rings.md", blocks, labels)])
    found = []
    for block in writer.headings(blocks):
        inner = block["c"]
        found.append(inner[1] if block["t"] == "RawBlock" else "".join(
            part["c"][1] if part["t"] == "RawInline" else part.get("c", " ") for part in inner))
    return found, writer.normative


def test_headings_and_clauses_as_latex():
    where = "Device Types / RDMA Device / Rings"
    found, normative = latex_of([
        heading(1, "Rings"), heading(2, "F_X"), heading(3, "Part"), heading(4, "Of it"),
        heading(3, "Device requirements"),
        para(strong("D-RING-01"), {"t": "Space"}, *words("A device MUST."))])
    assert found == [
        f"\\subsection{{Rings}}\\label{{sec:{where}}}", f"\\subsubsection{{F_X}}\\label{{sec:{where} / F-X}}",
        f"\\paragraph{{Part}}\\label{{sec:{where} / F-X / Part}}",
        f"\\subparagraph{{Of it}}\\label{{sec:{where} / F-X / Part / Of it}}",
        f"\\devicenormative{{\\paragraph}}{{F\\_X}}{{{where} / F-X}}", "\\clause{D-RING-01} A device MUST."]
    assert normative == {"D": [f"{where} / F-X"], "V": []}


def test_requirements_of_a_whole_chapter():
    where = "Device Types / RDMA Device / Rings"
    found, normative = latex_of([
        heading(1, "Rings"), heading(2, "Posting"), heading(2, "Requirements"), heading(3, "Device requirements"),
        heading(3, "Driver requirements")])
    assert found[2:] == [f"\\{side}normative{{\\subsubsection}}{{Rings}}{{{where}}}" for side in ("device", "driver")]
    assert normative == {"D": [where], "V": [where]}
    assert f"\n\\item \\ref{{drivernormative:{where}}}\n" in latex.conformance("V", normative["V"])


@pytest.mark.parametrize(("inlines", "expected"), [
    ([{"t": "Code", "c": [["", [], []], "max_qp"]}], "\\field{max\\_qp}"),
    ([{"t": "Code", "c": [["", [], []], "a - 1"]}], "\\texttt{a - 1}"),
    (words("0..2^32-1"), "0..$2^{32}$-1"),
    (words("1 << 3"), "1 \\textless{}\\null\\textless{} 3"),
    ([*words("2^"), {"t": "Code", "c": [["", [], []], "shift"]}], "2\\textsuperscript{\\field{shift}}"),
    ([{"t": "Link", "c": [["", [], []], words("post"), ["#posting", ""]]}],
     "\\hyperref[sec:Device Types / RDMA Device / Rings / Posting]{post}"),
    ([{"t": "Link", "c": [["", [], []], words("driver"), ["linux.md", ""]]}], "driver"),
    ([{"t": "Link", "c": [["", [], []], words("layout.md"), ["../layout.md", ""]]}], "Values and layouts"),
    (words("as layout.md, has"), "as Values and layouts, has"),
], ids=["field", "expression", "power", "shift", "power of a field", "link", "link to what is not there",
        "link to the layouts", "name of the layouts"])
def test_parts_of_paragraphs_as_latex(inlines, expected):
    assert latex_of([para(*inlines)])[0] == [expected]


def test_columns_are_as_wide_as_their_text():
    size, widths = tables.size_of([["name", "VIRTIO_RDMA_F_RINGS"], ["meaning", "queues are rings " * 20]])
    assert size == "small"
    assert widths[0] < 0.4 < widths[1]
    assert sum(widths) <= 1 - 2 * tables.GAP + 1e-9


@pytest.mark.parametrize("text", ["VIRTIO_RDMA_CAPABILITY" * 2, "v" * 500], ids=["broken", "too wide"])
def test_columns_of_long_words(text):
    size, widths = tables.size_of([[text]] * 4)
    assert size == "scriptsize"
    assert widths == pytest.approx([0.25 - tables.GAP] * 4)


def test_structures_as_c():
    text = layouts.structures()["virtio_rdma_cmd_reg_user_mr"]
    assert text.startswith("struct virtio_rdma_cmd_reg_user_mr {\n        le32 ")
    assert "__" not in text
    assert layouts.structures().keys() == set(re.findall(r"^### struct (\w+),", layouts.text(), re.MULTILINE))


def test_the_introduction_has_the_device_id():
    with open(os.path.join(latex.TEMPLATES, "introduction.tex"), encoding="ascii") as file:
        number = layouts.header.DEFINE.search(layouts.header.text_of(layouts.header.DEVICE))["value"]
        assert f"\n\n{number}\n" in file.read()


def test_the_letter_names_clauses_that_exist():
    with open(os.path.join(TOP, "Documentation", "upstream", "virtio-comment.txt"), encoding="ascii") as file:
        named = {found[0] for found in chapters.NUMBER.finditer(file.read())}
    assert named
    assert named <= {number for entries in manifest.read().values() for number in entries}


CONTENT = """\\input{device-types/net/description.tex}
\\input{device-types/rtc/description.tex}

\\chapter{Reserved Feature Bits}
"""
CONFORMANCE = """One of clauses
\\ref{sec:Conformance / Driver Conformance / Network Driver Conformance} or
\\ref{sec:Conformance / Driver Conformance / RTC Driver Conformance}.
One of clauses
\\ref{sec:Conformance / Device Conformance / Network Device Conformance} or
\\ref{sec:Conformance / Device Conformance / RTC Device Conformance}.
\\input{device-types/rtc/driver-conformance.tex}
\\input{device-types/rtc/device-conformance.tex}
"""


def test_the_device_type_follows_all_others():
    assert virtio.content(CONTENT) == CONTENT.replace("\n\n", "\n\\input{device-types/rdma/description.tex}\n\n")
    expected = CONFORMANCE
    for side in ("Driver", "Device"):
        ref = f"\\ref{{sec:Conformance / {side} Conformance / %s {side} Conformance}}"
        expected = expected.replace(f"{ref % 'Network'} or\n{ref % 'RTC'}.",
                                    f"{ref % 'Network'},\n{ref % 'RTC'} or\n{ref % 'RDMA'}.")
        line = f"\\input{{device-types/%s/{side.lower()}-conformance.tex}}\n"
        expected = expected.replace(line % "rtc", line % "rtc" + line % "rdma")
    assert virtio.conformance(CONFORMANCE) == expected


@pytest.mark.parametrize("text", ["", CONTENT, CONFORMANCE.replace(" or", ",")])
def test_another_form_of_virtios_text(text):
    with pytest.raises(Failure):
        virtio.conformance(text)


def test_wrong_labels_of_the_device_type():
    assert virtio.wrong_labels("""
LaTeX Warning: Reference `drivernormative:Device Types / RDMA Device / B' on page 4 undefined on input line 5.
LaTeX Warning: Hyper reference `sec:Device Types / RDMA Device / A' on page 1 undefined on input line 2.
LaTeX Warning: Label `sec:Device Types / RDMA Device / C' multiply defined.
LaTeX Warning: Label `sec:Device Types / Network Device' multiply defined.
LaTeX Warning: Label(s) may have changed. Rerun to get cross-references right.
""") == ["drivernormative:Device Types / RDMA Device / B", "sec:Device Types / RDMA Device / A",
         "sec:Device Types / RDMA Device / C"]
