"""``hf:NAME``: a Hugging Face data set, by name or local path, streamed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_llm.data.document import Item
from lit_llm.data.readers import HUB, SourceFile
from lit_llm.data.records import columns, record_item
from lit_llm.errors import UserError

_ROWS = 64


@dataclass(frozen=True, slots=True)
class DatasetName:
    """``hf:NAME[:CONFIG][@SPLIT]`` in its parts. ``split`` is None where it is not said (then: train)."""

    name: str
    config: str | None
    split: str | None

    @classmethod
    def parse(cls, entry: str) -> DatasetName:
        """Colons and ats that belong to a path that exists stay in it."""
        name, config, split = entry[len(HUB) :], None, None
        if not os.path.exists(name) and "@" in name:
            name, split = name.rsplit("@", 1)
        if not os.path.exists(name) and ":" in name:
            name, config = name.rsplit(":", 1)
        if not name or split == "" or config == "":
            raise UserError(f"{entry}: name a data set as {HUB}NAME, {HUB}NAME:CONFIG, {HUB}NAME@SPLIT or all of them")
        return cls(name, config, split)


def hub_file(entry: str) -> SourceFile:
    """The source that ``entry`` names."""
    DatasetName.parse(entry)
    return SourceFile(Path(entry), entry, read_hub)


def read_hub(file: SourceFile, text_key: str, skipped: Counter[str]) -> Iterator[Item]:
    """The rows of a data set: from the hub, a folder of data files, or a folder that ``save_to_disk`` wrote."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{file.name}: data sets need datasets: pip install 'lit-llm[datasets]'") from error
    name = DatasetName.parse(file.name)
    bars = not datasets.are_progress_bars_disabled()
    if bars:  # ours is the only one
        datasets.disable_progress_bars()
    try:
        rows = _load(datasets, name, file.name)
        if rows.column_names:
            rows = rows.select_columns(columns(rows.column_names, text_key))
    except UserError:
        raise
    except Exception as error:
        raise _explain(error, file.name) from error
    finally:
        if bars:
            datasets.enable_progress_bars()
    batches = rows.iter(_ROWS)  # three times as fast as row by row
    number = 0
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:
            raise _explain(error, file.name, after=number) from error
        if batch is None:
            return
        for values in zip(*batch.values(), strict=True):
            number += 1
            record = dict(zip(batch, values, strict=True))
            source = f"{file.name}:{number}"
            item = record_item(record, source, _size(record), text_key, skipped, half_characters=True)
            if item is not None:
                yield item


def _load(datasets: Any, name: DatasetName, entry: str) -> Any:
    """An iterable of rows; whatever `datasets` raises."""
    if os.path.isfile(name.name):
        raise UserError(f"{entry}: a file is no data set; name it without {HUB!r}")
    if not _is_saved(name.name):
        return datasets.load_dataset(name.name, name.config, split=name.split or "train", streaming=True)
    if name.config is not None:
        raise UserError(f"{entry}: a folder written by save_to_disk has no configurations; leave {name.config!r} out")
    saved = datasets.load_from_disk(name.name)  # mapped into memory, not read
    if not isinstance(saved, datasets.DatasetDict):
        if name.split is not None and str(saved.split) != name.split:
            raise UserError(f"{entry}: no split {name.split!r}, the folder holds one data set; leave '@SPLIT' out")
        return saved
    split = name.split or "train"
    if split not in saved:
        raise UserError(f"{entry}: no split {split!r}; name one of {', '.join(saved)} by {HUB}NAME@SPLIT")
    return saved[split]


def _is_saved(folder: str) -> bool:
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("dataset_dict.json", "state.json"))


def _explain(error: Exception, entry: str, after: int | None = None) -> UserError:
    """One line out of what `datasets` raises, which takes many forms over its releases."""
    text = " ".join(str(error).split())
    if isinstance(error, ConnectionError) or "Connect" in type(error).__name__ or "Timeout" in type(error).__name__:
        way = "check the network, or name a local copy by hf:PATH"
    elif after is None and "onfig" in text and "vailable" in text:
        way = f"name a configuration by {HUB}NAME:CONFIG"
    elif after is None and "split" in text.lower():
        way = f"name a split by {HUB}NAME@SPLIT"
    elif after is not None:
        way = "mend the data"
    else:
        way = "check the name; a private data set needs a login"
    where = "" if after is None else f" after row {after}"
    return UserError(f"{entry}: cannot read this data set{where}: {text or type(error).__name__:.300}; {way}")


def _size(record: Any) -> int:
    """About the bytes of input of a record, for progress: its strings' characters."""
    if isinstance(record, str):
        return len(record)
    if isinstance(record, dict):
        return sum(map(_size, record.values()))
    return sum(map(_size, record)) if isinstance(record, list) else 0
