"""Text to token ids and back: one convention over every ``tokenizer.json``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_llm.data.tokenizer_backend import (
    byte_lengths,
    encode_all,
    load_backend,
    part_control_tokens,
    special_ids,
    text_error,
)
from lit_llm.data.tokenizer_files import read_files
from lit_llm.data.tokenizer_json import (
    CARRIED_FILES,
    CONFIG_FILE,
    MODEL_FILES,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    among_specials,
    continuing,
    parse,
    processor_prefix,
)
from lit_llm.data.tokenizer_training import EOS_TOKEN as EOS_TOKEN
from lit_llm.data.tokenizer_training import check_vocab_size as check_vocab_size
from lit_llm.data.tokenizer_training import train_tokenizer as train_tokenizer
from lit_llm.errors import UserError

if TYPE_CHECKING:
    import tokenizers

    from lit_llm.data.fast_bpe import FastBPE
    from lit_llm.data.safe_cuts import SafeCuts

# Where no file says which token ends or begins a text: the names that base models gave them, most telling first.
_EOS_NAMES = (EOS_TOKEN, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "[EOS]", "<|im_end|>")
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "<|bos|>", "<｜begin▁of▁sentence｜>", "[BOS]", "<|startoftext|>")


class Tokenizer:
    """A ``tokenizer.json`` with its special tokens, its BOS convention and its chat template.

    Args:
        path: a ``tokenizer.json`` or a folder that holds one. The files that lie beside it under the usual names
            (tokenizer_config.json, special_tokens_map.json, chat_template.jinja, and the token ids of
            generation_config.json and config.json) are read too. Other formats are turned into a tokenizer.json of
            equal ids: a SentencePiece ``.model``, tiktoken ranks (``.tiktoken``, Llama 3's ``tokenizer.model``),
            Mistral's tekken.json, GPT-2's vocab.json with merges.txt.

    Control tokens typed inside a text are plain text unless ``allow_special`` is set, so that a document or a prompt
    cannot end itself. The padding, truncation and BPE dropout a file may ask for are switched off: every text is
    encoded whole, and always alike.

    Raises:
        UserError: the file is missing or broken, or names a token its vocabulary lacks.
    """

    def __init__(self, path: str | Path) -> None:
        self._load(read_files(Path(path)), str(path))

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> Tokenizer:
        """The tokenizer that ``to_files`` wrote down (a checkpoint carries it as plain strings)."""
        self = cls.__new__(cls)
        self._load(dict(files), "the tokenizer's files")
        return self

    def _load(self, files: dict[str, str], origin: str) -> None:
        if TOKENIZER_FILE not in files:
            raise UserError(f"{origin}: no {TOKENIZER_FILE}")
        content = self._content = parse(files, TOKENIZER_FILE, origin)
        self._config = parse(files, CONFIG_FILE, origin)
        special_map = parse(files, "special_tokens_map.json", origin)
        model_configs = [parse(files, name, origin) for name in MODEL_FILES]
        try:
            self._backend = load_backend(files[TOKENIZER_FILE])
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # the library raises bare Exception, and panics are not even that
            raise UserError(f"{origin}: no valid {TOKENIZER_FILE}: {error}") from error
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"{origin}: {TOKENIZER_FILE} has an empty vocabulary")
        known = set(vocabulary.values())
        self.vocab_size: int = max(known) + 1
        """Number of ids: the highest one, added tokens included, plus 1."""

        prefix = processor_prefix(content)
        if not known.issuperset(prefix):
            raise UserError(f"{origin}: the post-processor puts ids {prefix} before a text, the vocabulary lacks them")

        def find(kind: str, names: Sequence[str]) -> int | None:
            for config in (self._config, special_map):
                token = _token_text(config.get(f"{kind}_token"))
                if token in vocabulary:
                    return vocabulary[token]
                if token is not None and kind == "eos":
                    raise UserError(f"{origin}: the vocabulary lacks {token!r}, which is named as eos_token")
            if kind == "bos" and prefix:
                return prefix[0]
            for config in model_configs:
                ids = config.get(f"{kind}_token_id")
                ids = ids if isinstance(ids, list) else [ids]
                if ids and isinstance(ids[0], int) and ids[0] in known:
                    return ids[0]
            special = special_ids(self._backend)
            return next((vocabulary[name] for name in names if vocabulary.get(name) in special), None)

        self.bos_token_id: int | None = find("bos", _BOS_NAMES)
        self.eos_token_id: int | None = find("eos", _EOS_NAMES)
        self.pad_token_id: int | None = find("pad", ())
        self._prefix = prefix
        if self._config.get("add_bos_token") is True and self.bos_token_id not in prefix:
            if self.bos_token_id is None:
                raise UserError(f"{origin}: {CONFIG_FILE} has add_bos_token but no bos_token of the vocabulary")
            self._prefix = [self.bos_token_id, *prefix]
        self._add_special(self._backend)

        template = files.get(TEMPLATE_FILE, self._config.get("chat_template"))
        if isinstance(template, list):  # several named templates
            named = [item for item in template if isinstance(item, dict) and item.get("name") == "default"]
            template = named[0].get("template") if named else None
        self.chat_template: str | None = template if isinstance(template, str) and template.strip() else None
        self._files = self._self_contained(files)
        self._may_be_fast = True
        self._variants: dict[tuple[bool, bool], tokenizers.Tokenizer] = {(False, False): self._backend}

    def _add_special(self, backend: tokenizers.Tokenizer) -> None:
        """Let ``backend`` know as special what only a config calls so, that decoding can leave it out."""
        named = {self.bos_token_id, self.eos_token_id, self.pad_token_id} - {None} - special_ids(backend)
        backend.add_special_tokens([backend.id_to_token(i) for i in sorted(i for i in named if i is not None)])
        part_control_tokens(backend)

    def _self_contained(self, files: dict[str, str]) -> dict[str, str]:
        """The files to carry: ids that came from a model's config are written into the tokenizer's own."""
        config = dict(self._config)
        for kind, token_id in (("bos", self.bos_token_id), ("eos", self.eos_token_id), ("pad", self.pad_token_id)):
            if token_id is not None and config.get(f"{kind}_token") is None:
                config[f"{kind}_token"] = self._backend.id_to_token(token_id)
        carried = {name: files[name] for name in CARRIED_FILES if name in files}
        if config != self._config:
            carried[CONFIG_FILE] = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
        return carried

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer.from_files, (self._files,), {"_may_be_fast": self._may_be_fast}

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, bos={self.bos_token!r}, eos={self.eos_token!r})"

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_token_id is None else self._backend.id_to_token(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        return None if self.eos_token_id is None else self._backend.id_to_token(self.eos_token_id)

    @cached_property
    def _content(self) -> dict[str, Any]:
        """tokenizer.json, parsed: kept from loading on until the fingerprint is made, as parsing it takes a while and
        keeping it megabytes."""
        return json.loads(self._files[TOKENIZER_FILE])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what decides the ids: the content of tokenizer.json, EOS and what is put before a text."""
        content = {
            "tokenizer": self._content,
            "eos": self.eos_token_id,
            "prefix": self._prefix,
        }
        del self._content
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    # ---------------------------------------------------------------- encoding

    def encode(
        self,
        text: str,
        *,
        bos: bool | None = None,
        eos: bool = False,
        allow_special: bool = False,
        continues: bool = False,
    ) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: any valid Unicode text.
            bos: put BOS before it; None: where this tokenizer's convention does (its post-processor or
                ``add_bos_token``). A BOS with which the text begins already is not doubled.
            eos: put EOS behind it, once.
            allow_special: read control tokens written in the text as such.
            continues: the text goes on from an earlier one: neither BOS (unless ``bos`` is True) nor the blank that
                SentencePiece-like tokenizers put before a text.

        Raises:
            UserError: no BOS or EOS is known though it is asked for, or the text holds a lone surrogate.
        """
        options: dict[str, bool] = {"eos": eos, "allow_special": allow_special, "continues": continues}
        return self.encode_batch([text], bos=bos, **options)[0]

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        bos: bool | None = None,
        eos: bool = False,
        allow_special: bool = False,
        continues: bool = False,
    ) -> list[list[int]]:
        """``encode`` of each text, faster; the library spreads it over threads."""
        prefix = self._prefix_for(False if continues and bos is None else bos)
        suffix = self._suffix() if eos else []
        backend = self._variant(continues, allow_special)
        rows = encode_all(backend, texts)
        for row in rows:
            missing_end = suffix if row[-1:] != suffix else []
            if row[: len(prefix)] != prefix:
                row[:0] = prefix
            row += missing_end
        return rows

    def encode_parts(self, texts: Sequence[str], begins: Sequence[bool], ends: Sequence[bool]) -> list[np.ndarray]:
        """Ids (tokens,) uint32 of texts or parts of texts, by the faster engine where there is one.

        What begins a text gets what the tokenizer's convention puts before it, what does not is read as going on from
        an earlier part (``continues``); what ends one gets EOS, once. Control tokens are plain text. Errors as in
        ``encode``.
        """
        suffix = self._suffix() if any(ends) else []
        rows: list[np.ndarray | None] = [None] * len(texts)
        if self._fast is not None:
            try:
                rows = [self._fast.encode(text) for text in texts]
            except (UnicodeEncodeError, AttributeError) as error:
                raise text_error(texts) from error
        for begin in (True, False):
            left = [i for i, row in enumerate(rows) if row is None and bool(begins[i]) is begin]
            if left:
                found = encode_all(self._variant(not begin, False), [texts[i] for i in left])
                for i, ids in zip(left, found, strict=True):
                    rows[i] = np.array(ids, np.uint32)
        whole: list[np.ndarray] = []
        for row, begin, end in zip(rows, begins, ends, strict=True):
            assert row is not None
            front = self._prefix if begin and row[: len(self._prefix)].tolist() != self._prefix else []
            back = suffix if end and row[-1:].tolist() != suffix else []
            whole.append(np.concatenate([np.array(front, np.uint32), row, np.array(back, np.uint32)]))
        return whole

    @cached_property
    def _fast_engine(self) -> FastBPE | None:
        from lit_llm.data import fast_bpe

        return fast_bpe.build(self._content, self._backend)

    @property
    def _fast(self) -> FastBPE | None:
        return self._fast_engine if self._may_be_fast else None

    @property
    def engine(self) -> str:
        """The engine of ``encode_parts``: "tiktoken" where its ids are proved equal, else "tokenizers"."""
        return "tokenizers" if self._fast is None else "tiktoken"

    def use_engine(self, name: str | None) -> None:
        """Hold ``encode_parts`` to the "tokenizers" engine, or let it choose again (None)."""
        if name not in ("tokenizers", None):
            raise ValueError(f'the engine to hold to is "tokenizers" or None, not {name!r}')
        self._may_be_fast = name is None

    def check_engine(self, text: str) -> bool:
        """Whether the engine of ``encode_parts`` gives the ids of the tokenizers library for ``text``."""
        try:
            found = None if self._fast is None else self._fast.encode(text)
        except UnicodeEncodeError as error:
            raise text_error([text]) from error
        return found is None or found.tolist() == encode_all(self._backend, [text])[0]

    def last_cut(self, text: str) -> int | None:
        """The last position in ``text`` where it may be cut: ``encode(text[:cut])`` and, of the rest and whatever
        follows it, ``encode(..., continues=True)`` give the ids of the whole. None where no place is certain.
        See :mod:`lit_llm.data.safe_cuts`."""
        return None if self._cuts is None else self._cuts.last(text)

    @cached_property
    def _cuts(self) -> SafeCuts | None:
        from lit_llm.data.safe_cuts import safe_cuts

        flags = ("content", "special", "lstrip", "rstrip", "single_word")
        added = self._backend.get_added_tokens_decoder().values()  # with those that only a config calls special
        return safe_cuts({**self._content, "added_tokens": [{f: getattr(t, f) for f in flags} for t in added]})

    def _prefix_for(self, bos: bool | None) -> list[int]:
        if bos is None:
            return self._prefix
        if not bos:
            return []
        if self.bos_token_id is None:
            raise UserError(
                f'the tokenizer names no BOS token: put {{"bos_token": "..."}} into a {CONFIG_FILE} beside it'
            )
        return self._prefix if self.bos_token_id in self._prefix else [self.bos_token_id, *self._prefix]

    def _suffix(self) -> list[int]:
        if self.eos_token_id is None:
            raise UserError(
                f'the tokenizer names no EOS token: put {{"eos_token": "..."}} into a {CONFIG_FILE} beside it'
            )
        return [self.eos_token_id]

    def _variant(self, continues: bool, allow_special: bool) -> tokenizers.Tokenizer:
        """The backend that reads a text so; each is a separate one, for a flag flipped to and fro would not be safe
        among threads."""
        key = (continues, allow_special)
        if key not in self._variants:
            backend = self._backend
            content = json.loads(self._files[TOKENIZER_FILE])
            changed = continuing(content) if continues else among_specials(content)
            if allow_special or (continues and changed is not None):
                backend = load_backend(json.dumps(changed or content, ensure_ascii=False))
                self._add_special(backend)
                backend.encode_special_tokens = not allow_special
            self._variants[key] = backend
        return self._variants[key]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation by the tokenizer's template (ChatML without one), with exactly one BOS where
        the template or the convention wants it; control tokens typed in a message are plain text. Errors as in
        ``lit_llm.data.conversation.encode_prompt``."""
        from lit_llm.data.conversation import encode_prompt

        return encode_prompt(self, messages, add_generation_prompt)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation by the tokenizer's template (ChatML without one)."""
        from lit_llm.data.chat import render_chat

        return render_chat(
            messages,
            self.chat_template,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            add_generation_prompt=add_generation_prompt,
        )

    # ---------------------------------------------------------------- decoding

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids`` (a list, an array or a tensor). An id outside the vocabulary raises UserError."""
        plain: list[int] = ids.tolist() if hasattr(ids, "tolist") else [int(i) for i in ids]
        if plain and not 0 <= min(plain) <= max(plain) < self.vocab_size:
            wrong = next(i for i in plain if not 0 <= i < self.vocab_size)
            raise UserError(f"token id {wrong} is outside the tokenizer's vocabulary of {self.vocab_size} ids")
        return self._backend.decode(plain, skip_special_tokens=skip_special_tokens)

    def token_byte_lengths(self) -> np.ndarray:
        """UTF-8 bytes of text that each id stands for: (vocab_size,) int32, 0 for special tokens and unused ids.

        Exact for byte-level vocabularies. For SentencePiece-style ones the blank before a text's first word, which
        their decoders drop again, counts as a byte.
        """
        return byte_lengths(json.loads(self._files[TOKENIZER_FILE]), self._backend, self.vocab_size)

    # ---------------------------------------------------------------- files

    def to_files(self) -> dict[str, str]:
        """File name -> content, all that ``from_files`` needs; plain strings."""
        return dict(self._files)

    def save(self, folder: str | Path) -> None:
        """Write the files into ``folder``, which transformers' AutoTokenizer reads as well."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self._files.items():
            (folder / name).write_bytes(text.encode("utf-8"))


def _token_text(entry: Any) -> str | None:
    """A special token's text from its entry in a config: a string, or an object with its content."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None
