"""Rewards: hand-worked scores, and nothing that cannot be scored ever becomes 0."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import miles_core.defaults
from miles_core.contracts.rewards import Sample
from miles_core.errors import ConfigError, RewardError
from miles_core.plugins import PluginManager
from miles_core.rollout.rewards.answers import AnswerConfig, extract_answer, last_boxed
from miles_core.rollout.rewards.by_metadata import ByMetadata, ByMetadataConfig
from miles_core.rollout.rewards.function import CallableConfig, CallableReward
from miles_core.rollout.rewards.remote import RemoteConfig, RemoteReward
from miles_core.rollout.rewards.text import Choice, ChoiceConfig, Exact, ExactConfig, TokenF1, token_f1

Make = Callable[..., Sample]

# Finding the answer


@pytest.mark.parametrize(
    ("options", "response", "answer"),
    [
        ({}, " 4 \n", "4"),
        ({"extract": "first_line"}, "\n 4 \nbye", "4"),
        ({"extract": "last_line"}, "so\n 5\n\n", "5"),
        ({"extract": "first_line"}, "\n \n", None),
        ({"extract": "regex", "pattern": r"answer: (\d+)"}, "answer: 1, no, answer: 22", "22"),
        ({"extract": "regex", "pattern": r"\d+"}, "1 and 3", "3"),
        ({"extract": "regex", "pattern": r"\d+"}, "none", None),
        ({"extract": "regex", "pattern": r"(a)|b"}, "b", None),
        ({"boxed": True}, r"\boxed{1} then \boxed{ 2 }", "2"),
        ({"boxed": True}, "2", None),
        ({"boxed": True, "extract": "first_line"}, "\\boxed{1}\n\\boxed{2}", "1"),
    ],
)
def test_extraction(options: dict[str, Any], response: str, answer: str | None):
    assert extract_answer(AnswerConfig(**options), response) == answer


@given(
    st.recursive(
        st.sampled_from(["x", r"\{", r"\}", r"\\"]),
        lambda inner: st.lists(inner, max_size=3).map(lambda p: "{" + "".join(p) + "}"),
    )
)
def test_boxed_content_is_found_whole(content: str):
    assert last_boxed(rf"\boxed{{no}} \boxed{{{content}}} and an open \boxed{{ end") == content


@pytest.mark.parametrize("options", [{"extract": "regex"}, {"pattern": "x"}, {"extract": "regex", "pattern": "("}])
def test_extraction_options_that_make_no_sense(options: dict[str, str]):
    with pytest.raises(ValidationError):
        AnswerConfig(**options)


# exact, f1, choice


@pytest.mark.parametrize(
    ("response", "label", "options", "score"),
    [
        (" 4\n", "4", {}, 1.0),
        ("4", 4, {}, 1.0),
        ("four", ["4", "four"], {}, 1.0),
        ("Four", "four", {}, 0.0),
        ("Four", "four", {"ignore_case": True}, 1.0),
        ("", "4", {}, 0.0),
    ],
)
async def test_exact(make_sample: Make, response: str, label: Any, options: dict[str, Any], score: float):
    assert await Exact(ExactConfig(**options)).score([make_sample(response, label)]) == [score]


@pytest.mark.parametrize("kind", [Exact, TokenF1, Choice])
async def test_a_row_without_label_cannot_be_scored_and_fails_alone(make_sample: Make, kind: Any):
    samples = [make_sample("A", "A"), make_sample("A", None, episode="g.1"), make_sample("B", "A")]
    first, second, third = await kind(kind.Config()).score(samples)
    assert (first, third) == (1.0, 0.0)
    assert isinstance(second, RewardError)
    assert "episode g.1" in str(second)


@pytest.mark.parametrize(
    ("answer", "reference", "f1"),
    [
        ("The cat sat.", "a cat", 2 / 3),
        ("cat cat", "cat", 2 / 3),
        ("", "", 1.0),
        ("dog", "cat", 0.0),
        ("the", "cat", 0.0),
    ],
)
def test_token_f1(answer: str, reference: str, f1: float):
    assert token_f1(answer, reference) == pytest.approx(f1)


@given(st.lists(st.sampled_from(["cat", "dog", "sat"])), st.lists(st.sampled_from(["cat", "dog", "sat"])))
def test_token_f1_is_the_harmonic_mean_of_precision_and_recall(ours: list[str], theirs: list[str]):
    common = sum((Counter(ours) & Counter(theirs)).values())
    if ours and theirs:
        precision, recall = common / len(ours), common / len(theirs)
        expected = 0.0 if common == 0 else 2 * precision * recall / (precision + recall)
    else:
        expected = float(ours == theirs)
    assert token_f1(" ".join(ours), " ".join(theirs)) == pytest.approx(expected)


async def test_f1_takes_the_best_reference(make_sample: Make):
    assert await TokenF1(AnswerConfig()).score([make_sample("cat", ["dog", "cat"])]) == [1.0]


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("B", "B", 1.0),
        ("(B).", "b", 1.0),
        ("A looks good, but the answer is B", 1, 1.0),
        ("The answer is (B), not A.", "B", 1.0),
        ("Answer: **C**", "C", 1.0),
        ("A or B? B", "B", 1.0),
        ("Because", "B", 0.0),
        ("I have a cat", "A", 0.0),
        ("E", "A", 0.0),
    ],
)
async def test_choice(make_sample: Make, response: str, label: Any, score: float):
    assert await Choice(ChoiceConfig()).score([make_sample(response, label)]) == [score]


async def test_choice_counts_the_options_of_the_row(make_sample: Make):
    reward = Choice(ChoiceConfig())
    assert await reward.score([make_sample("B, not C", "B", options=["x", "y"])]) == [1.0]
    for sample in (
        make_sample("C", "C", options=["x", "y"]),
        make_sample("A", 7),
        make_sample("A", "A", options="x" * 9),
    ):
        (error,) = await reward.score([sample])
        assert isinstance(error, RewardError)


# callable

FUNCTIONS = """
import asyncio, threading

MAIN = threading.get_ident()

def length(sample, scale=1):
    if sample.response == "bad":
        raise KeyError("no such thing")
    return scale * len(sample.response)

async def later(sample):
    await asyncio.sleep(0)
    return {"length": len(sample.response), "other": 0.5}

def in_thread(sample):
    return float(threading.get_ident() != MAIN)

def ranked(samples):
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].response))
    return [order.index(i) for i in range(len(samples))]

def short(samples):
    return [1.0]
"""


@pytest.fixture
def functions(tmp_path: Path) -> Callable[..., CallableReward]:
    path = tmp_path / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return lambda name, **options: CallableReward(CallableConfig(function=f"{path}:{name}", **options))


async def test_callable_per_sample(make_sample: Make, functions: Callable[..., CallableReward]):
    samples = [make_sample("a"), make_sample("abc")]
    assert await functions("length", arguments={"scale": 2}).score(samples) == [2, 6]
    assert await functions("later").score(samples[:1]) == [{"length": 1, "other": 0.5}]
    assert await functions("in_thread").score(samples[:1]) == [1.0]


async def test_callable_that_raises_fails_its_episode_alone(
    make_sample: Make, functions: Callable[..., CallableReward]
):
    good, bad = await functions("length").score([make_sample("a"), make_sample("bad", episode="g.7")])
    assert good == 1
    assert isinstance(bad, RewardError)
    assert re.search(r"episode g\.7: .*raised KeyError: 'no such thing'", str(bad))


async def test_callable_per_group(make_sample: Make, functions: Callable[..., CallableReward]):
    samples = [make_sample("aaa"), make_sample("a"), make_sample("aa")]
    assert await functions("ranked", per="group").score(samples) == [2, 0, 1]
    with pytest.raises(RewardError, match=r"returned \[1.0\], expected a list of 3 scores"):
        await functions("short", per="group").score(samples)


async def test_callable_that_is_not_there_stops_the_run_at_setup(functions: Callable[..., CallableReward]):
    with pytest.raises(ConfigError, match="has no function lenght"):
        await functions("lenght").setup()


async def test_installed_functions_are_named_by_module(make_sample: Make):
    reward = CallableReward(CallableConfig(function="builtins:len", per="sample"))
    (error,) = await reward.score([make_sample("a")])
    assert isinstance(error, RewardError)  # a Sample has no len()


# remote


class Service:
    """Answers the scripted (status, JSON or text) in turn, the last one ever after. Status 0 breaks the connection."""

    def __init__(self, *answers: tuple[int, Any], delay: float = 0.0) -> None:
        self.answers = list(answers)
        self.delay = delay
        self.bodies: list[Any] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        await asyncio.sleep(self.delay)
        status, answer = self.answers[min(len(self.bodies), len(self.answers)) - 1]
        if status == 0:
            assert request.transport is not None
            request.transport.close()
        return (
            web.Response(text=answer, status=status or 200)
            if isinstance(answer, str)
            else web.json_response(answer, status=status)
        )

    async def score(self, samples: list[Sample], **options: Any) -> Any:
        app = web.Application()
        app.router.add_post("/score", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        reward = RemoteReward(RemoteConfig(url=f"http://127.0.0.1:{port}/score", backoff=0.01, **options))
        await reward.setup()
        try:
            return await reward.score(samples)
        finally:
            await reward.close()
            await runner.cleanup()


async def test_remote_scores_a_group_in_one_request(make_sample: Make):
    service = Service((200, {"scores": [1, {"a": 0.5}]}))
    assert await service.score([make_sample("x", "1", kind="k"), make_sample("y")]) == [1, {"a": 0.5}]
    (body,) = service.bodies
    assert body["samples"][0] == {
        "episode_id": "g.0",
        "prompt_id": "p:1",
        "messages": [{"role": "assistant", "content": "x"}],
        "response": "x",
        "label": "1",
        "metadata": {"kind": "k"},
    }


async def test_remote_tries_again_after_transport_errors_and_5xx(make_sample: Make):
    service = Service((503, "busy"), (0, ""), (200, {"scores": [1]}))
    assert await service.score([make_sample("x")]) == [1]
    assert len(service.bodies) == 3


async def test_remote_gives_up_and_says_what_it_tried(make_sample: Make):
    service = Service((500, "no"))
    with pytest.raises(RewardError, match=r"failed 3 times: try 1: HTTP 500; try 2: HTTP 500; try 3: HTTP 500"):
        await service.score([make_sample("x")], retries=2)


@pytest.mark.parametrize(
    ("status", "answer", "reason"),
    [
        (422, "label is missing", "HTTP 422: label is missing"),
        (302, "elsewhere", "HTTP 302"),
        (200, "oops", "answered no JSON"),
        (200, {"scores": [1, 2]}, "one for each of 1 samples"),
        (200, [1], "one for each of 1 samples"),
    ],
)
async def test_remote_does_not_try_a_final_answer_again(make_sample: Make, status: int, answer: Any, reason: str):
    service = Service((status, answer))
    with pytest.raises(RewardError, match=reason):
        await service.score([make_sample("x")])
    assert len(service.bodies) == 1


async def test_remote_keeps_its_deadline(make_sample: Make):
    with pytest.raises(RewardError, match=r"no scores within 0\.1 s"):
        await Service((200, {"scores": [1]}), delay=5.0).score([make_sample("x")], deadline=0.1)


async def test_remote_null_fails_one_episode(make_sample: Make):
    one, none = await Service((200, {"scores": [1, None]})).score([make_sample("x"), make_sample("y", episode="g.3")])
    assert one == 1
    assert isinstance(none, RewardError)
    assert "episode g.3" in str(none)


# by_metadata


async def test_by_metadata_scores_each_row_by_its_own(make_sample: Make, monkeypatch: pytest.MonkeyPatch):
    manager = PluginManager()
    manager.register(miles_core.defaults, name="core")
    monkeypatch.setattr(PluginManager, "discover", classmethod(lambda cls, enable=None: manager))
    config = ByMetadataConfig(key="kind", rewards={"exact": {"ignore_case": True}, "letter": {"use": "choice"}})
    reward = ByMetadata(config)
    await reward.setup()
    samples = [
        make_sample("(B)", "B", kind="letter"),
        make_sample("YES", "yes", kind="exact"),
        make_sample("x", "y", kind="other", episode="g.2"),
        make_sample("A", "B", kind="letter"),
    ]
    *_, unknown, last = scores = await reward.score(samples)
    assert scores[:2] == [1.0, 1.0]
    assert last == 0.0
    assert isinstance(unknown, RewardError)
    assert "'kind' of prompt p:1 is 'other'; allowed: exact, letter" in str(unknown)
    await reward.close()
