"""Request bodies of ``/generate`` (SGLang's field names) to typed requests, or a :class:`BadRequestError`.

Nothing after this module checks user input again: what passes here cannot kill the engine.
"""

from __future__ import annotations

import math
import secrets
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_MAX_NEW_TOKENS = 128
MIN_TEMPERATURE = 1e-4
"""Below it, logits over temperature lose float32's precision; 0 is greedy."""


class BadRequestError(ValueError):
    """What the caller sent cannot be served; the message says what, and what is allowed (HTTP 400)."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What this engine can serve, known once the model is loaded."""

    vocab_size: int
    context_length: int
    """Longest prompt plus output, in tokens."""
    has_tokenizer: bool
    has_experts: bool
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to draw one request's tokens. ``temperature == 0`` is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """Keep the k likeliest tokens; -1 keeps all."""
    min_p: float = 0.0
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    """Until so many tokens are out, stop ids are not drawn."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the request, the model's end-of-sequence ids among them unless ``ignore_eos``."""
    ignore_eos: bool = False
    sampling_seed: int
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    """Tokens between two events of this stream; None takes the engine's own, which also tells the first token."""

    @property
    def truncated(self) -> bool:
        """Whether a draw needs more than the temperature."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One prompt of a ``/generate`` body."""

    rid: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    """Lower first; equal priorities in order of arrival."""
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    """First prompt position whose log-prob is wanted; -1 for none."""
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    logprob_temperature: float = 1.0
    """Temperature of the prompt's log-probs. SGLang gives those of temperature 1 alone; this field is our own."""
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0


_SAMPLING_FIELDS = dict.fromkeys(
    (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_new_tokens",
        "min_new_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "sampling_seed",
        "skip_special_tokens",
        "no_stop_trim",
        "stream_interval",
    )
)
_BODY_FIELDS = dict.fromkeys(
    (
        "input_ids",
        "sampling_params",
        "rid",
        "priority",
        "stream",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
        "logprob_temperature",
        "return_routed_experts",
        "routed_experts_start_len",
        "extra_key",  # SGLang's, to keep prefixes apart; here a commit forgets all that came before it
    )
)


def parse_generate(body: object, limits: Limits) -> tuple[list[GenerateRequest], bool]:
    """Return the requests of one ``/generate`` body, and whether it was a batch (a list of prompts).

    In a batch every other field is either one value for all prompts or a list of one value a prompt.

    Raises:
        BadRequestError: with the field, the value and what is allowed.
    """
    if not isinstance(body, dict):
        raise BadRequestError(f"the body must be a JSON object, not {type(body).__name__}")
    _refuse_unknown(body, _BODY_FIELDS, "field")
    ids = body.get("input_ids")
    if not isinstance(ids, list):
        raise BadRequestError("input_ids: a list of token ids, or a list of such lists, is required")
    batched = bool(ids) and isinstance(ids[0], list)
    if not batched:
        return [_parse_one(body, limits)], False
    return [_parse_one(_item(body, index, len(ids)), limits) for index in range(len(ids))], True


def _item(body: Mapping[str, Any], index: int, count: int) -> dict[str, Any]:
    """Return the body of prompt ``index`` of a batch of ``count``."""
    item = {}
    for field, value in body.items():
        per_prompt = isinstance(value, list) and (
            field != "token_ids_logprob" or (bool(value) and isinstance(value[0], list))
        )
        if per_prompt and len(value) != count:
            raise BadRequestError(f"{field}: {len(value)} values for {count} prompts")
        if field == "rid" and not per_prompt and value is not None:
            value = f"{value}_{index}"
        item[field] = value[index] if per_prompt else value
    return item


def _parse_one(body: Mapping[str, Any], limits: Limits) -> GenerateRequest:
    ids = _token_ids(body["input_ids"], "input_ids", limits)
    if not ids:
        raise BadRequestError("input_ids: empty; at least one token is needed to predict the next")
    if len(ids) >= limits.context_length:
        raise BadRequestError(
            f"input_ids: {len(ids)} tokens, but this engine holds {limits.context_length} tokens a sequence "
            "(prompt and output); start it with a larger --context-length or --max-total-tokens"
        )
    sampling = _parse_sampling(body.get("sampling_params"), len(ids), limits)
    want_logprob = _boolean(body, "return_logprob")
    start = _integer(body, "logprob_start_len", -1, low=-1, high=len(ids))
    top = _integer(body, "top_logprobs_num", 0, low=0, high=limits.vocab_size)
    temperature = _number(body, "logprob_temperature", 1.0, low=0.0, low_open=True)
    experts = _boolean(body, "return_routed_experts")
    if experts and not limits.has_experts:
        raise BadRequestError("return_routed_experts: this model has no routed experts")
    rid = body.get("rid")
    if rid is not None and not isinstance(rid, str):
        raise BadRequestError(f"rid: a string, not {rid!r}")
    return GenerateRequest(
        rid=rid if rid is not None else uuid.uuid4().hex,
        input_ids=ids,
        sampling=sampling,
        priority=_integer(body, "priority", 0),
        stream=_boolean(body, "stream"),
        return_logprob=want_logprob,
        logprob_start_len=start if want_logprob else -1,
        top_logprobs_num=top if want_logprob else 0,
        token_ids_logprob=_token_ids(body.get("token_ids_logprob") or [], "token_ids_logprob", limits)
        if want_logprob
        else (),
        logprob_temperature=temperature,
        return_routed_experts=experts,
        routed_experts_start_len=_integer(body, "routed_experts_start_len", 0, low=0, high=len(ids)),
    )


def _parse_sampling(value: object, prompt_tokens: int, limits: Limits) -> SamplingParams:
    params = {} if value is None else value
    if not isinstance(params, dict):
        raise BadRequestError(f"sampling_params: an object, not {type(params).__name__}")
    _refuse_unknown(params, _SAMPLING_FIELDS, "sampling_params key")
    room = limits.context_length - prompt_tokens
    wanted = params.get("max_new_tokens")
    if wanted is None:
        max_new = min(DEFAULT_MAX_NEW_TOKENS, room)
    else:
        max_new = _integer(params, "max_new_tokens", 0, low=0)
        if max_new > room:
            raise BadRequestError(
                f"sampling_params.max_new_tokens: {max_new} after a prompt of {prompt_tokens} tokens passes this "
                f"engine's {limits.context_length} tokens a sequence; at most {room} fit"
            )
    stop = params.get("stop")
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else ()
    if (stop is not None and not isinstance(stop, str | list)) or not all(isinstance(s, str) and s for s in stops):
        raise BadRequestError(f"sampling_params.stop: a non-empty string or a list of them, not {stop!r}")
    if stops and not limits.has_tokenizer:
        raise BadRequestError("sampling_params.stop: the model directory has no tokenizer; use stop_token_ids")
    ignore_eos = _boolean(params, "ignore_eos")
    stop_ids = frozenset(_token_ids(params.get("stop_token_ids") or [], "sampling_params.stop_token_ids", limits))
    temperature = _number(params, "temperature", 1.0, low=0.0)
    if 0.0 < temperature < MIN_TEMPERATURE:
        raise BadRequestError(f"sampling_params.temperature: {temperature}; 0 is greedy, others from {MIN_TEMPERATURE}")
    seed = params.get("sampling_seed")
    top_k = _integer(params, "top_k", -1, low=-1)
    return SamplingParams(
        temperature=temperature,
        top_p=_number(params, "top_p", 1.0, low=0.0, high=1.0, low_open=True),
        top_k=top_k if top_k != 0 and top_k < limits.vocab_size else -1,
        min_p=_number(params, "min_p", 0.0, low=0.0, high=1.0),
        max_new_tokens=max_new,
        min_new_tokens=_integer(params, "min_new_tokens", 0, low=0, high=max_new),
        stop=stops,
        stop_token_ids=stop_ids if ignore_eos else stop_ids | limits.eos_token_ids,
        ignore_eos=ignore_eos,
        sampling_seed=secrets.randbits(63) if seed is None else _integer(params, "sampling_seed", 0),
        skip_special_tokens=_boolean(params, "skip_special_tokens", True),
        no_stop_trim=_boolean(params, "no_stop_trim"),
        stream_interval=_integer(params, "stream_interval", 0, low=1) or None,
    )


def _refuse_unknown(given: Mapping[str, Any], known: Mapping[str, None], what: str) -> None:
    for name in given:
        if name not in known:
            raise BadRequestError(f"unknown {what} {name!r}; known: {', '.join(known)}")


def _token_ids(value: object, field: str, limits: Limits) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise BadRequestError(f"{field}: a list of token ids, not {type(value).__name__}")
    if set(map(type, value)) <= {int} and (not value or (min(value) >= 0 and max(value) < limits.vocab_size)):
        return tuple(value)
    for position, token in enumerate(value):  # to say which
        if type(token) is not int:
            raise BadRequestError(f"{field}[{position}]: a token id is an integer, not {token!r}")
        if not 0 <= token < limits.vocab_size:
            raise BadRequestError(
                f"{field}[{position}]: {token} is outside the vocabulary (0 to {limits.vocab_size - 1})"
            )
    raise AssertionError("one of them is no token id")


def _integer(
    given: Mapping[str, Any], field: str, default: int, *, low: int | None = None, high: int | None = None
) -> int:
    value = given.get(field)
    if value is None:
        return default
    if type(value) is not int:
        raise BadRequestError(f"{field}: an integer, not {value!r}")
    _check_range(field, value, low, high)
    return value


def _number(
    given: Mapping[str, Any],
    field: str,
    default: float,
    *,
    low: float,
    high: float | None = None,
    low_open: bool = False,
) -> float:
    value = given.get(field)
    if value is None:
        return default
    if type(value) not in (int, float) or not math.isfinite(value):
        raise BadRequestError(f"{field}: a finite number, not {value!r}")
    if low_open and value == low:
        raise BadRequestError(f"{field}: {value} is not above {low}")
    _check_range(field, value, low, high)
    return float(value)


def _check_range(field: str, value: float, low: float | None, high: float | None) -> None:
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"from {low}" if high is None else f"up to {high}" if low is None else f"from {low} to {high}"
        raise BadRequestError(f"{field}: {value} is out of range ({bounds})")


def _boolean(given: Mapping[str, Any], field: str, default: bool = False) -> bool:
    value = given.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequestError(f"{field}: true or false, not {value!r}")
    return value
