"""LitLLM: the LightningModule that ties model, loss, optimizer, data and generation together."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lit_llm.checkpoint.write import write_safely
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.errors import UserError
from lit_llm.generation import GenerationConfig, generate
from lit_llm.generation.chat import until_turn_ends
from lit_llm.metrics import TokenLoss
from lit_llm.model import ModelConfig, Transformer
from lit_llm.model.moe import inactive_parameters
from lit_llm.optim import (
    OptimizerConfig,
    ScheduleConfig,
    StepSchedule,
    build_optimizer,
    build_scheduler,
    describe_groups,
    resolved,
)
from lit_llm.optim.checks import as_float
from lit_llm.parallel.activation_checkpointing import check_checkpointing
from lit_llm.parallel.ddp import ensure_float32_reduction
from lit_llm.parallel.parallelize import parallelize
from lit_llm.parallel.report import is_sharded, reshard
from lit_llm.parallel.strategy import MeshStrategy
from lit_llm.training.boundary import StepBoundary
from lit_llm.training.evaluation import EvaluationLockstep, EvaluationWatch
from lit_llm.training.gradients import gradients_of, scale_gradients
from lit_llm.training.guard import GuardConfig
from lit_llm.training.model_source import ModelSource
from lit_llm.training.saved_state import SavedState, agree_on_checkpoint
from lit_llm.training.window import StepWindow

_Config = TypeVar("_Config", OptimizerConfig, ScheduleConfig, GenerationConfig, GuardConfig)


class LitLLM(SavedState, ModelSource, L.LightningModule):
    """A language model under Lightning.

    An interface for subclasses: ``loss``, ``training_step``, ``configure_optimizers`` and ``configure_model`` can each
    be overridden alone. A ``training_step`` that returns a plain scalar gets Lightning's own semantics (the mean over
    micro-batches and ranks); the one here gives the exact mean over the label tokens of the global batch.

    Args:
        config: a preset's name, a mapping of ModelConfig fields, or a ModelConfig; or a Hugging Face folder, its
            config.json or a hub's ``org/model``, for a new model of that shape. A mapping may name such a ``preset``
            that its fields change. None: the one of ``pretrained``, or else 3m.
        vocab_size: ids of the data's tokenizer, on the command line linked from ``data``. It fills a preset or a
            mapping that names no vocabulary; a larger vocabulary in the mapping counts as padding.
        seq_len: tokens in a row of the data, linked likewise; fills ``max_position_embeddings`` of a mapping without
            it.
        optimizer: optimizer and its numbers.
        schedule: learning rate over the optimizer steps.
        generation: how predict decodes.
        compile: torch.compile of each block, in place.
        attention_backend: of :func:`lit_llm.ops.attention`.
        seed: of the initial weights and of what training draws at random; None: Lightning's global seed, or 0.
        guard: which steps are not taken.
        z_loss: coefficient of the squared log-partition function, a term of the training loss that keeps logits small.
        label_smoothing: share of the training loss that is spread over the whole vocabulary. Validation and test
            measure the plain loss.
        activation_checkpointing: what is computed again in backward instead of being kept: ``none``, ``full`` (all but
            each block's input), a number n (every n-th block so), or ``selective`` (all but matrix products and
            attention).
        pretrained: a Hugging Face folder with safetensors, or ``org/model[@revision]`` of the hub, whose weights,
            configuration and tokenizer the model begins with; fields of ``config`` may change what is no shape. Not
            read where a checkpoint is loaded, which holds all of it.

    Raises:
        UserError: a configuration that does not fit together or contradicts the data.
    """

    def __init__(
        self,
        config: str | dict[str, Any] | ModelConfig | None = None,
        vocab_size: int | None = None,
        seq_len: int | None = None,
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008 (frozen)
        schedule: ScheduleConfig = ScheduleConfig(),  # noqa: B008
        generation: GenerationConfig = GenerationConfig(),  # noqa: B008
        compile: bool = False,
        attention_backend: str = "auto",
        seed: int | None = None,
        guard: GuardConfig = GuardConfig(),  # noqa: B008
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        activation_checkpointing: str | int = "none",
        pretrained: str | None = None,
    ) -> None:
        super().__init__()
        self.optimizer_config = _as(OptimizerConfig, optimizer)
        self.schedule_config = _as(ScheduleConfig, schedule)
        self.generation_config = _as(GenerationConfig, generation)
        self.guard_config = _as(GuardConfig, guard)
        self.z_loss = as_float("model.z_loss", z_loss, 0.0)
        self.label_smoothing = as_float("model.label_smoothing", label_smoothing, 0.0, 1.0, below=True)
        self.compile_blocks, self.attention_backend = compile, attention_backend
        self.activation_checkpointing = check_checkpointing(activation_checkpointing)
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self.config_source = config
        self.pretrained = None if pretrained is None else os.fspath(pretrained)
        self.vocab_size, self.seq_len = vocab_size, seq_len
        self.tokenizer: Tokenizer | None = None
        self.model: Transformer | nn.Module | None = None
        self._window = StepWindow()
        self._boundary = StepBoundary(self._window, self.guard_config, self.seed)
        self._no_tokenizer = "predict needs a tokenizer: none is in the checkpoint; give data.store"
        self._sources: list[tuple[str, str]] = []
        self._tokens_by_store: dict[str, int] = {}
        self._labels_checked = False
        self.evaluated = TokenLoss()
        self._save_hparams()

    # The model

    def configure_model(self) -> None:
        """Builds ``self.model``, once.

        The weights are those of ``pretrained``, or else a function of (seed, parameter name) alone.
        """
        if self.model is not None:
            return
        if self.tokenizer is None:
            self._take_folder_tokenizer(prompts=False)
        strategy = None if self._trainer is None else self._trainer.strategy
        sharding = strategy.sharding() if isinstance(strategy, MeshStrategy) else None
        device = torch.get_default_device()
        with torch.device("meta"):  # no process may have room for the whole
            model = Transformer(self.resolve_config(), attention_backend=self.attention_backend)
        parallelize(
            model,
            activation_checkpointing=self.activation_checkpointing,
            compile=self.compile_blocks,
            sharding=sharding,
        )
        if isinstance(strategy, MeshStrategy) and sharding is not None:
            device = strategy.storage_device
        if device.type != "meta":
            model.to_empty(device=device)
            self.fill_weights(model)
        self.model = model
        self._save_hparams()

    @property
    def transformer(self) -> Transformer:
        """The Transformer that ``self.model`` is by default, also inside a ``torch.compile`` of it."""
        if (model := self._plain_model) is None:
            what = "not built yet; call configure_model() or run a Trainer first"
            raise UserError(f"the model is {what if self.model is None else 'no Transformer, as this needs'}")
        return model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """:meth:`Transformer.forward`."""
        if self.model is None:
            raise UserError("the model is not built yet; call configure_model() or run a Trainer first")
        return self.model(*args, **kwargs)

    def loss(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Summed loss over the batch's label tokens (float32), and their number; both scalars.

        Args:
            batch: ``input_ids`` and ``labels`` (batch, seq); ``document_ids`` and ``position_ids`` (batch, seq) if any.
        """
        names = ("position_ids", "document_ids", "labels", "cu_seqlens", "max_seqlen")
        inputs = {name: batch[name] for name in names if name in batch}
        if self.training:
            terms = {"z_loss": self.z_loss, "label_smoothing": self.label_smoothing}
            if (model := self._plain_model) is not None and model.config.num_experts:
                terms["router_aux_loss"] = model.config.router_aux_loss_coef
                terms["router_z_loss"] = model.config.router_z_loss_coef
            inputs.update({name: value for name, value in terms.items() if value})
        return self(batch["input_ids"], **inputs)

    # Training

    def setup(self, stage: str) -> None:
        """Takes the data's tokenizer, vocabulary and row length, and refuses a precision that trains to NaN."""
        self._drop_unfilled()
        precision = str(self.trainer.precision)
        if precision == "16-true" and stage == "fit":
            raise UserError(
                "trainer.precision 16-true keeps float16 weights and trains to NaN; use bf16-true or 16-mixed"
            )
        if isinstance(self.trainer.strategy, FSDPStrategy):
            raise UserError(
                "Lightning's FSDPStrategy can't keep float32 reduction, clipping by norm and accumulation without "
                "communication; use strategy=lit_llm.parallel.MeshStrategy(), which splits over all devices likewise"
            )
        if not isinstance(self.trainer.strategy, ModelParallelStrategy) and any(map(is_sharded, self.parameters())):
            raise UserError(
                f"the model is split by MeshStrategy, so {type(self.trainer.strategy).__name__} can't use it; build a "
                "new one and load its checkpoint"
            )
        agree_on_checkpoint(self.trainer)
        if stage == "fit":
            self._boundary.attach(self.trainer)
        else:
            EvaluationWatch.attach(self.trainer, self.guard_config.peer_timeout)
        EvaluationLockstep.attach(self.trainer)
        write_safely(self.trainer.strategy)
        data = getattr(self.trainer, "datamodule", None)
        if self.tokenizer is None:
            self._take_folder_tokenizer(data, prompts=stage == "predict")
        if self.tokenizer is None:
            try:
                self.tokenizer = getattr(data, "tokenizer", None)
            except UserError as error:
                if stage != "predict":
                    raise
                self._no_tokenizer = str(error)  # the checkpoint that comes next may have one, and the store be gone
        if self.model is None:
            self.vocab_size = self.vocab_size or getattr(data, "vocab_size", None)
            if stage != "predict" and self.vocab_size is not None:
                self.seq_len = self.seq_len or getattr(data, "seq_len", None)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """A micro-batch's part of the global batch's mean loss.

        The number of label tokens of the global batch is known only once its last micro-batch is there, so the sum is
        divided by a constant here and the gradient is put right before the step (:class:`StepBoundary`). A subclass
        returns it as it is: a further term belongs into :meth:`loss`. In manual optimization it is the mean over this
        micro-batch.
        """
        if not self._labels_checked:
            _refuse_unshifted(batch)
            self._refuse_unread()
            self._labels_checked = True
        exact = self._boundary.takes_part(self.trainer) and self.automatic_optimization
        loss_sum, count = self.loss(batch)
        if not exact:
            return loss_sum / torch.as_tensor(count).clamp(min=1)
        if self._window.scale is None:  # equal on all ranks, as their gradients are averaged
            self._window.scale = int(self.trainer.strategy.broadcast(batch["labels"].numel()))
        return self._window.offer(loss_sum, count, self._tokens_by_source(batch))

    def _tokens_by_source(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Label tokens of each store of a mixture, (sources,) int64: the data's, whatever ``loss`` counts."""
        if "source_ids" not in batch or not self._sources:
            return None
        counts = (batch["labels"] != -100).sum(dim=1)
        return counts.new_zeros(len(self._sources)).index_add_(0, batch["source_ids"], counts)

    def _begin_sources(self) -> None:
        """Goes on counting the tokens of this fit's stores, each known by its content."""
        self._tokens_by_store = self._all_tokens_by_store()
        self._sources = list(getattr(getattr(self._trainer, "datamodule", None), "sources", []))
        counts = [self._tokens_by_store.get(mark, 0) for _, mark in self._sources]
        self._window.trained_tokens_by_source = torch.tensor(counts, dtype=torch.int64) if counts else None

    def _all_tokens_by_store(self) -> dict[str, int]:
        tokens = self._window.trained_tokens_by_source
        marks = [mark for _, mark in self._sources]
        return self._tokens_by_store | ({} if tokens is None else dict(zip(marks, tokens.tolist(), strict=True)))

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips by the norm that :class:`StepBoundary` has measured, or by Lightning's own way."""
        reshard(self)  # a forward since the backward has gathered parameters that the step makes stale
        norm, gradients = self._boundary.norm, gradients_of(optimizer)
        by_norm = bool(gradient_clip_val) and str(gradient_clip_algorithm or "norm").endswith("norm")
        if not by_norm or norm is None:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        else:
            assert gradient_clip_val is not None
            scale_gradients(gradients, (gradient_clip_val / (norm + 1e-6)).clamp(max=1.0))

    def _log_step(self, optimizer: torch.optim.Optimizer, loss: Tensor, norm: Tensor) -> None:
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/grad_norm", norm)
        if self.guard_config.active:
            self.log("train/skipped_steps", self._boundary.guard.skipped.to("cpu", torch.float64))
        # As float64: Lightning would make float32 of a number, which counts no further than 16 million tokens.
        self.log("train/learning_rate", torch.tensor(self._learning_rate(optimizer), dtype=torch.float64))
        self.log("train/tokens", self._window.trained_tokens.to("cpu", torch.float64))
        by_source = self._window.trained_tokens_by_source
        if by_source is not None:
            for (name, _), tokens in zip(self._sources, by_source.to("cpu", torch.float64), strict=True):
                self.log(f"train/tokens/{name}", tokens)
        rate = self._window.tokens_per_second()
        if rate is not None:
            self.log("train/tokens_per_second", rate, prog_bar=True)

    def _learning_rate(self, optimizer: torch.optim.Optimizer) -> float:
        """The scheduled rate; single groups may scale it."""
        schedules = [one.scheduler for one in self.trainer.lr_scheduler_configs]
        if len(schedules) == 1 and isinstance(schedules[0], StepSchedule):
            return self.optimizer_config.lr * schedules[0].factor
        return float(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        """The optimizer over its parameter groups, and the schedule in optimizer steps; both are told at the start."""
        config = self.optimizer_config
        if str(self.trainer.precision) == "16-mixed":
            # A fused optimizer unscales inside its own step: the gradients would be clipped and logged still scaled.
            if config.fused:
                raise UserError("model.optimizer.fused can't be true with trainer.precision 16-mixed; set it to null")
            config = dataclasses.replace(config, fused=False)
        optimizer = build_optimizer(self, config)
        total, tokens = self.total_steps(), self.tokens_per_step()
        scheduler = build_scheduler(optimizer, self.schedule_config, total, tokens)
        rank_zero_info(describe_groups(optimizer))
        lengths = resolved(self.schedule_config, total, tokens)
        steps = "no fixed number of" if lengths.total is None else f"{lengths.total:,}"
        rank_zero_info(f"schedule: {self.schedule_config.name} over {steps} steps, {lengths.warmup:,} of them warm-up")
        end = total or lengths.total
        if end is not None and lengths.warmup > end:
            rank_zero_warn(
                f"model.schedule: the warm-up of {lengths.warmup:,} steps is longer than the run of {end:,}; the rate "
                "ends below its peak"
            )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def tokens_per_step(self) -> int | None:
        """Tokens of a global batch, padding and ignored labels among them; None when the data does not say."""
        data = getattr(self.trainer, "datamodule", None)
        rows, length = getattr(data, "global_batch_size", None), getattr(data, "seq_len", None)
        return rows * length if isinstance(rows, int) and isinstance(length, int) else None

    def total_steps(self) -> int | None:
        """Optimizer steps of the run, by the Trainer's max_steps and max_epochs; None when neither bounds it."""
        trainer = self.trainer
        limits = [trainer.max_steps] if trainer.max_steps != -1 else []
        if trainer.max_epochs not in (None, -1):
            per_epoch = getattr(getattr(trainer, "datamodule", None), "steps_per_epoch", None)
            if per_epoch is None:
                steps = trainer.estimated_stepping_batches
                return int(steps) if steps != float("inf") else None
            if isinstance(trainer.limit_train_batches, int):  # whole steps, see TokenDataModule
                per_epoch = min(per_epoch, -(-trainer.limit_train_batches // trainer.accumulate_grad_batches))
            limits.append(per_epoch * trainer.max_epochs)
        return min(limits) if limits else None

    def on_fit_start(self) -> None:
        """Says what is trained, and refuses a clip that would turn the gradient round."""
        clip = self.trainer.gradient_clip_val
        if clip is not None and clip < 0:
            raise UserError(f"trainer.gradient_clip_val must be above 0, or null for none; got {clip}")
        self._refuse_unsplit()
        model = self._plain_model
        if model is not None and not model.parallelized:  # of an overridden configure_model
            parallelize(model, activation_checkpointing=self.activation_checkpointing, compile=self.compile_blocks)
        ensure_float32_reduction(self.trainer.strategy)
        total = sum(p.numel() for p in self.parameters())
        idle = 0 if model is None else inactive_parameters(model.config)
        rank_zero_info(f"model: {total:,} parameters" + (f" ({total - idle:,} active)" if idle else ""))

    def _refuse_unsplit(self) -> None:
        """Under a strategy that leaves splitting to the module, gradients of what is not split stay apart."""
        strategy = self.trainer.strategy
        if not isinstance(strategy, ModelParallelStrategy) or isinstance(strategy, MeshStrategy):
            return
        whole = [name for name, p in self.named_parameters() if p.requires_grad and not is_sharded(p)]
        if whole and strategy.distributed_sampler_kwargs["num_replicas"] > 1:
            raise UserError(
                f"{type(strategy).__name__} splits nothing by itself, so each rank would train a model of its own "
                f"({whole[0]} is not split); use lit_llm.parallel.MeshStrategy, or split it in configure_model"
            )

    def on_train_start(self) -> None:
        """Starts the clock of tokens per second, and the counts of the data's stores."""
        self._begin_sources()
        self._window.start_clock()

    # Evaluation

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Adds a batch to the token-weighted mean."""
        self._add_evaluated(batch)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Adds a batch to the token-weighted mean."""
        self._add_evaluated(batch)

    def on_validation_start(self) -> None:
        """Begins a new mean, and stops the clock of tokens per second."""
        self.evaluated.reset()
        self._window.pause_clock()

    def on_test_start(self) -> None:
        """Begins a new mean."""
        self.evaluated.reset()

    def on_validation_end(self) -> None:
        """Starts it again."""
        self._window.resume_clock()

    def on_validation_epoch_end(self) -> None:
        """Logs val/loss, val/perplexity and val/bits_per_byte over all ranks."""
        values = self._evaluated("val")
        if self.trainer.sanity_checking:
            # The loss before training, so that curves begin at step 0; Lightning drops what a sanity check logs.
            for logger in self.trainer.loggers if values else ():
                logger.log_metrics(values, step=0)
        else:
            self.log_dict(values, sync_dist=True, prog_bar=True)

    def on_test_epoch_end(self) -> None:
        """Logs test/loss, test/perplexity and test/bits_per_byte over all ranks."""
        self.log_dict(self._evaluated("test"), sync_dist=True)

    def _add_evaluated(self, batch: dict[str, Any]) -> None:
        loss_sum, count = self.loss(batch)
        self.evaluated.update(loss_sum, count, batch.get("num_bytes"))

    def _evaluated(self, stage: str) -> dict[str, float]:
        values = self.evaluated.compute()  # over all ranks, so all of them must ask
        self.evaluated.reset()
        if not values and not self.trainer.sanity_checking:  # whose few batches may hold no label
            raise UserError(
                "no label token was evaluated: the split is too short, or all its labels are ignored (chats longer "
                "than data.seq_len are cut there)"
            )
        return {f"{stage}/{name}": value for name, value in values.items()}

    # Generation

    def predict_step(self, batch: dict[str, list[Any]], batch_idx: int) -> list[dict[str, Any]]:
        """Completes a batch of prompts.

        Args:
            batch: ``index`` and ``prompt``, lists; a prompt is a text or a list of chat messages.

        Returns:
            One record per prompt: index, prompt, completion, tokens, finish_reason, logprobs.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise UserError(self._no_tokenizer)
        prompts = [tokenizer.encode(p) if isinstance(p, str) else tokenizer.encode_chat(p) for p in batch["prompt"]]
        config = self.generation_config
        if not all(isinstance(p, str) for p in batch["prompt"]):
            config = until_turn_ends(config, self.transformer.config, tokenizer)
        results = generate(self.transformer, prompts, config, tokenizer=tokenizer)
        numbered = zip(batch["index"], batch["prompt"], results, strict=True)
        return [result.record(index, prompt) for index, prompt, result in numbered]

    def _save_hparams(self) -> None:
        """What ``load_from_checkpoint`` passes to ``__init__``, as plain types."""
        model = self._plain_model
        # Built, it is resolved, and needs the pretrained folder no more.
        source, pretrained = (self.config_source, self.pretrained) if model is None else (model.config, None)
        self.save_hyperparameters(
            {
                "config": source.to_dict() if isinstance(source, ModelConfig) else source,
                "vocab_size": self.vocab_size,
                "seq_len": self.seq_len,
                "optimizer": _plain(self.optimizer_config),
                "schedule": _plain(self.schedule_config),
                "generation": _plain(self.generation_config),
                "compile": self.compile_blocks,
                "attention_backend": self.attention_backend,
                "seed": self.seed,
                "guard": _plain(self.guard_config),
                "z_loss": self.z_loss,
                "label_smoothing": self.label_smoothing,
                "activation_checkpointing": self.activation_checkpointing,
                "pretrained": pretrained,
            },
            logger=False,
        )


def _refuse_unshifted(batch: Mapping[str, Any]) -> None:
    """Labels that equal their inputs would teach the model to copy; read on the host, once a run."""
    labels, input_ids = batch["labels"], batch["input_ids"]
    used = labels != -100
    if int(used.sum()) > 1 and bool((labels == input_ids)[used].all()):
        raise UserError(
            "the first batch's labels equal its input_ids (the Hugging Face habit); here labels[t] is the token after "
            "input_ids[t]: shift them in the data"
        )


def _as(kind: type[_Config], value: Any) -> _Config:
    return kind(**(value or {})) if value is None or isinstance(value, Mapping) else value


def _plain(config: Any) -> dict[str, Any]:
    fields = dataclasses.asdict(config)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
