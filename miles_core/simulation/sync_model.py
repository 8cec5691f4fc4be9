"""Seconds of a publish from bandwidth, topology and layout, by broadcast and by one-sided writes.

**Broadcast.** A stage gathers a bucket over its tensor and expert parallel ranks, then one of its GPUs broadcasts it
through its adapter to every rank of every engine. Stages gather at the same time, but send one at a time.

**P2P.** A stage's weights are gathered past each of its GPUs; each cuts out the shard of the engine rank that it was
given, copies it into its registered buffer, and writes it to every engine that wants it. A GPU that was given several
shards goes through the stage once for each. Stages work at the same time; the slowest counts.
"""

from __future__ import annotations

import dataclasses

from miles_core.simulation.sync_plan import busiest
from miles_core.simulation.sync_scenario import SyncScenario
from miles_core.simulation.sync_weights import Weights

__all__ = ["FITTED", "Costs", "broadcast_seconds", "p2p_seconds"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What no datasheet says."""

    gather_share: float
    """Of the slowest link's bandwidth that a gather reaches. Of both transports."""
    broadcast_share: float
    """Of one adapter's bandwidth that a broadcast reaches."""
    tensor_seconds: float
    """What a stage spends on one tensor before it is broadcast: its name and shape to the engines, its conversion, its
    own collective."""
    p2p_seconds: float
    """A publish of nothing by P2P."""
    staging: float
    """GB/s at which one GPU's shard is cut out and copied into its registered buffer."""
    write_share: float
    """Of one adapter's bandwidth that one-sided writes reach."""


FITTED = Costs(
    gather_share=0.462,
    broadcast_share=0.843,
    tensor_seconds=58.9e-6,
    p2p_seconds=0.321,
    staging=5.31,
    write_share=0.596,
)
"""Fitted to the published figures by `miles_core.simulation.sync_published.fit`."""


def broadcast_seconds(scenario: SyncScenario, costs: Costs = FITTED) -> dict[str, float]:
    """The parts of a publish by broadcast, in seconds; their sum is its length.

    `send`: all bytes through one adapter at a time. `gather`: what of gathering and preparing no other stage's sending
    hides: all of it with one stage; with several, the first bucket's, unless one stage takes longer to gather and send
    than all take to send. `engine`: `publish.engine_seconds`.
    """
    link = scenario.cluster.nic * costs.broadcast_share
    sends = [_gigabytes(scenario, stage.parameters) / link for stage in scenario.stages]
    gathers = [_gather(scenario, stage, costs) + stage.tensors * costs.tensor_seconds for stage in scenario.stages]
    first = _gigabytes(scenario, scenario.stages[0].parameters)
    fill = gathers[0] * min(1.0, scenario.publish.bucket / first)
    alone = max(gather + send for gather, send in zip(gathers, sends, strict=True))
    return {
        "send": sum(sends),
        "gather": max(fill, alone - sum(sends)),
        "engine": scenario.publish.engine_seconds,
    }


def p2p_seconds(scenario: SyncScenario, costs: Costs = FITTED) -> dict[str, float]:
    """The parts of a publish by one-sided writes, in seconds, of the slowest stage; their sum is its length.

    `start`: what a publish of nothing takes. `gather`: a pass over the stage's weights for each shard of the busiest
    GPU. `staging`: those shards into its buffer. `write`: its buffer to all its targets. `engine`:
    `publish.engine_seconds`.
    """
    shards, targets = busiest(scenario.sources, scenario.engine_count, scenario.engines.tensor)
    parts = []
    for stage in scenario.stages:
        shard = _gigabytes(scenario, stage.a_rank(scenario.engines.tensor))
        parts.append(
            {
                "start": costs.p2p_seconds,
                "gather": shards * _gather(scenario, stage, costs),
                "staging": shards * shard / costs.staging,
                "write": targets * shard / (scenario.cluster.nic * costs.write_share),
                "engine": scenario.publish.engine_seconds,
            }
        )
    return max(parts, key=lambda part: sum(part.values()))


def _gather(scenario: SyncScenario, stage: Weights, costs: Costs) -> float:
    """Seconds of one pass of a stage's weights past each of its GPUs: NVLink inside a node; the node's adapters too
    where the ranks that share experts are on several."""
    cluster, trainer = scenario.cluster, scenario.trainer
    moved = stage.experts * (1 - 1 / trainer.expert) + (stage.split + stage.whole) * (1 - 1 / trainer.tensor)
    spans_nodes = max(trainer.expert, trainer.tensor) > cluster.gpus
    link = min(cluster.nvlink, cluster.nic * cluster.nics) if spans_nodes else cluster.nvlink
    return _gigabytes(scenario, moved) / (link * costs.gather_share)


def _gigabytes(scenario: SyncScenario, parameters: float) -> float:
    return parameters * scenario.publish.bytes_per_parameter / 1e9
