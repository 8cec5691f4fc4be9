"""Where ranks compute. What needs a GPU is marked `gpu`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from miles_core.training.device import device_of
from miles_core.training.settings import FsdpConfig

HERE = Path(__file__).parent


def pretend(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.mark.parametrize(
    ("choice", "gpus", "rank", "expected"),
    [("auto", 0, 1, "cpu"), ("cpu", 2, 0, "cpu"), ("auto", 2, 1, "cuda:1"), ("cuda", 1, 0, "cuda:0")],
)
def test_each_rank_has_its_own(monkeypatch, choice, gpus, rank, expected):
    pretend(monkeypatch, gpus)
    assert str(device_of(choice, rank)) == expected


def test_torchrun_says_which_on_this_host(monkeypatch):
    pretend(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert str(device_of("auto", 5)) == "cuda:1"


@pytest.mark.parametrize(("choice", "gpus"), [("cuda", 0), ("auto", 1)])
def test_too_few_are_refused(monkeypatch, choice, gpus):
    pretend(monkeypatch, gpus)
    with pytest.raises(ValueError, match=f"needs a GPU of its own, and torch finds {gpus}"):
        device_of(choice, 1)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@gpu
def test_a_gpu_computes_what_the_cpu_does(backends, batches, tmp_path):
    from test_fsdp import FULL

    cpu, cuda = backends(device="cpu"), backends(device="cuda")
    for mine, theirs in zip(cuda.logprobs(batches().trajectories), cpu.logprobs(batches().trajectories), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
    for seed in (0, 1):
        mine, theirs = (b.train_step(batches(seed), FULL) for b in (cuda, cpu))
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-4, abs=1e-5)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)
    cuda.save(tmp_path)
    cpu.load(tmp_path)
    for (_, mine), (_, theirs) in zip(cpu.named_weights(), cuda.named_weights(), strict=True):
        assert torch.equal(mine, theirs.cpu())
    before = torch.cuda.memory_allocated()
    cuda.sleep()
    assert torch.cuda.memory_allocated() < before
    cuda.wake()
    assert np.isfinite(cuda.train_step(batches(2), FULL).loss)


@pytest.mark.gpu
@gpu
def test_ranks_meet_over_nccl(directory, tmp_path):
    """As many ranks as GPUs, by torchrun: the same loss as on one CPU."""
    count = torch.cuda.device_count()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    subprocess.run([*command, str(HERE / "rank.py"), str(directory), str(tmp_path)], check=True, timeout=300)
    assert len(list(tmp_path.glob("rank*.json"))) == count


def test_the_default_takes_a_gpu_where_there_is_one():
    assert FsdpConfig().device == "auto"
