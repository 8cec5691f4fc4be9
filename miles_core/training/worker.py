"""A trainer process: a backend, an objective and the sending end of a transport, driven by the controller.

`python -m miles_core.training.worker` listens on a loopback port, prints `{"host", "port"}` as its ready line, takes
one connection (authenticated by the key in `MILES_TRAINER_KEY`) and answers calls until it is closed. The process
ends when its stdin does, so it never outlives the run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.config.load import loaded_from_tree
from miles_core.config.run import RunConfig
from miles_core.contracts.backends import BackendStart, StepReport, TrainBackend
from miles_core.contracts.engines import Engine, WeightWitness
from miles_core.contracts.objective import AdvantageEstimator, Correction, LossTerm, Needs, Objective
from miles_core.contracts.transports import Published, WeightSender, WeightTransport
from miles_core.data.packed import Packed, unpack_batch, unpack_trajectories
from miles_core.garbage import settle
from miles_core.objective.compose import WeightedTerm, compose
from miles_core.plugins import PluginManager
from miles_core.training.outgoing import in_dtype, seen_by

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["KEY_VARIABLE", "TrainerService", "build_objective", "main", "no_delay"]

KEY_VARIABLE = "MILES_TRAINER_KEY"


def build_objective(config: RunConfig, plugins: PluginManager) -> Objective:
    """The objective that `[objective]` describes, from the components that plugins registered."""
    section = config.objective
    estimator = plugins.create(
        "miles_advantage_estimators",
        section.algorithm,
        section.settings(section.algorithm),
        AdvantageEstimator,
    )
    terms = []
    for name in section.terms:
        term = plugins.create("miles_loss_terms", name, section.settings(name), LossTerm)
        terms.append(WeightedTerm(name=name, term=term, coefficient=float(section.coefficient(name))))
    corrections = [
        (name, plugins.create("miles_corrections", name, section.settings(name), Correction))
        for name in section.corrections
    ]
    return compose(
        estimator=estimator,
        terms=terms,
        corrections=corrections,
        aggregation=section.aggregation,
        constant_length=section.constant_length or config.sampling.max_new_tokens,
    )


class TrainerService:
    """The calls that the controller makes, one method each."""

    def __init__(self) -> None:
        self._backend: TrainBackend[Any] | None = None
        self._objective: Objective | None = None
        self._sender: WeightSender | None = None
        self._witness: Callable[[], WeightWitness | None] = lambda: None
        self._dtype = "float32"
        self._store: Any = None

    @property
    def backend(self) -> TrainBackend[Any]:
        assert self._backend is not None, "a call before start"
        return self._backend

    def rendezvous(self) -> str:
        """Open the place where the ranks of this run meet (`host:port`), before any of them starts."""
        from miles_core.training.ranks import open_rendezvous

        self._store, address = open_rendezvous()
        return address

    def start(self, config_tree: Mapping[str, Any], start: BackendStart, run_directory: Path) -> None:
        """Load plugins, backend and objective. Rank 0 alone publishes."""
        config = loaded_from_tree(config_tree, {}).config
        plugins = PluginManager.discover(enable=config.plugins.enable)
        self._objective = build_objective(config, plugins)
        backend = plugins.create(
            "miles_train_backends",
            config.backend.use,
            config.backend.settings,
            TrainBackend,
        )
        backend.start(dataclasses.replace(start, critic=Needs.VALUES in self._objective.needs))
        self._backend = backend
        settle()
        if start.rank:
            return
        transport = plugins.create(
            "miles_weight_transports",
            config.transport.use,
            config.transport.settings,
            WeightTransport,
        )
        self._sender = transport.sender(run_directory)
        self._dtype = config.model.dtype
        self._witness = plugins.create("miles_engines", config.engine.use, config.engine.settings, Engine).witness

    def train_step(self, batch: Packed) -> StepReport:
        assert self._objective is not None, "a call before start"
        return self.backend.train_step(unpack_batch(batch), self._objective)

    def logprobs(self, trajectories: Packed) -> list[NDArray[np.float32]]:
        return self.backend.logprobs(unpack_trajectories(trajectories))

    def publish(self, version: int) -> Published | None:
        """Hand the current weights to the transport; on other ranks than 0 only help to gather them."""
        if self._sender is None:
            self._gather()
            return None
        witness = self._witness()
        weights = in_dtype(self.backend.named_weights(), self._dtype)
        published = self._sender.send(version, weights if witness is None else seen_by(witness, weights))
        return published if witness is None else dataclasses.replace(published, expected=witness.expected())

    def transfer(self, published: Published, session: Mapping[str, object]) -> None:
        """Move the bytes of an in-place transport; on other ranks than 0 only help to gather them."""
        if self._sender is None:
            self._gather()
        else:
            self._sender.transfer(published, in_dtype(self.backend.named_weights(), self._dtype), session)

    def _gather(self) -> None:
        for _ in self.backend.named_weights():
            pass

    def begin_save(self, directory: Path) -> None:
        self.backend.begin_save(directory)

    def finish_save(self, wait: bool) -> bool:
        return self.backend.finish_save(wait=wait)

    def load(self, directory: Path) -> None:
        self.backend.load(directory)

    def export(self, directory: Path) -> None:
        self.backend.export(directory)

    def begin_export(self, directory: Path) -> None:
        self.backend.begin_export(directory)

    def finish_export(self, wait: bool) -> bool:
        return self.backend.finish_export(wait=wait)

    def peak_memory(self) -> int:
        """Peak resident bytes of this process."""
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


def serve(connection: Connection, service: TrainerService) -> None:
    """Answer `(method, arguments)` with `("ok", result, seconds)` or `("error", exception, traceback)`."""
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            service.close()
            return
        begin = time.perf_counter()
        try:
            result = getattr(service, method)(*arguments)
        except Exception as error:
            text = traceback.format_exc()
            print(text, file=sys.stderr, flush=True)
            connection.send(("error", error, text))
            continue
        connection.send(("ok", result, time.perf_counter() - begin))


def no_delay(connection: Connection) -> None:
    """Send small messages at once. A message's length and body are two writes, and without this the second waits 40 ms
    for the acknowledgement of the first (Nagle's algorithm against delayed acknowledgements)."""
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _end_with_parent() -> None:
    """The controller holds our stdin; when it is gone, so are we."""
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    """Entry point of the trainer process."""
    key = os.environ.pop(KEY_VARIABLE).encode()
    with Listener(("127.0.0.1", 0), authkey=key) as listener:
        host, port = listener.address
        print(json.dumps({"host": host, "port": port}), flush=True)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        with listener.accept() as connection:
            no_delay(connection)
            serve(connection, TrainerService())


if __name__ == "__main__":
    main()
