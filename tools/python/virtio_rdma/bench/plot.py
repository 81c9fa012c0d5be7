# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Draws the report: plot.py DIRECTORY, where report.json is. Runs where matplotlib is, tools/bench/root."""

import json
import os
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

# The same path has the same look everywhere; the limit is the line above (or below) all.
LOOK = {
    "rings": {"color": "#1f77b4", "marker": "o"},
    "virtqueues": {"color": "#2ca02c", "marker": "s"},
    "rxe": {"color": "#d62728", "marker": "^"},
    "tcp": {"color": "#9467bd", "marker": "v"},
    "limit": {"color": "black", "linestyle": "--", "marker": None},
}
VERBS = ("write", "read", "send")
PLACES = {"uml": "user-mode Linux", "qemu": "QEMU"}


class Rows:
    def __init__(self, rows, vmm):
        self.rows = [row for row in rows if row["vmm"] == vmm and row["value"] is not None]

    def line(self, path, tool, over="size"):
        """Returns the points of a line, (size or QPs, value), in ascending order."""
        return sorted((row[over], row["value"]) for row in self.rows if row["path"] == path and row["tool"] == tool)

    def level(self, tool):
        """Returns a limit that has no size, or None."""
        return next((row["value"] for row in self.rows if row["path"] == "limit" and row["tool"] == tool), None)


def bytes_text(value, _=None):
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def draw(axes, points, path, label):
    if points:
        axes.plot(*zip(*points), label=label, markersize=4, **LOOK[path])


def against_size(rows, axes, tool, tcp, title, unit):
    for path in ("rings", "virtqueues", "rxe"):
        draw(axes, rows.line(path, tool), path, path)
    if tcp:
        draw(axes, rows.line("tcp", tcp), "tcp", "TCP")
    axes.set(title=title, xlabel="bytes", ylabel=unit, yscale="log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(bytes_text)
    axes.grid(True, which="both", alpha=0.2)


def bandwidth(rows, axes, verb):
    against_size(rows, axes, f"ib_{verb}_bw", "tcp_bw" if verb == "send" else "", f"{verb}, one QP", "MiB/s")
    draw(axes, rows.line("limit", "memcpy"), "limit", "memcpy")


def latency(rows, axes, verb):
    way = "there and back" if verb == "read" else "one way"
    against_size(rows, axes, f"ib_{verb}_lat", "tcp_lat" if verb == "send" else "", f"{verb}, {way}", "µs")
    for tool, name, style in (("cacheline", "cache line", "--"), ("eventfd", "two eventfd hops", ":")):
        level = rows.level(tool)
        if level:
            axes.axhline(level, label=name, color="black", linestyle=style)


def rate(rows, axes, verb):
    for path in ("rings", "virtqueues", "rxe"):
        draw(axes, rows.line(path, f"ib_{verb}_rate", "qps"), path, path)
    copies = [value * 2**20 / 64 / 1e6 for size, value in rows.line("limit", "memcpy") if size == 64]
    if copies:
        axes.axhline(copies[0], label="memcpy of 64 bytes", color="black", linestyle="--")
    axes.set(title=f"64-byte {verb}s", xlabel="QPs", ylabel="million a second", xscale="log", yscale="log")
    axes.grid(True, which="both", alpha=0.2)


def figure(rows, panel, verbs, title, name, directory):
    """Draws one picture, a panel for each verb, and returns the names of its files. A picture without a line is not
    made."""
    drawing, axes = pyplot.subplots(1, len(verbs), figsize=(5 * len(verbs), 4.2), layout="constrained")
    for one, verb in zip(axes, verbs):
        panel(rows, one, verb)
    made = []
    if any(one.lines for one in axes):
        for one in axes:
            if one.lines:
                one.legend(fontsize="small")
        drawing.suptitle(title)
        made = [f"{name}.svg", f"{name}.png"]
        for file in made:
            drawing.savefig(os.path.join(directory, file), dpi=110)
    pyplot.close(drawing)
    return made


def main(directory):
    with open(os.path.join(directory, "report.json"), encoding="ascii") as file:
        report = json.load(file)
    matplotlib.rcParams["svg.hashsalt"] = "report"
    machine = report["machine"]
    made = []
    for vmm, place in PLACES.items():
        rows = Rows(report["rows"], vmm)
        where = f"{place} guests, {machine['cpus']} x {machine['cpu']}, {machine['commit']}"
        for panel, verbs, name in ((bandwidth, VERBS, "bandwidth"), (latency, VERBS, "latency"),
                                   (rate, ("write", "send"), "rate")):
            made += figure(rows, panel, verbs, f"{name.capitalize()}, {where}", f"{name}-{vmm}", directory)
    print("\n".join(made))


if __name__ == "__main__":
    main(sys.argv[1])
