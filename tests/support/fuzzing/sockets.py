"""One attempt over a raw socket: send the bytes, and take every answer that they are worth."""

from __future__ import annotations

import socket

import httptools

__all__ = ["exchange", "whole_requests"]


class _Requests:
    def __init__(self) -> None:
        self.count = 0

    def on_message_complete(self) -> None:
        self.count += 1


class _Answers:
    """Statuses of the answers so far; interim ones are none."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.parser = httptools.HttpResponseParser(self)

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() >= 200:
            self.statuses.append(self.parser.get_status_code())


def whole_requests(data: bytes) -> int:
    """How many answers are due: one a whole request, one for the first bytes that are no HTTP."""
    requests = _Requests()
    parser = httptools.HttpRequestParser(requests)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        return max(requests.count, 1)  # what follows would be another protocol
    except httptools.HttpParserError:
        return requests.count + 1
    return requests.count


def exchange(address: tuple[str, int], data: bytes, *, timeout: float = 20.0) -> list[int]:
    """Statuses of the answers, in order; fewer than are due where the server closed the connection. Raises
    `TimeoutError` when it neither answers nor closes, and `httptools.HttpParserError` when what came is no HTTP."""
    due = whole_requests(data)
    answers = _Answers()
    with socket.create_connection(address, timeout=timeout) as connection:
        try:
            connection.sendall(data)
            while len(answers.statuses) < due:
                piece = connection.recv(1 << 16)
                if not piece:
                    break
                answers.parser.feed_data(piece)
        except (ConnectionResetError, BrokenPipeError):
            pass  # closed while it still had bytes of ours to read
    return answers.statuses
