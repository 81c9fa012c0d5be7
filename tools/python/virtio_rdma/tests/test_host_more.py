# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite host-more: tests of the device and the provider that take long and seldom find what the suite host does
not: those under a model of memory and under ThreadSanitizer, and those of the engine whose devices are upgraded."""

import pytest

from virtio_rdma.common import TOP
from virtio_rdma.tests import cargo

# Each with the command that runs it, its directory and its environment.
TESTS = {
    "loom device": (["make", "-s", "loom-device"], TOP, {}),
    "loom provider": (["make", "-s", "loom-provider"], TOP, {}),
    "tsan": (["make", "-s", "tsan"], TOP, {}),
    # The devices of the engine's tests lose all that they know, and take it up again, whenever they rest.
    "upgrades": (["cargo", "test", "--locked", "-p", "engine", "--lib", "tests::"], cargo.DEVICE,
                 cargo.OF_DEVICE | {"UPGRADES": "1", "SCHEDULES": "0..200"}),
}


@pytest.mark.parametrize("name", TESTS)
def test_cargo(name, results):
    cargo.run(results, name, *TESTS[name])
