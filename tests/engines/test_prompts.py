"""A prompt's JSON is the same, whatever was asked before under its key and whatever is still held."""

from __future__ import annotations

import numpy as np
import orjson
from hypothesis import given
from hypothesis import strategies as st

from miles_core.engines.prompts import PromptJson

ids = st.lists(st.integers(0, 2**31 - 1) | st.sampled_from([0, 1, 256]), max_size=6)
asked = st.lists(st.tuples(st.sampled_from(["", "a", "b"]), ids, st.booleans(), st.booleans()), max_size=12)


@given(asked, st.integers(0, 200))
def test_it_is_json_of_the_ids(requests, room):
    prompts, last = PromptJson(max_bytes=room), {}
    for key, new, grows, array in requests:
        prompt = [*last.get(key, []), *new] if grows else new
        last[key] = prompt
        given_ids = np.array(prompt, np.int32) if array else prompt
        assert orjson.dumps({"ids": prompts.encode(key, given_ids)}) == orjson.dumps({"ids": prompt})
        assert 0 <= prompts._room == room - sum(len(raw) + len(text) for raw, text in prompts._held.values())


def test_arrays_of_another_type_or_order_are_read_as_they_are():
    prompts = PromptJson()
    assert prompts.encode("a", np.array([1, 2, 3, 4], np.int32)[::2]) is not None
    for array in (np.array([1, 3, 5, 7], np.int32)[::2], np.array([1, 3, 5], np.int64)):
        assert orjson.loads(orjson.dumps(prompts.encode("a", array))) == array.tolist()


def test_what_begins_as_before_is_encoded_behind_that():
    prompts = PromptJson()
    prompts.encode("a", np.array([1, 2], np.int32))
    prompts._held["a"] = (prompts._held["a"][0], b"[seen]")
    assert orjson.dumps(prompts.encode("a", np.array([1, 2, 3], np.int32))) == b"[seen,3]"
