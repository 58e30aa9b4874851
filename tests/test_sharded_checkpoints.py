"""Sharded checkpoints: written and read at other numbers of ranks, as one file, and when something fails."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_llm.checkpoint import find_checkpoint, load_model, open_weights, read_checkpoint
from lit_llm.checkpoint.average import averaged_weights
from lit_llm.checkpoint.folder import Folder
from lit_llm.checkpoint.placing import fill
from lit_llm.checkpoint.sharded import load_sharded, open_sharded, prepare_write, read_sharded, shard_content
from lit_llm.checkpoint.write import SafeCheckpointIO, write_checkpoint
from lit_llm.errors import UserError
from lit_llm.optim.resume import keep_configuration
from tests.distributed import run_ranks
from tests.sharded_runs import OPTIMIZERS, Toy, cleared, content_of, difference, loaded, names_of, train, trained

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
            for weights in (content["state_dict"], content["callbacks"]["Doubles"]["weights"]):
                assert weights["head.weight"] is weights["embed.weight"]
            in_meta = Folder(folder / f"{size}-{kind}.ckpt").content["callbacks"]  # no tensor that is split
            assert set(in_meta["Doubles"]["weights"].values()) == {None}
            assert torch.equal(in_meta["mine"]["tensor"], torch.arange(3))
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


def test_what_is_gathered_is_not_copied_again(two: tuple[Path, list[dict[str, Any]]]) -> None:
    assert [one["copies"] for one in two[1]] == [[False, True, True]] * 2


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


def test_an_average_goes_through_the_dtype_of_the_weights(tmp_path: Path) -> None:
    """As in a file: what a 16-bit run evaluated with is 16 bits wide in a wider model, too."""
    truth = write_alone(tmp_path / "x.ckpt")["state_dict"][A].detach()
    target = torch.zeros(truth.shape)
    fill([(Folder(tmp_path / "x.ckpt").weights().placeholder(A, torch.bfloat16), target)])
    assert torch.equal(target, truth.bfloat16().float())
    assert not torch.equal(target, truth)


def test_other_trained_parameters_are_named(tmp_path: Path) -> None:
    write_alone(tmp_path / "x.ckpt")
    model, _ = cleared(None, "named")
    optimizer = torch.optim.AdamW([model.embed.weight])
    with pytest.raises(UserError, match=r"trained other parameters: body.* not here; .*frozen"):
        load_sharded(tmp_path / "x.ckpt", model.state_dict(), [optimizer], [["embed.weight"]])
    with pytest.raises(UserError, match=r"states of 1 optimizers, and this run has 2"):
        load_sharded(tmp_path / "x.ckpt", model.state_dict(), [optimizer] * 2, [["embed.weight"]] * 2)


def in_groups(model: Toy, groups: list[tuple[str, ...]], hooked: bool = False) -> tuple[Any, list[str]]:
    """AdamW over some parameters; the n-th group decays by n, and its rate has been halved n times."""
    known = dict(model.named_parameters())
    members: list[dict[str, Any]] = []
    for number, names in enumerate(groups):
        own: dict[str, Any] = {"param_names": list(names)} if hooked else {}
        members.append({"params": [known[n] for n in names], "weight_decay": float(number), "lr": 0.5**number, **own})
    optimizer = torch.optim.AdamW(members)
    if hooked:
        optimizer.register_load_state_dict_pre_hook(keep_configuration)
    return optimizer, [name for names in groups for name in names]


A, B, C = "body.0.weight", "body.1.weight", "body.1.bias"


@pytest.mark.parametrize("to", ["folder", "file"])
def test_other_groups_are_refused(tmp_path: Path, to: str) -> None:
    """As torch does, which would give each group the settings of the one at its place; here by names."""
    model = Toy()
    path = tmp_path / "x.ckpt"

    def save(groups: list[tuple[str, ...]], hooked: bool) -> None:
        optimizer, names = in_groups(model, groups, hooked)
        content = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
        if to == "folder":
            prepare_write(content, path, [names])()
        else:
            write_checkpoint(content, path)

    def load(groups: list[tuple[str, ...]], hooked: bool) -> list[tuple[int, float, float]]:
        optimizer, names = in_groups(model, groups, hooked)
        for group in optimizer.param_groups:
            group |= {"lr": 9.0, "weight_decay": 9.0}
        shard_content(read_checkpoint(path), model.state_dict(), [optimizer], [names])
        return [(len(group["params"]), group["weight_decay"], group["lr"]) for group in optimizer.param_groups]

    save([(A, B), (C,)], hooked=False)
    assert load([(A, B), (C,)], hooked=False) == [(2, 0.0, 1.0), (1, 1.0, 0.5)]
    if to == "folder":  # which knows the names
        assert load([(C,), (B, A)], hooked=False) == [(1, 1.0, 0.5), (2, 0.0, 1.0)]
    for groups, sizes in (
        ([(A, B, C)], r"1 \(of 3\)"),
        ([(A,), (B,), (C,)], r"3 \(of 1, 1, 1\)"),
        ([(A,), (B, C)], r"2 \(of 1, 2\)"),
    ):
        with pytest.raises(UserError, match=rf"in 2 groups \(of 2, 1\), this one in {sizes}, and"):
            load(groups, hooked=False)
    # With names and LitLLM's hook, which decides: settings of the group in which the first of them was.
    save([(A, B), (C,)], hooked=True)
    assert load([(A, B, C)], hooked=True) == [(3, 0.0, 1.0)]
    assert load([(C,), (A,), (B,)], hooked=True) == [(1, 1.0, 0.5), (1, 0.0, 1.0), (1, 0.0, 1.0)]


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


# ------------------------------------------------------------------ under a Trainer


def check_trainer(store: str, folder: Path, ranks: int, sizes: dict[str, int], everything: bool) -> None:
    one = train(store, folder / "one", 5)
    write_as_before(read_checkpoint(folder / "one/checkpoints/step-2.ckpt"), folder / "old.ckpt")
    options = {"store": store, "folder": str(folder), "sizes": sizes, "everything": everything}
    results = run_ranks("tests.sharded_runs:under_trainer", ranks, timeout=300, **options)
    near: dict[str, Any] = {"rtol": 0.0, "atol": 1e-5}
    ran = {"whole": (0, 5), "async": (1, 3), "from file": (2, 5), "to file": (2, 3), "from old": (2, 3)}
    if everything:
        ran |= {"from folder": (2, 5), "from async": (3, 5), "to file async": (2, 4), "ddp": (2, 5)}
    for got in results:
        for name, (first, last) in ran.items():
            expected = torch.tensor(one[first:last])
            torch.testing.assert_close(torch.tensor(got[name]), expected, msg=f"{name}: {got[name]} {one}", **near)
        assert got["async"] == got["whole"][1:3]
        assert got["whole reads"] == []
        torch.testing.assert_close(*(torch.tensor(values) for values in got["validated"]), **near)
        if everything:
            assert got["from folder"] == got["whole"][2:]
            assert "model.layers.1.mlp.down_proj.weight is not in it" in got["refused"]
    # One process goes on from what several wrote.
    for path in (folder / "mesh/checkpoints/step-3.ckpt", folder / "file/checkpoints/step-3.ckpt"):
        again = train(store, folder / path.parts[-3] / "alone", 5, ckpt_path=path)
        torch.testing.assert_close(torch.tensor(again), torch.tensor(one[3:]), **near)
    # Folders and files hold what one process' file does, in the same order.
    plain = read_checkpoint(folder / "one/checkpoints/step-3.ckpt")
    for path in (folder / "mesh/checkpoints/step-3.ckpt", folder / "file/checkpoints/step-3.ckpt"):
        content = read_sharded(path) if path.is_dir() else read_checkpoint(path)
        assert outline(content) == outline(plain)
    assert [path.name for path in (folder / "async/checkpoints").iterdir()] == ["step-3.ckpt"]
    check_averages(folder)
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


def write_as_before(content: dict[str, Any], path: Path) -> None:
    """A folder whose average lies whole in meta.pt, as one process writes it."""
    names = [[name for g in one["param_groups"] for name in g["param_names"]] for one in content["optimizer_states"]]
    prepare_write(content, path, names)()
    assert all(isinstance(one, torch.Tensor) for one in average_in(Folder(path).content).values())


def average_in(content: dict[str, Any]) -> Any:
    return content["callbacks"]["WeightAverage"]["weights"]


def check_averages(folder: Path) -> None:
    """Whatever was resumed from and saved to, the averages go on as that of one process."""
    one, mesh = folder / "one/checkpoints", folder / "mesh/checkpoints"
    assert set(average_in(Folder(mesh / "step-3.ckpt").content).values()) == {None}
    averages = {}
    for path in (*folder.glob("*/checkpoints/step-*.ckpt"), *folder.glob("*/alone/checkpoints/step-*.ckpt")):
        content = read_sharded(path) if path.is_dir() else read_checkpoint(path)
        averages[path.relative_to(folder).as_posix().replace("/checkpoints/", "/")] = average_in(content)
        truth = average_in(read_checkpoint(one / f"step-{content['global_step']}.ckpt"))
        assert outline(average_in(content)) == outline(truth)
        for name, tensor in average_in(content).items():
            torch.testing.assert_close(tensor, truth[name], rtol=0, atol=2e-5, msg=f"{path} {name}")
    three = averages["mesh/step-3.ckpt"]
    assert difference(averages["async/step-3.ckpt"], three) is None
    assert difference(averages["file/step-3.ckpt"], three) is None
    assert difference(averages["old/step-3.ckpt"], averages["filed/step-3.ckpt"]) is None
    assert {"mesh/alone/step-5.ckpt", "file/alone/step-5.ckpt"} < set(averages)
    assert not torch.equal(*(averages[f"one/step-{n}.ckpt"]["model.embed_tokens.weight"] for n in (2, 3)))


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
