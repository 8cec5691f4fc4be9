"""FSDP2 over several processes: the same numbers as one process, whatever the layout. The ranks run `rank.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.training.ranks import open_rendezvous

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
WORK = ["plain", "next", "empty_rank", "split", "lora", "ppo", "bfloat16"]
WHOLE = {"whole": "plain", "whole_next": "next", "whole_empty_rank": "empty_rank", "whole_ppo": "ppo"}
"""What ranks without shards do, and what it must equal."""


def run(*commands):
    """All at once; each must end well."""
    processes = [
        subprocess.Popen([sys.executable, *map(str, c)], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
        for c in commands
    ]
    try:
        for process in processes:
            _, said = process.communicate(timeout=240)
            assert process.returncode == 0, said[-3000:]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def found_by_ranks(directory, tmp_path_factory):
    """Findings of every rank, by number of processes; two are started by torchrun, four at a rendezvous."""
    result = {}
    out = {size: tmp_path_factory.mktemp(f"size{size}") for size in (1, 2, 4)}
    run([HERE / "rank.py", directory, out[1], 0, 1, ""])
    run(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", HERE / "rank.py", directory, out[2]])
    store, meeting = open_rendezvous()
    run(*([HERE / "rank.py", directory, out[4], rank, 4, meeting] for rank in range(4)))
    del store
    for size, place in out.items():
        result[size] = [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(size)]
    return result, out


pytestmark = pytest.mark.slow


def reports(tree):
    return tree if isinstance(tree, list) else [tree]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("what", WORK)
def test_loss_and_gradient_norm_are_those_of_one_process(found_by_ranks, size, what):
    one, many = reports(found_by_ranks[0][1][0][what]), reports(found_by_ranks[0][size][0][what])
    loose = 500 if what == "bfloat16" else 1
    for mine, theirs in zip(many, one, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5 * loose, abs=1e-7)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5 * loose)
        assert mine["grad_norm"] > 0
        assert mine["metrics"] == pytest.approx(theirs["metrics"], rel=1e-4 * loose, abs=1e-5 * loose)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("what", WHOLE)
def test_ranks_without_shards_do_what_one_process_does(found_by_ranks, size, what):
    one, many = reports(found_by_ranks[0][1][0][WHOLE[what]]), reports(found_by_ranks[0][size][0][what])
    for mine, theirs in zip(many, one, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-7)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert mine["metrics"] == pytest.approx(theirs["metrics"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_the_whole_gradient_of_branching_episodes_is_that_of_one_process(found_by_ranks, size):
    one, many = found_by_ranks[0][1][0]["float64"], found_by_ranks[0][size][0]["float64"]
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert many["gradients"].keys() == one["gradients"].keys()
    for name, numbers in one["gradients"].items():
        assert many["gradients"][name] == pytest.approx(numbers, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_the_same_answer(found_by_ranks, size):
    first, *others = found_by_ranks[0][size]
    assert all(other == first for other in others)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_checkpoint_continues_bit_for_bit(found_by_ranks, size):
    answer = found_by_ranks[0][size][0]
    assert answer["resumed"] == answer["next"]
    assert answer["resumed_digest"] == answer["digest"]


@pytest.mark.parametrize("saved", ["checkpoint", "whole"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_checkpoint_loads_into_another_process_count(found_by_ranks, size, saved, backends, batches, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    from rank import FULL

    answers, out = found_by_ranks
    backend = backends()
    backend.load(out[size] / saved)
    report = backend.train_step(batches(2), FULL)
    assert report.step == 3
    assert report.loss == pytest.approx(answers[size][0]["next"]["loss"], rel=1e-6, abs=1e-8)
    assert report.grad_norm == pytest.approx(answers[size][0]["next"]["grad_norm"], rel=1e-6)


@pytest.mark.parametrize("size", [2, 4])
def test_logprobs_and_export_are_whole(found_by_ranks, size):
    from safetensors.torch import load_file

    answers, out = found_by_ranks
    for mine, theirs in zip(answers[size][0]["logprobs"], answers[1][0]["logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    mine, theirs = (load_file(out[s] / "export" / "model.safetensors") for s in (size, 1))
    assert {k: v.shape for k, v in mine.items()} == {k: v.shape for k, v in theirs.items()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_nan_on_one_rank_is_refused_by_all(found_by_ranks, size):
    for answer in found_by_ranks[0][size]:
        assert "loss term policy is not finite" in answer["refused"]
