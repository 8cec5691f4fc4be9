"""A session with a model that ends its turns by the next role: nothing that it sampled is lost, or trained twice."""

from __future__ import annotations

import numpy as np
import pytest
from miles_models_glm.family import GlmConfig, GlmFamily

from miles_core.contracts.component import ComponentConfig
from miles_core.contracts.engines import Generation, Sampling
from miles_core.runs.audit import audit_trajectory, whole_outputs
from miles_core.runs.wire import WireRecord
from miles_core.testing.families import vocabulary
from miles_core.tito.export import Identity, export
from miles_core.tito.matchers import ToolArgumentsMatcher
from miles_core.tito.sessions import Session
from miles_core.tito.settings import Codec, SessionSettings
from miles_core.tito.turns import TurnRequest

NAMES = Identity(prompt_id="p", group_id="g", episode_id="g.0")


class Engine:
    """Says its script, and records what went over the wire."""

    def __init__(self, wire, *script):
        self.wire = wire
        self.script = list(script)
        self.prompts = []

    async def generate(self, input_ids, sampling, **_):
        ids = np.array(self.script[len(self.prompts)], np.int32)
        self.prompts.append(list(input_ids))
        generation = Generation(
            token_ids=ids,
            logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
            versions=np.zeros(len(ids), np.int32),
            finish_reason="stop",
            engine="e",
            prompt_tokens=len(input_ids),
            cached_tokens=0,
            started=0.0,
            finished=1.0,
            request_id=f"r{len(self.prompts)}",
        )
        self.wire.add(input_ids, generation)
        return generation


@pytest.fixture
def wire(tmp_path):
    record = WireRecord(tmp_path / "wire.sqlite")
    yield record
    record.close()


async def talk(wire, tmp_path, ends, *, max_tokens=0):
    """Two turns: the first one ends with `ends`, and the user answers it."""
    family = GlmFamily(GlmConfig(version="4.7"))
    tokenizer = vocabulary(family, tmp_path / "tokenizer")
    thought, user = tokenizer.special("</think>"), tokenizer.special("<|user|>")
    first = [thought, *tokenizer.encode("one"), tokenizer.special(ends)]
    engine = Engine(wire, first, [thought, *tokenizer.encode("two"), user])
    codec = Codec(family=family, tokenizer=tokenizer, matcher=ToolArgumentsMatcher(ComponentConfig()))
    session = Session(codec, SessionSettings(engine=engine, sampling=Sampling(max_new_tokens=64)))
    messages = [{"role": "user", "content": "a"}]
    reply = await session.turn(TurnRequest(messages=messages))
    messages += [reply.message, {"role": "user", "content": "b"}]
    await session.turn(TurnRequest(messages=messages))
    official = family.render(messages, tokenizer, add_generation_prompt=True)
    kept = [tokenizer.special(ends)] if ends == "<|endoftext|>" else []  # it is no role: what was sampled stays
    border = len(engine.prompts[0]) + len(first) - 1
    assert engine.prompts[1] == [*official[:border], *kept, *official[border:]]
    wire.flush()
    return export(session.tree, NAMES, max_tokens=max_tokens), engine


def problems(trajectories, wire):
    outputs = whole_outputs(trajectories, wire)
    return [p for t in trajectories for p in audit_trajectory(t, wire, policy_version=0, outputs=outputs)]


async def test_a_role_that_comes_next_indeed_stays_where_it_was_sampled(wire, tmp_path):
    trajectories, engine = await talk(wire, tmp_path, "<|user|>")
    (trajectory,) = trajectories
    assert trajectory.token_ids[trajectory.loss_mask].tolist() == [i for said in engine.script for i in said]
    assert problems(trajectories, wire) == []


@pytest.mark.parametrize("ends", ["<|observation|>", "<|endoftext|>"])
async def test_every_sampled_token_trains_once_and_the_audit_misses_none(wire, tmp_path, ends):
    trajectories, engine = await talk(wire, tmp_path, ends)
    trained = sorted(i for t in trajectories for i in t.token_ids[t.loss_mask].tolist())
    assert trained == sorted(i for said in engine.script for i in said)
    assert problems(trajectories, wire) == []
    if ends == "<|observation|>":
        whole, tail = trajectories
        assert tail.token_ids.tolist() == [*engine.prompts[0], *engine.script[0]]
        assert tail.loss_mask.nonzero()[0].tolist() == [len(tail.token_ids) - 1]
        assert len(whole.turns) == 2


async def test_a_token_that_was_dropped_and_is_nowhere_is_found(wire, tmp_path):
    trajectories, _ = await talk(wire, tmp_path, "<|observation|>")
    assert problems(trajectories[:1], wire) == ["g.0.0 turn 0: 4 sampled ids, the engine returned 5"]


async def test_what_no_trajectory_has_room_for_is_cut_at_the_limit(wire, tmp_path):
    trajectories, engine = await talk(wire, tmp_path, "<|observation|>")
    limit = len(engine.prompts[0]) + len(engine.script[0]) - 1
    wire.close()
    again = WireRecord(tmp_path / "again.sqlite")
    trajectories, _ = await talk(again, tmp_path, "<|observation|>", max_tokens=limit)
    assert [t.status.value for t in trajectories] == ["truncated"]
    assert problems(trajectories, again) == []
    again.close()
