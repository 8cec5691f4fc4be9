"""Requests that schemathesis makes from a server's own OpenAPI document, and what its answers must be by it."""

from __future__ import annotations

from collections import Counter

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.fuzzing.served import SessionServer

__all__ = ["documented"]

_CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
_RENEWED = 300
"""Requests for which a session is used, before it is full of turns."""


def documented(server: SessionServer, each: int, *, seed: int) -> Counter[int]:
    """Ask `each` requests of every operation, half of them valid by the document and half not; the statuses. Raises
    where an answer is not as documented, or is a 5xx other than 502 and 503."""
    statuses: Counter[int] = Counter()
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    with requests.Session() as http:
        for operation in (found.ok() for found in schema.get_all_operations()):
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                try:
                    strategy = operation.as_strategy(generation_mode=mode)
                except Exception as error:
                    raise AssertionError(operation.label) from error

                @hypothesis.seed(seed)
                @hypothesis.settings(
                    max_examples=(each + 1) // 2,
                    deadline=None,
                    database=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                @hypothesis.given(case=strategy)
                def ask(case: schemathesis.Case) -> None:
                    count = sum(statuses.values())
                    if count % _RENEWED == 0 or case.method == "DELETE":
                        server.renew()
                    headers = dict(server.headers) if count % 10 else {}
                    if count % 7:
                        if "session" in case.path_parameters:
                            case.path_parameters["session"] = server.session
                        elif "X-Session-ID" in (case.headers or {}):
                            case.headers["X-Session-ID"] = server.session
                    response = case.call(base_url=server.url, session=http, headers=headers)
                    statuses[response.status_code] += 1
                    case.validate_response(response, checks=_CHECKS)
                    assert response.status_code in (502, 503) or response.status_code < 500, response.status_code

                try:
                    ask()
                except hypothesis.errors.Unsatisfiable:
                    assert mode is GenerationMode.NEGATIVE, operation.label  # there is nothing in it to get wrong
    return statuses
