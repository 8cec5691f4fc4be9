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
from miles_core.engines.scoring import score_tokens
from miles_core.errors import EngineError
from miles_core.objective.compose import WeightedTerm, compose
from miles_core.objective.distillation import Distillation
from miles_core.objective.none import NoAdvantages
from miles_core.plugins import PluginManager
from miles_core.runs.teacher import with_teacher

ROOT = Path(__file__).parents[2]
OBJECTIVE = compose(
    estimator=NoAdvantages(ComponentConfig()),
    terms=[WeightedTerm(name="distillation", term=Distillation(ComponentConfig()))],
)


class FakeHttp:
    """Answers as an engine does: token t has the log-prob −t / 10."""

    def __init__(self, change=lambda answer: answer):
        self.bodies = []
        self.change = change

    async def call(self, method, url, body):
        self.bodies.append((url, body))
        return [
            self.change({"meta_info": {"input_token_logprobs": [[None if i == 0 else -t / 10, t, None] for i, t in e]}})
            for e in (list(enumerate(ids)) for ids in body["input_ids"])
        ]


async def test_every_token_is_scored_in_order_over_all_engines():
    http = FakeHttp()
    sequences = [[7, 8, n] for n in range(70)]
    columns = await score_tokens(http, ["a", "b"], sequences)
    assert [url for url, _ in http.bodies] == ["a/generate", "b/generate", "a/generate"]
    assert all(body["logprob_start_len"] == 0 for _, body in http.bodies)
    assert all(body["sampling_params"]["temperature"] == 1.0 for _, body in http.bodies)
    for n, column in enumerate(columns):
        np.testing.assert_allclose(column, [0, -0.8, -n / 10], rtol=1e-6)


def other_token(answer):
    answer["meta_info"]["input_token_logprobs"][-1][1] = 99
    return answer


def not_finite(answer):
    answer["meta_info"]["input_token_logprobs"][-1][0] = float("nan")
    return answer


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_token, "of other tokens"),
        (not_finite, "is not finite"),
        (lambda answer: {"error": "out of memory"}, "without log-probs of the input"),
    ],
)
async def test_garbage_never_becomes_a_column(change, said):
    with pytest.raises(EngineError, match=said):
        await score_tokens(FakeHttp(change), ["a"], [[1, 2, 3]])


def test_the_student_moves_towards_the_teacher(backends, batches):
    """The teacher is a policy that was trained on other tokens; the reverse KL to it falls."""
    teacher, student, batch = backends(), backends(), batches(5)
    for _ in range(3):
        teacher.train_step(batch, _likelihood())
    columns = dict(
        zip((t.trajectory_id for t in batch.trajectories), teacher.logprobs(batch.trajectories), strict=True)
    )
    annotated = with_teacher(batch, columns)
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


def test_a_batch_without_a_teacher_is_refused(backends, batches):
    with pytest.raises(ValueError, match="the batch has none"):
        backends().train_step(batches(), OBJECTIVE)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"teacher": None}, "distillation learns from a teacher, and there is none"),
        ({"objective": {"terms": ["policy"]}}, "no part of the objective learns from a teacher"),
        ({"sampling": {"max_new_tokens": 6, "temperature": 0.7}}, "must be 1.0 with a teacher"),
    ],
)
def test_what_cannot_work_is_explained(changes, said):
    tree = load_config(ROOT / "examples" / "distill.toml").resolved()
    problems = preflight(loaded_from_tree({**tree, **changes}, {}), PluginManager.discover(enable=["core"])).problems
    assert any(said in str(problem) for problem in problems), problems


@pytest.mark.slow
def test_a_teacher_that_is_the_student_has_nothing_to_teach(tmp_path):
    """Through two engines and over the wire: the same weights give the same log-probs."""
    settings = [f"run.directory={tmp_path}", "run.steps=1", "teacher.path=tiny:0", "evaluation.at_start=false"]
    command = [sys.executable, "-m", "miles_core.cli.main", "train", "examples/distill.toml", "--quiet"]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    connection = sqlite3.connect(tmp_path / "distill" / "metrics.sqlite")
    found = dict(connection.execute("select name, value from metrics where kind = 'train' and step = 1"))
    connection.close()
    assert found["distillation/reverse_kl"] == pytest.approx(0, abs=1e-5)
    assert found["grad_norm"] < 1e-4
