"""Faults of engines, on the one that reaches a server of the user's."""

from __future__ import annotations

import json
import sys

from miles_core.contracts.component import Example
from miles_core.contracts.launchers import ProcessSpec
from miles_core.testing.serving import dead_url
from miles_core.testing.stub_engine import StubEngine, hashed_script, served_stub
from planted_faults import scaffolded

Good = scaffolded("engines")
GOOD = (Good,)


def serves(stub):
    """An engine over this stub."""

    class Serves(Good):
        """Its server misbehaves."""

        @classmethod
        def example(cls, bench):
            return Example(settings={"urls": (bench._stack.enter_context(served_stub(stub())).url,)})

    return Serves


class Nobody(Good):
    """Gives a URL at which nobody answers."""

    async def start(self, launcher, start):
        return [dead_url()]


class NoUrls(Good):
    """Gives none."""

    async def start(self, launcher, start):
        return []


class LeavesServer(Good):
    """Leaves what it launched running."""

    async def start(self, launcher, start):
        code = "import sys; print('{}', flush=True); sys.stdin.read()"
        command = [sys.executable, "-c", code]
        await launcher.launch(ProcessSpec(name="server", command=command, log=start.run_directory / "log"))
        return list(self.config.urls)


class EndsTheUsers(Good):
    """Ends a server that it did not start."""

    _served = None

    async def start(self, launcher, start):
        self._served = served_stub(StubEngine(hashed_script(16, 2)))
        return [self._served.__enter__().url]

    async def stop(self):
        if self._served is not None:
            self._served.__exit__(None, None, None)
        self._served = None


class _OtherVersion(StubEngine):
    def __init__(self):
        super().__init__(hashed_script(256, 64), version=3, vocabulary=256)


class _Unseeded(StubEngine):
    def __init__(self):
        self.calls = 0
        super().__init__(self._script, version=7, vocabulary=256)

    def _script(self, ids, params):
        self.calls += 1
        return [self.calls] * 64


class _Positive(StubEngine):
    def __init__(self):
        super().__init__(hashed_script(256, 64), version=7, vocabulary=256)

    def _answer(self, body):
        answer = json.loads(json.dumps(super()._answer(body)))
        triples = answer["meta_info"]["output_token_logprobs"]
        answer["meta_info"]["output_token_logprobs"] = [[0.5, i, None] for _, i, _ in triples]
        return answer


class _Gullible(StubEngine):
    def __init__(self):
        super().__init__(hashed_script(256, 64), version=7)


class _Fragile(StubEngine):
    """Answers 500 to a bad request."""

    def __init__(self):
        super().__init__(self._script, version=7)

    def _script(self, ids, params):
        assert max(ids) < 256
        return [1]


FAULTS = {
    "urls_are_healthy_until_stop": (Nobody, NoUrls, LeavesServer, EndsTheUsers),
    "it_samples_over_the_protocol": (serves(_OtherVersion), serves(_Unseeded), serves(_Positive)),
    "a_bad_request_is_refused_and_harmless": (serves(_Gullible), serves(_Fragile)),
}
