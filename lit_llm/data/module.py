"""The LightningDataModule: stores in, batches out, resumed exactly."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Literal

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader, DistributedSampler

from lit_llm.data.loaders import EvalSampler, PromptBatches, Rows, TokenLoader, TrainSampler, to_tensors
from lit_llm.data.mixed_rows import MixedRows
from lit_llm.data.mixture import Mixture
from lit_llm.data.order import EvalOrder, TrainOrder
from lit_llm.data.prompts import read_prompts
from lit_llm.data.resume import fit_progress
from lit_llm.data.rows import PackedRows, TokenRows
from lit_llm.data.store import TokenStore
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.errors import UserError

_PACKINGS = ("auto", "contiguous", "best_fit")
_NAMES = {"stores": "the stores' content or order", "shares": "the mixture's weights"}


class TokenDataModule(L.LightningDataModule):
    """Fixed-length rows from a token store, shuffled by a pure function of (seed, epoch).

    What a rank sees at optimizer step k is a function of (store, seed, k) and of the layout alone, so a run resumed at
    any step goes on with the batches that the uninterrupted one would have had. Batches are dicts of int64 tensors:
    ``input_ids``, ``labels`` and, with documents isolated, ``document_ids``, all (batch, seq_len).

    Args:
        store: folder that ``lit-llm prepare`` wrote, or an address of fsspec's such as ``s3://bucket/store``; or a
            mapping of several to weights, whose rows are mixed in these proportions; their order counts for the order
            of the rows. Needed for all but predict.
        seq_len: tokens in a row.
        global_batch_size: rows of an optimizer step over all ranks; accumulation is derived from it.
        micro_batch_size: rows that a rank computes at once; None: its whole share of the global batch.
        seed: of the shuffling.
        num_workers: processes that read ahead; 0 reads in the training process.
        isolate_documents: attention, positions and labels stay inside a document.
        packing: ``contiguous``: documents end to end, cut into rows; nothing is lost or padded. ``best_fit``: whole
            documents (a chat longer than seq_len is cut, a longer text split), rows padded a little. ``auto``: best_fit
            for stores of chats, contiguous for texts.
        resume_with_other_data: whether a checkpoint of other data, seed or row length is resumed, with the new data
            from its beginning; otherwise that is refused. With another global_batch_size alone the run goes on after
            the samples that it has seen.
        prompts: texts to complete, for predict.
        prompts_file: a .txt (a prompt a line) or .jsonl file of them.

    Raises:
        UserError: sizes that do not divide, a seq_len longer than the store, a missing store.
    """

    def __init__(
        self,
        store: dict[str, float] | str | None = None,
        seq_len: int = 512,
        global_batch_size: int = 32,
        micro_batch_size: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        isolate_documents: bool = True,
        packing: Literal["auto", "contiguous", "best_fit"] = "auto",
        resume_with_other_data: bool = False,
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
        if packing not in _PACKINGS:
            raise UserError(f"data.packing must be one of {', '.join(_PACKINGS)}, got {packing!r}")
        if packing == "best_fit" and not isolate_documents:
            raise UserError("data.packing best_fit keeps documents apart; set data.isolate_documents true")
        if isinstance(store, Mapping):
            self.store: dict[str, float] | str | None = {str(folder): weight for folder, weight in store.items()}
            self._folders = list(self.store)
            self._mixture: Mixture | None = Mixture(list(self.store.values()), self._folders)
        else:
            self.store = os.fspath(store) if store is not None else None
            self._folders = [] if self.store is None else [self.store]
            self._mixture = None
        self.packing, self.resume_with_other_data = packing, resume_with_other_data
        self.seq_len = seq_len
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.seed, self.num_workers, self.isolate_documents = seed, num_workers, isolate_documents
        self.prompts, self.prompts_file = prompts, prompts_file
        # A rank may have no prompt at all.
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self._stores: dict[tuple[str, str], TokenStore] = {}
        self._rows: dict[str, Rows] = {}
        self._order: TrainOrder | None = None
        # Steps of the data order that lie before the Trainer's first one; not 0 only after a resume with other data.
        self._step_offset = 0

    def __str__(self) -> str:
        """Lightning's own asks the loaders, and fails on several."""
        return f"{type(self).__name__}({', '.join(self._folders) or 'no store'})"

    # What the model needs to know

    @property
    def vocab_size(self) -> int | None:
        """Ids of the stores' tokenizer; None without a store."""
        return self._any_store().vocab_size if self._folders else None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The stores' tokenizer; None without a store."""
        return self._any_store().tokenizer if self._folders else None

    @property
    def sources(self) -> list[tuple[str, str]]:
        """The stores of a mixture in the order of ``source_ids``: what each is called in logs, and a mark of its
        content; [] for a single store."""
        if self._mixture is None:
            return []
        short = [PurePosixPath(folder).name or folder for folder in self._folders]
        names = short if len(set(short)) == len(short) else self._folders
        marks = [self._open(folder, "train").fingerprint for folder in self._folders]
        return [
            (name, f"{mark}/{marks[:i].count(mark)}") for i, (name, mark) in enumerate(zip(names, marks, strict=True))
        ]

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
        splits = {split for folder in self._folders for split in TokenStore.splits(folder)}
        if stage in ("fit", "validate") and "val" in splits:
            self._evaluation_rows("val")
        elif stage == "validate":
            raise UserError(f"{self._named()} has no split 'val'; prepare it with --val_fraction above 0")
        elif stage == "test":
            self._evaluation_rows("test" if "test" in splits else "val")

    def train_dataloader(self) -> DataLoader:
        """Micro-batches of this rank, from the Trainer's current optimizer step on."""
        assert self._order is not None
        sampler = TrainSampler(self._rows["train"], self._order, self._next_position, self._epochs_are_cut)
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
            **self._identity(),
            "global_batch_size": self.global_batch_size,
            "samples": self._order.samples_before(self._next_position()[0]),
            "step_offset": self._step_offset,
            "micro_batches_per_step": self._order.accumulation,
            "micro_batches_per_epoch": self._epoch_length(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuses other data than the saved run's, and fits Lightning's saved counters to the present layout."""
        if not state_dict or self._order is None or self.trainer is None:
            return
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        mine = self._identity()
        changed = [name for name in mine if name in state_dict and state_dict[name] != mine[name]]
        batch = (state_dict["global_batch_size"], self.global_batch_size)
        if changed or batch[0] != batch[1]:
            what = [f"{_NAMES.get(n, n)} {_short(state_dict[n])} -> {_short(mine[n])}" for n in changed]
            what += [f"global_batch_size {batch[0]} -> {batch[1]}"] * (batch[0] != batch[1])
            if not self.resume_with_other_data:
                raise UserError(
                    f"the checkpoint was trained on other data ({', '.join(what)}); resume with the same, or set "
                    "data.resume_with_other_data true to go on with this"
                )
            where = "from its beginning" if changed else "after the samples seen so far"
            rank_zero_info(f"resuming with other data ({', '.join(what)}), {where}")
        checkpoint = self.trainer._checkpoint_connector._loaded_checkpoint
        self._step_offset = state_dict.get("step_offset", 0)
        loops = checkpoint.get("loops", {}).get("fit_loop")
        if loops is None:
            return
        progress = loops["epoch_loop.batch_progress"]
        saved = (state_dict["micro_batches_per_step"], state_dict["micro_batches_per_epoch"])
        present = (self._order.accumulation, self._epoch_length())
        if not changed and batch[0] == batch[1]:
            if saved != present or self._counts_in_steps():
                cut = saved[1] // saved[0] != present[1] // present[0]  # otherwise than the saved run's epochs
                whole = cut and not self._epochs_are_cut() and self._counts_in_steps()
                place = (checkpoint["global_step"] + self._step_offset) % self._order.steps_per_epoch
                fit_progress(progress, saved, present, steps=place if whole else None)
            return
        step = 0 if changed else self._order.step_after(state_dict["samples"])
        # Where an epoch is cut, Lightning's place in it is not the data's: the same share of the epoch is done then.
        steps = step % self._order.steps_per_epoch
        if self._epochs_are_cut():
            samples = 0 if changed else progress["current"]["ready"] // saved[0] * batch[0]
            steps = min(samples // self.global_batch_size, present[1] // present[0] - 1)
        fit_progress(progress, saved, present, steps=steps, total_steps=step)
        done = checkpoint["global_step"] if self._counts_in_steps() else progress["total"]["ready"] // present[0]
        self._step_offset = step - done

    # Inside

    def _setup_training(self) -> None:
        trainer = self.trainer
        assert trainer is not None
        rank, replicas = self._rank_and_replicas()
        micro = self.micro_batch_size or self.global_batch_size // replicas
        if micro == 0 or self.global_batch_size % (micro * replicas):
            raise UserError(
                f"data.global_batch_size {self.global_batch_size} does not divide by micro_batch_size {max(micro, 1)} "
                f"x {replicas} data-parallel rank{'s' if replicas > 1 else ''}; change one of them"
            )
        parts = [self._training_rows(folder) for folder in self._folders]
        rows = self._rows["train"] = parts[0] if self._mixture is None else MixedRows(parts)
        numbers = len(rows) if self._mixture is None else tuple(map(len, parts))
        self._order = TrainOrder(numbers, self.global_batch_size, micro, self.seed, rank, replicas, self._mixture)
        self._step_offset = 0
        accumulation = self._order.accumulation
        self._count_in_micro_batches(trainer, accumulation)
        shares = [1.0] if self._mixture is None else self._mixture.shares / self._mixture.period
        for folder, part, share in zip(self._folders, parts, shares, strict=True):
            mixed = f"; {share:.2%} of all rows, {share * len(rows) / len(part):.2f} of its epochs in one of the whole"
            rank_zero_info(f"data: {folder}: {part.describe()}{mixed if self._mixture else ''}")
        rank_zero_info(
            f"data: {self._order.steps_per_epoch:,} steps an epoch of {self.global_batch_size} rows = {micro} x "
            f"{replicas} rank{'s' if replicas > 1 else ''} x {accumulation} micro-batches"
        )

    def _training_rows(self, folder: str) -> TokenRows | PackedRows:
        store = self._open(folder, "train")
        if self._packed(store):
            return PackedRows(store, self.seq_len)
        return TokenRows(store, self.seq_len, self.isolate_documents)

    def _packed(self, store: TokenStore) -> bool:
        return self.packing == "best_fit" or (self.packing == "auto" and store.has_trained and self.isolate_documents)

    def _count_in_micro_batches(self, trainer: L.Trainer, accumulation: int) -> None:
        """Sets accumulation, and turns what a user says in steps into micro-batches, in which Lightning counts.

        The Trainer's own values are kept on it, as it may fit again with another layout.
        """
        names = ("accumulate_grad_batches", "val_check_interval", "limit_train_batches", "check_val_every_n_epoch")
        asked: dict[str, Any] = trainer.__dict__.setdefault(
            "_lit_llm_asked", {n: getattr(trainer, n, None) for n in names}
        )
        assert self._order is not None
        steps = self._order.steps_per_epoch
        if asked["accumulate_grad_batches"] not in (1, accumulation):
            raise UserError(
                f"trainer.accumulate_grad_batches {asked['accumulate_grad_batches']} contradicts global_batch_size "
                f"{self.global_batch_size} = micro_batch_size {self._order.micro_batch_size} x "
                f"{self._order.num_replicas} ranks x accumulation {accumulation}; leave it out, it is derived"
            )
        trainer.accumulate_grad_batches = accumulation
        limit = asked["limit_train_batches"]
        if isinstance(limit, float) and limit < 1.0 and limit > 0:
            limit = max(1, int(steps * limit)) * accumulation
        if isinstance(limit, int):  # whole steps, or a step would leave out rows of its global batch
            trainer.limit_train_batches = -(-limit // accumulation) * accumulation
            steps = min(steps, max(1, trainer.limit_train_batches // accumulation))
        interval = asked["val_check_interval"]  # None: by the clock
        trainer.check_val_every_n_epoch = asked["check_val_every_n_epoch"]
        if isinstance(interval, int) and not isinstance(interval, bool):
            if interval < 1:
                raise UserError(f"trainer.val_check_interval must be at least 1 step, got {interval}")
            if interval > steps:
                trainer.check_val_every_n_epoch = None  # so many steps pass an epoch's end: count on over it
            trainer.val_check_interval = interval * accumulation
        elif isinstance(interval, float) and interval < 1.0:
            trainer.val_check_interval = max(1, int(steps * interval)) * accumulation

    def require_store(self) -> str:
        """The first store's folder; UserError without one."""
        if not self._folders:
            raise UserError("data.store is missing; give the folder that `lit-llm prepare ... --output DIR` wrote")
        return self._folders[0]

    def _named(self) -> str:
        return ", ".join(self._folders)

    def _any_store(self) -> TokenStore:
        """The first store's first split, after a look that all stores go together."""
        stores = []
        for folder in self._folders:
            splits = TokenStore.splits(folder)
            stores.append(self._open(folder, "train" if "train" in splits else splits[0]))
        for store in stores[1:]:
            if store.tokenizer.fingerprint != stores[0].tokenizer.fingerprint:
                raise UserError(
                    f"data.store: {store.folder} was made with another tokenizer ({store.vocab_size} ids) than "
                    f"{stores[0].folder} ({stores[0].vocab_size} ids); prepare it with --tokenizer {stores[0].folder}"
                )
        return stores[0]

    def _open(self, folder: str, split: str) -> TokenStore:
        if (folder, split) not in self._stores:
            self._stores[folder, split] = TokenStore(folder, split)
        return self._stores[folder, split]

    def _evaluation_rows(self, split: str) -> None:
        stores = [self._open(folder, split) for folder in self._folders if split in TokenStore.splits(folder)]
        if not stores:
            raise UserError(f"{self._named()} has no split {split!r}; prepare it with --val_fraction above 0")
        tokenizer = self.tokenizer  # read once, for all stores and splits
        assert tokenizer is not None
        lengths = tokenizer.token_byte_lengths()
        parts: list[TokenRows | PackedRows] = []
        for store in stores:
            if self._packed(store):
                parts.append(PackedRows(store, self.seq_len, lengths))
            else:
                parts.append(
                    TokenRows(store, self.seq_len, self.isolate_documents, pad_last=True, byte_lengths=lengths)
                )
        self._rows[split] = parts[0] if len(parts) == 1 else MixedRows(parts)

    def _identity(self) -> dict[str, Any]:
        """What makes two runs' data the same, whatever the layout."""
        stores = [self._open(folder, "train") for folder in self._folders]
        return {
            "seed": self.seed,
            "seq_len": self.seq_len,
            "isolate_documents": self.isolate_documents,
            "packing": ["best_fit" if self._packed(store) else "contiguous" for store in stores],
            "stores": [store.fingerprint for store in stores],
            "shares": None if self._mixture is None else self._mixture.shares.tolist(),
        }

    def _evaluation_loader(self, split: str) -> DataLoader:
        rows, (rank, replicas) = self._rows[split], self._rank_and_replicas()
        micro = self.micro_batch_size or max(1, self.global_batch_size // replicas)
        return self._loader(rows, EvalSampler(rows, EvalOrder(len(rows), micro, rank, replicas)), persistent=False)

    def _loader(self, rows: Rows, sampler: DistributedSampler, persistent: bool) -> DataLoader:
        for store in self._stores.values():
            store.prefetch()  # here and not in a worker, as connections do not survive a fork
        pin = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        # batch_size=None: the sampler's items are whole micro-batches, gathered at once by TokenRows.
        return TokenLoader(
            rows,  # type: ignore[arg-type]
            batch_size=None,
            sampler=sampler,
            num_workers=self.num_workers,
            collate_fn=to_tensors,  # type: ignore[arg-type]
            pin_memory=pin,
            persistent_workers=persistent and self.num_workers > 0,
        )

    def _rank_and_replicas(self) -> tuple[int, int]:
        kwargs = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (kwargs["rank"], kwargs["num_replicas"]) if kwargs else (0, 1)

    def _epoch_length(self) -> int:
        """Micro-batches of an epoch as Lightning runs it."""
        assert self._order is not None
        assert self.trainer is not None
        limit = self.trainer.limit_train_batches
        full = self._order.micro_batches_per_epoch
        return min(limit, full) if isinstance(limit, int) else full

    def _counts_in_steps(self) -> bool:
        """Whether a global batch is an optimizer step: with manual optimization a module takes any number of them."""
        assert self.trainer is not None
        return self.trainer.lightning_module.automatic_optimization

    def _completed_steps(self) -> int:
        return 0 if self.trainer is None else self.trainer.global_step

    def _next_position(self) -> tuple[int, int]:
        """The step of the order whose rows come next, and how many of its micro-batches are done already."""
        trainer = self.trainer
        if trainer is None:
            return 0, 0
        assert self._order is not None
        accumulation = self._order.accumulation
        if getattr(trainer, "overfit_batches", False):  # the same few steps again and again
            return self._completed_steps() % max(1, self._epoch_length() // accumulation), 0
        if self._counts_in_steps():
            return self._completed_steps() + self._step_offset, 0
        step, begun = divmod(trainer.fit_loop.epoch_loop.batch_progress.total.ready, accumulation)
        return step + self._step_offset, begun

    def _epochs_are_cut(self) -> bool:
        return self.trainer is not None and self.trainer.limit_train_batches != 1.0


def _short(value: Any) -> str:
    text = (
        ", ".join(v[:8] if isinstance(v, str) and len(v) == 64 else str(v) for v in value)
        if isinstance(value, list)
        else str(value)
    )
    return text if len(text) <= 60 else text[:57] + "..."
