"""Writing a sharded checkpoint: each process its part, into a folder that gets its name when it is complete."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, cast

from torch import Tensor

from lit_llm.checkpoint.copies import snapshot
from lit_llm.checkpoint.disk import (
    LOCK,
    Stream,
    explained,
    lock_file,
    name_folder,
    partial_name,
    remove_partials,
    replaces,
    save_file,
    sync_folder,
)
from lit_llm.checkpoint.folder import SECTION, callback_key, state_key, weight_key
from lit_llm.checkpoint.marker import FORMAT, META, write_marker
from lit_llm.checkpoint.team import Team

Names = Sequence[Sequence[str]]


def prepare_write(
    content: dict[str, Any], path: str | Path, optimizer_names: Names, *, group: Any = None, copy: bool = False
) -> Callable[[], None]:
    """Makes ready to write a checkpoint into a folder; every process calls this, and then what it returns.

    The folder comes to its name when it is complete, and its marker is written last. If writing fails on one process,
    all raise, and what was written is removed; a killed process leaves ``.NAME.PROCESS.partial`` behind. One already
    there is replaced, but see :func:`lit_llm.checkpoint.disk.new_names_only`.

    Args:
        content: of a Lightning checkpoint: ``state_dict`` and, if any, ``optimizer_states`` in torch's format, of
            tensors or DTensors, and ``callbacks``, whose nested dicts may hold DTensors. It is not changed. All but
            DTensors is taken from the first process.
        path: of the folder. All processes see this disk.
        optimizer_names: of each optimizer, the parameters' names by their positions.
        group: processes that write together, of the gloo back end; a thread in the background needs one of its own.
            None: all.
        copy: take copies in CPU memory now, so that training may go on before it is written.

    Returns:
        Writes. Collective over ``group``; raises CheckpointWriteError, the same line on all processes, if the disk is
        full, the folder can't be written, and the like.
    """
    team = Team(group)
    tensors, rest = _split(content, optimizer_names)
    if copy:
        tensors = _copies(tensors)
        rest = snapshot(rest) if team.rank == 0 else {}
    replace = replaces()
    return lambda: _write(tensors, rest, Path(path), team, replace)


def _split(content: Mapping[str, Any], optimizer_names: Names) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What goes to the files of tensors, by key, and what to meta.pt, where each of those is None."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = dict(content)
    rest["state_dict"], tied = {}, {}
    in_callbacks: list[tuple[list[Any], str]] = []
    known: dict[Any, str] = {}
    for name, value in content["state_dict"].items():
        rest["state_dict"][name] = None if isinstance(value, Tensor) else value
        if isinstance(value, Tensor):
            first = known.setdefault(identity(value), name)
            if first != name:
                tied[name] = first
            else:
                tensors[weight_key(name)] = value
    if "optimizer_states" in content:
        states = enumerate(content["optimizer_states"])
        rest["optimizer_states"] = [_without_tensors(i, state, optimizer_names[i], tensors) for i, state in states]
    if "callbacks" in content:
        rest["callbacks"] = _without_parts(content["callbacks"], [], tensors, in_callbacks, {})
    names = [list(one) for one in optimizer_names] if "optimizer_states" in content else []
    rest[SECTION] = {"format": FORMAT, "tied": tied, "optimizer_names": names, "callbacks": in_callbacks}
    return tensors, rest


def _without_tensors(
    index: int, saved: Mapping[str, Any], names: Sequence[str], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    states: dict[Any, Any] = {}
    for position, values in saved.get("state", {}).items():
        states[position] = dict(values)
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[state_key(index, names[position], key)] = value
                states[position][key] = None
    return {**saved, "state": states}


def _without_parts(
    value: Any, path: list[Any], tensors: dict[str, Tensor], places: list[tuple[list[Any], str]], known: dict[Any, str]
) -> Any:
    """Nested dicts with None for each DTensor in them; tensors that are the same get one key."""
    if hasattr(value, "to_local"):
        key = known.setdefault(identity(value), callback_key(path))
        tensors[key] = value
        places.append((path, key))
        return None
    if not isinstance(value, dict):
        return value
    return {key: _without_parts(one, [*path, key], tensors, places, known) for key, one in value.items()}


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same memory. An empty part of a DTensor has a storage of its own as well."""
    part = _local(tensor)
    if part.is_meta:
        return (id(tensor),)
    storage = part.untyped_storage()._cdata
    return storage, part.storage_offset(), tuple(part.shape), part.stride(), tuple(tensor.shape), part.dtype


def _local(tensor: Tensor) -> Tensor:
    """This process' part."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}


def _write(tensors: dict[str, Tensor], rest: dict[str, Any], path: Path, team: Team, replace: bool) -> None:
    partial: Path | None = None
    lock: list[Any] = []
    try:
        partial = Path(team.first(lambda: _begin(path, lock)))
        _write_tensors(tensors, partial, team)
        team.first(lambda: _finish(rest, path, partial, team, replace))
    except BaseException as error:
        failure = explained(error, path) if isinstance(error, OSError) else error
        if partial is not None and team.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        if failure is error:
            raise
        raise failure from error
    finally:
        for file in lock:
            file.close()


def _begin(path: Path, lock: list[Any]) -> str:
    """The folder in which to write, marked as being written."""
    partial = partial_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_partials(path.parent, path.name)
    try:
        partial.mkdir()
        lock.append((partial / LOCK).open("wb", buffering=0))
        lock[0].write(path.name.encode("utf-8"))
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    lock_file(lock[0])
    return str(partial)


def _write_tensors(tensors: dict[str, Tensor], partial: Path, team: Team) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    writer = dcp.FileSystemWriter(partial)
    writer.fs = _files()
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    silence = warnings.catch_warnings() if team.alone else nullcontext()  # that it writes alone; no thread then
    try:
        with silence:
            if team.alone:
                warnings.simplefilter("ignore")
            dcp.save(tensors, storage_writer=writer, planner=planner, process_group=team.group, no_dist=team.alone)
    except CheckpointException as error:
        failures = [failure for _, (failure, _) in sorted(error.failures.items())]
        disk = next((failure for failure in failures if isinstance(failure, OSError)), None)
        raise disk or RuntimeError(f"a checkpoint could not be written: {failures[0]!r}") from error


def _files() -> Any:
    """torch's access to files, by which the disk's own error arrives here and not what torch.save makes of it."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    class Files(FileSystem):
        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Any:
            with super().create_stream(path, mode) as file:
                stream = _Stream(cast("IO[bytes]", file))
                try:
                    yield stream
                except Exception:
                    if stream.error is not None:
                        raise stream.error from None
                    raise

    return Files()


class _Stream(Stream):
    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def _finish(rest: dict[str, Any], path: Path, partial: Path | None, team: Team, replace: bool) -> None:
    """Adds what is no tensor, then the marker, and gives the folder its name."""
    assert partial is not None
    save_file(rest, partial / META)
    _refuse_missing_files(partial, team)
    write_marker(partial, team.size, without=LOCK)
    sync_folder(partial)
    name_folder(partial, path, replace=replace)
    (path / LOCK).unlink(missing_ok=True)
    sync_folder(path.parent)


def _refuse_missing_files(partial: Path, team: Team) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    written = FileSystemReader(partial).read_metadata().storage_data or {}
    missing = sorted({one.relative_path for one in written.values() if not (partial / one.relative_path).exists()})
    if missing:
        raise OSError(
            f"{missing[0]}, the part of another machine, is not there; all {team.size} processes must write to one disk"
        )
