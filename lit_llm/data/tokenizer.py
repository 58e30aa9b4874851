"""Text to token ids and back: one convention over every ``tokenizer.json``."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_llm.errors import UserError

if TYPE_CHECKING:
    import tokenizers

EOS_TOKEN = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
CARRIED_FILES = (TOKENIZER_FILE, CONFIG_FILE, "special_tokens_map.json", TEMPLATE_FILE)
MODEL_FILES = ("generation_config.json", "config.json")  # read for their token ids only, never carried along

# Where no file says which token ends or begins a text: the names that base models gave them, most telling first.
_EOS_NAMES = (EOS_TOKEN, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "[EOS]", "<|im_end|>")
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "<|bos|>", "<｜begin▁of▁sentence｜>", "[BOS]", "<|startoftext|>")


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
        self._load(_read_files(Path(path)), str(path))

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> Tokenizer:
        """The tokenizer that ``to_files`` wrote down (a checkpoint carries it as plain strings)."""
        self = cls.__new__(cls)
        self._load(dict(files), "the tokenizer's files")
        return self

    def _load(self, files: dict[str, str], origin: str) -> None:
        if TOKENIZER_FILE not in files:
            raise UserError(f"{origin}: no {TOKENIZER_FILE}")
        self._content = _parse(files, TOKENIZER_FILE, origin)
        self._config = _parse(files, CONFIG_FILE, origin)
        special_map = _parse(files, "special_tokens_map.json", origin)
        model_configs = [_parse(files, name, origin) for name in MODEL_FILES]
        try:
            self._backend = _backend(files[TOKENIZER_FILE])
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{origin}: {TOKENIZER_FILE} is no tokenizer: {error}") from error
        self._ids = self._backend.get_vocab(with_added_tokens=True)
        if not self._ids:
            raise UserError(f"{origin}: {TOKENIZER_FILE} has an empty vocabulary")
        self.vocab_size: int = max(self._ids.values()) + 1
        """Number of ids: the highest one, added tokens included, plus 1."""

        processor_prefix = _processor_prefix(self._backend)

        def find(kind: str, names: Sequence[str]) -> int | None:
            for config in (self._config, special_map):
                token = _token_text(config.get(f"{kind}_token"))
                if token in self._ids:
                    return self._ids[token]
                if token is not None and kind == "eos":
                    raise UserError(f"{origin}: the vocabulary lacks {token!r}, which is named as eos_token")
            if kind == "bos" and processor_prefix:
                return processor_prefix[0]
            for config in model_configs:
                ids = config.get(f"{kind}_token_id")
                ids = ids if isinstance(ids, list) else [ids]
                if ids and isinstance(ids[0], int) and 0 <= ids[0] < self.vocab_size:
                    return ids[0]
            special = _special_ids(self._backend)
            return next((self._ids[name] for name in names if self._ids.get(name) in special), None)

        self.bos_token_id: int | None = find("bos", _BOS_NAMES)
        self.eos_token_id: int | None = find("eos", _EOS_NAMES)
        self.pad_token_id: int | None = find("pad", ())
        self._prefix = processor_prefix
        if self._config.get("add_bos_token") is True and self.bos_token_id not in processor_prefix:
            if self.bos_token_id is None:
                raise UserError(f"{origin}: {CONFIG_FILE} has add_bos_token but no bos_token of the vocabulary")
            self._prefix = [self.bos_token_id, *processor_prefix]

        self._add_special(self._backend)

        template = files.get(TEMPLATE_FILE, self._config.get("chat_template"))
        if isinstance(template, list):  # several named templates
            template = {item["name"]: item["template"] for item in template}.get("default")
        self.chat_template: str | None = template
        self._files = self._self_contained(files)

    def _add_special(self, backend: tokenizers.Tokenizer) -> None:
        """Let ``backend`` know as special what only a config calls so, that decoding can leave it out."""
        named = {self.bos_token_id, self.eos_token_id, self.pad_token_id} - {None} - _special_ids(backend)
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
        content = {"tokenizer": self._content, "eos": self.eos_token_id, "prefix": self._prefix}
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
        if eos and self.eos_token_id is None:
            raise UserError(
                f'the tokenizer names no EOS token: put {{"eos_token": "..."}} into a {CONFIG_FILE} beside it'
            )
        backend = self._special_backend if allow_special else self._backend
        try:
            rows = [e.ids for e in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        except TypeError as error:
            raise _text_error(texts) from error
        for row in rows:
            ended = row[-1:] == [self.eos_token_id]
            if prefix and row[: len(prefix)] != prefix:
                row[:0] = prefix
            if eos and not ended:
                row.append(self.eos_token_id)
        return rows

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
        backend = _backend(self._files[TOKENIZER_FILE])
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
        measure = _measure(self._content)
        for token, i in self._ids.items():
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
        UserError: ``vocab_size`` below 257 (256 bytes and EOS).
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise UserError(f"vocab_size {vocab_size} is too small: 256 bytes and {EOS_TOKEN} need 257")
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
    backend.train_from_iterator(_batched(texts), trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS_TOKEN, "add_bos_token": False}
    config["clean_up_tokenization_spaces"] = False
    return Tokenizer.from_files(
        {TOKENIZER_FILE: backend.to_str(pretty=True), CONFIG_FILE: json.dumps(config, indent=2)}
    )


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


def _read_files(path: Path) -> dict[str, str]:
    """The texts of the tokenizer's files; those of a file under another name than tokenizer.json are it alone."""
    if path.is_dir():
        main, beside = path / TOKENIZER_FILE, True
        if not main.exists():
            raise UserError(f"{path}: no {TOKENIZER_FILE} in this folder")
    else:
        main, beside = path, path.name == TOKENIZER_FILE
        if not main.exists():
            raise UserError(f"no tokenizer at {path}: name a {TOKENIZER_FILE} or a folder that holds one")
    paths = {TOKENIZER_FILE: main}
    if beside:
        names = (*CARRIED_FILES[1:], *MODEL_FILES)
        paths |= {name: main.parent / name for name in names if (main.parent / name).is_file()}
    try:
        return {name: file.read_text(encoding="utf-8-sig") for name, file in paths.items()}
    except UnicodeDecodeError as error:
        raise UserError(f"{main}: the tokenizer's files are not UTF-8 text: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read the tokenizer {main}: {error.strerror}") from error


def _parse(files: Mapping[str, str], name: str, origin: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        content = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: {name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{origin}: {name} holds no JSON object")
    return content


def _backend(text: str) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(text)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    if getattr(backend.model, "dropout", None) is not None:
        backend.model.dropout = None
    return backend


def _special_ids(backend: tokenizers.Tokenizer) -> set[int]:
    return {i for i, token in backend.get_added_tokens_decoder().items() if token.special}


def _processor_prefix(backend: tokenizers.Tokenizer) -> list[int]:
    """The ids that the file's post-processor puts before a text."""
    encoding = backend.encode("a", add_special_tokens=True)
    mask = [*encoding.special_tokens_mask, 0]
    return encoding.ids[: mask.index(0)]


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


def _measure(content: dict[str, Any]) -> Callable[[str], int]:
    """The function from a token of the vocabulary to the bytes of text it stands for."""
    kinds = {part["type"] for part in _parts(content.get("decoder") or content.get("pre_tokenizer"))}
    if "ByteLevel" in kinds:
        from tokenizers.pre_tokenizers import ByteLevel

        alphabet = set(ByteLevel.alphabet())
        # a character of the alphabet is a byte; the decoder takes a token with any other character as it stands
        return lambda token: len(token) if alphabet.issuperset(token) else len(token.encode())
    byte = re.compile("<0x[0-9A-Fa-f]{2}>")
    blanks = bool(kinds & {"Metaspace", "Replace"})

    def measure(token: str) -> int:
        if "ByteFallback" in kinds and byte.fullmatch(token):
            return 1
        return len((token.replace("▁", " ") if blanks else token).encode())

    return measure


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """A component of tokenizer.json and, for a sequence, its members."""
    if isinstance(component, dict) and "type" in component:
        yield component
        for members in ("decoders", "pretokenizers"):
            for member in component.get(members, []):
                yield from _parts(member)
