# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""A test of somebody who develops with pyverbs."""

from pyverbs import device


def test_has_an_rdma_device():
    names = [each.name.decode() for each in device.get_device_list()]
    assert names == ["virtio_rdma0"]
    with device.Context(name=names[0]) as context:
        assert context.query_port(1).state == 4
