"""What the tests of sharded checkpoints run on several ranks, and in one process: a toy model whose state is known."""

from __future__ import annotations

import os
import signal
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lit_llm import LitLLM, TokenDataModule
from lit_llm.callbacks import RunCheckpoint
from lit_llm.callbacks.weight_average import WeightAverage
from lit_llm.checkpoint import CheckpointWriteError, read_checkpoint, sharded_write, stored
from lit_llm.checkpoint.copies import gather, snapshot
from lit_llm.checkpoint.folder import Folder
from lit_llm.checkpoint.sharded import load_sharded, prepare_write, shard_content
from lit_llm.errors import UserError
from lit_llm.optim import OptimizerConfig, ScheduleConfig
from lit_llm.optim.chained import ChainedOptimizer
from lit_llm.optim.resume import keep_configuration
from lit_llm.parallel import MeshStrategy
from lit_llm.parallel.checkpointing import ShardedCheckpoints
from tests.checkpoint_runs import fill

OPTIMIZERS = ("named", "unnamed")


def drawn(name: str, shape: Any, salt: int = 0) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(zlib.crc32(name.encode()) + salt))


class Toy(nn.Module):
    """61 rows, which no number of ranks divides; 3 rows, fewer than ranks; tied, frozen, idle and 16-bit ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 61), nn.Linear(61, 3), nn.Linear(5, 5))
        self.coarse = nn.Linear(7, 9).bfloat16()
        self.embed = nn.Embedding(61, 8)
        self.head = nn.Linear(8, 61, bias=False)
        self.head.weight = self.embed.weight
        self.body[0].bias.requires_grad_(False)
        self.register_buffer("counted", torch.tensor(0))
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(drawn(name, p.shape))


def shard_toy(model: Toy, mesh: Any) -> Toy:
    from torch.distributed.fsdp import fully_shard

    for part in (*model.body, model.coarse, model):
        fully_shard(part, mesh=mesh)
    return model


def optimizers_of(model: Toy, kind: str, *, other_order: bool = False) -> list[Any]:
    """AdamW on matrices and SGD with momentum on the rest, as one; the last layer of the body never gets a gradient."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    named = named[::-1] if other_order else named
    groups = [[one for one in named if one[1].ndim == 2], [one for one in named if one[1].ndim != 2]]
    parts = []
    for members, make in zip(groups, (torch.optim.AdamW, torch.optim.SGD), strict=True):
        group: dict[str, Any] = {"params": [p for _, p in members]}
        if kind == "named":
            group |= {"param_names": [name for name, _ in members], "optimizer": make.__name__}
        options = {"momentum": 0.9} if make is torch.optim.SGD else {}
        parts.append(make([group], lr=0.1, **options))
    chained = ChainedOptimizer(*parts)
    if kind == "named":
        chained.register_load_state_dict_pre_hook(keep_configuration)
    return [chained]


def names_of(model: Toy, optimizers: list[Any]) -> list[list[str]]:
    known = {id(p): name for name, p in model.named_parameters()}
    return [[known[id(p)] for group in one.param_groups for p in group["params"]] for one in optimizers]


def take_steps(model: Toy, optimizers: list[Any], steps: int = 2) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    for step in range(steps):
        for name, p in model.named_parameters():
            if p.requires_grad and not name.startswith("body.2"):
                grad = drawn(name, p.shape, step + 1).to(p.dtype)
                if isinstance(p, DTensor):
                    grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
                p.grad = grad
        for one in optimizers:
            one.step()
    counted = model.counted
    assert isinstance(counted, Tensor)
    counted += steps


def content_of(model: Toy, optimizers: list[Any]) -> dict[str, Any]:
    """As Lightning's, with something that is no tensor, a callback's tensor, and one that is split as the model is."""
    doubled = {id(p): p.detach() * 2 for p in model.parameters()}
    doubles = {name: doubled[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    return {
        "global_step": 3,
        "state_dict": model.state_dict(),
        "callbacks": {"mine": {"tensor": torch.arange(3)}, "Doubles": {"updates": 2, "weights": doubles}},
        "optimizer_states": [one.state_dict() for one in optimizers],
        "after": "wards",
    }


def whole(value: Any) -> Any:
    """A copy with full tensors."""
    if isinstance(value, Tensor):
        return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    return [whole(one) for one in value] if isinstance(value, list) else value


def difference(one: Any, other: Any, at: str = "") -> str | None:
    """Where two contents differ first, bit for bit; None: nowhere."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        same = isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype == other.dtype
        return None if same and torch.equal(one.detach(), other.detach()) else at
    if isinstance(one, dict) and isinstance(other, dict):
        if list(one) != list(other):
            return f"{at}: {list(one)} != {list(other)}"
        return next((d for key in one if (d := difference(one[key], other[key], f"{at}/{key}"))), None)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return at
        pairs = enumerate(zip(one, other, strict=True))
        return next((d for i, (a, b) in pairs if (d := difference(a, b, f"{at}/{i}"))), None)
    return None if one == other else f"{at}: {one!r} != {other!r}"


def trained(mesh: Any, kind: str, steps: int = 2, **options: Any) -> tuple[Toy, list[Any]]:
    model = Toy() if mesh is None else shard_toy(Toy(), mesh)
    optimizers = optimizers_of(model, kind, **options)
    take_steps(model, optimizers, steps)
    return model, optimizers


def cleared(mesh: Any, kind: str, **options: Any) -> tuple[Toy, list[Any]]:
    """Another model of other weights, without optimizer state."""
    model, optimizers = trained(mesh, kind, 0, **options)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    return model, optimizers


def loaded(path: str, mesh: Any, kind: str, **options: Any) -> dict[str, Any]:
    """What a model and its optimizers hold once they have loaded a folder or a file."""
    model, optimizers = cleared(mesh, kind, **options)
    names = names_of(model, optimizers)
    if Path(path).is_dir():
        rest = load_sharded(path, model.state_dict(), optimizers, names)
    else:
        rest = shard_content(read_checkpoint(path), model.state_dict(), optimizers, names)
    return {**whole(content_of(model, optimizers)), "rest": stored.whole(rest)}


def refusal(call: Any, kind: type[BaseException] = UserError) -> str | None:
    try:
        call()
    except kind as error:
        return str(error)
    return None


def raw(folder: str, meshes: list[list[int]], disk: str | None = None) -> dict[str, Any]:
    """Saves and loads on every mesh, over what the parent and the other meshes have written; what was wrong."""
    torch.distributed.init_process_group("gloo")
    rank, root = torch.distributed.get_rank(), Path(folder)
    names = ("replicate", "shard")
    made = {str(one): init_device_mesh("cpu", tuple(one), mesh_dim_names=names[-len(one) :]) for one in meshes}
    group = torch.distributed.new_group(backend="gloo")
    wrong: dict[str, Any] = {}
    for size, mesh in made.items():
        for kind in OPTIMIZERS:
            model, optimizers = trained(mesh, kind)
            ids = names_of(model, optimizers)
            truth = whole(content_of(model, optimizers))
            path = root / f"{size}-{kind}.ckpt"
            write = prepare_write(content_of(model, optimizers), path, ids, group=group, copy=True)
            with torch.no_grad():  # training goes on
                for p in model.parameters():
                    p.zero_()
            take_steps(model, optimizers, 1)
            write()
            if rank == 0:
                torch.save(truth, root / f"{size}-{kind}.truth")
            torch.distributed.barrier()
    model, optimizers = trained(mesh, "named", 0)  # before the first step
    prepare_write(content_of(model, optimizers), root / "fresh.ckpt", names_of(model, optimizers))()
    for saved in sorted(root.glob("*.truth")):
        truth = torch.load(saved, weights_only=False)
        kind = saved.stem.rpartition("-")[2]
        for size, mesh in made.items():
            for suffix in (".ckpt", ".plain.ckpt"):
                if (path := saved.with_suffix(suffix)).exists():
                    got = loaded(str(path), mesh, kind)
                    wrong[f"{path.name} on {size}"] = difference(
                        {key: got[key] for key in ("state_dict", "optimizer_states")},
                        {key: truth[key] for key in ("state_dict", "optimizer_states")},
                    ) or difference(got["rest"], {key: truth[key] for key in ("global_step", "callbacks", "after")})
    fresh = loaded(str(root / "fresh.ckpt"), mesh, "named")
    wrong["fresh"] = None if fresh["optimizer_states"][0]["state"] == {} else "state"
    return {"wrong": {k: v for k, v in wrong.items() if v}, "seen": len(wrong), **_failures(root, mesh, group, disk)}


def _failures(root: Path, mesh: Any, group: Any, disk: str | None) -> dict[str, Any]:
    """A full disk on one rank or all, a folder that can't be written, and a model that a folder does not fit."""
    rank = torch.distributed.get_rank()
    model, optimizers = trained(mesh, "named")
    content, names = content_of(model, optimizers), names_of(model, optimizers)
    told: dict[str, Any] = {"copies": _copied_once(mesh, model)}
    if disk is not None:
        if rank == 0:
            fill(disk)
            os.truncate(Path(disk, "ballast"), Path(disk, "ballast").stat().st_size - 16384)  # for a part of it
        torch.distributed.barrier()
        write = prepare_write(content, Path(disk, "full.ckpt"), names, group=group)
        told["full"] = refusal(write, CheckpointWriteError)
        torch.distributed.barrier()
        told["left"] = sorted(os.listdir(disk))
    (root / "file").touch()
    write = prepare_write(content, root / "file" / "x.ckpt", names, group=group)
    told["no folder"] = refusal(write, CheckpointWriteError)
    if rank == 1:  # one rank alone can't write
        content["state_dict"]["body.0.weight"] = Unwritable.of(content["state_dict"]["body.0.weight"])
    write = prepare_write(content, root / "one.ckpt", names, group=group)
    told["one rank"] = refusal(write, CheckpointWriteError)
    torch.distributed.barrier()
    told["left of one"] = sorted(one.name for one in root.glob("*one.ckpt*"))
    probe = Probe()
    probe.prepare_saving()
    told["come"] = [probe.all_come(30)]
    for alone in range(torch.distributed.get_world_size()):
        if rank == alone:
            told["come"].append(probe.all_come(0.5))
        torch.distributed.barrier()
    return told


def _copied_once(mesh: Any, model: Toy) -> list[bool]:
    """Whether a snapshot of what was gathered copies it: of parts, of a replica, and of a plain tensor."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    replica = distribute_tensor(torch.ones(3), mesh, [Replicate()] * mesh.ndim)
    copied = []
    for tensor in (model.body[0].weight, replica, torch.ones(3)):
        one = gather(tensor, keeps=True)
        own = snapshot([one])[0]
        copied.append(own is not one)
        part: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        assert own.untyped_storage().data_ptr() != part.untyped_storage().data_ptr()
    return copied


class Probe(ShardedCheckpoints):
    """What of a strategy is used to see whether all ranks come."""

    def __init__(self) -> None:
        self._timeout = timedelta(seconds=60)


class Unwritable:
    """Makes a DTensor whose reading fails as a broken disk would."""

    @staticmethod
    def of(tensor: Any) -> Any:
        def fail() -> Any:
            raise OSError(28, "No space left on device")

        tensor.to_local = fail
        return tensor


# ------------------------------------------------------------------ under a Trainer


SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}


def train(
    store: str,
    folder: str | Path,
    steps: int,
    *,
    ranks: int = 1,
    strategy: Any = None,
    ckpt_path: Any = None,
    callbacks: Any = (),
    average: bool = True,
    stage: str = "fit",
    **own: Any,
) -> list[Any]:
    """Losses and gradient norms of a run that saves each step, or the figures of a validation."""
    losses = Losses()
    checkpoint = RunCheckpoint(**{"every_n_train_steps": 1, "save_top_k": 0, "keep_last": -1, **own})
    trainer = L.Trainer(
        default_root_dir=folder,
        max_steps=steps,
        accelerator="cpu",
        devices=ranks,
        strategy="auto" if strategy is None else strategy,
        callbacks=[losses, *callbacks, *([WeightAverage(0.5)] if average else []), checkpoint],
        limit_val_batches=2,
        val_check_interval=1000,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TokenDataModule(store, seq_len=16, global_batch_size=8, micro_batch_size=2)
    module = LitLLM(SMALL, optimizer=OptimizerConfig(lr=1e-2), schedule=ScheduleConfig(warmup_steps=2, total_steps=40))
    values = getattr(trainer, stage)(module, data, ckpt_path=ckpt_path)
    return losses.seen if stage == "fit" else [values[0]["val/loss"]]


class Losses(L.Callback):
    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            metrics = trainer.callback_metrics
            self.seen.append([float(metrics["train/loss"]), float(metrics["train/grad_norm"])])


def under_trainer(store: str, folder: str, sizes: dict[str, Any], everything: bool) -> dict[str, Any]:
    """Saves and resumes with MeshStrategy, from and to folders and files, beside what one process has done."""
    ranks = int(os.environ["WORLD_SIZE"])

    def mesh(**options: Any) -> Any:
        return MeshStrategy(**sizes, **options)

    root, one = Path(folder), Path(folder, "one", "checkpoints")

    def fit(to: str, steps: int, ckpt_path: Path | None = None, *, strategy: Any = None, **options: Any) -> list[Any]:
        strategy = mesh() if strategy is None else strategy
        return train(store, root / to, steps, ranks=ranks, strategy=strategy, ckpt_path=ckpt_path, **options)

    def to_file() -> Any:
        return mesh(save_distributed_checkpoint=False)

    def validated(path: Path) -> list[Any]:
        return train(store, root / "v", 5, ranks=ranks, strategy=mesh(), ckpt_path=path, stage="validate")

    reads: list[str] = []
    read = Folder.read
    Folder.read = lambda self, key: reads.append(key) or read(self, key)  # type: ignore[method-assign, func-returns-value]
    saved = root / "mesh" / "checkpoints"
    result: dict[str, Any] = {
        "whole": fit("mesh", 5),
        "async": fit("async", 3, saved / "step-1.ckpt", async_save=True, keep_last=1),
        "from file": fit("filed", 5, one / "step-2.ckpt", save_top_k=0),
        "to file": fit("file", 3, saved / "step-2.ckpt", strategy=to_file()),
        "from old": fit("old", 3, root / "old.ckpt"),
        "validated": [validated(saved / "step-3.ckpt"), validated(one / "step-3.ckpt")],
        "whole reads": list(reads),
    }
    if everything:
        result["from folder"] = fit("again", 5, saved / "step-2.ckpt")
        result["from async"] = fit("again", 5, root / "async/checkpoints/step-3.ckpt")
        result["to file async"] = fit("file2", 4, one / "step-2.ckpt", strategy=to_file(), async_save=True)
        result["ddp"] = fit("ddp", 5, saved / "step-2.ckpt", strategy="ddp")
        misfit = _misfit(root, torch.distributed.get_rank())
        result["refused"] = refusal(lambda: fit("x", 5, misfit, average=False))
    return result


def _misfit(root: Path, rank: int) -> Path:
    """A file that lacks a tensor."""
    path = root / "misfit.ckpt"
    if rank == 0:
        content = torch.load(root / "one/checkpoints/step-2.ckpt", weights_only=True)
        del content["state_dict"]["model.layers.1.mlp.down_proj.weight"]
        torch.save(content, path)
    torch.distributed.barrier()
    return path


class KillAtSave(L.Callback):
    """Rank 1 dies while it writes the checkpoint of a step in the background; the test's main thread trains on."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step != self.step or trainer.global_rank != 1:
            return
        write = sharded_write._write_tensors

        def dying(*args: Any) -> None:
            partial = args[1]
            assert Path(partial).is_dir()
            os.kill(os.getpid(), signal.SIGKILL)
            write(*args)

        sharded_write._write_tensors = dying  # type: ignore[assignment]


def killed(store: str, folder: str) -> None:
    """A run whose rank 1 is killed in the asynchronous save of step 3."""
    train(
        store,
        folder,
        50,
        ranks=2,
        strategy=MeshStrategy(),
        async_save=True,
        keep_last=1,
        callbacks=[KillAtSave(3)],
    )
