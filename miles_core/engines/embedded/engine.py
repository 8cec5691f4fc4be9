"""The engine: one thread that owns model, scheduler and weights, and a thread-safe way in.

Everything that changes state runs in that thread, between steps, in the order in which it was asked for. A
step never sees half a pause or half a commit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from .scheduler import Scheduler
from .sequence import Sequence
from .weights import Staged, WeightStore, WrongStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as Items

    import torch

    from .protocol import GenerateRequest
    from .runner import ModelRunner
    from .scheduler import Plan
    from .sequence import Decoder

    PauseMode = Literal["abort", "retract", "in_place"]
    Listener = Callable[[Sequence, "dict[str, Any] | StepError"], object]

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class StepError(Exception):
    """A step failed, and with it the requests that it computed (HTTP 500)."""


class Engine:
    """Serves one model.

    Args:
        runner: the model.
        weights: the same model's weights.
        decoder: its tokenizer, None when the directory has none.
        version: policy version of the weights that are loaded; None serves nothing before the first commit.
        max_running, max_total_tokens, max_prefill_tokens: see :class:`~.scheduler.Scheduler`.
        threads: intra-op threads of the step.
        stream_interval: tokens between two events of a stream (its first and last token always make one).
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        weights: WeightStore,
        decoder: Decoder | None,
        version: str | None,
        max_running: int,
        max_total_tokens: int,
        max_prefill_tokens: int,
        threads: int,
        stream_interval: int = 1,
    ) -> None:
        self._runner = runner
        self._weights = weights
        self._decoder = decoder
        self.version = version
        self.pause_mode: PauseMode | None = None
        self.staged: Staged | None = None
        self._max_running = max_running
        self._max_total_tokens = max_total_tokens
        self._max_prefill_tokens = max_prefill_tokens
        self._scheduler = self._new_scheduler()
        self._threads = threads
        self._stream_interval = stream_interval
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._listeners: dict[Sequence, Listener] = {}
        self._outbox: list[tuple[Listener, Sequence, dict[str, Any] | StepError]] = []
        self._arrivals = 0
        self._started = time.perf_counter()
        self._busy = 0.0
        self._steps = 0
        self._totals = {
            "requests": 0,
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "completion_tokens": 0,
            "failed_steps": 0,
        }
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Abort what is left and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def call(self, command: Callable[[], Result]) -> Future[Result]:
        """Run ``command`` in the engine's thread, between two steps."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

        self._post(run)
        return future

    def submit(self, requests: Items[GenerateRequest], listener: Listener) -> None:
        """Queue requests. ``listener`` hears, in the engine's thread, each final answer or failure, and of
        streams what there is meanwhile: behind the step, all that it came to."""

        def add() -> None:
            for request in requests:
                sequence = Sequence(request=request, arrival=self._arrivals)
                self._arrivals += 1
                self._listeners[sequence] = listener
                self._scheduler.add(sequence)

        self._post(add)

    # Commands: run them through :meth:`call`.

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping. Requests that arrive meanwhile are queued."""
        self.pause_mode = mode
        if mode == "abort":
            self.abort(None, "generation was paused with mode abort")
        elif mode == "retract":
            for sequence in list(self._scheduler.running):
                self._scheduler.retract(sequence)

    def resume(self) -> None:
        """Go on."""
        self.pause_mode = None

    def abort(self, rid: str | None, message: str = "aborted by request") -> int:
        """Finish the requests called ``rid`` (None: all) with the tokens they have; return how many."""
        scheduler = self._scheduler
        found = [s for s in [*scheduler.running, *scheduler.waiting] if rid is None or s.request.rid == rid]
        for sequence in found:
            scheduler.remove(sequence)
            sequence.abort(message)
            self._answer(sequence)
        return len(found)

    def flush_cache(self) -> None:
        """Forget all cached prefixes. Running sequences keep their own keys and values."""
        self._scheduler.forget_prefixes()

    def commit(self, version: str) -> None:
        """Serve the staged version from the next step on.

        No prefix computed under other weights is matched afterwards; sequences paused in place go on with the
        keys and values that they have.

        Raises:
            WrongStateError: not paused, or ``version`` is not the one that is staged.
        """
        if self.pause_mode is None:
            raise WrongStateError("commit_weights: generation must be paused first (POST /pause_generation)")
        if self.staged is None or self.staged.version != version:
            held = "nothing" if self.staged is None else f"version {self.staged.version}"
            raise WrongStateError(f"commit_weights: version {version} is not staged; {held} is")
        self._weights.commit(self.staged)
        self.version, self.staged = version, None
        self._scheduler.forget_prefixes()

    def switch(self, version: str, mode: PauseMode) -> dict[str, str]:
        """Commit the staged version between two steps: a pause that no step falls into. Returns the checksums of the
        weights in use.

        Raises:
            WrongStateError: ``version`` is not the one that is staged.
        """
        before = self.pause_mode
        self.pause(mode)
        try:
            self.commit(version)
            return self.checksums()
        finally:
            self.pause_mode = before

    def write(self, tensors: Mapping[str, torch.Tensor], *, adopt: bool = False) -> None:
        """Write over weights in use, or with ``adopt`` make these tensors the weights.

        Raises:
            WrongStateError: not paused.
        """
        if self.pause_mode is None:
            raise WrongStateError("generation must be paused while weights are written (POST /pause_generation)")
        self._weights.write(tensors, adopt=adopt)
        self._scheduler.forget_prefixes()

    def take_version(self, version: str) -> None:
        """Report ``version`` from the next token on, for the weights in use."""
        self.version = version
        self._scheduler.forget_prefixes()

    def checksums(self) -> dict[str, str]:
        """Return the checksums of the weights in use, by checkpoint name."""
        return self._weights.checksums()

    def stats(self) -> dict[str, Any]:
        """Return counters and gauges; times in seconds."""
        scheduler, uptime = self._scheduler, time.perf_counter() - self._started
        return {
            "weight_version": self.version,
            "paused": self.pause_mode,
            "num_running_reqs": len(scheduler.running),
            "num_queue_reqs": len(scheduler.waiting),
            "num_used_tokens": scheduler.used_tokens,
            "num_evictable_tokens": scheduler.cache.evictable,
            "max_total_num_tokens": self._max_total_tokens,
            "max_running_requests": self._max_running,
            "steps": self._steps,
            "busy_seconds": self._busy,
            "idle_seconds": uptime - self._busy,
            **{f"total_{name}": count for name, count in self._totals.items()},
        }

    # The thread.

    def _new_scheduler(self) -> Scheduler:
        routes = self._runner.routes
        return Scheduler(
            max_running=self._max_running,
            max_total_tokens=self._max_total_tokens,
            max_prefill_tokens=self._max_prefill_tokens,
            routed=routes.known if routes.supported else None,
            before_release=self._keep_routes,
        )

    def _keep_routes(self, sequence: Sequence) -> None:
        if sequence.request.return_routed_experts:
            self._runner.take_routes(sequence)

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._closing or not self.alive:
                raise StepError("the engine is shutting down")
            self._inbox.append(command)
            self._wake.notify()

    @property
    def _runnable(self) -> bool:
        return self.pause_mode is None and bool(self._scheduler.running or self._scheduler.waiting)

    def _run(self) -> None:
        self._runner.use_threads(self._threads)
        while True:
            with self._wake:
                while not (self._inbox or self._closing or self._runnable):
                    self._wake.wait()
                commands = list(self._inbox)
                self._inbox.clear()
                closing = self._closing
            for command in commands:
                command()
            if closing:
                self.abort(None, "the engine is shutting down")
            elif self._runnable:
                self._step()
            self._deliver()
            if closing:
                return

    def _step(self) -> None:
        start = time.perf_counter()
        try:
            plan = self._scheduler.plan()
            assert plan is not None, "requests wait, and none of them can run"
            self._advance(plan)
        except Exception as error:
            log.exception("a step failed; its requests are answered with 500 and the engine goes on")
            self._fail_running(error)
        self._steps += 1
        self._busy += time.perf_counter() - start

    def _advance(self, plan: Plan) -> None:
        assert self.version is not None, "a request was queued before the first weights"
        scored = [s.sequence for s in plan.segments if s.samples and s.sequence.remaining == 0]
        segments, sampled = self._runner.step(plan)
        self._scheduler.complete(plan)
        for sequence in scored:
            sequence.finish_reason = {"type": "length", "length": 0}
            self._scheduler.finish(sequence)
            self._answer(sequence)
        if sampled is None:
            return
        for row, segment in enumerate(segments):
            sequence = segment.sequence
            sequence.append(
                sampled.tokens[row],
                sampled.logprobs[row],
                sampled.logprobs_original[row],
                self.version,
                self._decoder,
            )
            if sequence.finish_reason is not None:
                self._scheduler.finish(sequence)
                self._answer(sequence)
            elif sequence.request.stream and self._tells(sequence):
                answer = sequence.answer(self.version, self._decoder)
                self._outbox.append((self._listeners[sequence], sequence, answer))

    def _tells(self, sequence: Sequence) -> bool:
        """Whether the sequence's newest token makes an event."""
        own = sequence.request.sampling.stream_interval
        sampled = len(sequence.logprobs)
        return (sampled - 1) % self._stream_interval == 0 if own is None else sampled % own == 0

    def _answer(self, sequence: Sequence) -> None:
        """A sequence is finished."""
        self._totals["requests"] += 1
        self._totals["prompt_tokens"] += sequence.prompt_tokens
        self._totals["cached_tokens"] += sequence.cached_tokens or 0
        self._totals["completion_tokens"] += len(sequence.logprobs)
        answer = sequence.answer(self.version or "", self._decoder)
        self._outbox.append((self._listeners.pop(sequence), sequence, answer))

    def _fail_running(self, error: Exception) -> None:
        """Answer all running sequences with the failure, and start over with the queue and an empty pool."""
        self._totals["failed_steps"] += 1
        failed, waiting = self._scheduler.running, self._scheduler.waiting
        self._scheduler = self._new_scheduler()
        for sequence in waiting:
            self._scheduler.add(sequence)
        failure = StepError(f"{type(error).__name__}: {error}")
        self._outbox += [(self._listeners.pop(sequence), sequence, failure) for sequence in failed]

    def _deliver(self) -> None:
        """Tell the listeners what became of their sequences."""
        outbox, self._outbox = self._outbox, []
        for listener, sequence, answer in outbox:
            listener(sequence, answer)
