"""Buckets: everything once, never above the limit unless one unit is, units whole, experts and dtypes apart."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from miles_core.contracts.transports import TensorInfo
from miles_core.data.fusion import fused_place, is_expert
from miles_core.sync.buckets import buckets_of

NAMES = [
    "model.embed_tokens.weight",
    *(
        f"model.layers.{layer}.{name}.weight"
        for layer in range(3)
        for name in (
            *(f"self_attn.{part}_proj" for part in "qkvo"),
            "input_layernorm",
            *(f"mlp.experts.{expert}.{part}_proj" for expert in range(2) for part in ("gate", "up", "down")),
        )
    ),
    "lm_head.weight",
]

plans = st.permutations(NAMES).flatmap(
    lambda names: st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from(["float32", "bfloat16"])),
        min_size=len(names),
        max_size=len(names),
    ).map(
        lambda drawn: [
            TensorInfo(name=name, dtype=dtype, shape=(size,), nbytes=4 * size, checksum="")
            for name, (size, dtype) in zip(names, drawn, strict=True)
        ]
    )
)


@given(plan=plans, limit=st.integers(1, 400))
def test_laws(plan: list[TensorInfo], limit: int) -> None:
    buckets = buckets_of(plan, limit)
    assert Counter(t.name for bucket in buckets for t in bucket) == Counter(t.name for t in plan)
    homes: dict[tuple[str, str], int] = {}
    for index, bucket in enumerate(buckets):
        assert len({(t.dtype, is_expert(t.name)) for t in bucket}) == 1
        units = {fused_place(t.name).unit for t in bucket}
        assert sum(t.nbytes for t in bucket) <= limit or len(units) == 1
        for tensor in bucket:
            assert homes.setdefault((fused_place(tensor.name).unit, tensor.dtype), index) == index
    position = {t.name: index for index, t in enumerate(plan)}
    assert all([position[t.name] for t in bucket] == sorted(position[t.name] for t in bucket) for bucket in buckets)
    ends = [position[bucket[-1].name] for bucket in buckets]
    assert ends == sorted(ends), "a stream in plan order completes them in this order"
