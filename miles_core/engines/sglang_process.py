"""Runs an SGLang server as a child: `python -m miles_core.engines.sglang_process --url URL --deadline S -- COMMAND…`.

SGLang neither says when it is ready nor ends with its parent. This process does both for it, as every process of a run
does: it prints a JSON line once `/health` answers, and ends the server, with its children, when its own stdin ends. It
ends when the server does, with the server's status.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

__all__ = ["main"]

_POLL = 0.25
_GRACE = 5.0
_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the server's exit status, 1 when it was not ready in time."""
    parser = argparse.ArgumentParser(prog="python -m miles_core.engines.sglang_process", description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--deadline", type=float, required=True, help="seconds until /health must answer")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    server = subprocess.Popen(
        options.command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
    )
    threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: _end(server))
    try:
        if not _ready(server, options.url, options.deadline):
            status = server.poll()
            said = "did not answer /health" if status is None else f"ended with status {status}"
            print(f"the server at {options.url} {said} within {options.deadline:.0f} s", file=sys.stderr, flush=True)
            return 1
        print(json.dumps({"url": options.url, "pid": server.pid}), flush=True)
        return server.wait()
    finally:
        _end(server)


def _ready(server: subprocess.Popen[bytes], url: str, deadline: float) -> bool:
    end = time.monotonic() + deadline
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            pass  # not yet: the loop's deadline decides
        time.sleep(_POLL)
    return False


def _end_with_parent(server: subprocess.Popen[bytes]) -> None:
    while os.read(0, 65536):
        pass
    _end(server)
    os._exit(1)


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server and its children: they share its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
        except ProcessLookupError:
            return
        if number == signal.SIGTERM:
            try:
                server.wait(_GRACE)
            except subprocess.TimeoutExpired:
                continue
    server.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
