"""MeshStrategy: FSDP and hybrid sharding under Lightning, on a mesh of processes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lit_llm.errors import UserError
from lit_llm.model import Transformer
from lit_llm.parallel.checkpointing import ShardedCheckpoints
from lit_llm.parallel.mesh import MeshSizes, Size, build_mesh, data_place, resolve_sizes, sharding_mesh
from lit_llm.parallel.parallelize import Sharding, check_reshard
from lit_llm.parallel.report import describe_memory
from lit_llm.parallel.split import check_optimizer, split_module

_COMPUTE_DTYPES = {"bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class MeshStrategy(ShardedCheckpoints, ModelParallelStrategy):
    """Trains one model on a mesh of processes, with the numbers that one process would give.

    The sizes' product is the number of processes, and one of them may be ``auto``. ``shard`` splits parameters,
    gradients and optimizer state (FSDP); ``replicate`` x ``shard`` does so within groups and averages the gradients
    over the groups (hybrid sharding), which keeps the gathers inside a machine. Works with LitLLM and its subclasses:
    what ``configure_model`` has built is split, unless it has been already. It runs on CPUs (gloo) and GPUs (NCCL).

    Args:
        replicate: groups that each hold the whole model.
        shard: processes over which a group splits it.
        tensor: of tensor parallelism; 1 for now.
        context: of context parallelism; 1 for now.
        reshard_after_forward: see :class:`lit_llm.parallel.Sharding`.
        prefetch: blocks that are gathered ahead, in forward and in backward; each costs the memory of one.
        reduce_every_micro_batch: with accumulation, reduce and split gradients after each micro-batch, where otherwise
            the whole model's gradients stay on each process until the step; communicates more, needs less memory.
        cpu_offload: keep parameters, gradients and optimizer state in the CPU's memory, and step there.
        save_distributed_checkpoint: a checkpoint is a folder to which each process writes its part; false: one file,
            as one process would write it, gathered by rank 0.
        process_group_backend: gloo, nccl, ...; None: by the device.
        timeout: after which a collective that some process does not join fails.

    Raises:
        UserError: sizes that do not fit the number of processes or each other, when the Trainer is built.
    """

    def __init__(
        self,
        replicate: Size = 1,
        shard: Size = "auto",
        tensor: Size = 1,
        context: Size = 1,
        reshard_after_forward: bool | int = True,
        prefetch: int = 1,
        reduce_every_micro_batch: bool = False,
        cpu_offload: bool = False,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._asked: dict[str, Size] = {"replicate": replicate, "shard": shard, "context": context, "tensor": tensor}
        self._reshard_after_forward = reshard_after_forward
        self._prefetch = prefetch
        self._reduce_every_micro_batch = reduce_every_micro_batch
        self._cpu_offload = cpu_offload
        self.sizes = MeshSizes()
        """Known once the Trainer is built."""

    # The processes

    def _configure_launcher(self) -> None:
        """Called as the Trainer is built, before any process is started: where sizes that do not fit are refused."""
        for name in ("tensor", "context"):
            if self._asked[name] != 1:
                raise UserError(
                    f"trainer.strategy.{name} {self._asked[name]} is not there yet; leave it 1 and use "
                    "trainer.strategy.shard"
                )
        if self._prefetch < 0:
            raise UserError(f"trainer.strategy.prefetch must be 0 or more; got {self._prefetch}")
        self.sizes = resolve_sizes(self.num_nodes * self.num_processes, **self._asked)
        self._reshard_after_forward = check_reshard(self._reshard_after_forward, self.sizes.shard)
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Joins the processes, and lays them out."""
        self._setup_distributed()
        if self._device_mesh is None:
            self._device_mesh = build_mesh(self.root_device.type, self.sizes)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is None and self._cpu_offload and self.root_device.type == "cuda":
            return "cpu:gloo,cuda:nccl"  # norms of gradients that lie on the CPU are added up there
        return super()._get_process_group_backend()

    def barrier(self, name: str | None = None) -> None:
        """Waits for all processes."""
        if torch.distributed.is_initialized():
            on_gpu = self.root_device.type == "cuda"
            torch.distributed.barrier(device_ids=[self.root_device.index] if on_gpu else None)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of processes that see different rows, and this one's place among them."""
        return {"num_replicas": self.sizes.data, "rank": data_place(self.device_mesh, self.sizes)}

    @property
    def shard_group(self) -> torch.distributed.ProcessGroup:
        """The processes that gather parameters together."""
        return self.device_mesh.get_group("shard")

    # The model

    @property
    def shards(self) -> bool:
        """Whether there is anything to split or to average; one process alone is left as it is."""
        return self.sizes.world_size > 1 or self._cpu_offload

    def sharding(self) -> Sharding | None:
        """How a model is split; None: not at all."""
        if not self.shards:
            return None
        return Sharding(
            mesh=sharding_mesh(self.device_mesh, self.sizes),
            reshard_after_forward=self._reshard_after_forward,
            prefetch=self._prefetch,
            compute_dtype=_COMPUTE_DTYPES.get(str(self.precision_plugin.precision)),
            cpu_offload=self._cpu_offload,
            pin_memory=self.root_device.type == "cuda",
        )

    @property
    def storage_device(self) -> torch.device:
        """Where parameters lie between their uses."""
        return torch.device("cpu") if self._cpu_offload else self.root_device

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None]:
        """As other strategies': LitLLM.configure_model itself builds without memory where the model will be split."""
        with self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: Any) -> None:
        """Splits what ``configure_model`` has built and not split yet, and makes the optimizers."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        if (sharding := self.sharding()) is not None:
            split_module(self.model, sharding, self.root_device)
            self._set_compute_device(self.model)
        if not self._cpu_offload:
            self.model_to_device()
        # DTensor has no inference mode.
        for loop in (
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ):
            loop.inference_mode = False
        self.barrier()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers if self.shards else ():
                check_optimizer(optimizer, self.model, self.sizes.shard)
        self.setup_precision_plugin()
        if fitting:
            rank_zero_info(f"mesh: {self.sizes}; {describe_memory(self.model)}{self._what_waits(trainer)}")

    def _what_waits(self, trainer: Any) -> str:
        """On gradients that are not split until the step, which for a large model may be most of the memory."""
        if trainer.accumulate_grad_batches == 1 or self._reduce_every_micro_batch or self.sizes.shard == 1:
            return ""
        assert self.model is not None
        whole = sum(4 * p.numel() for p in self.model.parameters() if p.requires_grad) / 2**20
        return f"; {whole:,.1f} MiB of gradients between micro-batches (less by reduce_every_micro_batch)"

    def _set_compute_device(self, module: nn.Module) -> None:
        if self._cpu_offload:
            for part in module.modules():
                if isinstance(part, Transformer):
                    part.compute_device = self.root_device

    # Training

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Within it, backward adds to the gradients without any communication."""
        self._communicate(False)
        try:
            yield
        finally:
            self._communicate(True)

    def _communicate(self, enabled: bool) -> None:
        from torch.distributed.fsdp import FSDPModule

        assert self.lightning_module is not None
        for part in self.lightning_module.modules():
            if isinstance(part, FSDPModule):
                if self._reduce_every_micro_batch:
                    part.set_requires_all_reduce(enabled, recurse=False)
                else:
                    part.set_requires_gradient_sync(enabled, recurse=False)
