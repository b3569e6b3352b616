"""The parallel backend's loops are compiled for each type, which takes as long as all other tests here:
fp64 is slow.
"""

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        parallel = "parallel" in item.name or item.path.name == "test_parallel.py"
        if item.path.parent == Path(__file__).parent and parallel and "float64" in item.name:
            item.add_marker(pytest.mark.slow)
