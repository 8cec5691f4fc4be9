"""Sessions: one conversation each, with its tree, its engine client and its limits. No HTTP here.

A turn reserves its place in the tree, builds its ids, waits for the engine, and commits: all between two awaits, so the
event loop is the lock. Whatever fails or is cancelled in between releases the reservation and leaves no trace.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from miles_core.contracts.engines import Generation, Sampling
from miles_core.data.seeds import derive_seed
from miles_core.errors import MilesError
from miles_core.tito.bodies import Written
from miles_core.tito.generating import generate
from miles_core.tito.history import History, Known
from miles_core.tito.paths import RecentPaths
from miles_core.tito.prompts import TOKENS, digest_of_ids, prompt_digests
from miles_core.tito.routes import new_routes
from miles_core.tito.settings import Codec, SessionSettings
from miles_core.tito.streaming import Progress, cut_at_stop
from miles_core.tito.suffix import Suffix, turn_suffix
from miles_core.tito.tree import Added, Node, Part, Plan, SessionTree, TurnRefusedError, sampled_columns
from miles_core.tito.turns import BadRequestError, Reply, TurnRequest

__all__ = ["Session", "SessionEndedError"]

_INLINE_CHARS = 4096
"""Longer additions are tokenised in a worker thread: about a millisecond of the event loop's time."""


class SessionEndedError(MilesError):
    """The session ended while a turn of it was under way (HTTP 404)."""


class Session:
    """One conversation. Read its public attributes freely; `turn` alone changes it."""

    def __init__(self, codec: Codec, settings: SessionSettings, paths: RecentPaths | None = None) -> None:
        self.id = secrets.token_hex(16)
        self.token = f"ms-{secrets.token_hex(32)}"
        self.settings = settings
        self.tree = SessionTree(
            mode=settings.mode, max_nodes=settings.max_nodes, max_tokens=settings.max_session_tokens
        )
        self.created = time.time()
        self.touched = time.monotonic()
        self.full = False
        """A turn was refused because it would have passed a token limit."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._codec = codec
        self._paths = paths or RecentPaths()
        self.ended = False
        self._stop_ids = tuple(sorted({*settings.sampling.stop_token_ids, *codec.stop_ids()}))
        self._known: Known | None = None
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def running(self) -> int:
        """Turns under way."""
        return len(self._running)

    @property
    def written(self) -> Written | None:
        """What the next request is expected to repeat, byte by byte."""
        return None if self._known is None else self._known.written

    def owns(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.token.encode())

    async def answer(self, request: TurnRequest, progress: Progress | None = None) -> Reply:
        """As `turn`, unless the session ends before: raises `SessionEndedError` then."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await self.turn(request, progress)
        except asyncio.CancelledError:
            if self.ended and task.uncancel() == 0:
                raise SessionEndedError("the session ended under this turn") from None
            raise
        finally:
            self._running.discard(task)
            del task  # what cancels it holds this frame, which would hold it: a cycle around the whole session

    def end(self) -> None:
        """End the turns under way; nothing of them is recorded."""
        self.ended = True
        self._paths.forget(self.id)
        for task in self._running:
            task.cancel()

    async def turn(self, request: TurnRequest, progress: Progress | None = None) -> Reply:
        """Sample one reply and record it. Raises `TurnConflictError`, `TurnRefusedError`, `BadRequestError`, and the
        engine's `EngineError`."""
        if request.ids is not None:
            return await self._turn_of_ids(request, request.ids)
        self.touched = time.monotonic()
        messages = self.conversation(request)
        identity, digests, known = self._key(messages, request.tools)
        plan = self.tree.plan(identity, digests, known=known)
        try:
            suffix = await self._suffix(plan.parent, messages, request.tools)
            ids = self._paths.ids(self.id, plan.parent, suffix.drop, suffix.ids)
            stops = (*self.settings.sampling.stop, *request.stop)
            generations = await self._generate(ids, self._sampling(request, plan, ids, suffix), progress)
            message, ended_by = self._message(generations, stops, request.tools)
            if progress is not None:
                progress.finish(message)
            node = self._commit(plan, suffix, request.turn_id, messages, message, generations)
            self._known = Known(node, identity, messages, digests)
            assert node.added is not None
            if not self.ended:
                self._paths.keep(self.id, node, ids, node.added.ids[node.added.sampled :])
            if request.tools and identity not in self.tree.tools:
                self.tree.tools[identity] = orjson.dumps(request.tools)
        finally:
            self.tree.release(plan)
            self.touched = time.monotonic()
        first, last = generations[0], generations[-1]
        self.prompt_tokens += first.prompt_tokens
        self.cached_tokens += first.cached_tokens
        return Reply(
            message=message,
            finish_reason="tool_calls" if message.get("tool_calls") else last.finish_reason,
            stop_sequence=ended_by,
            prompt_tokens=len(ids),
            cached_tokens=first.cached_tokens,
            completion_tokens=sum(len(g.token_ids) for g in generations),
        )

    async def _turn_of_ids(self, request: TurnRequest, ids: NDArray[np.int32]) -> Reply:
        """As `turn`, for a prompt of token ids; the reply has generations and no message."""
        self.touched = time.monotonic()
        plan = self.tree.plan(TOKENS, prompt_digests(self.tree, ids))
        try:
            suffix = Suffix(drop=0, ids=ids[plan.parent.length :])
            generations = await self._generate(ids, self._sampling(request, plan, ids, suffix), None)
            sampled = np.concatenate([g.token_ids for g in generations]).astype(np.int32, copy=False)
            self._record(plan, suffix, request.turn_id, b"[]", digest_of_ids(sampled), generations)
        finally:
            self.tree.release(plan)
            self.touched = time.monotonic()
        first, last = generations[0], generations[-1]
        self.prompt_tokens += first.prompt_tokens
        self.cached_tokens += first.cached_tokens
        return Reply(
            message={},
            finish_reason=last.finish_reason,
            stop_sequence=None,
            prompt_tokens=len(ids),
            cached_tokens=first.cached_tokens,
            completion_tokens=len(sampled),
            generations=tuple(generations),
        )

    async def count(self, request: TurnRequest) -> int:
        """Tokens of the prompt that `turn` would send; nothing is reserved or recorded."""
        messages = self.conversation(request)
        identity, digests, known = self._key(messages, request.tools)
        parent = self.tree.match(identity, digests, known=known) or Node(None, (), None, 0)
        suffix = await self._suffix(parent, messages, request.tools)
        return parent.length - suffix.drop + len(suffix.ids)

    def conversation(self, request: TurnRequest) -> History:
        """The whole history that a request stands for."""
        if not request.messages:
            raise BadRequestError("there is no message to answer")
        messages = request.messages if isinstance(request.messages, History) else History(request.messages)
        if request.previous is not None:
            messages = History([*self.messages(self._node(request.previous)), *messages])
        if messages[-1].get("role") == "assistant":
            raise BadRequestError("the last message is the assistant's own; send the message that it answers")
        return messages

    def messages(self, node: Node) -> list[dict[str, Any]]:
        """The conversation up to a turn, replies as they were given."""
        found: list[dict[str, Any]] = []
        for turn in node.path():
            assert turn.added is not None
            found += orjson.loads(turn.added.messages)
        return found

    def _node(self, turn_id: str) -> Node:
        for node in self.tree.walk():
            if node.added is not None and node.added.turn_id == turn_id and node.added.messages != b"[]":
                return node  # a turn of token ids has no messages to go on from
        raise BadRequestError(f"this session has no turn {turn_id!r}", code="previous_response_not_found")

    def _key(
        self, messages: History, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[bytes, tuple[bytes, ...], Node | None]:
        """The root's identity, a digest a message, and the turn whose request is known to be repeated, if one is."""
        identity = xxhash.xxh3_128_digest(orjson.dumps(tools)) if tools else b""
        repeated = () if self._known is None else self._known.repeated(identity, messages)
        digests = (*repeated, *map(self._codec.matcher.digest, messages[len(repeated) :]))
        return identity, digests, self._known.node if self._known is not None and repeated else None

    async def _suffix(
        self, parent: Node, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> Suffix:
        codec = self._codec
        new = messages[parent.depth :]
        try:
            if parent.added is not None and all(len(m.get("content") or "") < _INLINE_CHARS for m in new):
                return turn_suffix(codec.family, codec.tokenizer, parent, messages, tools)
            return await asyncio.to_thread(turn_suffix, codec.family, codec.tokenizer, parent, messages, tools)
        except ValueError as error:
            raise BadRequestError(str(error)) from error

    def _sampling(self, request: TurnRequest, plan: Plan, ids: NDArray[np.int32], suffix: Suffix) -> Sampling:
        """The session's sampling with the request's limits, its own seed, and no more tokens than there is room for."""
        settings, own = self.settings, self.settings.sampling
        room = self.tree.room() - len(suffix.ids)
        if settings.max_tokens:
            room = min(room, settings.max_tokens - len(ids))
        if room < 1:
            self.full = True
            raise TurnRefusedError(
                f"the conversation has {len(ids)} tokens, which leaves no room to sample under this session's limit"
            )
        seed = request.seed
        if settings.turn_seed is not None:
            seed = settings.turn_seed(plan.parent.turns)
            if plan.attempt:
                seed = derive_seed(seed, "attempt", plan.attempt)
        wanted = own.max_new_tokens if request.max_tokens is None else min(request.max_tokens, own.max_new_tokens)
        chosen = {
            name: value
            for name in ("temperature", "top_p", "top_k", "min_p")
            if (value := getattr(request, name)) is not None and not settings.locked
        }
        try:
            return dataclasses.replace(
                own,
                max_new_tokens=min(wanted, room),
                stop=(*own.stop, *request.stop),
                stop_token_ids=tuple(sorted({*self._stop_ids, *request.stop_token_ids})),
                seed=seed,
                **chosen,
            )
        except ValueError as error:
            raise BadRequestError(str(error)) from error

    async def _generate(
        self, ids: NDArray[np.int32], sampling: Sampling, progress: Progress | None
    ) -> list[Generation]:
        key = self.settings.routing_key or self.id
        return await generate(self.settings, key, ids, sampling, progress)

    def _message(
        self, generations: Sequence[Generation], stops: Sequence[str], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, Any], str | None]:
        """The assistant's message, and the stop string that ended it."""
        ids = [i for g in generations for i in g.token_ids.tolist()]
        parsed = self._codec.family.parse(ids, self._codec.tokenizer, tools=tools)
        content, ended_by = parsed.content, None
        if stops and generations[-1].finish_reason == "stop":
            content, ended_by = cut_at_stop(content, stops)
        calls = tuple({"id": f"call_{secrets.token_hex(12)}", **call} for call in parsed.tool_calls)
        return dataclasses.replace(parsed, content=content, tool_calls=calls).as_message(), ended_by

    def _commit(
        self,
        plan: Plan,
        suffix: Suffix,
        turn_id: str,
        messages: Sequence[Mapping[str, Any]],
        message: Mapping[str, Any],
        generations: Sequence[Generation],
    ) -> Node:
        said = orjson.dumps([*messages[plan.parent.depth :], message])
        return self._record(plan, suffix, turn_id, said, self._codec.matcher.digest(message), generations)

    def _record(
        self, plan: Plan, suffix: Suffix, turn_id: str, said: bytes, reply: bytes, generations: Sequence[Generation]
    ) -> Node:
        """Commit a finished turn: `said` is the JSON of its messages, `reply` the digest of what was answered."""
        sampled, logprobs, versions = sampled_columns(generations)
        added = Added(
            turn_id=turn_id,
            drop=suffix.drop,
            ids=np.concatenate([suffix.ids, sampled]),
            sampled=len(suffix.ids),
            logprobs=logprobs,
            versions=versions,
            finish_reason=generations[-1].finish_reason,
            parts=tuple(
                Part(
                    count=len(g.token_ids),
                    finish_reason=g.finish_reason,
                    engine=g.engine,
                    cached_tokens=g.cached_tokens,
                    started=g.started,
                    finished=g.finished,
                    request_id=g.request_id,
                )
                for g in generations
            ),
            messages=said,
            routes=new_routes(plan.parent, suffix.drop, len(suffix.ids), generations),
        )
        return self.tree.commit(plan, reply, added)
