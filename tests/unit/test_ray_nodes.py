"""Tests servers on two nodes of a Ray cluster, both of which are on this machine."""

# pyright: basic
# Ray has no complete types.
from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aprilsched.errors import ConfigError
from tests.support.ray_cluster import two_nodes, url_of

ray = pytest.importorskip("ray")

from aprilsched.fronts.ray import SGLangServers  # noqa: E402

pytestmark = pytest.mark.long
SERVE = (sys.executable, "-m", "aprilsched", "serve-sim")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with two_nodes():
        yield


def test_each_node_has_a_server_at_its_address(cluster: None, tmp_path: Path):
    with SGLangServers(2, command=SERVE, gpus=0, host="node", logs=tmp_path) as started:
        assert len({url_of(name) for name in started.names}) == 2
        groups = ray.util.placement_group_table().values()
        assert len({group["bundles_to_node_id"][0] for group in groups}) == 2


def test_loopback_is_refused_in_a_cluster_of_several_nodes(cluster: None, tmp_path: Path):
    refused = pytest.raises(ConfigError, match=r'the cluster has 2 nodes.*give host="node"')
    with refused, SGLangServers(1, logs=tmp_path):
        pass
