"""Supervised fine-tuning: what trains, what the loss is, and a run without an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import Sampling
from miles_core.contracts.environments import EpisodeTask
from miles_core.data.group import Batch, Group, Prompt
from miles_core.data.tokenizer import load_tokenizer
from miles_core.errors import EnvironmentFailure, MilesError
from miles_core.evaluation.evaluate import EvaluationSet
from miles_core.evaluation.likelihood import held_out_loss, loss_and_error
from miles_core.objective.compose import WeightedTerm, compose
from miles_core.objective.none import NoAdvantages
from miles_core.objective.supervised import Supervised as SupervisedTerm
from miles_core.rollout.environments.supervised import Supervised, SupervisedConfig
from miles_core.tito.families.chatml import ChatMLFamily

ROOT = Path(__file__).parents[2]
OBJECTIVE = compose(
    estimator=NoAdvantages(ComponentConfig()),
    terms=[WeightedTerm(name="supervised", term=SupervisedTerm(ComponentConfig()))],
)
TWO_TURNS = (
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "good day"},
    {"role": "user", "content": "and now?"},
    {"role": "assistant", "content": "good night"},
)
SILENT = ({"role": "user", "content": "hello"},)


@pytest.fixture(scope="module")
def environment(directory):
    def make(**config):
        made = Supervised(SupervisedConfig(**config))
        made.bind(ChatMLFamily(ChatMLFamily.Config()), load_tokenizer(directory))
        return made

    return make


async def episode(environment, messages, name="0", max_tokens=0):
    task = EpisodeTask(
        prompt=Prompt(prompt_id=name, messages=tuple(messages)),
        group_id=name,
        episode_id=name,
        sampling=Sampling(max_new_tokens=1),
        seed=0,
        max_tokens=max_tokens,
    )
    return await environment.generate(task, None)


async def make_batch(environment, *rows):
    groups = []
    for number, messages in enumerate(rows):
        made = (await episode(environment, messages, str(number))).with_reward(0.0)
        prompt = Prompt(prompt_id=str(number), messages=tuple(messages))
        groups.append(Group(group_id=str(number), prompt=prompt, episodes=(made,)))
    return Batch(groups=tuple(groups), policy_version=0, step=0)


def spans(trajectory, tokenizer):
    """The texts of the trained spans."""
    texts, current = [], []
    for token, trains in zip(trajectory.token_ids.tolist(), trajectory.loss_mask.tolist(), strict=True):
        if trains:
            current.append(token)
        elif current:
            texts.append(tokenizer.decode(current))
            current = []
    return [*texts, tokenizer.decode(current)] if current else texts


async def test_what_the_assistant_wrote_trains_with_its_stop_token(environment, directory):
    tokenizer = load_tokenizer(directory)
    (trajectory,) = (await episode(environment(), TWO_TURNS)).trajectories
    assert spans(trajectory, tokenizer) == ["good day<|im_end|>", "good night<|im_end|>"]
    official = ChatMLFamily(ChatMLFamily.Config()).render(TWO_TURNS, tokenizer)
    assert trajectory.token_ids.tolist() == official


async def test_the_last_turn_alone(environment, directory):
    tokenizer = load_tokenizer(directory)
    (trajectory,) = (await episode(environment(train="last"), TWO_TURNS)).trajectories
    assert spans(trajectory, tokenizer) == ["good night<|im_end|>"]
    (silent,) = (await episode(environment(train="last"), SILENT)).trajectories
    assert silent.trainable_tokens == 0


async def test_a_row_without_an_assistant_trains_nothing_and_is_in_no_denominator(environment, backends):
    (trajectory,) = (await episode(environment(), SILENT)).trajectories
    assert trajectory.trainable_tokens == 0
    alone, beside = [
        backends().train_step(await make_batch(environment(), *rows), OBJECTIVE)
        for rows in ((TWO_TURNS,), (TWO_TURNS, SILENT))
    ]
    assert beside.loss == pytest.approx(alone.loss, rel=1e-6)
    assert beside.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)


async def test_nothing_to_train_is_no_step_and_no_loss(environment, backends):
    backend = backends()
    before = {name: tensor.clone() for name, tensor in backend.named_weights()}
    batch = await make_batch(environment(), SILENT, SILENT)
    report = backend.train_step(batch, OBJECTIVE)
    assert (report.loss, report.grad_norm) == (0, 0)
    assert "supervised/nll" not in report.metrics  # a loss of nothing is not reported as 0
    assert all(torch.equal(before[name], tensor) for name, tensor in backend.named_weights())
    with pytest.raises(MilesError, match="says nothing in any of its 2 rows"):
        await measure(environment(), backend, SILENT, SILENT)


async def test_the_loss_is_cross_entropy_over_the_assistants_tokens(environment, backends, directory):
    from transformers import AutoModelForCausalLM

    batch = await make_batch(environment(), TWO_TURNS, TWO_TURNS[:3])
    model = AutoModelForCausalLM.from_pretrained(directory)
    total, count = 0.0, 0
    for trajectory in batch.trajectories:
        ids = torch.tensor(trajectory.token_ids.tolist())[None]
        labels = torch.where(torch.tensor(trajectory.loss_mask.tolist())[None], ids, -100)
        total += float(model(input_ids=ids, labels=labels).loss.detach()) * trajectory.trainable_tokens
        count += trajectory.trainable_tokens
    backend = backends()
    point = (await measure(environment(), backend, TWO_TURNS, TWO_TURNS[:3]))[0]
    report = backend.train_step(batch, OBJECTIVE)
    assert report.loss == pytest.approx(total / count, rel=1e-5)
    assert report.metrics["supervised/nll"] == pytest.approx(total / count, rel=1e-5)
    assert point.mean == pytest.approx(total / count, rel=1e-5)
    assert not [name for name in report.metrics if name.startswith("fidelity/")]


async def measure(environment, backend, *rows):
    class Hold:
        engine = None

    async def logprobs(trajectories):
        return backend.logprobs(trajectories)

    prompts = tuple(Prompt(prompt_id=str(i), messages=tuple(m)) for i, m in enumerate(rows))
    dataset = EvaluationSet(
        name="heldout", mode="sampled", prompts=prompts, samples=1, sampling=Sampling(max_new_tokens=1)
    )
    return await held_out_loss(dataset, environment, Hold(), logprobs, version=3, timeout=10)


async def test_the_point_counts_rows_without_an_assistant_as_missing(environment, backends):
    point, episodes = await measure(environment(), backends(), TWO_TURNS, SILENT)
    assert (point.mode, point.version, point.prompts, point.missing, len(episodes)) == ("loss", 3, 2, 1, 2)


async def test_a_row_that_is_too_long_is_refused(environment):
    with pytest.raises(EnvironmentFailure, match=r"row 0 has \d+ tokens, more than sampling.max_tokens = 5"):
        await episode(environment(), TWO_TURNS, max_tokens=5)


def test_error_of_a_ratio():
    assert loss_and_error([(2.0, 1), (4.0, 3)]) == (1.5, 0.25)
    assert loss_and_error([(3.0, 2)]) == (1.5, 0.0)


@pytest.mark.slow
def test_a_run_learns_without_an_engine_and_its_audit_is_clean(tmp_path):
    command = [sys.executable, "-m", "miles_core.cli.main"]
    train = [*command, "train", "examples/sft.toml", "--quiet", "--set", f"run.directory={tmp_path}"]
    done = subprocess.run([*train, "--set", "run.steps=8"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("Held-out heldout, loss:"))
    before, after = float(line.split()[3]), float(line.split()[7])
    assert before == pytest.approx(5.8, abs=0.2)
    assert after < 0.7 * before
    assert not list((tmp_path / "sft" / "logs").glob("engine*"))
    audit = subprocess.run([*command, "audit", str(tmp_path / "sft")], capture_output=True, text=True, check=False)
    assert "hard mismatches: 0" in audit.stdout
