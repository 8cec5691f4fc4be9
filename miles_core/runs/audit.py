"""The audit: prove, from what is on disk, that what was trained is exactly what was sampled.

Every trained trajectory is compared with the wire record of the generations it came from: the ids before a turn are
what the engine was sent, the ids, log-probs and versions of a turn are what it returned. On top: every masked-in
token has a log-prob and a version, no version is above the trainer's, nothing is trained twice, and the ledger's
conservation law holds. Trajectories of sessions are compared with their conversations, too, as the family renders them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from miles_core.data.parquet import read_rollouts
from miles_core.data.trajectory import NOT_SAMPLED, Trajectory, Turn
from miles_core.rollout.ledger import Conservation, Ledger
from miles_core.runs.audit_text import TextAudit
from miles_core.runs.directory import RunDirectory
from miles_core.runs.metrics import MetricsStore
from miles_core.runs.wire import WireRecord, digest
from miles_core.tito.fidelity import HARD

__all__ = ["AuditResult", "audit_run", "audit_trajectory"]

_LISTED = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditResult:
    """What the audit found. `mismatches` is empty when everything agrees; every one of them is hard. `conversations` of
    session trajectories were compared; `by_class` counts their mismatches by class, of which the last is soft."""

    trajectories: int
    tokens: int
    trained_tokens: int
    turns: int
    mismatches: tuple[str, ...]
    conservation: Conservation
    staleness: Counter[int]
    divergence: dict[str, float]
    conversations: int = 0
    by_class: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def hard_mismatches(self) -> int:
        return len(self.mismatches)

    @property
    def text(self) -> str:
        """The result in words."""
        counts = self.conservation
        staleness = ", ".join(f"{age}: {n}" for age, n in sorted(self.staleness.items())) or "no trained token"
        classes = ", ".join(f"{kind} {n}{'' if kind in HARD else ' (soft)'}" for kind, n in self.by_class.items())
        lines = [
            f"{self.trajectories} trained trajectories, {self.turns} turns, {self.tokens} tokens, "
            f"{self.trained_tokens} of them trained",
            f"hard mismatches: {self.hard_mismatches}",
            *(f"  {m}" for m in self.mismatches[:_LISTED]),
            *([f"  and {self.hard_mismatches - _LISTED} more"] if self.hard_mismatches > _LISTED else []),
            *([f"conversations compared: {self.conversations}; {classes}"] if self.conversations else []),
            f"ledger: issued {counts.issued} = trained {counts.trained} + dropped {counts.dropped} "
            f"+ open {counts.open}",
            f"trained tokens by staleness: {staleness}",
            *(f"{name}: {value:.3g}" for name, value in self.divergence.items()),
        ]
        return "\n".join(lines)


def audit_run(run: RunDirectory) -> AuditResult:
    """Audit everything that a run trained on."""
    wire = WireRecord(run.path / "wire.sqlite")
    config = run.loaded_config().config
    supervised = config.run.mode == "supervised"  # its tokens came over no wire
    texts = TextAudit(config)
    ledger = Ledger(run.ledger_file)
    try:
        conservation = ledger.conservation()
        trained = {e.group_id: e for e in ledger.entries() if e.state == "trained"}
        mismatches: list[str] = []
        if not conservation.holds:
            mismatches.append("the ledger's conservation law does not hold")
        seen: set[str] = set()
        staleness: Counter[int] = Counter()
        count = tokens = trained_tokens = turns = 0
        for step, path in _rollout_files(run):
            rollouts = read_rollouts(path)
            outputs = whole_outputs(rollouts, wire)
            for trajectory in rollouts:
                entry = trained.get(trajectory.group_id)
                if entry is None or entry.version != step:
                    continue  # the batch of a step that was lost with its weights
                if not supervised:
                    mismatches += audit_trajectory(trajectory, wire, policy_version=step - 1, outputs=outputs)
                mismatches += texts.check(trajectory)
                if trajectory.trajectory_id in seen:
                    mismatches.append(f"{trajectory.trajectory_id} was trained twice")
                seen.add(trajectory.trajectory_id)
                ages = (step - 1) - trajectory.versions[trajectory.loss_mask]
                staleness.update(ages.tolist())
                count, tokens = count + 1, tokens + len(trajectory)
                trained_tokens, turns = trained_tokens + trajectory.trainable_tokens, turns + len(trajectory.turns)
        groups = {t.rpartition(".")[0].partition(".")[0] for t in seen}
        mismatches += [f"group {g} is trained in the ledger and in no rollout file" for g in trained.keys() - groups]
    finally:
        wire.close()
        ledger.close()
    return AuditResult(
        trajectories=count,
        tokens=tokens,
        trained_tokens=trained_tokens,
        turns=turns,
        mismatches=tuple(mismatches),
        conservation=conservation,
        staleness=staleness,
        divergence=_divergence(run),
        conversations=texts.compared,
        by_class=texts.found,
    )


def audit_trajectory(
    trajectory: Trajectory,
    wire: WireRecord,
    *,
    policy_version: int,
    outputs: Mapping[str, NDArray[np.int32]] | None = None,
) -> Iterator[str]:
    """What is wrong with one trajectory, a sentence each. `outputs` are ids of generations, by request, that some
    trajectory holds to the end: another one may end a turn earlier, where a junction dropped what follows."""
    name = trajectory.trajectory_id
    covered = 0
    for number, turn in enumerate(trajectory.turns):
        covered += turn.stop - turn.start
        for problem in _audit_turn(trajectory, turn, wire, outputs or {}):
            yield f"{name} turn {number}: {problem}"
    sampled = int((trajectory.versions != NOT_SAMPLED).sum())
    if sampled != covered:
        yield f"{name}: {sampled} tokens are marked as sampled, its turns cover {covered}"
    newest = int(trajectory.versions.max(initial=NOT_SAMPLED))
    if newest > policy_version:
        yield f"{name}: sampled by version {newest}, later than the trainer's {policy_version}"


def _audit_turn(
    trajectory: Trajectory, turn: Turn, wire: WireRecord, outputs: Mapping[str, NDArray[np.int32]]
) -> Iterator[str]:
    """Compare the requests of one turn: several, where an interrupted generation went on."""
    request_ids = turn.request_id.split("+")
    start = turn.start
    for request_id in request_ids:
        entry = wire.find(request_id)
        if entry is None:
            yield f"request {request_id!r} is not in the wire record"
            return
        sent = trajectory.token_ids[:start]
        if (len(sent), digest(sent)) != (entry.input_tokens, entry.input_digest):
            yield f"the {len(sent)} ids before it are not what the engine was sent"
        part = slice(start, start + entry.output_tokens)
        start = part.stop
        if part.stop > turn.stop:
            here, whole = trajectory.token_ids[part.start : turn.stop], outputs.get(request_id)
            if whole is not None and np.array_equal(here, whole[: len(here)]):
                return  # the rest was dropped at a junction, and is exported with the generation that has it all
            # Cut at the length limit, or behind a stop string that began in the part before: no digest to compare.
            if turn.finish_reason != "length" and not (turn.finish_reason == "stop" and len(request_ids) > 1):
                yield f"{turn.stop - part.start} sampled ids, the engine returned {entry.output_tokens}"
            return
        for column, expected in (
            (trajectory.token_ids, entry.output_digest),
            (trajectory.logprobs, entry.logprobs_digest),
            (trajectory.versions, entry.versions_digest),
        ):
            if digest(column[part]) != expected:
                yield "ids, log-probs or versions are not what the engine returned"
                break
    if start != turn.stop:
        yield f"{turn.stop - turn.start} sampled ids, the engine returned {start - turn.start}"


def whole_outputs(rollouts: Sequence[Trajectory], wire: WireRecord) -> dict[str, NDArray[np.int32]]:
    """Ids of the generations that a trajectory holds to the end, by request: those that others may hold in part."""
    asked: Counter[str] = Counter(turn.request_id for t in rollouts for turn in t.turns)
    found: dict[str, NDArray[np.int32]] = {}
    for trajectory in rollouts:
        for turn in trajectory.turns:
            entry = wire.find(turn.request_id) if asked[turn.request_id] > 1 else None
            if entry is not None and turn.stop - turn.start == entry.output_tokens:
                found[turn.request_id] = trajectory.token_ids[turn.start : turn.stop]
    return found


def _rollout_files(run: RunDirectory) -> list[tuple[int, Path]]:
    paths = (run.path / "rollouts").glob("step-*.parquet")
    return sorted((int(p.stem.removeprefix("step-")), p) for p in paths)


def _divergence(run: RunDirectory) -> dict[str, float]:
    """Worst train/rollout divergence of the run, from its metrics."""
    store = MetricsStore(run.metrics_file)
    try:
        names = [n for n in store.names("train") if n.startswith("fidelity/")]
        return {f"largest {n}": max(v for _, v in store.series("train", n)) for n in names}
    finally:
        store.close()
