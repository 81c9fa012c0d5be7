# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The numbers and structures of layout.md.

The repository has layout.md in the form of Python, too: selftests/virtio_rdma/verbs/abi.py. This file loads that one.
"""

import importlib.util
from pathlib import Path
from typing import Any


def load() -> Any:
    """Returns the module abi, whose structures are ctypes classes."""
    path = Path(__file__).resolve().parents[3] / "selftests/virtio_rdma/verbs/abi.py"
    spec = importlib.util.spec_from_file_location("abi", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


abi: Any = load()
