"""A tokenizer directory, read with the `tokenizers` library alone.

Two views of one vocabulary. *Text* is encoded by the model proper (normaliser, pre-tokeniser, merges), from which every
added token has been taken away, so that no text can spell its way to `<|im_end|>` or `<tool_call>`. *Tokens* are
looked up by name, and only where a family asks for one.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

__all__ = ["FileTokenizer", "load_tokenizer"]

_SHORT, _MOST_SHORT = 24, 4096
"""Texts up to so many characters, and so many of them, are remembered: role names and line ends stand between all
messages."""


class FileTokenizer:
    """Implements `miles_core.contracts.families.Tokenizer`. Thread-safe; encoding and decoding release the GIL.

    `special_tokens` maps the roles that the directory names (`eos_token`, `bos_token`, …) to token texts;
    `chat_templates` maps names to Jinja sources, the usual one is `default`.
    """

    def __init__(
        self,
        *,
        text: Backend,
        full: Backend,
        added: Mapping[str, int],
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        source: str,
    ) -> None:
        self._text = text
        self._full = full
        self._encode_short = functools.lru_cache(_MOST_SHORT)(self._encode)
        self._added = dict(added)
        self._added_ids = frozenset(added.values())
        self._vocab_size = max(full.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates)
        self.source = source

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as text: no token is added, and text that spells an added token stays text.

        Raises `ModelError` for text that the vocabulary cannot spell without an added token (an unknown token).
        """
        return list(self._encode_short(text)) if len(text) <= _SHORT else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._text.encode(text, add_special_tokens=False).ids
        if not self._added_ids.isdisjoint(ids):
            bad = next(i for i in ids if i in self._added_ids)
            raise ModelError(
                f"{self.source}: the text {text[:80]!r} tokenises to the added token {self._full.id_to_token(bad)!r}; "
                "a tokenizer that can spell any text is needed (byte-level BPE, or byte fallback)"
            )
        return ids

    def special(self, token: str) -> int:
        """Id of an added token, special or not. Raises `ModelError` when there is none of that name."""
        found = self.added(token)
        if found is None:
            raise ModelError(
                f"{self.source}: no added token {token!r}; it has {', '.join(sorted(self._added)[:40]) or 'none'}. "
                "Is the model family the right one for this tokenizer?"
            )
        return found

    def added(self, token: str) -> int | None:
        """Id of the added token `token`, None when the vocabulary has none of that name."""
        return self._added.get(token)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of `ids`, exactly: no clean-up of spaces. Bytes that are no UTF-8 become U+FFFD, and so does an id
        beyond the vocabulary: models pad their embedding, and can sample such a row.

        Raises `ModelError` for a negative id.
        """
        plain = [int(i) for i in ids]
        if plain and min(plain) < 0:
            raise ModelError(f"{self.source}: id {min(plain)} is negative")
        if not plain or max(plain) < self._vocab_size:
            return str(self._full.decode(plain, skip_special_tokens=skip_special))
        runs = itertools.groupby(plain, key=lambda i: i < self._vocab_size)
        return "".join(
            str(self._full.decode(list(run), skip_special_tokens=skip_special)) if known else "\ufffd" * len(list(run))
            for known, run in runs
        )

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of all added tokens that text cannot reach, by name."""
        return dict(self._added)

    @property
    def added_ids(self) -> frozenset[int]:
        """The ids of all added tokens."""
        return self._added_ids

    @functools.cached_property
    def special_names(self) -> frozenset[str]:
        """Names of the added tokens that are special: control tokens, which `skip_special` leaves out."""
        return frozenset(t.content for t in self._full.get_added_tokens_decoder().values() if t.special)

    @property
    def vocab_size(self) -> int:
        """Largest id plus one."""
        return self._vocab_size

    @property
    def eos_id(self) -> int | None:
        eos = self.special_tokens.get("eos_token")
        return None if eos is None else self._full.token_to_id(eos)

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the directory's chat template, None when it has none."""
        return self.chat_templates.get("default")


def load_tokenizer(directory: Path | str) -> FileTokenizer:
    """Read `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json` and the chat template of a directory.

    Raises `ModelError` when `tokenizer.json` is missing or damaged.
    """
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    directory = Path(directory)
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"tokenizer directory {directory}: tokenizer.json is missing; "
            "load the tokenizer with transformers and save_pretrained it to get one"
        )
    source = path.read_text(encoding="utf-8")
    try:
        full = Backend.from_str(source)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path}: the tokenizers library cannot read it ({error})") from error
    full.no_truncation()
    full.no_padding()
    config = _read_json(directory / "tokenizer_config.json")
    # Older directories keep some added tokens in the config alone; transformers adds them on load.
    known = {token.content for token in full.get_added_tokens_decoder().values()}
    for key in sorted(config.get("added_tokens_decoder", {}), key=int):
        entry = config["added_tokens_decoder"][key]
        token = AddedToken(entry["content"], special=entry.get("special", False), normalized=False)
        if entry["content"] not in known:
            (full.add_special_tokens if token.special else full.add_tokens)([token])
            if full.token_to_id(entry["content"]) != int(key):
                raise ModelError(
                    f"{directory / 'tokenizer_config.json'}: added token {entry['content']!r} has id {key}, but "
                    f"tokenizer.json makes it {full.token_to_id(entry['content'])}; the files do not belong together"
                )
    added = {token.content: i for i, token in full.get_added_tokens_decoder().items() if _is_control(token)}
    names = _read_json(directory / "special_tokens_map.json") | config
    return FileTokenizer(
        text=_text_only(full, added),
        full=full,
        added=added,
        special_tokens={
            key: _content(value) for key, value in names.items() if key.endswith("_token") and _content(value)
        },
        chat_templates=_chat_templates(directory, config),
        source=str(path),
    )


def _is_control(token: Any) -> bool:
    """Added tokens that text must not reach: all but runs of white space, which are text (GPT-NeoX, Phi)."""
    return bool(token.special or token.content.strip())


def _text_only(full: Backend, added: Mapping[str, int]) -> Backend:
    """The tokenizer without its `added` tokens."""
    from tokenizers import Tokenizer as Backend

    kept = [token for token in full.get_added_tokens_decoder().values() if token.content not in added]
    if kept or getattr(full.model, "ignore_merges", False):
        return Backend.from_str(_without_added(full.to_str(), added))
    text = Backend(full.model)  # shares the vocabulary: no second copy, and half the time of loading one
    if full.normalizer is not None:
        text.normalizer = full.normalizer
    if full.pre_tokenizer is not None:
        text.pre_tokenizer = full.pre_tokenizer
    return text


def _without_added(source: str, added: Mapping[str, int]) -> str:
    """The tokenizer's JSON with the `added` tokens gone, from the list and (for BPE) from the model's vocabulary."""
    data = json.loads(source)
    data["added_tokens"] = [entry for entry in data["added_tokens"] if entry["content"] not in added]
    data["post_processor"] = None
    model = data["model"]
    if model.get("type") == "BPE":
        # An added token gets the next free id, unless the model has it: those that stay must keep theirs.
        model["vocab"].update({entry["content"]: entry["id"] for entry in data["added_tokens"]})
        # With `ignore_merges` a pre-token that is in the vocabulary is taken whole, an added token's text too.
        merged = {piece for merge in model["merges"] for piece in ("".join(_pair(merge)), *_pair(merge))}
        keep = merged | {model.get("unk_token")}
        model["vocab"] = {piece: i for piece, i in model["vocab"].items() if piece not in added or piece in keep}
    return json.dumps(data, ensure_ascii=False)


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not JSON ({error})") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _content(value: Any) -> str:
    """A token is written as its text, or as an object with its text under `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template files win over the config's entry, as in transformers."""
    templates: dict[str, str] = {}
    entry = config.get("chat_template")
    if isinstance(entry, str):
        templates["default"] = entry
    elif isinstance(entry, list):
        templates.update({item["name"]: item["template"] for item in entry})
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    path = directory / "chat_template.jinja"
    if path.is_file():
        templates["default"] = path.read_text(encoding="utf-8")
    return templates
