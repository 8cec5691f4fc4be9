"""The document is an OpenAPI document, and describes the server that serves it."""

from __future__ import annotations

import re

import jsonschema
import pytest

from miles_core.data.tokenizer import FileTokenizer
from miles_core.tito.openapi import openapi_document
from miles_core.tito.server import TURNS
from tests.tito.serving import Engine, serving


def operations(document):
    return [(m.upper(), p, o) for p, item in document["paths"].items() for m, o in item.items() if m != "parameters"]


def test_every_schema_in_it_is_one():
    document = openapi_document("1", opens=True)
    schemas = [document["components"]["schemas"]["Error"]]
    for _, _, operation in operations(document):
        contents = [operation.get("requestBody", {}), *operation["responses"].values()]
        schemas += [media["schema"] for content in contents for media in content.get("content", {}).values()]
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
    assert len(schemas) > 40


def test_every_turn_is_in_it_under_both_addresses():
    paths = openapi_document("1", opens=False)["paths"]
    assert {f"/{tail}" for tail in TURNS} | {f"/sessions/{{session}}/{tail}" for tail in TURNS} <= paths.keys()
    assert "/sessions" not in paths


@pytest.mark.parametrize("tokenizer", [True], indirect=True)
async def test_every_operation_in_it_is_served_and_asks_for_a_token(tokenizer: FileTokenizer):
    async with serving(Engine(tokenizer, "x"), tokenizer, admin_token="admin") as s:
        async with s.http.get(f"{s.root}/openapi.json") as response:
            document = await response.json()
        for method, path, operation in operations(document):
            url = s.root + re.sub("{session}", s.session.id, path)
            headers = {"X-Session-ID": s.session.id}
            async with s.http.request(method, url, headers=headers, json={}) as response:
                expected = 200 if operation.get("security") == [] else 401
                assert response.status == expected, (method, path)
                assert str(response.status) in operation["responses"]


@pytest.mark.parametrize("opens", [False, True])
def test_it_is_the_same_each_time(opens: bool):
    assert openapi_document("1", opens=opens) == openapi_document("1", opens=opens)
