"""The protocol in use is what the library found, whatever it was asked for."""

from __future__ import annotations

import json
import sys
import types

import pytest
from miles_transport_p2p import libraries
from miles_transport_p2p.libraries import Mooncake, installed


class Engine:
    """Mooncake's engine as it behaves: it accepts "rdma" whether or not it can open an adapter."""

    adapters: tuple[str, ...] = ()

    def initialize(self, host, metadata, protocol, device):
        self.asked = protocol
        return 0

    def get_local_topology(self):
        return json.dumps({"cpu:0": [list(self.adapters), []]})


@pytest.mark.parametrize(
    ("kernel", "opened", "asked", "used"),
    [
        ([], (), "tcp", "tcp"),
        (["mlx5_0"], ("mlx5_0",), "rdma", "rdma"),
        (["mlx5_0"], (), "rdma", "tcp"),
    ],
    ids=["no adapter", "an adapter", "an adapter that cannot be opened"],
)
def test_mooncake_is_read_back(monkeypatch, kernel, opened, asked, used):
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    module = types.ModuleType("mooncake.engine")
    module.TransferEngine = type("Opened", (Engine,), {"adapters": opened})
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    monkeypatch.setattr(libraries, "rdma_adapters", lambda: kernel)
    library = Mooncake("127.0.0.1")
    assert library._engine.asked == asked
    assert library.protocol == used


@pytest.mark.skipif(bool(installed()["mooncake"]), reason=installed()["mooncake"])
def test_the_real_mooncake_tells_its_adapters(monkeypatch):
    """On a host without any, it takes "rdma" without a word, and its topology says otherwise."""
    if libraries.rdma_adapters():
        pytest.skip("this host has RDMA adapters")
    monkeypatch.setattr(libraries, "rdma_adapters", lambda: ["mlx5_0"])
    assert Mooncake("127.0.0.1").protocol == "tcp"
