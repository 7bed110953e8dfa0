"""Bounds of what nodes and schedulers send each other."""

import msgspec
import pytest

from cpumond.core.wire import NodeResources


@pytest.mark.parametrize("name", ["cpu", "gpu", "memory", "network", "user_slots"])
def test_no_sum_over_nodes_is_infinite(name):
    for amount in (1e308, 10**308, -1):
        with pytest.raises(msgspec.ValidationError, match=rf"\$\.{name}"):
            msgspec.convert({"cpu": 1.0, name: amount}, NodeResources)
