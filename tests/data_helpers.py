"""Made-up tokenizers and stores for the data tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from lit_llm.data.new_folder import new_folder
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.data.writer import SHARD_BYTES, StoreWriter

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def llama3_style(bos_in_json: bool = True) -> Backend:
    """Bytes as tokens and Llama 3's special ones, BOS put in front by the post-processor or by nobody."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, EOS, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    template = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))])
    byte_level = processors.ByteLevel(trim_offsets=False)
    backend.post_processor = processors.Sequence([byte_level, template]) if bos_in_json else byte_level
    return backend


def sentencepiece_style() -> Backend:
    """Single characters with byte fallback, as converted from SentencePiece."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for piece in ("▁", *"Helothr", "▁t", "he"):
        vocab[piece] = len(vocab)
    merges = [("▁", "t"), ("h", "e")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return backend


def word_level(size: int, unk: str | None = None) -> Backend:
    """Words ``w0``, ``w1``, ... and ``</s>``: as many ids as wanted, and which one a text gives is plain."""
    vocab = {f"w{i}": i for i in range(size - 1)} | {"</s>": size - 1}
    backend = Backend(models.WordLevel(vocab=vocab, unk_token=unk) if unk else models.WordLevel(vocab=vocab))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["</s>"])
    return backend


def write_tokenizer(folder: Path, backend: Backend, **config: Any) -> Path:
    """The folder with tokenizer.json and, given fields for it, tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_store(
    folder: Path, tokenizer: Tokenizer, documents: Sequence[Sequence[int]], *, shard_bytes: int = SHARD_BYTES
) -> Path:
    """A store with a train split of exactly these ids."""
    with new_folder(folder) as new:
        writer = StoreWriter(new, tokenizer, shard_bytes=shard_bytes)
        for ids in documents:
            writer.append("train", np.array(ids, np.int64), np.array([len(ids)]), np.array([len(ids)]))
        writer.finish()
    return folder


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path
