"""The LightningDataModule: stores in, batches out, resumed exactly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from lit_llm.data.order import EvalOrder, StepSource, TrainOrder
from lit_llm.data.prompts import Prompt, read_prompts
from lit_llm.data.rows import TokenRows
from lit_llm.data.store import TokenStore
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.errors import UserError


class TokenDataModule(L.LightningDataModule):
    """Fixed-length rows from a token store, shuffled by a pure function of (seed, epoch).

    What a rank sees at optimizer step k is a function of (store, seed, k) and of the layout alone, so a run resumed at
    any step goes on with the batches that the uninterrupted one would have had. Batches are dicts of int64 tensors:
    ``input_ids``, ``labels`` and, with documents isolated, ``document_ids``, all (batch, seq_len).

    Args:
        store: folder that ``lit-llm prepare`` wrote. Needed for all but predict.
        seq_len: tokens in a row.
        global_batch_size: rows of an optimizer step over all ranks; accumulation is derived from it.
        micro_batch_size: rows that a rank computes at once; None: its whole share of the global batch.
        seed: of the shuffling.
        num_workers: processes that read ahead; 0 reads in the training process.
        isolate_documents: attention, positions and labels stay inside a document.
        prompts: texts to complete, for predict.
        prompts_file: a .txt (a prompt a line) or .jsonl file of them.

    Raises:
        UserError: sizes that do not divide, a seq_len longer than the store, a missing store.
    """

    def __init__(
        self,
        store: str | None = None,
        seq_len: int = 512,
        global_batch_size: int = 32,
        micro_batch_size: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        isolate_documents: bool = True,
        prompts: list[str] | None = None,
        prompts_file: str | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("seq_len", seq_len), ("global_batch_size", global_batch_size)):
            if value < 1:
                raise UserError(f"data.{name} must be at least 1, got {value}")
        if micro_batch_size is not None and micro_batch_size < 1:
            raise UserError(f"data.micro_batch_size must be at least 1, got {micro_batch_size}")
        if num_workers < 0:
            raise UserError(f"data.num_workers must be 0 or more, got {num_workers}")
        self.store = os.fspath(store) if store is not None else None
        self.seq_len = seq_len
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.seed, self.num_workers, self.isolate_documents = seed, num_workers, isolate_documents
        self.prompts, self.prompts_file = prompts, prompts_file
        # A rank may have no prompt at all.
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self._stores: dict[str, TokenStore] = {}
        self._rows: dict[str, TokenRows] = {}
        self._order: TrainOrder | None = None

    # What the model needs to know

    @property
    def vocab_size(self) -> int | None:
        """Ids of the store's tokenizer; None without a store."""
        return None if self.store is None else self._open(self._first_split()).vocab_size

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The store's tokenizer; None without a store."""
        return None if self.store is None else self._open(self._first_split()).tokenizer

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that see every training row once; known after ``setup``."""
        assert self._order is not None, "steps_per_epoch is known after setup('fit')"
        return self._order.steps_per_epoch

    # Lightning's hooks

    def setup(self, stage: str) -> None:
        """Opens the splits that the stage reads, derives accumulation, and sets it in the Trainer."""
        if stage == "predict":
            return
        self.require_store()
        if stage == "fit":
            self._setup_training()
        splits = TokenStore.splits(self.require_store())
        if stage in ("fit", "validate") and "val" in splits:
            self._evaluation_rows("val")
        elif stage == "validate":
            raise UserError(f"{self.store} has no split 'val'; prepare it with --val_fraction above 0")
        elif stage == "test":
            self._evaluation_rows("test" if "test" in splits else "val")

    def train_dataloader(self) -> DataLoader:
        """Micro-batches of this rank, from the Trainer's current optimizer step on."""
        assert self._order is not None
        sampler = _TrainSampler(self._rows["train"], self._order, self._next_step, self._epochs_are_cut)
        return self._loader(self._rows["train"], sampler, persistent=True)

    def val_dataloader(self) -> DataLoader | list[Any]:
        """Every row of split ``val`` once over all ranks; no batches when the store has none."""
        return self._evaluation_loader("val") if "val" in self._rows else []

    def test_dataloader(self) -> DataLoader:
        """Every row of split ``test`` once over all ranks; of ``val`` when the store has no ``test``."""
        return self._evaluation_loader("test" if "test" in self._rows else "val")

    def predict_dataloader(self) -> PromptBatches:
        """This rank's prompts, as dicts of ``index`` and ``prompt`` lists."""
        rank, replicas = self._rank_and_replicas()
        prompts = read_prompts(self.prompts, self.prompts_file)
        return PromptBatches(prompts, self.micro_batch_size or 8, rank, replicas)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run is compared with; the position itself is a function of the optimizer step."""
        if self._order is None:
            return {}
        return {
            "seed": self.seed,
            "seq_len": self.seq_len,
            "global_batch_size": self.global_batch_size,
            "isolate_documents": self.isolate_documents,
            "fingerprint": self._stores["train"].fingerprint,
            "samples": self._samples_at(self._completed_steps()),
            "micro_batches_per_step": self._order.accumulation,
            "micro_batches_per_epoch": self._order.micro_batches_per_epoch,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Names what differs from the saved run, and fits Lightning's saved counters to the present layout."""
        if not state_dict or self._order is None or self.trainer is None:
            return
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        mine = self.state_dict()
        same = ("seed", "seq_len", "global_batch_size", "isolate_documents", "fingerprint")
        changed = [name for name in same if state_dict.get(name) != mine[name]]
        if changed:
            what = ", ".join(f"{n} {state_dict.get(n)!r} -> {mine[n]!r}" for n in changed)
            rank_zero_warn(
                f"resuming with other data than the checkpoint was trained on ({what}): the new data is taken from the "
                "same optimizer step on, so rows may repeat or be left out in this epoch"
            )
        loops = self.trainer._checkpoint_connector._loaded_checkpoint.get("loops", {}).get("fit_loop")
        if loops is not None:
            fit_progress_to_layout(
                loops["epoch_loop.batch_progress"],
                saved=(state_dict["micro_batches_per_step"], state_dict["micro_batches_per_epoch"]),
                present=(self._order.accumulation, self._order.micro_batches_per_epoch),
            )

    # Inside

    def _setup_training(self) -> None:
        trainer = self.trainer
        assert trainer is not None
        store = self._open("train")
        rank, replicas = self._rank_and_replicas()
        micro = self.micro_batch_size or self.global_batch_size // replicas
        if micro == 0 or self.global_batch_size % (micro * replicas):
            raise UserError(
                f"data.global_batch_size {self.global_batch_size} does not divide by micro_batch_size {max(micro, 1)} "
                f"x {replicas} data-parallel rank{'s' if replicas > 1 else ''}; change one of them"
            )
        self._rows["train"] = TokenRows(store, self.seq_len, self.isolate_documents)
        self._order = TrainOrder(len(self._rows["train"]), self.global_batch_size, micro, self.seed, rank, replicas)
        accumulation = self._order.accumulation
        self._count_in_micro_batches(trainer, accumulation)
        unused = store.num_tokens - len(self._rows["train"]) * self.seq_len
        rank_zero_info(
            f"data: {len(self._rows['train']):,} rows of {self.seq_len} tokens, {unused} tokens at the end left out; "
            f"{self._order.steps_per_epoch:,} steps an epoch of {self.global_batch_size} rows = {micro} x {replicas} "
            f"rank{'s' if replicas > 1 else ''} x {accumulation} micro-batches"
        )

    def _count_in_micro_batches(self, trainer: L.Trainer, accumulation: int) -> None:
        """Sets accumulation, and turns what a user says in steps into micro-batches, in which Lightning counts.

        The Trainer's own values are kept on it, as it may fit again with another layout.
        """
        names = ("accumulate_grad_batches", "val_check_interval", "limit_train_batches", "check_val_every_n_epoch")
        asked: dict[str, Any] = trainer.__dict__.setdefault("_lit_llm_asked", {n: getattr(trainer, n) for n in names})
        assert self._order is not None
        steps = self._order.steps_per_epoch
        if asked["accumulate_grad_batches"] not in (1, accumulation):
            raise UserError(
                f"trainer.accumulate_grad_batches {asked['accumulate_grad_batches']} contradicts global_batch_size "
                f"{self.global_batch_size} = micro_batch_size {self._order.micro_batch_size} x "
                f"{self._order.num_replicas} ranks x accumulation {accumulation}; leave it out, it is derived"
            )
        trainer.accumulate_grad_batches = accumulation
        interval = asked["val_check_interval"]
        trainer.check_val_every_n_epoch = asked["check_val_every_n_epoch"]
        if isinstance(interval, int) and not isinstance(interval, bool):
            if interval < 1:
                raise UserError(f"trainer.val_check_interval must be at least 1 step, got {interval}")
            if interval > steps:
                trainer.check_val_every_n_epoch = None  # so many steps pass an epoch's end: count on over it
            trainer.val_check_interval = interval * accumulation
        elif isinstance(interval, float) and interval < 1.0:
            trainer.val_check_interval = max(1, int(steps * interval)) * accumulation
        limit = asked["limit_train_batches"]
        if isinstance(limit, float) and limit < 1.0 and limit > 0:
            limit = max(1, int(steps * limit)) * accumulation
        if isinstance(limit, int):  # whole steps, or a step would leave out rows of its global batch
            trainer.limit_train_batches = -(-limit // accumulation) * accumulation

    def require_store(self) -> str:
        """The store's folder; UserError without one."""
        if self.store is None:
            raise UserError("data.store is missing; give the folder that `lit-llm prepare ... --output DIR` wrote")
        return self.store

    def _first_split(self) -> str:
        splits = TokenStore.splits(self.require_store())
        return "train" if "train" in splits else splits[0]

    def _open(self, split: str) -> TokenStore:
        if split not in self._stores:
            self._stores[split] = TokenStore(self.require_store(), split)
        return self._stores[split]

    def _evaluation_rows(self, split: str) -> None:
        store = self._open(split)
        lengths = store.tokenizer.token_byte_lengths()
        self._rows[split] = TokenRows(store, self.seq_len, self.isolate_documents, pad_last=True, byte_lengths=lengths)

    def _evaluation_loader(self, split: str) -> DataLoader:
        rows, (rank, replicas) = self._rows[split], self._rank_and_replicas()
        micro = self.micro_batch_size or max(1, self.global_batch_size // replicas)
        return self._loader(rows, _EvalSampler(rows, EvalOrder(len(rows), micro, rank, replicas)), persistent=False)

    def _loader(self, rows: TokenRows, sampler: DistributedSampler, persistent: bool) -> DataLoader:
        pin = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        # batch_size=None: the sampler's items are whole micro-batches, gathered at once by TokenRows.
        return TokenLoader(
            rows,  # type: ignore[arg-type]
            batch_size=None,
            sampler=sampler,
            num_workers=self.num_workers,
            pin_memory=pin,
            persistent_workers=persistent and self.num_workers > 0,
        )

    def _rank_and_replicas(self) -> tuple[int, int]:
        kwargs = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (kwargs["rank"], kwargs["num_replicas"]) if kwargs else (0, 1)

    def _completed_steps(self) -> int:
        return 0 if self.trainer is None else self.trainer.global_step

    def _next_step(self) -> int:
        """The step whose rows come next; always the first when Lightning overfits a few batches."""
        trainer = self.trainer
        if trainer is None or getattr(trainer, "overfit_batches", False):
            return 0
        if trainer.lightning_module.automatic_optimization:
            return self._completed_steps()
        # With manual optimization any number of optimizer steps may be taken in a micro-batch.
        assert self._order is not None
        return trainer.fit_loop.epoch_loop.batch_progress.total.ready // self._order.accumulation

    def _epochs_are_cut(self) -> bool:
        return self.trainer is not None and self.trainer.limit_train_batches != 1.0

    def _samples_at(self, step: int) -> int:
        assert self._order is not None
        epoch, position = divmod(step, self._order.steps_per_epoch)
        return epoch * self._order.num_samples + position * self.global_batch_size


class TokenLoader(DataLoader):
    """A DataLoader that Lightning may call resumable: its position is a function of the optimizer step."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""


class _BatchSampler(DistributedSampler, SequentialSampler):
    """A sampler whose items are whole micro-batches.

    Lightning leaves a DistributedSampler in place under ddp, and a SequentialSampler when it overfits a few batches.
    """

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("subclasses say what comes")


class _TrainSampler(_BatchSampler):
    """This rank's micro-batches, from the step on that comes next."""

    def __init__(self, rows: TokenRows, order: TrainOrder, next_step: StepSource, endless: Any) -> None:
        super().__init__(rows, order.num_replicas, order.rank, shuffle=False)  # type: ignore[arg-type]
        self.order, self._next_step, self._endless = order, next_step, endless

    def __iter__(self) -> Iterator[Any]:
        return self.order.epoch_from(self._next_step(), endless=self._endless())

    def __len__(self) -> int:
        return self.order.micro_batches_per_epoch


class _EvalSampler(_BatchSampler):
    """This rank's evaluation batches."""

    def __init__(self, rows: TokenRows, order: EvalOrder) -> None:
        super().__init__(rows, order.num_replicas, order.rank, shuffle=False)  # type: ignore[arg-type]
        self.order = order

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class PromptBatches:
    """The prompts of one rank, dealt in turn, in batches."""

    def __init__(self, prompts: list[Prompt], batch_size: int, rank: int = 0, num_replicas: int = 1) -> None:
        mine = list(enumerate(prompts))[rank::num_replicas]
        self._batches = [mine[i : i + batch_size] for i in range(0, len(mine), batch_size)]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[dict[str, list[Any]]]:
        for batch in self._batches:
            yield {"index": [index for index, _ in batch], "prompt": [prompt for _, prompt in batch]}


def fit_progress_to_layout(progress: dict[str, Any], saved: tuple[int, int], present: tuple[int, int]) -> None:
    """Rewrites Lightning's saved count of micro-batches for another number of ranks or micro-batch size.

    Lightning counts the micro-batches of one rank. The optimizer step is what both layouts share; a window that was not
    finished has left no trace in the weights and is done again.

    Args:
        progress: Lightning's saved ``epoch_loop.batch_progress``, changed in place.
        saved, present: (micro-batches per step, micro-batches per epoch) of the two layouts.
    """
    current, total = progress["current"], progress["total"]
    ready = current["ready"]
    finished_epoch = ready >= saved[1]
    steps, begun = divmod(ready, saved[0])
    if saved == present and (begun == 0 or finished_epoch):
        return
    new_ready = present[1] if finished_epoch else steps * present[0]
    # Saved inside Lightning's own hooks, the last micro-batch is processed but not yet counted as completed.
    behind = ready - current["completed"] if finished_epoch or begun == 0 else 0
    epochs_before = (total["ready"] - ready) // saved[1]
    for name in ("ready", "started", "processed", "completed"):
        current[name] = new_ready - (behind if name == "completed" else 0)
        total[name] = epochs_before * present[1] + current[name]
