"""JSON calls to a function, for two processes that already share a secret: one POST, one answer."""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from miles_core.errors import PublishError

__all__ = ["ControlServer"]

Call = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class ControlServer:
    """Serves `calls` (by path) at `url` from threads of its own. A body must have the `token`. A `PublishError` is
    answered with 409 and its text."""

    def __init__(self, host: str, token: str, calls: Mapping[str, Call], *, port: int = 0) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)))
                call = calls.get(self.path)
                if call is None or not hmac.compare_digest(str(body.pop("token", "")), token):
                    return self.answer(403, {"error": {"message": "no such call, or not with this token"}})
                try:
                    self.answer(200, call(body))
                except (PublishError, OSError) as error:
                    self.answer(409, {"error": {"message": str(error)}})

            def answer(self, status: int, body: Mapping[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet: failures are told to who called."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="p2p-control", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
