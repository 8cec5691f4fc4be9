"""Whatever bytes reach the router are answered by something else than a 500, and it goes on serving."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.fuzzing.running import ALLOWED, hammer
from tests.support.fuzzing.served import router

SEED = int(os.environ.get("MILES_FUZZ_SEED", "0"))
IN_CI = 1_000


def test_bytes_that_are_hardly_requests(tmp_path: Path):
    """504 is an engine that took too long, 505 another version of HTTP."""
    print(f"MILES_FUZZ_SEED={SEED}")
    with router(tmp_path / "log") as (server, valid):
        outcome = hammer(server.address, lambda: valid, seed=SEED, numbers=range(IN_CI), allowed=ALLOWED | {504, 505})
        assert outcome.wrong == []
        assert server.tracebacks() == []
        assert outcome.statuses.keys() >= {200, 400, 404, 505}
        status, answer = server.ask("POST", "/generate", valid[0].body)
        assert (status, answer["output_ids"]) == (200, [65, 66])
