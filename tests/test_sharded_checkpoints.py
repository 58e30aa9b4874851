"""Sharded checkpoints: written and read at other numbers of ranks, as one file, and when something fails."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_llm.checkpoint import disk, find_checkpoint, list_checkpoints, load_model, open_weights, read_checkpoint
from lit_llm.checkpoint.average import averaged_weights
from lit_llm.checkpoint.folder import MARKER, METADATA, Folder
from lit_llm.checkpoint.sharded import load_sharded, open_sharded, prepare_write, read_sharded, shard_content
from lit_llm.checkpoint.write import SafeCheckpointIO, write_checkpoint
from lit_llm.errors import UserError
from tests.distributed import run_ranks
from tests.sharded_runs import OPTIMIZERS, cleared, content_of, difference, loaded, names_of, train, trained

SAVED = ("state_dict", "optimizer_states")


def write_alone(path: Path, kind: str = "named", **options: Any) -> dict[str, Any]:
    """One process' folder; its truth."""
    model, optimizers = trained(None, kind, **options)
    content = content_of(model, optimizers)
    prepare_write(content, path, names_of(model, optimizers))()
    return content


def write_both(folder: Path) -> None:
    """What one process writes: for each kind of optimizer a folder, and a file of the same."""
    for kind in OPTIMIZERS:
        truth = write_alone(folder / f"1-{kind}.ckpt", kind)
        write_checkpoint(truth, folder / f"1-{kind}.plain.ckpt")
        torch.save(truth, folder / f"1-{kind}.truth")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Everything at once on 2 ranks."""
    folder = tmp_path_factory.mktemp("two")
    write_both(folder)
    return folder, run_ranks("tests.sharded_runs:raw", 2, folder=str(folder), meshes=[[2]])


def check_meshes(folder: Path, results: list[dict[str, Any]], sizes: list[str]) -> None:
    for one in results:
        assert one["wrong"] == {}
        # From each mesh and from one process, from folders and one process' files, onto each mesh; and the fresh one.
        assert one["seen"] == len(sizes) * (len(sizes) + 2) * len(OPTIMIZERS) + 1
    for size in sizes:
        for kind in OPTIMIZERS:
            truth = torch.load(folder / f"{size}-{kind}.truth", weights_only=False)
            content = read_sharded(folder / f"{size}-{kind}.ckpt")
            assert difference(content, truth) is None
            assert content["state_dict"]["head.weight"] is content["state_dict"]["embed.weight"]
            alone = loaded(str(folder / f"{size}-{kind}.ckpt"), None, kind)
            assert difference({k: alone[k] for k in SAVED}, {k: truth[k] for k in SAVED}) is None
    fresh = read_sharded(folder / "fresh.ckpt")
    assert fresh["optimizer_states"][0]["state"] == {}


def test_two_ranks(two: tuple[Path, list[dict[str, Any]]]) -> None:
    check_meshes(*two, ["[2]"])


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    """As shard 4 and as replicate 2 x shard 2."""
    write_both(tmp_path)
    results = run_ranks("tests.sharded_runs:raw", 4, folder=str(tmp_path), meshes=[[4], [2, 2]])
    check_meshes(tmp_path, results, ["[4]", "[2, 2]"])


def test_a_failure_on_one_rank_is_told_on_all(two: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, results = two
    for one in results:
        assert "file/x.ckpt can't be written: " in one["no folder"]
        assert f"{folder}/one.ckpt can't be written: No space left on device" in one["one rank"]
        assert "\n" not in one["one rank"]
        assert one["left of one"] == []


def test_ranks_know_whether_all_come(two: tuple[Path, list[dict[str, Any]]]) -> None:
    assert [one["come"] for one in two[1]] == [[True, False], [True, False]]


@pytest.mark.slow
def test_a_full_disk_is_told_on_all_ranks(small_disk: Path, tmp_path: Path) -> None:
    results = run_ranks("tests.sharded_runs:raw", 2, folder=str(tmp_path), meshes=[[2]], disk=str(small_disk))
    for one in results:
        assert f"{small_disk}/full.ckpt can't be written: No space left on device" in one["full"]
        assert one["left"] == ["ballast"]


def test_one_process_on_a_full_disk(small_disk: Path) -> None:
    with (small_disk / "ballast").open("wb") as file:
        file.write(bytes(200 * 1024))
    model, optimizers = trained(None, "named")
    with pytest.raises(OSError, match=r"full\.ckpt can't be written: No space left on device"):
        prepare_write(
            {**content_of(model, optimizers), "much": torch.ones(10000)},
            small_disk / "full.ckpt",
            names_of(model, optimizers),
        )()
    assert os.listdir(small_disk) == ["ballast"]


# ------------------------------------------------------------------ one process


def test_names_and_not_positions_decide(tmp_path: Path) -> None:
    for kind in OPTIMIZERS:
        path = tmp_path / f"{kind}.ckpt"
        truth = write_alone(path, kind)
        model, optimizers = cleared(None, kind, other_order=True)
        names = names_of(model, optimizers)
        load_sharded(path, model.state_dict(), optimizers, names)
        before = names_of(*trained(None, kind))[0]
        got, saved = optimizers[0].state_dict()["state"], truth["optimizer_states"][0]["state"]
        assert before != names[0]
        assert {names[0][i] for i in got} == {before[i] for i in saved}
        for position, values in got.items():
            assert difference(values, saved[before.index(names[0][position])]) is None


def test_without_the_optimizer_nothing_of_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = write_alone(tmp_path / "x.ckpt")
    read: list[str] = []
    real = Folder.read_into

    def noted(self: Folder, pairs: Any) -> None:
        read.extend(key for key, _ in pairs)
        real(self, pairs)

    monkeypatch.setattr(Folder, "read_into", noted)
    content = read_sharded(tmp_path / "x.ckpt", optimizer=False)
    assert "optimizer_states" not in content
    assert difference(content["state_dict"], dict(truth["state_dict"])) is None
    assert read
    assert all(key.startswith("state_dict.") for key in read)
    assert len(read) == len(set(read)) == len(truth["state_dict"]) - 1  # the tied one once
    read.clear()
    opened = open_sharded(tmp_path / "x.ckpt")
    assert (opened["global_step"], len(opened["optimizer_states"])) == (3, 1)
    assert read == []
    taken = SafeCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")
    assert type(taken["state_dict"]) is dict
    assert all(key.startswith("state_dict.") for key in read)
    assert difference(list(taken["optimizer_states"]), truth["optimizer_states"]) is None


def test_a_folder_in_the_way_is_replaced(tmp_path: Path) -> None:
    write_alone(tmp_path / "x.ckpt", steps=0)
    truth = write_alone(tmp_path / "x.ckpt")
    assert os.listdir(tmp_path) == ["x.ckpt"]
    assert difference(read_sharded(tmp_path / "x.ckpt"), truth) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("body.1.bias"), r"body\.1\.bias is not here"),
        (lambda s: s.update(more=torch.ones(1)), r"more is not in it"),
        (lambda s: s.update({"body.1.bias": torch.ones(4)}), r"body\.1\.bias is \(3,\) there and \(4,\) here"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, change: Any, message: str) -> None:
    truth = write_alone(tmp_path / "x.ckpt")
    write_checkpoint(truth, tmp_path / "plain.ckpt")
    model, optimizers = cleared(None, "named")
    state = dict(model.state_dict())
    change(state)
    for name in ("x.ckpt", "plain.ckpt"):
        with pytest.raises(UserError, match=message):
            shard_content(read_checkpoint(tmp_path / name), state, optimizers, names_of(model, optimizers))


def test_other_trained_parameters_are_named(tmp_path: Path) -> None:
    write_alone(tmp_path / "x.ckpt")
    model, _ = cleared(None, "named")
    optimizer = torch.optim.AdamW([model.embed.weight])
    with pytest.raises(UserError, match=r"trained other parameters: body.* not here; .*frozen"):
        load_sharded(tmp_path / "x.ckpt", model.state_dict(), [optimizer], [["embed.weight"]])
    with pytest.raises(UserError, match=r"states of 1 optimizers, and this run has 2"):
        load_sharded(tmp_path / "x.ckpt", model.state_dict(), [optimizer] * 2, [["embed.weight"]] * 2)


# ------------------------------------------------------------------ on disk


def test_last_passes_over_what_is_not_complete(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    write_alone(place / "step-1.ckpt")
    good = place / "step-1.ckpt"
    when = (good / MARKER).stat().st_mtime
    os.utime(good / MARKER, (when - 100, when - 100))
    broken = {"step-2.ckpt": MARKER, "step-3.ckpt": "meta.pt", "step-4.ckpt": "__0_0.distcp", "step-5.ckpt": METADATA}
    for number, (name, lost) in enumerate(broken.items()):
        shutil.copytree(good, place / name)
        (place / name / lost).unlink()
        if lost != MARKER:
            os.utime(place / name / MARKER, (when + number, when + number))
    shutil.copytree(good, place / "step-6.ckpt")
    shard = place / "step-6.ckpt" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    (place / "step-7.ckpt").mkdir()
    found = find_checkpoint(tmp_path, "last")
    assert found is not None
    assert found.path == good
    assert found.content["global_step"] == 3
    told = {Path(line.split()[0]).name: line for line in found.skipped}
    assert set(told) == {f"step-{n}.ckpt" for n in (2, 3, 4, 5, 6, 7)}
    assert "marker complete.json is missing" in told["step-2.ckpt"]
    assert "marker complete.json is missing" in told["step-7.ckpt"]
    for name, lost in list(broken.items())[1:]:
        assert f"{lost} is missing" in told[name]
    assert "__0_0.distcp has" in told["step-6.ckpt"]
    with pytest.raises(UserError, match=r"step-6\.ckpt is damaged"):
        read_checkpoint(place / "step-6.ckpt")
    assert len(list_checkpoints(tmp_path)) == 7


def test_a_folder_never_runs_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/done",)

    write_alone(tmp_path / "x.ckpt")
    evil = pickle.dumps(Evil())
    (tmp_path / "x.ckpt" / METADATA).write_bytes(evil)
    marker = json.loads((tmp_path / "x.ckpt" / MARKER).read_text())
    marker["files"][METADATA] = len(evil)
    (tmp_path / "x.ckpt" / MARKER).write_text(json.dumps(marker))
    with pytest.raises(UserError, match=r"\.metadata can't be read: .*system.* is no part"):
        read_sharded(tmp_path / "x.ckpt")
    assert not (tmp_path / "done").exists()


def test_folders_of_lightnings_own_strategy(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model, optimizers = trained(None, "unnamed")
    content, (names,) = content_of(model, optimizers), names_of(model, optimizers)
    saved = content["optimizer_states"][0]
    state = {names[position]: values for position, values in saved["state"].items()}
    groups = [{**group, "params": [names[one] for one in group["params"]]} for group in saved["param_groups"]]
    tensors = {"state_dict": content["state_dict"], "optimizer_0": {"state": state, "param_groups": groups}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors, checkpoint_id=tmp_path / "x.ckpt")
    rest = {key: value for key, value in content.items() if key not in SAVED}
    torch.save(rest, tmp_path / "x.ckpt" / "meta.pt")
    got = read_sharded(tmp_path / "x.ckpt")
    assert difference({key: got[key] for key in rest}, rest) is None
    for kind in OPTIMIZERS:
        again = loaded(str(tmp_path / "x.ckpt"), None, kind)
        assert difference(again["state_dict"], dict(content["state_dict"])) is None
        assert difference(again["optimizer_states"][0]["state"], saved["state"]) is None


def test_partial_folders(tmp_path: Path) -> None:
    host, pid = socket.gethostname(), os.getpid()
    gone = 2**22 - 1  # above any process' number here
    mine, killed, begun, left = (
        tmp_path / f".x.ckpt.{host}-{number}-{thread}.partial"
        for number, thread in ((pid, 1), (pid, 2), (pid, 3), (gone, 4))
    )
    for path in (mine, killed, begun, left):
        path.mkdir()
        (path / "__0_0.distcp").touch()
    (killed / disk.LOCK).touch()
    with (mine / disk.LOCK).open("wb") as lock:
        disk.lock_file(lock)
        disk.remove_partials(tmp_path)
        assert [one.exists() for one in (mine, killed, begun, left)] == [True, False, True, False]
    disk.remove_partials(tmp_path)
    assert [one.exists() for one in (mine, begun)] == [False, True]


def test_a_removed_folder_leaves_its_name_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_alone(tmp_path / "x.ckpt")

    def killed(path: Path, **options: Any) -> None:
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        SafeCheckpointIO().remove_checkpoint(tmp_path / "x.ckpt")
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".x.ckpt.")
    assert left.endswith(".partial")
    monkeypatch.undo()
    write_alone(tmp_path / "x.ckpt")
    SafeCheckpointIO().remove_checkpoint(tmp_path / "x.ckpt")
    assert "x.ckpt" not in os.listdir(tmp_path)


# ------------------------------------------------------------------ under a Trainer


def check_trainer(store: str, folder: Path, ranks: int, sizes: dict[str, int], everything: bool) -> None:
    one = train(store, folder / "one", 5)
    options = {"store": store, "folder": str(folder), "sizes": sizes, "everything": everything}
    results = run_ranks("tests.sharded_runs:under_trainer", ranks, timeout=300, **options)
    near: dict[str, Any] = {"rtol": 0.0, "atol": 1e-5}
    ran = {"whole": (0, 5), "async": (1, 3), "from file": (2, 5), "to file": (2, 3)}
    if everything:
        ran |= {"from folder": (2, 5), "from async": (3, 5), "to file async": (2, 4), "ddp": (2, 5)}
    for got in results:
        for name, (first, last) in ran.items():
            expected = torch.tensor(one[first:last])
            torch.testing.assert_close(torch.tensor(got[name]), expected, msg=f"{name}: {got[name]} {one}", **near)
        assert got["async"] == got["whole"][1:3]
        torch.testing.assert_close(*(torch.tensor(values) for values in got["validated"]), **near)
        if everything:
            assert got["from folder"] == got["whole"][2:]
            assert "model.layers.1.mlp.down_proj.weight is not in it" in got["refused"]
    # One process goes on from what several wrote.
    for path in (folder / "mesh/checkpoints/step-3.ckpt", folder / "file/checkpoints/step-3.ckpt"):
        again = train(store, folder / "alone", 5, ckpt_path=path)
        torch.testing.assert_close(torch.tensor(again), torch.tensor(one[3:]), **near)
    # Folders and files hold what one process' file does, in the same order.
    plain = read_checkpoint(folder / "one/checkpoints/step-3.ckpt")
    for path in (folder / "mesh/checkpoints/step-3.ckpt", folder / "file/checkpoints/step-3.ckpt"):
        content = read_sharded(path) if path.is_dir() else read_checkpoint(path)
        assert outline(content) == outline(plain)
    assert [path.name for path in (folder / "async/checkpoints").iterdir()] == ["step-3.ckpt"]
    for path in (folder / "mesh/checkpoints/step-3.ckpt", folder / "mesh"):
        model, _ = load_model(path, "cpu")
    opened = open_weights(folder / "mesh")
    average = averaged_weights(read_checkpoint(folder / "mesh/checkpoints/step-5.ckpt"))
    assert average is not None
    assert set(opened.weights.names()) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(opened.weights.read(name), tensor)
        assert torch.equal(average[f"model.{name}"], tensor)
        assert (opened.weights.shape(name), opened.weights.dtype(name)) == (tensor.shape, tensor.dtype)


def outline(value: Any) -> Any:
    """Keys in their order, kinds and shapes."""
    if isinstance(value, dict):
        return {str(key): outline(one) for key, one in value.items() if key != "callbacks"}
    if isinstance(value, (list, tuple)):
        return [outline(one) for one in value]
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)


def test_a_trainer_on_two_ranks(store: str, tmp_path: Path) -> None:
    check_trainer(store, tmp_path, 2, {"shard": 2}, everything=False)


@pytest.mark.slow
def test_a_trainer_on_four_ranks(store: str, tmp_path: Path) -> None:
    check_trainer(store, tmp_path, 4, {"replicate": 2, "shard": 2}, everything=True)


@pytest.mark.slow
def test_a_rank_killed_in_an_asynchronous_save(store: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank 1 \(-9\)"):
        run_ranks("tests.sharded_runs:killed", 2, store=store, folder=str(tmp_path))
    found = find_checkpoint(tmp_path, "last")
    assert found is not None
    assert (found.path.name, found.skipped) == ("step-2.ckpt", [])
    assert len(train(store, tmp_path, 4, ckpt_path=found.path)) == 2
    assert not [name for name in os.listdir(tmp_path / "checkpoints") if name.startswith(".")]
