"""Where a store's files lie: a local folder, or a remote one read through fsspec and a local cache."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from lit_llm.data.lock import being_written, locked
from lit_llm.data.tokenizer_json import CARRIED_FILES, TOKENIZER_FILE
from lit_llm.errors import UserError

META_FILE = "meta.json"
_DAMAGED = "the store is damaged, prepare it anew"


def open_files(folder: str | Path) -> StoreFiles:
    """The files of the store in ``folder``, a local path or an address such as ``s3://bucket/store``."""
    if is_remote(folder):
        return RemoteFiles(str(folder))
    name = str(folder)
    local = name.removeprefix("file://").removeprefix("localhost")
    return StoreFiles(unquote(local) if name.startswith("file://") and not Path(local).exists() else local)


def is_remote(folder: str | Path) -> bool:
    """Whether ``folder`` is an address that needs fsspec."""
    return isinstance(folder, str) and "://" in folder and not folder.startswith("file://")


class StoreFiles:
    """The files of a local folder. ``name``: the folder as the user wrote it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name,)

    @cached_property
    def meta(self) -> Any:
        """The content of meta.json; UserError where there is none."""
        way_out = f"make one by `lit-llm prepare INPUT... --output {self.name}`"
        try:
            return json.loads(self._read_meta())
        except (FileNotFoundError, NotADirectoryError) as error:
            if self._in_the_making():
                raise UserError(
                    f"the store {self.name} is being written by another lit-llm prepare; wait until that has ended"
                ) from error
            there = self._exists()
            what = f"{self.name} is no token store (it has no {META_FILE})" if there else f"no store at {self.name}"
            raise UserError(f"{what}; {way_out}") from error
        except OSError as error:
            raise UserError(f"cannot read {self.name}/{META_FILE}: {error.strerror or error}") from error
        except UserError:
            raise
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.name}/{META_FILE} is not JSON ({error}); {way_out}") from error

    def path(self, name: str) -> Path:
        """Where a file can be mapped."""
        return Path(self.name, name)

    def size(self, name: str) -> int:
        """Bytes of a file; UserError if it is not there."""
        try:
            return self.path(name).stat().st_size
        except OSError as error:
            raise UserError(f"cannot read {self.path(name)}: {error.strerror}; {_DAMAGED}") from error

    def checksum(self, name: str) -> str:
        """SHA-256 of a file."""
        return _sha256(self.path(name))

    def tokenizer_folder(self) -> Path:
        """A local folder that holds the tokenizer's files."""
        return Path(self.name)

    def _read_meta(self) -> bytes:
        return self.path(META_FILE).read_bytes()

    def _exists(self) -> bool:
        return Path(self.name).exists()

    def _in_the_making(self) -> bool:
        return being_written(Path(self.name))


class RemoteFiles(StoreFiles):
    """A remote folder's files, each copied into a local cache when it is first needed.

    The cache is ``$LIT_LLM_CACHE`` or ``~/.cache/lit_llm``; a store has a folder there by its address and content, so
    that a store replaced at the same address is fetched anew. Processes that need a file at the same time wait for one
    to fetch it. Its checksum is compared on arrival.
    """

    @cached_property
    def _system(self) -> tuple[Any, str]:
        try:
            import fsspec
        except ImportError as error:
            raise UserError(f"{self.name}: remote stores need fsspec: pip install fsspec") from error
        try:
            return fsspec.core.url_to_fs(self.name)
        except (ImportError, ValueError) as error:
            # fsspec names the package that an address needs
            raise UserError(f"{self.name}: {error}") from error
        except Exception as error:
            raise UserError(f"cannot reach {self.name}: {error}") from error

    @cached_property
    def cache(self) -> Path:
        """The local folder of this store's copies."""
        root = Path(os.environ.get("LIT_LLM_CACHE") or Path.home() / ".cache" / "lit_llm")
        key = hashlib.sha256(f"{self.name}\n{json.dumps(self.meta, sort_keys=True)}".encode()).hexdigest()[:16]
        folder = root / "stores" / f"{PurePosixPath(self.name).name or 'store'}-{key}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot write the cache {folder}: {error.strerror}; set LIT_LLM_CACHE to a writable folder"
            ) from error
        return folder

    def path(self, name: str) -> Path:
        if Path(name).name != name:
            raise UserError(f"{self.name}: {name!r} is no plain name of a file in it")
        local = self.cache / name
        if not self._whole(local):
            with locked(local, wait=True):
                if not self._whole(local):
                    self._fetch(name, local)
        return local

    def _whole(self, local: Path) -> bool:
        """Whether a copy is there and, as far as meta.json says how long it is, of that length."""
        wanted = self._sizes().get(local.name)
        return local.exists() and (wanted is None or local.stat().st_size == wanted)

    def _sizes(self) -> dict[str, int]:
        try:
            width = 2 if self.meta["dtype"] == "uint16" else 4
            sizes = {}
            for split in self.meta["splits"].values():
                sizes[split["index"]] = 8 * (split["documents"] + 1)
                sizes |= {shard["file"]: shard["tokens"] * width for shard in split["shards"]}
                sizes |= {shard["trained"]: shard["tokens"] for shard in split["shards"] if "trained" in shard}
            return sizes
        except (KeyError, TypeError, AttributeError):
            return {}

    def size(self, name: str) -> int:
        local = self.cache / name
        if self._whole(local):
            return local.stat().st_size
        return int(self._ask("info", name)["size"])

    def tokenizer_folder(self) -> Path:
        for name in CARRIED_FILES:
            if name == TOKENIZER_FILE or (self.cache / name).exists() or self._ask("exists", name):
                self.path(name)
        return self.cache

    def _fetch(self, name: str, local: Path) -> None:
        part = local.with_name(f".{local.name}.{os.getpid()}.part")
        size = self.size(name)
        if size > 64 << 20:
            print(f"fetching {self.name}/{name} ({size / 1e9:.1f} GB) into {self.cache}", file=sys.stderr, flush=True)
        try:
            self._ask("get_file", name, str(part))
            self._refuse_changed(part, name)
            os.replace(part, local)
        except OSError as error:
            raise UserError(
                f"cannot copy {self.name}/{name} into {self.cache}: {error.strerror or error}; set LIT_LLM_CACHE to a "
                "folder with room"
            ) from error
        finally:
            with suppress(OSError):
                part.unlink()

    def _refuse_changed(self, part: Path, name: str) -> None:
        wanted = self._checksums().get(name)
        if wanted is not None and _sha256(part) != wanted:
            raise UserError(f"{self.name}/{name}: its checksum differs from {META_FILE}; {_DAMAGED}")

    def checksum(self, name: str) -> str:
        path = self.path(name)
        digest = _sha256(path)
        if digest != self._checksums().get(name, digest):
            raise UserError(f"{path}, a copy of {self.name}/{name}, was changed; delete it, and it is fetched anew")
        return digest

    def _checksums(self) -> dict[str, str]:
        from lit_llm.data.store import checksums

        try:
            return {name: sha for split in self.meta["splits"] for name, sha in checksums(self.meta, split).items()}
        except (KeyError, TypeError, AttributeError):  # TokenStore says what is wrong with it
            return {}

    def _ask(self, what: str, name: str, *more: Any) -> Any:
        system, root = self._system
        try:
            return getattr(system, what)(f"{root}/{name}", *more)
        except FileNotFoundError as error:
            raise UserError(f"{self.name}/{name} is not there; {_DAMAGED}") from error
        except Exception as error:  # each file system has errors of its own
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            raise UserError(f"cannot read {self.name}/{name}: {error}; see that it can be reached and read") from error

    def _read_meta(self) -> bytes:
        system, root = self._system
        try:
            return system.cat_file(f"{root}/{META_FILE}")
        except OSError:
            raise
        except Exception as error:
            raise UserError(f"cannot read {self.name}/{META_FILE}: {error}") from error

    def _exists(self) -> bool:
        system, root = self._system
        with suppress(Exception):
            return bool(system.exists(root))
        return False

    def _in_the_making(self) -> bool:
        return False


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
