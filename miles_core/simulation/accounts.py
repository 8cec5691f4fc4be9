"""The books of a simulation: where time and tokens went."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from miles_core.data.group import Group
from miles_core.rollout.ledger import Conservation
from miles_core.simulation.episodes import SimulatedEpisode, Spans
from miles_core.simulation.fleet import Fleet
from miles_core.simulation.outcome import Outcome

__all__ = ["Accounts"]


class Accounts:
    """Counts from the first event on; what there was at the end of the warm-up is taken off at the end."""

    def __init__(self, fleet: Fleet, *, warmup: int) -> None:
        self._fleet = fleet
        self._warmup = warmup
        self._held: dict[str, dict[int, int]] = {}
        self._tokens: Counter[str] = Counter()
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._dropped: Counter[str] = Counter()
        self._returned: Counter[str] = Counter()
        self._ages: Counter[int] = Counter()
        self._token_ages: Counter[int] = Counter()
        self._running = 0
        self._running_since = self._wanted_at = self._began = 0.0
        self._before: Mapping[str, float] = {}

    # Episodes.

    def started(self, now: float) -> None:
        self._integrate(now)
        self._running += 1

    def removed(self, now: float) -> None:
        """An episode ended, or was withdrawn."""
        self._integrate(now)
        self._running -= 1

    def _integrate(self, now: float) -> None:
        self._sums["running"] += self._running * (now - self._running_since)
        self._running_since = now

    def ended(self, episode: SimulatedEpisode) -> None:
        """Its tokens are held until its group is settled. One that it replaces was sampled in vain."""
        index = int(episode.start.episode_id.rpartition("/")[2])
        held = self._held.setdefault(episode.start.group_id, {})
        self._tokens["again"] += held.get(index, 0)
        held[index] = episode.tokens

    def withdrawn(self, episode: SimulatedEpisode) -> None:
        """Nobody waits for it any more."""
        self._tokens["again"] += episode.tokens

    def left_open(self, episode: SimulatedEpisode) -> None:
        """The simulation ended, and this episode did not."""
        self._tokens["open"] += episode.tokens

    def cut(self) -> None:
        """A request was interrupted."""
        self._sums["cut"] += 1

    def dropped(self, drops: Sequence[tuple[str, str]]) -> None:
        for group_id, reason in drops:
            self._dropped[reason] += 1
            self._tokens["dropped"] += sum(self._held.pop(group_id, {}).values())

    # Steps.

    def wanted(self, now: float, step: int) -> None:
        """The trainer is free. At the end of the warm-up the numbers start."""
        self._wanted_at = now
        if step == self._warmup:
            self._began = now
            self._before = self._totals(now)
            for counter in (self._dropped, self._returned, self._ages, self._token_ages):
                counter.clear()

    def took(self, now: float, groups: Sequence[Group], version: int, returned: Mapping[str, int]) -> None:
        """The trainer has its batch; `returned` is what went back to pending since the last."""
        self._sums["waiting"] += now - self._wanted_at
        self._returned.update(returned)
        for group in groups:
            self._trains(group, version)

    def trained(self, train_seconds: float, publish_seconds: float) -> None:
        """A step of the trainer is over."""
        self._sums["steps"] += 1
        self._sums["trainer"] += train_seconds + publish_seconds
        self._sums["publish"] += publish_seconds

    def _trains(self, group: Group, version: int) -> None:
        tokens = sum(self._held.pop(group.group_id).values())
        trained, oldest = 0, version
        for trajectory in group.trajectories:
            assert isinstance(trajectory, Spans)
            rows = (trajectory.versions.tolist(), trajectory.lengths.tolist(), trajectory.loss_mask.tolist())
            for sampled_by, length, trains in zip(*rows, strict=True):
                if trains:
                    trained += length
                    oldest = min(oldest, sampled_by)
                    self._token_ages[version - sampled_by] += length
        self._ages[version - oldest] += 1
        self._tokens["trained"] += trained
        self._tokens["masked"] += tokens - trained
        self._sums["episodes"] += len(group.episodes)
        self._sums["prefill"] += sum(e.metrics["prefilled"] for e in group.episodes) / self._fleet.prefill_rate

    # The end.

    def _totals(self, now: float) -> dict[str, float]:
        self._integrate(now)
        engines = self._fleet.engines
        for engine in engines:
            engine.advance(now)
        return {
            **self._sums,
            **self._tokens,
            "busy": sum(engine.busy_seconds for engine in engines),
            "slots": sum(engine.slot_seconds for engine in engines),
            "sampled": sum(engine.sampled for engine in engines),
        }

    def outcome(self, now: float, law: Conservation) -> Outcome:
        """What the steps behind the warm-up came to."""
        self._tokens["open"] += sum(sum(held.values()) for held in self._held.values())
        whole = self._totals(now)
        part = defaultdict(float, {name: total - self._before.get(name, 0.0) for name, total in whole.items()})
        seconds, fleet = now - self._began, self._fleet
        count = len(fleet.engines)
        at_work = part["publish"] * count + part["prefill"] + (part["trained"] + part["masked"]) / fleet.peak_rate
        bound = max(part["trainer"], at_work / count)
        in_vain = part["again"] + part["dropped"]
        settled = part["trained"] + part["masked"] + in_vain
        return Outcome(
            steps=int(part["steps"]),
            seconds=seconds,
            episodes=int(part["episodes"]),
            tokens_trained=int(part["trained"]),
            tokens_sampled=part["sampled"],
            trainer_idle=part["waiting"] / seconds,
            engine_idle=1 - (part["busy"] / count + part["publish"]) / seconds,
            engine_unused=1 - at_work / count / seconds,
            generating=part["slots"] / seconds,
            running=part["running"] / seconds,
            staleness_mean=_mean(self._ages),
            staleness_p95=_quantile(self._ages, 0.95),
            staleness_max=max(self._ages),
            token_staleness=_mean(self._token_ages),
            dropped=dict(self._dropped.most_common()),
            returned=dict(self._returned.most_common()),
            wasted=(in_vain + part["masked"]) / settled,
            bound_seconds=bound,
            trainer_idle_bound=1 - part["trainer"] / bound,
            engine_unused_bound=1 - at_work / count / bound,
            tokens=dict(self._tokens),
            sampled=whole["sampled"],
            cut=int(whole.get("cut", 0)),
            groups=law,
        )


def _mean(counts: Counter[int]) -> float:
    return sum(value * count for value, count in counts.items()) / counts.total()


def _quantile(counts: Counter[int], share: float) -> int:
    """The least value that at least `share` of the counted do not exceed."""
    below = 0
    for value in sorted(counts):
        below += counts[value]
        if below >= share * counts.total():
            break
    return value
