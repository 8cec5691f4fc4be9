"""What a rank of the tests in test_ranks.py does: `python rank.py MODEL OUT [RANK SIZE RENDEZVOUS]`.

Without the last three it reads RANK and WORLD_SIZE, as `torchrun` sets them. Writes its findings to OUT/rankR.json.
"""

# ruff: noqa: E402
from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import torch
from conftest import make_batch
from invariance import branching, objective, projections, step
from test_fsdp import FULL, an_objective, weights_digest

from miles_core.contracts.backends import BackendStart
from miles_core.errors import NumericsError
from miles_core.objective.compose import WeightedTerm, compose
from miles_core.objective.policy import Policy, PolicyConfig
from miles_core.objective.ppo import Ppo, PpoConfig
from miles_core.objective.value import Value, ValueConfig
from miles_core.training.fsdp import FsdpBackend
from miles_core.training.settings import FsdpConfig

PPO = compose(
    estimator=Ppo(PpoConfig()),
    terms=[
        WeightedTerm(name="policy", term=Policy(PolicyConfig())),
        WeightedTerm(name="value", term=Value(ValueConfig())),
    ],
)


def started(start: dict, **config) -> FsdpBackend:
    backend = FsdpBackend(FsdpConfig(**{"learning_rate": 1e-2, **config}))
    usual = {"dtype": "float32", "seed": 0, "temperature": 1.0, "total_steps": 10}
    backend.start(BackendStart(**{**usual, **start}))
    return backend


def report(backend, batch, objective=FULL):
    made = backend.train_step(batch, objective)
    return {"loss": made.loss, "grad_norm": made.grad_norm, "metrics": dict(made.metrics)}


def work(start: dict, out: Path) -> dict:
    found = {}
    plain = started(start)
    found["logprobs"] = [x.tolist() for x in plain.logprobs(make_batch(0).trajectories)]
    found["plain"] = [report(plain, make_batch(seed)) for seed in (0, 1)]
    plain.save(out / "checkpoint")
    found["next"] = report(plain, make_batch(2))
    found["digest"] = weights_digest(plain)
    plain.export(out / "export")

    again = started(start)
    again.load(out / "checkpoint")
    found["resumed"] = report(again, make_batch(2))
    found["resumed_digest"] = weights_digest(again)

    small = make_batch(3, groups=1, size=3)  # one trajectory trains: the other ranks have nothing to do
    found["empty_rank"] = report(started(start), small)
    whole = started(start, sharding="none")
    found["whole"] = [report(whole, make_batch(seed)) for seed in (0, 1)]
    whole.save(out / "whole")
    found["whole_next"] = report(whole, make_batch(2))
    found["whole_digest"] = weights_digest(whole)
    found["whole_empty_rank"] = report(started(start, sharding="none"), small)
    found["whole_ppo"] = [
        report(critic := started({**start, "critic": True}, sharding="none"), make_batch(seed), PPO) for seed in (0, 1)
    ]
    found["split"] = report(started(start, max_tokens_per_microbatch=8, share_prefix=False), make_batch(0))
    found["lora"] = [report(tuned := started(start, lora={"rank": 2}), make_batch(seed)) for seed in (0, 1)]
    found["lora_digest"] = weights_digest(tuned)
    found["ppo"] = [report(critic := started({**start, "critic": True}), make_batch(seed), PPO) for seed in (0, 1)]
    critic.save(out / "critic")
    loss, gradients = step(started({**start, "dtype": "float64"}), branching(), objective())
    found["float64"] = {"loss": loss, "gradients": projections(gradients)}
    found["bfloat16"] = report(started({**start, "dtype": "bfloat16"}), make_batch(0))

    poisoned = started(start)
    with torch.no_grad():
        norm = poisoned.trainer.scorer.model.get_input_embeddings().weight
        getattr(norm, "_local_tensor", norm)[-1] = float("nan")
    try:
        poisoned.train_step(make_batch(0), an_objective())
    except NumericsError as error:
        found["refused"] = str(error)
    return found


def main() -> None:
    model, out, *place = sys.argv[1:]
    rank, size, rendezvous = place or (os.environ["RANK"], os.environ["WORLD_SIZE"], "")
    start = {
        "model_directory": Path(model),
        "rank": int(rank),
        "world_size": int(size),
        "rendezvous": rendezvous,
    }
    found = work(start, Path(out))
    (Path(out) / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
