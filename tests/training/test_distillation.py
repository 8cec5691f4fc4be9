"""Distillation: the teacher's log-probs reach the loss, and are of the same tokens at the same temperature."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from miles_core.config.load import load_config, loaded_from_tree
from miles_core.config.preflight import preflight
from miles_core.contracts.component import ComponentConfig
from miles_core.data.parquet import read_rollouts, write_rollouts
from miles_core.engines.embedded_launch import EmbeddedEngine
from miles_core.engines.scoring import TokenScores, score_tokens
from miles_core.errors import EngineError
from miles_core.objective.compose import WeightedTerm, compose
from miles_core.objective.distillation import Distillation
from miles_core.objective.distillation_top_k import DistillationTopK, DistillationTopKConfig
from miles_core.objective.none import NoAdvantages
from miles_core.plugins import PluginManager
from miles_core.runs.teacher import with_teacher

ROOT = Path(__file__).parents[2]
OBJECTIVE = compose(
    estimator=NoAdvantages(ComponentConfig()),
    terms=[WeightedTerm(name="distillation", term=Distillation(ComponentConfig()))],
)

TOP_K = compose(
    estimator=NoAdvantages(ComponentConfig()),
    terms=[WeightedTerm(name="distillation_top_k", term=DistillationTopK(DistillationTopKConfig()))],
)


class FakeHttp:
    """Answers as an engine does: token t has the log-prob −t / 10; the likeliest tokens are 1, 2, …"""

    def __init__(self, change=lambda answer: answer):
        self.bodies = []
        self.change = change

    async def call(self, method, url, body):
        self.bodies.append((url, body))
        return [self.change({"meta_info": self.meta(body, ids)}) for ids in body["input_ids"]]

    def meta(self, body, ids):
        meta = {"input_token_logprobs": [[None if i == 0 else -t / 10, t, None] for i, t in enumerate(ids)]}
        if count := body.get("top_logprobs_num"):
            likeliest = [[-t / 10, t, None] for t in range(1, count + 1)]
            meta["input_top_logprobs"] = [None, *([likeliest] * (len(ids) - 1))]
        if "logprob_temperature" in body:
            meta["logprob_temperature"] = body["logprob_temperature"]
        return meta


async def test_every_token_is_scored_in_order_over_all_engines():
    http = FakeHttp()
    sequences = [[7, 8, n] for n in range(70)]
    columns = await score_tokens(http, ["a", "b"], sequences)
    assert [url for url, _ in http.bodies] == ["a/generate", "b/generate", "a/generate"]
    assert all(body["logprob_start_len"] == 0 for _, body in http.bodies)
    assert all(body["sampling_params"]["temperature"] == 1.0 for _, body in http.bodies)
    for n, column in enumerate(columns):
        np.testing.assert_allclose(column.logprobs, [0, -0.8, -n / 10], rtol=1e-6)
        assert column.top_ids is None


async def test_the_likeliest_tokens_come_with_their_logprobs():
    (scores,) = await score_tokens(FakeHttp(), ["a"], [[7, 8, 9]], top_k=2)
    assert scores.top_ids.tolist() == [[0, 0], [1, 2], [1, 2]]
    np.testing.assert_allclose(scores.top_logprobs, [[0, 0], [-0.1, -0.2], [-0.1, -0.2]], rtol=1e-6)


def other_token(answer):
    answer["meta_info"]["input_token_logprobs"][-1][1] = 99
    return answer


def not_finite(answer):
    answer["meta_info"]["input_token_logprobs"][-1][0] = float("nan")
    return answer


def at_temperature_one(answer):
    del answer["meta_info"]["logprob_temperature"]
    return answer


def one_missing(answer):
    answer["meta_info"]["input_top_logprobs"][1] = [[-0.1, 1, None]]
    return answer


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_token, "of other tokens"),
        (not_finite, "is not finite"),
        (lambda answer: {"error": "out of memory"}, "without log-probs of the input"),
        (at_temperature_one, "the answer does not say that they are"),
        (one_missing, "not 2 likeliest tokens in place of each of 3"),
    ],
)
async def test_garbage_never_becomes_a_column(change, said):
    with pytest.raises(EngineError, match=said):
        await score_tokens(FakeHttp(change), ["a"], [[1, 2, 3]], temperature=0.7, top_k=2)


def test_the_student_moves_towards_the_teacher(backends, batches):
    """The teacher is a policy that was trained on other tokens; the reverse KL to it falls."""
    teacher, student, batch = backends(), backends(), batches(5)
    for _ in range(3):
        teacher.train_step(batch, _likelihood())
    columns = dict(
        zip((t.trajectory_id for t in batch.trajectories), teacher.logprobs(batch.trajectories), strict=True)
    )
    annotated = with_teacher(batch, {name: TokenScores(column) for name, column in columns.items()})
    divergence = [student.train_step(annotated, OBJECTIVE).metrics["distillation/reverse_kl"] for _ in range(2)]
    own = dict(zip(columns, student.logprobs(batch.trajectories), strict=True))
    gain = sum(
        float((own[t.trajectory_id] - backends().logprobs([t])[0])[t.loss_mask].sum()) for t in batch.trajectories
    )
    assert divergence[0] < 0  # the teacher likes these tokens better, so they become likelier
    assert gain > 0


def _likelihood():
    from miles_core.objective.supervised import Supervised

    return compose(
        estimator=NoAdvantages(ComponentConfig()),
        terms=[WeightedTerm(name="supervised", term=Supervised(ComponentConfig()))],
    )


def test_the_divergence_on_the_likeliest_tokens_falls(backends, batches):
    """The teacher's numbers are those of other weights; the loss is what a slow pass over whole logits gives."""
    torch = pytest.importorskip("torch")
    teacher, student, batch = backends(), backends(), batches(5)
    for _ in range(3):
        teacher.train_step(batch, _likelihood())
    annotated = with_teacher(batch, {t.trajectory_id: _likeliest(teacher, t, 4) for t in batch.trajectories})
    reports = [student.train_step(annotated, TOP_K) for _ in range(3)]
    expected, tokens = 0.0, 0
    fresh = backends()
    for t in annotated.trajectories:
        own = _distributions(fresh, t)
        for i in np.flatnonzero(t.loss_mask):
            p = own[i - 1][torch.tensor(t.teacher_top_ids[i].tolist())].exp().double()
            q = torch.tensor(t.teacher_top_logprobs[i].tolist()).exp().double()
            p, q = torch.cat([p, 1 - p.sum(0, keepdim=True)]), torch.cat([q, 1 - q.sum(0, keepdim=True)])
            expected, tokens = expected + float((p * (p / q).log()).sum()), tokens + 1
    assert reports[0].loss == pytest.approx(expected / tokens, rel=1e-4)
    assert reports[0].metrics["distillation_top_k/kl"] == pytest.approx(reports[0].loss, rel=1e-5)
    assert reports[2].loss < reports[1].loss < reports[0].loss


def _distributions(backend, trajectory):
    """Log-probs [T, V] of a plain forward pass."""
    torch = pytest.importorskip("torch")
    model = backend.trainer.scorer.model
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(torch.tensor([trajectory.token_ids.tolist()])).logits[0].log_softmax(-1)


def _likeliest(backend, trajectory, k):
    top = _distributions(backend, trajectory).topk(k)
    first = np.zeros((1, k))
    return TokenScores(
        np.zeros(len(trajectory), np.float32),
        np.concatenate([first, top.indices[:-1].numpy()]).astype(np.int32),
        np.concatenate([first, top.values[:-1].numpy()]).astype(np.float32),
    )


def test_a_batch_without_a_teacher_is_refused(backends, batches):
    with pytest.raises(ValueError, match="log-probs, but the batch has none"):
        backends().train_step(batches(), OBJECTIVE)
    with pytest.raises(ValueError, match="likeliest tokens, but the batch has none"):
        backends().train_step(batches(), TOP_K)


def test_what_the_teacher_said_is_written_and_read(batches, tmp_path):
    batch = batches(1)
    scores = {
        t.trajectory_id: TokenScores(
            np.full(len(t), -1.5, np.float32),
            np.arange(3 * len(t), dtype=np.int32).reshape(-1, 3),
            np.full((len(t), 3), -2.5, np.float32),
        )
        for t in batch.trajectories
    }
    annotated = with_teacher(batch, scores)
    write_rollouts(tmp_path / "file.parquet", annotated.trajectories, step=1, policy_version=0)
    for read, written in zip(read_rollouts(tmp_path / "file.parquet"), annotated.trajectories, strict=True):
        for name in ("teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs"):
            np.testing.assert_array_equal(getattr(read, name), getattr(written, name))
            assert getattr(read, name).dtype == getattr(written, name).dtype


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"teacher": None}, "distillation learns from a teacher, and there is none"),
        ({"objective": {"terms": ["policy"]}}, "no part of the objective learns from a teacher"),
        ({"objective": {"algorithm": "none", "terms": ["distillation_top_k"]}}, "none are recorded"),
        ({"teacher": {"path": "tiny:0", "top_k": 4}}, "no part of the objective learns from the teacher's likeliest"),
    ],
)
def test_what_cannot_work_is_explained(changes, said):
    tree = load_config(ROOT / "examples" / "distill.toml").resolved()
    problems = preflight(loaded_from_tree({**tree, **changes}, {}), PluginManager.discover(enable=["core"])).problems
    assert any(said in str(problem) for problem in problems), problems


def test_an_engine_that_scores_at_temperature_1_alone_needs_a_student_at_temperature_1(monkeypatch):
    tree = load_config(ROOT / "examples" / "distill-top-k.toml").resolved()
    check = lambda: preflight(loaded_from_tree(tree, {}), PluginManager.discover(enable=["core"])).problems  # noqa: E731
    said = "must be 1.0 with a teacher on 'embedded'"
    assert not any(said in str(problem) for problem in check())
    monkeypatch.setattr(EmbeddedEngine, "scores_at_temperature", False)
    assert any(said in str(problem) for problem in check())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "divergence", "temperature"),
    [
        ("distill", "distillation/reverse_kl", 1.0),
        ("distill", "distillation/reverse_kl", 0.6),
        ("distill-top-k", "distillation_top_k/kl", 0.6),
    ],
)
def test_a_teacher_that_is_the_student_has_nothing_to_teach(example, divergence, temperature, tmp_path):
    """Through two engines and over the wire: the same weights give the same log-probs, at any temperature."""
    settings = [
        *(f"run.directory={tmp_path}", "run.steps=1", "teacher.path=tiny:0", "evaluation.datasets=[]"),
        *(f"sampling.temperature={temperature}",),
    ]
    command = [sys.executable, "-m", "miles_core.cli.main", "train", f"examples/{example}.toml", "--quiet"]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    connection = sqlite3.connect(tmp_path / example / "metrics.sqlite")
    found = dict(connection.execute("select name, value from metrics where kind = 'train' and step = 1"))
    connection.close()
    assert found[divergence] == pytest.approx(0, abs=1e-5)
    assert found["grad_norm"] < 1e-4
