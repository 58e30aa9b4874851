"""Reading safetensors files: every value, every dtype, few bytes, and what is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lit_llm.checkpoint.tensor_files import INDEX_FILE
from lit_llm.checkpoint.tensor_folder import TensorFolder
from lit_llm.checkpoint.tensor_reader import DTYPES, PIECE, SafetensorsFile
from lit_llm.errors import UserError

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * 3
    return (drawn > 0) if dtype == torch.bool else drawn.abs().to(dtype) if "uint" in str(dtype) else drawn.to(dtype)


def write(path: Path, header: dict[str, Any] | bytes, data: bytes, length: int | None = None) -> Path:
    """A file by hand, right or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_every_dtype_and_shape_is_read_bit_by_bit(tmp_path: Path) -> None:
    tensors = {f"{word}.{len(shape)}": values(*shape, dtype=d) for word, d in DTYPES.items() for shape in ((5, 3), ())}
    tensors |= {"empty": torch.empty(0, 4), "long": values(70_001)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert set(file.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert (file.shape(name), file.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        found = file.read(name)
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        assert found.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name
    assert file.bytes_read == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def test_rows_cost_their_own_bytes(tmp_path: Path) -> None:
    whole = values(10, 3, 2)
    save_file({"other": values(7), "x": whole}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert file.read_rows("x", 2, 7).equal(whole[2:7])
    assert file.bytes_read == 5 * 6 * 4
    assert file.read_rows("x", 4, 4).shape == (0, 3, 2)
    assert file.read_rows("x", 9, 10).equal(whole[9:])
    assert file.bytes_read == 6 * 6 * 4


@pytest.mark.parametrize("place", ["whole", "columns", "transposed", "slice"])
def test_any_target_is_filled(place: str, tmp_path: Path) -> None:
    rows = PIECE // 4 // 300 * 2 + 17  # three pieces
    whole = values(rows, 300)
    save_file({"x": whole}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    for dtype in FLOATS:
        room = torch.full((rows + 2, 304), 7.0, dtype=dtype)
        target = {
            "whole": torch.zeros(rows, 300, dtype=dtype),
            "columns": room[1:-1, 2:-2],
            "transposed": torch.zeros(300, rows, dtype=dtype).T,
            "slice": torch.nn.Parameter(torch.zeros(rows + 2, 300, dtype=dtype))[1:-1],
        }[place]
        file.read_into("x", target)
        assert target.equal(whole.to(dtype))
        if place == "columns":  # and nothing beside it
            assert room.sum(dtype=torch.float64) == 7 * (room.numel() - whole.numel()) + target.sum(dtype=torch.float64)
            assert room[:, :2].eq(7).all()
        file.read_into("x", target[3:5], (7, 9))
        assert target[3:5].equal(whole[7:9].to(dtype))


def test_the_same_dtype_goes_through_no_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = values(100, 30)
    save_file({"x": whole}, tmp_path / "a.safetensors")
    file, target, half = SafetensorsFile(tmp_path / "a.safetensors"), torch.zeros(102, 30), torch.zeros(100, 30).half()

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a buffer")

    monkeypatch.setattr(torch, "empty", refuse)
    file.read_into("x", target[1:-1])
    file.read_into("x", target[1:2], (99, 100))
    with pytest.raises(AssertionError, match="a buffer"):
        file.read_into("x", half)
    monkeypatch.undo()
    assert target[2:-1].equal(whole[1:])
    assert target[1].equal(whole[99])


def test_values_that_float16_cannot_hold_are_named(tmp_path: Path) -> None:
    save_file({"x": torch.tensor([1.0, -1e5]), "inf": torch.tensor([torch.inf, 2.0])}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"x holds 1e\+05, more than float16 can \(6.55e\+04\); read it as bfloat16"):
        file.read_into("x", torch.empty(2, dtype=torch.float16))
    file.read_into("inf", target := torch.empty(2, dtype=torch.float16))
    assert target.tolist() == [torch.inf, 2.0]


GOOD = {"a": entry([2], 0, 8), "b": entry([1, 2], 8, 16)}
BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "empty": (lambda p: _bytes(p, b""), r"\(0 bytes\) is truncated"),
    "five bytes": (lambda p: _bytes(p, b"12345"), "is truncated or no safetensors file"),
    "a long header": (lambda p: write(p, GOOD, bytes(16), length=10**6), "is truncated or no safetensors file"),
    "an endless header": (lambda p: write(p, GOOD, bytes(16), length=2**63), "is truncated or no safetensors file"),
    "no JSON": (lambda p: write(p, b"{nothing", bytes(16)), "its header is none of safetensors"),
    "a list": (lambda p: write(p, b"[1, 2]", bytes(16)), "its header is none of safetensors"),
    "no UTF-8": (lambda p: write(p, b'{"\xff": 1}', bytes(16)), "its header is none of safetensors"),
    "a number": (lambda p: write(p, {"a": 3}, bytes(16)), "its header is none of safetensors"),
    "no shape": (lambda p: write(p, {"a": {"dtype": "F32"}}, b""), "its header is none of safetensors"),
    "below zero": (lambda p: write(p, {"a": entry([2], -8, 0)}, b""), "its header is none of safetensors"),
    "twice": (lambda p: write(p, b'{"a": %s, "a": %s}' % ((json.dumps(GOOD["a"]).encode(),) * 2), bytes(8)), "none of"),
    "wrong size": (lambda p: write(p, {"a": entry([3], 0, 8)}, bytes(8)), r"a of shape \[3\] has 8 bytes, not 12"),
    "dtype": (lambda p: write(p, {"a": entry([2], 0, 1, "F4")}, bytes(1)), "a is of dtype 'F4', which is not read"),
    "overlap": (lambda p: write(p, {**GOOD, "b": entry([2], 4, 12)}, bytes(12)), "b lies on the bytes of another"),
    "cut": (lambda p: write(p, GOOD, bytes(15)), r"is truncated: it has \d+ bytes and should have \d+; fetch it again"),
    "too long": (lambda p: write(p, GOOD, bytes(17)), "is damaged: it has"),
}


def _bytes(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_damaged_is_named_in_one_line(case: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    make, said = BROKEN[case]
    make(path)
    with pytest.raises(UserError, match=said) as error:
        SafetensorsFile(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_sound_file_by_hand_is_read_and_a_later_cut_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {**GOOD, "__metadata__": {"format": "pt"}}, bytes(range(16)))
    file = SafetensorsFile(path)
    assert file.names() == ["a", "b"]
    assert file.read("b").view(torch.uint8).flatten().tolist() == list(range(8, 16))
    path.write_bytes(path.read_bytes()[:-4])
    assert file.read("a").shape == (2,)
    with pytest.raises(UserError, match="ends too early"):
        file.read("b")
    with pytest.raises(UserError, match=r"nothing\.safetensors can't be read: No such file"):
        SafetensorsFile(tmp_path / "nothing.safetensors")


def split(folder: Path, *, index: bool = True, names: tuple[str, str] = ("x", "y")) -> dict[str, Tensor]:
    tensors = {name: values(4, number + 1) for number, name in enumerate(names)}
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, file in zip(names, files, strict=True):
        save_file({name: tensors[name]}, folder / file)
    if index:
        weight_map = dict(zip(names, files, strict=True))
        (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


@pytest.mark.parametrize("index", [True, False])
def test_a_folder_of_several_files_is_one(index: bool, tmp_path: Path) -> None:
    tensors = split(tmp_path, index=index)
    if index:
        save_file({"x": values(1)}, tmp_path / "consolidated.safetensors")  # beside what the index names: left alone
    folder = TensorFolder(tmp_path)
    assert folder.names() == ["x", "y"]
    assert "x" in folder
    assert "z" not in folder
    for name, tensor in tensors.items():
        assert folder.read(name).equal(tensor)
        assert folder.read_rows(name, 1, 3).equal(tensor[1:3])
        folder.read_into(name, target := torch.zeros(4, tensor.shape[1], dtype=torch.float64))
        assert target.equal(tensor.double())
        assert (folder.shape(name), folder.dtype(name)) == (tuple(tensor.shape), torch.float32)
    assert folder.bytes_read == (4 + 8) * 4 * 2 + (2 + 4) * 4


def test_a_single_file_of_any_name_is_enough(tmp_path: Path) -> None:
    save_file({"x": values(2)}, tmp_path / "weights.safetensors")
    assert TensorFolder(tmp_path).names() == ["x"]
    save_file({"y": values(2)}, tmp_path / "model.safetensors")  # which comes first
    assert TensorFolder(tmp_path).names() == ["y"]


def _missing(folder: Path) -> None:
    split(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _missing_without_index(folder: Path) -> None:
    split(folder, index=False)
    (folder / "model-00001-of-00002.safetensors").unlink()


def _twice(folder: Path) -> None:
    split(folder)
    save_file({"x": values(1), "y": values(1)}, folder / "model-00002-of-00002.safetensors")


def _promised(folder: Path) -> None:
    split(folder)
    save_file({"z": values(1)}, folder / "model-00002-of-00002.safetensors")


def _index(content: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / INDEX_FILE).write_text(content)


FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (_missing, f"{INDEX_FILE} names model-00002-of-00002.safetensors, which is not there"),
    "missing without index": (_missing_without_index, "model-00001-of-00002.safetensors is not there"),
    "twice": (_twice, "x is in model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors"),
    "promised": (_promised, "promises y in model-00002-of-00002.safetensors, which has no such tensor"),
    "index": (_index("{"), "is no index of safetensors files"),
    "index outside": (_index('{"weight_map": {"x": "../x.safetensors"}}'), "is no index of safetensors files"),
    "nothing": (lambda folder: None, r"has no weights: no \*.safetensors file is in it"),
    "pickle": (lambda folder: (folder / "pytorch_model.bin").touch(), "pytorch_model.bin and no safetensors; pickles"),
    "pth": (lambda folder: (folder / "consolidated.00.pth").touch(), r"save_pretrained\(NEW_FOLDER, safe_serial"),
    "gguf": (lambda folder: (folder / "m.gguf").touch(), r"m\.gguf and no safetensors; .*gguf_file"),
    "adapter": (lambda folder: (folder / "adapter_config.json").touch(), r"holds an adapter .*merge_and_unload"),
    "two sets": (
        lambda folder: [save_file({"x": values(1)}, folder / f"{name}.safetensors") for name in ("one", "two")],
        r"several safetensors files that don't belong together \(one.safetensors, two.safetensors\)",
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_that_hold_no_model_are_refused_by_name(case: str, tmp_path: Path) -> None:
    make, said = FOLDERS[case]
    make(tmp_path)
    with pytest.raises(UserError, match=said) as error:
        TensorFolder(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
