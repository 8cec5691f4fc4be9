"""What `auto` picks, what it says, and that the choice stands in the config that everybody reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from miles_core.cli.main import cli
from miles_core.config.load import load_config
from miles_core.errors import PublishError
from miles_core.plugins import PluginManager
from miles_core.runs import transport_choice
from miles_core.sync.auto import AutoTransport, Measurement, choose

TINY = Path(__file__).parents[2] / "examples" / "tiny.toml"


def row(name, seconds, **more):
    return Measurement(transport=name, nbytes=1000, engines=1, seconds=seconds, **more)


@given(st.dictionaries(st.sampled_from(["broadcast", "p2p", "shared_memory", "x"]), st.floats(0.001, 9), min_size=1))
def test_never_slower_than_broadcast(seconds):
    picked = choose([row(name, s) for name, s in seconds.items()], {}).transport
    assert seconds[picked] == min(seconds.values())
    if seconds.get("broadcast") == seconds[picked]:
        assert picked == "broadcast"


def test_what_fails_or_is_refused_is_named_and_not_picked():
    choice = choose([row("broadcast", 2.0), Measurement(transport="p2p", failure="no library")], {"x": "cannot"})
    assert choice.transport == "broadcast"
    assert any("p2p does not work here: no library" in r for r in choice.reasons)
    assert any("x is refused: cannot" in r for r in choice.reasons)
    with pytest.raises(PublishError, match="no library"):
        choose([Measurement(transport="p2p", failure="no library")], {})


def test_the_config_gets_the_choice(monkeypatch):
    monkeypatch.chdir(TINY.parents[1])
    rows = [{"transport": "broadcast", "seconds": 2.0}, {"transport": "shared_memory", "seconds": 1.0}]
    asked = []
    monkeypatch.setattr(transport_choice, "_measured_apart", lambda names, mb: asked.append((list(names), mb)) or rows)
    plugins = PluginManager.discover()
    loaded, reasons = transport_choice.resolved_transport(load_config(TINY, ["transport.use=auto"]), plugins)
    assert loaded.config.transport.use == "shared_memory"
    assert loaded.resolved()["transport"]["use"] == "shared_memory"
    assert "broadcast took 2.000 s" in reasons
    assert {"broadcast", "shared_memory"} <= set(asked[0][0])
    sglang = load_config(TINY, ["transport.use=auto", "engine.use=sglang"])
    allowed, refused = transport_choice.candidates(sglang, plugins)
    assert "shared_memory" not in allowed
    assert "SGLang cannot map" in refused["shared_memory"]


def test_any_other_config_is_left_alone(monkeypatch):
    monkeypatch.chdir(TINY.parents[1])
    loaded = load_config(TINY, [])
    assert transport_choice.resolved_transport(loaded, PluginManager.discover()) == (loaded, ())


def test_unresolved_it_is_no_transport(tmp_path):
    with pytest.raises(PublishError, match="miles train"):
        AutoTransport(AutoTransport.Config()).sender(tmp_path)


def test_bench_measures_what_is_here():
    pytest.importorskip("torch")
    options = ["--transport", "broadcast", "--transport", "shared_memory", "--megabytes", "4", "--repeats", "1"]
    done = CliRunner().invoke(cli, ["sync", "bench", "--json", *options], catch_exceptions=False)
    rows = json.loads(done.output)
    assert [r["transport"] for r in rows] == ["broadcast", "shared_memory"]
    for found in rows:
        assert not found["failure"]
        assert found["nbytes"] == 4_000_000
        assert 0 < found["verify_share"] < 1
        assert found["seconds"] >= found["paused_seconds"] > 0
    table = CliRunner().invoke(cli, ["sync", "bench", "--megabytes", "4", *options[:2]], catch_exceptions=False).output
    assert "memcpy" in table
    assert "gloo broadcast" in table
