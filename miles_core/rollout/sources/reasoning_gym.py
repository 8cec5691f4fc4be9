"""Prompts from reasoning-gym: procedural task families, offline, seeded.

**Held-out sets never overlap training sets.** The split is a property of the question, not of a seed: a hash of family
and question text puts one question in four into the held-out part, whatever seed, size, weights or options drew it.
A source draws until it gets a question of its own part. Few-shot examples come from the training part, and a row
that repeats one of them is drawn again.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import xxhash
from pydantic import Field, field_validator

from miles_core.contracts.component import ComponentConfig, Example, Requirement, Workbench
from miles_core.contracts.sources import DataSource
from miles_core.data.group import Prompt
from miles_core.data.seeds import derive_seed
from miles_core.errors import DataError, nearest
from miles_core.rollout.sources.one_family import one_family
from miles_core.rollout.sources.rows import PLACEHOLDER

__all__ = ["FamilyChoice", "ReasoningGymConfig", "ReasoningGymSource", "entry", "held_out", "score_answer"]

HELD_OUT_SHARE = 4
"""One question in this many is held out. A constant: two configs must agree on it for their sets not to overlap."""

_MOST_DRAWS = 400
# Observed with reasoning-gym 0.1.25: these read their seed when they are created, the others whenever an item is made.
_SEEDED_AT_CREATION = frozenset({"acre", "gsm_symbolic", "list_functions", "survo"})
# And these iterate over sets of strings, so that their items depend on Python's hash seed.
_HASH_ORDERED = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)


class FamilyChoice(ComponentConfig):
    """One task family of the mixture."""

    name: str
    """Its name in reasoning-gym (`basic_arithmetic`, `letter_counting`, …)."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Its share of the rows, relative to the other families' weights."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The family's own options (`min_digits`, …), as reasoning-gym documents them."""


class ReasoningGymConfig(ComponentConfig):
    """Section `[data]` of `reasoning_gym`."""

    families: tuple[FamilyChoice, ...] = Field(min_length=1)
    """The mixture: names, or tables with `name`, `weight` and `config`."""
    size: int = Field(default=1000, ge=1)
    """Rows in one epoch."""
    seed: int = 0
    """Seed of the rows: the same seed gives the same rows."""
    split: Literal["train", "heldout"] = "train"
    """Which part of the questions to draw from; the two parts share no question."""
    fresh_epochs: bool = False
    """Draw new rows in every epoch. Without it, an epoch passes over the same rows again."""
    shots: int = Field(default=0, ge=0)
    """Solved examples before the question, the same ones for all rows of a family."""
    shots_seed: int = 0
    """Seed of the examples; give training and held-out sources the same one."""
    style: Literal["turns", "inline"] = "turns"
    """Examples as turns of the conversation (question by the user, answer by the assistant), or all in the one user
    message."""
    system: str = ""
    """System prompt; none is added when empty."""
    template: str = PLACEHOLDER
    """Text around a question, in examples too: `{prompt}` stands for the question."""

    @field_validator("families", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """A bare name is a family with default options."""
        return (
            [{"name": item} if isinstance(item, str) else item for item in value]
            if isinstance(value, list | tuple)
            else value
        )

    @field_validator("template")
    @classmethod
    def _has_placeholder(cls, value: str) -> str:
        if PLACEHOLDER not in value:
            raise ValueError(f"must contain {PLACEHOLDER}, where the question goes")
        return value


class ReasoningGymSource(DataSource[ReasoningGymConfig]):
    """Rows are drawn when they are asked for. The metadata holds what draws an item again (`family`, `config`,
    `draw`), which is what the `reasoning_gym` reward scores with; the label is the reference answer, if any."""

    Config = ReasoningGymConfig
    requires = (Requirement(key="import:reasoning_gym", reason="the task families live in it (extra 'tasks')"),)

    @classmethod
    def example(cls, bench: Workbench) -> Example:
        """Two families with a solved example each."""
        return Example(settings={"families": ("basic_arithmetic", "letter_counting"), "size": 12, "shots": 1})

    def __init__(self, config: ReasoningGymConfig) -> None:
        super().__init__(config)
        self._bounds = list(itertools.accumulate(family.weight for family in config.families))
        self._shots: dict[int, list[dict[str, Any]]] = {}

    def __len__(self) -> int:
        return self.config.size

    def prompt(self, index: int, *, epoch: int = 0) -> Prompt:
        """See `DataSource.prompt`. Raises `DataError` for an unknown family or option, or when a family's questions
        are too few to fill the split."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a source of {len(self)}")
        config = self.config
        epoch = epoch if config.fresh_epochs else 0
        identity = (config.seed, "reasoning_gym", config.split, epoch, index)
        at = derive_seed(*identity) / 2**31 * self._bounds[-1]
        number = min(bisect.bisect_right(self._bounds, at), len(self._bounds) - 1)
        family = config.families[number]
        examples = self._examples(number)
        shown = {example["question"] for example in examples}
        draws = self._draws(family, config.split, *identity)
        draw, item = next((draw, item) for draw, item in draws if item["question"] not in shown)
        return Prompt(
            prompt_id=f"{family.name}:{config.split}:{epoch}:{index}",
            messages=self._messages(item["question"], examples),
            label=item["answer"],
            metadata={"family": family.name, "config": family.config, "draw": draw},
        )

    def _draws(self, family: FamilyChoice, split: str, *identity: object) -> Iterator[tuple[int, dict[str, Any]]]:
        """(draw, item) of one split, without end as far as the caller cares. Raises `DataError` after many misses."""
        for attempt in range(_MOST_DRAWS):
            draw = derive_seed(*identity, attempt)
            item = entry(family.name, family.config, draw)
            if held_out(family.name, item["question"]) == (split == "heldout"):
                yield draw, item
        raise DataError(
            f"{_MOST_DRAWS} draws gave too few {split} questions that are no few-shot example; the family's options "
            f"{family.config} leave too few different questions",
            file=f"reasoning_gym:{family.name}",
        )

    def _examples(self, number: int) -> list[dict[str, Any]]:
        """The solved examples of a family: different questions of the training part."""
        if number not in self._shots:
            family, found = self.config.families[number], dict[str, dict[str, Any]]()
            draws = self._draws(family, "train", self.config.shots_seed, "shots", family.name)
            while len(found) < self.config.shots:
                _, item = next(draws)
                if not isinstance(item["answer"], str):
                    raise DataError(
                        "the family has no reference answers to show; set shots = 0",
                        file=f"reasoning_gym:{family.name}",
                    )
                found.setdefault(item["question"], item)
            self._shots[number] = list(found.values())
        return self._shots[number]

    def _messages(self, question: str, examples: list[dict[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        template = self.config.template
        solved = [(template.replace(PLACEHOLDER, item["question"]), item["answer"]) for item in examples]
        text = template.replace(PLACEHOLDER, question)
        if self.config.style == "inline":
            text = "".join(f"{asked} {answer}\n\n" for asked, answer in solved) + text
            solved = []
        turns = [
            {"role": role, "content": said}
            for pair in solved
            for role, said in zip(("user", "assistant"), pair, strict=True)
        ]
        head = [{"role": "system", "content": self.config.system}] if self.config.system else []
        return (*head, *turns, {"role": "user", "content": text})


def held_out(family: str, question: str) -> bool:
    """Whether a question belongs to the held-out part: a pure function of its text."""
    return xxhash.xxh3_64_intdigest(f"{family}\x1f{question}".encode()) % HELD_OUT_SHARE == 0


def entry(family: str, config: Mapping[str, Any], draw: int) -> dict[str, Any]:
    """The item that `draw` gives: `question`, `answer` and the family's own `metadata`. Equal draws, equal items.

    Raises `DataError` for an unknown family, or options that it refuses.
    """
    item: dict[str, Any] = _dataset(family, config, draw)[0]
    return item


def score_answer(family: str, config: Mapping[str, Any], draw: int, answer: str | None) -> float:
    """What the family's own scorer gives `answer`."""
    dataset = _dataset(family, config, draw)
    return float(dataset.score_answer(answer=answer, entry=dataset[0]))


def _dataset(family: str, config: Mapping[str, Any], draw: int) -> Any:
    """A one-item data set of reasoning-gym whose item is that of `draw`."""
    options = json.dumps(config, sort_keys=True)
    if family in _SEEDED_AT_CREATION:
        return _create(family, options, draw)
    dataset = _cached(family, options)
    dataset.seed = draw
    return dataset


@functools.lru_cache(maxsize=128)
def _cached(family: str, options: str) -> Any:
    return _create(family, options, 0)


def _create(family: str, options: str, seed: int) -> Any:
    file = f"reasoning_gym:{family}"
    if family in _HASH_ORDERED and not os.environ.get("PYTHONHASHSEED", "random").isdecimal():
        raise DataError(
            "its items depend on Python's hash seed, so rows would change on resume; start with PYTHONHASHSEED=0 set",
            file=file,
        )
    with one_family(family) as factory:
        if family not in factory.DATASETS:
            allowed = list(factory.DATASETS)
            raise DataError(f"there is no such family; {nearest(family, allowed)}", file=file, field="name")
        try:
            return factory.create_dataset(family, seed=seed, size=1, **json.loads(options))
        except (TypeError, ValueError, AssertionError) as error:
            raise DataError(f"refuses its options {options}: {error}", file=file, field="config") from error
