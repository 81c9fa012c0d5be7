# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Options, parameters and fixtures of all tests."""

import dataclasses
import os
import random
import signal
import subprocess

import pytest

from virtio_rdma import guests
from virtio_rdma.common import end_on
from virtio_rdma.tests import networks, results, tools
from virtio_rdma.tests.platform import Platform

SEED = pytest.StashKey[int]()
# What is written of a program that does not run in a suite that runs beside others.
NOT_THIS_TIME = "not this time: alone, the suite runs all"


def pytest_addoption(parser):
    group = parser.getgroup("virtio-rdma")
    group.addoption("--platform", action="append", default=[], type=Platform.parse,
                    metavar="NAME=VMM,KERNEL,KERNEL_DIR,IMAGE,SHARE[,PATH]", help="what guests boot")
    group.addoption("--before", action="append", default=[], metavar="FILE", help="results (KTAP) of what ran before")
    group.addoption("--packages", default="", metavar="DIR", help="the project's Debian packages")
    group.addoption("--dissectors", default="", metavar="ROOT", help="a root with tshark and tcpdump")
    group.addoption("--peer", action="append", default=[], metavar="NAME=KERNEL_DIR",
                    help="a release of Linux whose rxe is a peer")
    group.addoption("--earlier", default="", metavar="PATH", help="the virtio-rdmad of an earlier revision")
    group.addoption("--lab-module", metavar="FILE", help="a module for the kernel of the lab, with a parameter")
    group.addoption("--lab-root", action="append", default=[], metavar="NAME=ROOT",
                    help="the root of a machine on which virtio-rdma-lab runs")
    group.addoption("--brief", action="store_true", help="leave out what takes long: other suites run beside this one")


def pytest_configure(config):
    config.addinivalue_line("markers", "network(title, guests=1, kind=Network, known=FUNCTION, breaks={KIND: REASON}, "
                                       "**options): the guests of a class of tests; breaks names rules.KINDS; options "
                                       "are guests.Options'")
    config.addinivalue_line("markers", "machines(name, ...): the roots of --lab-root in which a test runs")
    config.addinivalue_line("markers", "only(condition): where these tests make sense: condition(Where)")
    # The same seed chooses the same programs and their seeds again, in each worker.
    config.stash[SEED] = int(os.environ.get("SEED", "0"), 0) or random.getrandbits(32) | 1
    os.environ["SEED"] = str(config.stash[SEED])
    if not hasattr(config, "workerinput"):
        end_on(signal.SIGTERM)
    elif config.option.platform:
        # Guests of each worker (xdist) have a network of their own.
        os.unshare(os.CLONE_NEWNET)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def pytest_generate_tests(metafunc):
    if "platform" in metafunc.fixturenames:
        platforms = metafunc.config.option.platform
        metafunc.parametrize("platform", platforms, ids=[each.name for each in platforms], indirect=True,
                             scope="class")


@dataclasses.dataclass
class Where:
    """Where a test would run."""

    platform: Platform | None
    path: str
    brief: bool


def where_of(item):
    """Returns where a test would run."""
    chosen = item.callspec.params if hasattr(item, "callspec") else {}
    platform = chosen.get("platform")
    return Where(platform, chosen.get("path", platform.path if platform else "rings"), item.config.option.brief)


def applies(item):
    """Returns whether a test makes sense where it would run: the marker "only", and what its class says of the
    program that is the test's parameter (selects())."""
    where = where_of(item)
    if not all(marker.args[0](where) for marker in item.iter_markers("only")):
        return False
    program = program_of(item)
    return program is None or item.cls.selects(where, program)


def program_of(item):
    """Returns the program that is the test's parameter, or None."""
    return item.callspec.params.get("program") if hasattr(item, "callspec") else None


def leave_out_some(config, items):
    """Where the suite is brief, skips all but some of the programs of each class that has brief_percent. The seed
    chooses."""
    classes: dict[tuple[str, str], list] = {}
    for item in items:
        if program_of(item) and getattr(item.cls, "brief_percent", None):
            classes.setdefault((item.cls.__name__, where_of(item).path), []).append(item)
    for (name, path), programs in classes.items():
        percent = programs[0].cls.brief_percent[where_of(programs[0]).platform.vmm]
        count = -(-len(programs) * percent // 100)
        programs.sort(key=program_of)
        chosen = random.Random(f"{config.stash[SEED]}/{name}/{path}").sample(programs, count)
        for item in programs:
            item.stash[results.TITLE] = "virtqueues: " * (path == "virtqueues") + program_of(item)
            if item not in chosen:
                item.add_marker(pytest.mark.skip(NOT_THIS_TIME))


def pytest_itemcollected(item):
    """Keeps the tests of a class, which share their guests, on one worker (xdist)."""
    if item.cls:
        item.add_marker(pytest.mark.xdist_group(item.cls.__name__))


def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if not applies(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if applies(item)]
    if config.option.brief:
        leave_out_some(config, items)


def pytest_collection_finish(session):
    """Says what repeats what is random."""
    if session.config.option.platform:
        session.config.pluginmanager.get_plugin("results").note(f"seed {session.config.stash[SEED]:#x}")


@pytest.fixture(scope="class")
def platform(request):
    """What the guests of these tests boot."""
    return request.param


@pytest.fixture(scope="class")
def path(request, platform):
    """The data path: "rings", or "virtqueues" where the device does not offer rings."""
    return getattr(request, "param", platform.path)


@pytest.fixture(scope="class")
def prefix():
    """What stands in front of the names of all results of a platform."""
    return ""


@pytest.fixture(scope="class")
def title(request, path, prefix):
    """What these guests are called in results."""
    return prefix + request.node.get_closest_marker("network").args[0] + ", virtqueues" * (path == "virtqueues")


@pytest.fixture(scope="class")
def label(path, prefix):
    """What stands in front of the names of what runs in these guests."""
    return prefix + "virtqueues: " * (path == "virtqueues")


@pytest.fixture(scope="class")
def changes():
    """Further options of the guests of a class."""
    return {}


@pytest.fixture(scope="class")
def network(request, platform, path, title, changes, results):
    """Guests and their device, as the marker "network" says. They boot once for a class of tests."""
    marker = dict(request.node.get_closest_marker("network").kwargs)
    kind, known = marker.pop("kind", guests.Network), marker.pop("known", networks.is_of_kernel)
    count, breaks = marker.pop("guests", 1), marker.pop("breaks", {})
    no_rings = () if path == "rings" else tuple(range(1, count + 1))
    options = platform.options(guests=count, no_rings=no_rings, **marker, **changes)
    with networks.judged(results, title, kind(options), known, breaks=breaks) as network:
        yield network


@pytest.fixture(scope="session", autouse=True)
def tries(results):
    """Judges at the end of the suite how often its cases began again."""
    yield
    if not results.interrupted:
        tools.TRIES.judge(results)


@pytest.fixture(scope="class")
def guest(network):
    """The one guest of a network."""
    (guest,) = network.guests
    return guest
