"""The agent: a small process beside an engine that lends registered memory to the trainer's writes.

    python -m miles_transport_p2p.agent --library nixl --host 127.0.0.1 [--port 7801]

It keeps two files in memory in turn. A version is written into the one that the engine does not serve from, which the
engine then maps and verifies tensor by tensor. A file whose transfer failed is dropped, with its registration: what is
in it may go on changing. The secret of its callers is the environment variable MILES_P2P_TOKEN; the first line it
prints is its URL. Started by a run, it ends with the run: it watches standard input.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import threading
import uuid
from collections.abc import Mapping
from typing import Any

from miles_core.errors import PublishError
from miles_core.lifeline import Lifeline
from miles_core.sync.memory_files import memory_directory
from miles_transport_p2p.control import ControlServer
from miles_transport_p2p.libraries import Library, open_library
from miles_transport_p2p.region import Region

__all__ = ["Agent"]

_PREFIX = "miles-p2p-"


class Agent:
    """Slots of memory. `prepare` lends one, `drop` gives one up, `serve` says that the engine has mapped it."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._directory = memory_directory(_PREFIX)
        self._slots: dict[str, Region] = {}
        self._owner: dict[str, str] = {}
        self._serving = ""
        self._lock = threading.Lock()
        self.calls = {"/prepare": self.prepare, "/drop": self.drop, "/serve": self.serve}

    def prepare(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A slot of at least `nbytes` that no engine maps, for the publisher named `owner` alone."""
        nbytes, owner = int(body["nbytes"]), str(body["owner"])
        with self._lock:
            for slot, region in list(self._slots.items()):
                if slot == self._serving:
                    continue
                if self._owner.get(slot, owner) != owner:
                    raise PublishError(f"another publisher ({self._owner[slot]}) is writing here")
                if region.nbytes < nbytes:
                    self._forget(slot)
            free = [slot for slot in self._slots if slot != self._serving]
            slot = free[0] if free else self._new(nbytes)
            self._owner[slot] = owner
            region = self._slots[slot]
            return {
                "slot": slot,
                "address": region.address,
                "path": str(region.path),
                "endpoint": self._library.endpoint(),
                "library": self._library.name,
                "protocol": self._library.protocol,
            }

    def serve(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The engine maps this slot from now on, and the other no more."""
        with self._lock:
            self._serving = str(body["slot"])
            self._owner.clear()
        return {}

    def drop(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Give a slot up. One that an engine may have mapped keeps its pages for it."""
        with self._lock:
            self._forget(str(body["slot"]))
        return {}

    def _new(self, nbytes: int) -> str:
        slot = uuid.uuid4().hex
        region = Region(nbytes, self._directory / slot)
        try:
            self._library.register(region.address, region.nbytes)
        except BaseException:
            region.close()
            raise
        self._slots[slot] = region
        return slot

    def _forget(self, slot: str) -> None:
        region = self._slots.pop(slot, None)
        self._owner.pop(slot, None)
        if region is not None:
            self._library.unregister(region.address, region.nbytes)
            region.close()

    def close(self) -> None:
        with self._lock:
            for slot in list(self._slots):
                self._forget(slot)
        self._library.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="miles_transport_p2p.agent")
    parser.add_argument("--library", default="auto", choices=("auto", "nixl", "mooncake"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--with-parent", action="store_true", help="end when standard input does")
    options = parser.parse_args()
    token = os.environ.get("MILES_P2P_TOKEN", "")
    if not token:
        sys.exit("set MILES_P2P_TOKEN to the secret that the run has in it too")
    end = threading.Event()
    if options.with_parent:
        Lifeline(grace=5.0).on_end = end.set
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the libraries print
    agent = Agent(open_library(options.library, options.host))
    server = ControlServer(options.host, token, agent.calls, port=options.port)
    print(json.dumps({"url": server.url}), file=output, flush=True)
    end.wait()
    server.close()
    agent.close()
    os._exit(0)  # the libraries' threads outlive an orderly end


if __name__ == "__main__":
    main()
