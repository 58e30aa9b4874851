"""Text to token ids and back: one convention over every ``tokenizer.json``."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_llm.data.tokenizer_json import (
    CARRIED_FILES,
    CONFIG_FILE,
    MODEL_FILES,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    byte_measure,
    load_backend,
    parse,
    processor_prefix,
    read_files,
    special_ids,
    words_end_at_lines,
)
from lit_llm.errors import UserError

if TYPE_CHECKING:
    import tokenizers

EOS_TOKEN = "<|endoftext|>"

# Where no file says which token ends or begins a text: the names that base models gave them, most telling first.
_EOS_NAMES = (EOS_TOKEN, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "[EOS]", "<|im_end|>")
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "<|bos|>", "<｜begin▁of▁sentence｜>", "[BOS]", "<|startoftext|>")

_LONG_WORD = re.compile(r"\S{1000}")
_LINE_END = re.compile(r"[A-Za-z](?=\n)")


class Tokenizer:
    """A ``tokenizer.json`` with its special tokens, its BOS convention and its chat template.

    Args:
        path: a ``tokenizer.json`` or a folder that holds one. The files that lie beside it under the usual names
            (tokenizer_config.json, special_tokens_map.json, chat_template.jinja, and the token ids of
            generation_config.json and config.json) are read too.

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
        content = parse(files, TOKENIZER_FILE, origin)
        self._config = parse(files, CONFIG_FILE, origin)
        special_map = parse(files, "special_tokens_map.json", origin)
        model_configs = [parse(files, name, origin) for name in MODEL_FILES]
        try:
            self._backend = load_backend(files[TOKENIZER_FILE])
        except Exception as error:  # the library raises bare Exception
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
        self.chat_template: str | None = template if isinstance(template, str) else None
        self._files = self._self_contained(files)
        self._cuts_at_lines = words_end_at_lines(content)

    def _add_special(self, backend: tokenizers.Tokenizer) -> None:
        """Let ``backend`` know as special what only a config calls so, that decoding can leave it out."""
        named = {self.bos_token_id, self.eos_token_id, self.pad_token_id} - {None} - special_ids(backend)
        backend.add_special_tokens([backend.id_to_token(i) for i in sorted(i for i in named if i is not None)])

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
        return Tokenizer.from_files, (self._files,)

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, bos={self.bos_token!r}, eos={self.eos_token!r})"

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_token_id is None else self._backend.id_to_token(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        return None if self.eos_token_id is None else self._backend.id_to_token(self.eos_token_id)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what decides the ids: the content of tokenizer.json, EOS and what is put before a text."""
        content = {
            "tokenizer": json.loads(self._files[TOKENIZER_FILE]),
            "eos": self.eos_token_id,
            "prefix": self._prefix,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    # ---------------------------------------------------------------- encoding

    def encode(
        self, text: str, *, bos: bool | None = None, eos: bool = False, allow_special: bool = False
    ) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: any valid Unicode text.
            bos: put BOS before it; None: where this tokenizer's convention does (its post-processor or
                ``add_bos_token``). A BOS with which the text begins already is not doubled.
            eos: put EOS behind it, once.
            allow_special: read control tokens written in the text as such.

        Raises:
            UserError: no BOS or EOS is known though it is asked for, or the text holds a lone surrogate.
        """
        return self.encode_batch([text], bos=bos, eos=eos, allow_special=allow_special)[0]

    def encode_batch(
        self, texts: Sequence[str], *, bos: bool | None = None, eos: bool = False, allow_special: bool = False
    ) -> list[list[int]]:
        """``encode`` of each text, faster; the library spreads it over threads."""
        prefix = self._prefix_for(bos)
        suffix: list[int] = []
        if eos:
            if self.eos_token_id is None:
                raise UserError(
                    f'the tokenizer names no EOS token: put {{"eos_token": "..."}} into a {CONFIG_FILE} beside it'
                )
            suffix = [self.eos_token_id]
        backend = self._special_backend if allow_special else self._backend
        try:
            rows = [e.ids for e in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        except TypeError as error:
            raise _text_error(texts) from error
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"the tokenizer cannot encode this text: {error}; give one that knows its words") from error
        for row in rows:
            missing_end = suffix if row[-1:] != suffix else []
            if row[: len(prefix)] != prefix:
                row[:0] = prefix
            row += missing_end
        return rows

    def pieces(self, text: str, characters: int) -> list[str]:
        """``text`` cut into pieces of about ``characters`` whose ids in a row are those of the whole (control tokens
        in it being plain text); uncut where that is not certain of this tokenizer or its lines."""
        starts = [0]
        while self._cuts_at_lines and len(text) - starts[-1] > characters:
            cut = _LINE_END.search(text, starts[-1] + characters)
            if cut is None:
                break
            starts.append(cut.end())
        return [text[start:stop] for start, stop in zip(starts, [*starts[1:], len(text)], strict=True)]

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

    @cached_property
    def _special_backend(self) -> tokenizers.Tokenizer:
        # a second one, for a flag flipped to and fro would not be safe among threads
        backend = load_backend(self._files[TOKENIZER_FILE])
        self._add_special(backend)
        backend.encode_special_tokens = False
        return backend

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation by the tokenizer's template (ChatML without one), with exactly one BOS where
        the template or the convention wants it. Errors as in ``lit_llm.data.chat.render_chat``."""
        return self.encode(self.render_chat(messages, add_generation_prompt), allow_special=True)

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
        lengths = np.zeros(self.vocab_size, dtype=np.int32)
        added = self._backend.get_added_tokens_decoder()
        measure = byte_measure(json.loads(self._files[TOKENIZER_FILE]))
        for token, i in self._backend.get_vocab(with_added_tokens=True).items():
            if i not in added:
                lengths[i] = measure(token)
            elif not added[i].special:
                lengths[i] = len(token.encode())
        return lengths

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


def train_tokenizer(texts: Iterable[str], vocab_size: int = 8192, *, min_frequency: int = 2) -> Tokenizer:
    """A byte-level BPE (Sennrich et al. 2016 over bytes, with GPT-2's way of cutting text into words) learned on texts.

    Any Unicode text can be encoded and comes back unchanged. EOS is ``<|endoftext|>``, id 0; no BOS. The result
    depends on the texts alone. A corpus with too few pairs that occur ``min_frequency`` times gives fewer ids.

    Raises:
        UserError: ``vocab_size`` below 257 (256 bytes and EOS) or beyond a million.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    check_vocab_size(vocab_size)
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_batched(map(_cut_long_words, texts)), trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS_TOKEN, "add_bos_token": False}
    config["clean_up_tokenization_spaces"] = False
    return Tokenizer.from_files(
        {TOKENIZER_FILE: backend.to_str(pretty=True), CONFIG_FILE: json.dumps(config, indent=2)}
    )


def _cut_long_words(text: str) -> str:
    """Breaks words of over 1,000 characters, such as encoded data: to learn from one takes the square of its length."""
    return _LONG_WORD.sub(r"\g<0>\n", text)


def check_vocab_size(vocab_size: int) -> None:
    """UserError unless a tokenizer of this size can be trained."""
    if vocab_size < 257:
        raise UserError(f"vocab_size {vocab_size} is too small: 256 bytes and {EOS_TOKEN} need 257")
    if vocab_size > 1_000_000:  # the library would allocate for it at once
        raise UserError(f"vocab_size {vocab_size} is too large: the limit is 1000000")


def _batched(texts: Iterable[str], characters: int = 1 << 20) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    yield batch


def _token_text(entry: Any) -> str | None:
    """A special token's text from its entry in a config: a string, or an object with its content."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _text_error(texts: Sequence[str]) -> Exception:
    """Why the library takes one of ``texts`` for no text."""
    for text in texts:
        if not isinstance(text, str):
            return TypeError(f"a text must be a str, not {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return UserError(f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}): not valid Unicode")
    return TypeError("the tokenizers library refuses these texts")
