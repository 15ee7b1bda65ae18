"""`StrettoStrategy`: Lightning's loops, callbacks and loggers around a pipeline of Stretto."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device, _init_dist_connection
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor
from torch.optim import Optimizer

from stretto.errors import UsageError
from stretto.lightning.batch_parts import StepExamples, size_of
from stretto.lightning.logged_values import logged_on_step, metrics_alone, replay
from stretto.lightning.pipeline import (
    FinishedMinibatch,
    Pipeline,
    PipelineSettings,
    Processes,
    Snapshot,
    training_modes,
)
from stretto.lightning.refusals import plugin_for, precision_of, refuse_arguments, refuse_optimizers, refuse_training
from stretto.mesh import Mesh
from stretto.methods import Method
from stretto.methods.table import check_written
from stretto.nn.devices import accelerator
from stretto.options.checks import mapping, of_kind, one_of, refuse
from stretto.runtime.group_sockets import made_here
from stretto.runtime.job_member import START, fail
from stretto.runtime.world import choose_interface

LAUNCHED = ("popen", "spawn", "fork")


class StrettoStrategy(ParallelStrategy):
    """Trains a LightningModule's forward in stages: `lightning.Trainer(strategy=StrettoStrategy(...), devices=2)`.

    Each device is a worker of the pipeline, in a process of its own; with devices=1 all workers are emulated, with the
    same numbers to the last bit. Every process reads the same batches.

    Args:
        method: a name, "1f1b(microbatches=8)", or what `stretto.method` returned.
        stages: how many to cut the forward into, or where they begin; as many as workers if it is left out.
        network: the name of the submodule that the steps call, "net" for `self.net(...)`; left out for `self(...)`.
        split: further arguments of `stretto.split`: path, by, tied.
        start_method: how devices get processes: "popen" runs the script again, as Lightning's "ddp" does; "spawn" and
            "fork" suit notebooks. torchrun and SLURM start them themselves.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as Lightning's strategies
            have them; left to its Trainer, as a rule.
        options: further arguments of `stretto.Trainer`: mesh, sync, heads, timeout, seed (that of seed_everything).
    """

    strategy_name = "stretto"

    def __init__(
        self,
        method: str | Method = "1f1b",
        stages: int | Sequence[int] | None = None,
        *,
        network: str = "",
        split: Mapping[str, Any] | None = None,
        start_method: str = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **options: Any,
    ) -> None:
        for name, value, kind in (
            ("accelerator", accelerator, Accelerator),
            ("cluster_environment", cluster_environment, ClusterEnvironment),
            ("checkpoint_io", checkpoint_io, CheckpointIO),
            ("precision_plugin", precision_plugin, Precision),
        ):
            if value is not None:
                of_kind(f"StrettoStrategy: {name}", value, kind, f"one of Lightning's, a {kind.__name__}")
        devices = [] if parallel_devices is None else parallel_devices
        if not isinstance(devices, list) or not all(isinstance(device, torch.device) for device in devices):
            refuse("StrettoStrategy: parallel_devices", devices, "a list of torch.device")
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        refuse_arguments(options)
        of_kind("StrettoStrategy: network", network, str, "the name of a submodule, 'net' for self.net(...)")
        if split is not None:
            mapping("StrettoStrategy: split", split, "a dict of arguments of stretto.split")
            for key in split:
                one_of("StrettoStrategy: split", key, ("path", "by", "tied"))
        one_of("StrettoStrategy: start_method", start_method, LAUNCHED)
        check_written(method)  # refuses a wrong one now; what it stands for may not be pickled, for "spawn"
        self._method, self._stages, self._network = method, stages, network
        self._split, self._options, self._start_method = dict(split or {}), options, start_method
        self.num_nodes = 1
        self._processes: Processes | None = None
        self._pipeline: Pipeline | None = None
        self._group: list[tuple[Any, tuple[Any, ...]]] = []  # batches of a minibatch that is not complete, and the rest
        self._entered_at: dict[int, int] = {}  # Lightning's step of each minibatch under way
        self._resumed: dict[str, Any] | None = None  # what a checkpoint holds beside Lightning's own
        self._snapshot: Snapshot | None = None
        self._finished: tuple[Snapshot, dict[str, Any]] | None = None  # of a fit that is over: all, and the optimizer
        self._modes: dict[torch.nn.Module, bool] = {}
        self._undo: list[Callable[[], object]] = []

    # -- processes --------------------------------------------------------------------------------------------------

    is_distributed = False  # no sampler deals the examples out: every process reads all batches

    @property
    def precision_plugin(self) -> Precision:
        """The plugin that names the precision; stretto.Trainer computes in it."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else plugin_for(precision_plugin)

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """The number of processes of this machine."""
        return len(self.parallel_devices or ())

    def set_world_ranks(self) -> None:
        """Tell the cluster environment this process's rank, and Lightning who is the first."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for each in (rank_zero_only, fabric_rank_zero_only):
            setattr(each, "rank", self.global_rank)  # noqa: B010 - a function's attribute

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.num_processes * self.num_nodes == 1:
            return
        if self._start_method == "popen":
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = _MultiProcessingLauncher(self, start_method=self._start_method)  # type: ignore[arg-type]

    def setup_environment(self) -> None:
        """Join the other processes; all draw the random numbers of rank 0 from here on."""
        super().setup_environment()
        if self.root_device.type not in ("cpu", accelerator()):
            raise UsageError(f"accelerator={self.root_device.type!r}: stages are trained on 'cpu' and 'gpu'")
        self.set_world_ranks()
        if self.world_size > 1:
            assert self.cluster_environment is not None
            choose_interface({"MASTER_ADDR": self.cluster_environment.main_address})
            backend = _get_default_process_group_backend_for_device(self.root_device)
            timeout = timedelta(seconds=max(START, self._options.get("timeout", 600.0)))
            with made_here():  # Lightning's own collectives end with ours
                _init_dist_connection(self.cluster_environment, backend, timeout=timeout)
        if self._processes is None or self._processes.size != self.world_size:
            self._processes = Processes(self.global_rank, self.world_size, self._options.get("timeout", 600.0))
        self._processes.share_generators()

    @property
    def processes(self) -> Processes:
        """The processes of the job; there once the environment is set up."""
        assert self._processes is not None
        return self._processes

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        if self._processes is not None:
            self._processes.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank `src`."""
        return obj if self._processes is None else self._processes.from_first(obj, src)

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """The tensor itself: what Lightning reduces is the same in every process, of the whole batch."""
        return tensor

    def all_gather(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        """The tensor itself: it is of the whole batch already."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all processes have decided so, or any."""
        if self._processes is None:
            return decision
        decisions = self._processes.all_of(bool(decision))
        return False not in decisions if all else True in decisions

    # -- building ---------------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Seed its workers as those of rank 0, where Lightning would seed them by rank: all read the same batches."""
        _auto_add_worker_init_fn(dataloader, rank=0)
        return dataloader

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def setup(self, trainer: pl.Trainer) -> None:
        """Look for what cannot work, give all processes rank 0's weights, and make Lightning's optimizer."""
        module = self.lightning_module
        assert module is not None
        assert self.accelerator is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._finished = None if fitting else self._finished
        if self._layer_sync is not None:
            raise UsageError("sync_batchnorm=True: norms take their statistics from micro-batches; leave it out")
        if fitting:
            refuse_training(trainer, module)
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(module)
        self.processes.share_weights(module)
        self._modes = {part: part.training for part in module.modules()}
        if fitting:
            self.setup_optimizers(trainer)
        module.__dict__["zero_grad"] = _nothing  # gradients belong to the minibatches under way
        self._undo.append(lambda: module.__dict__.pop("zero_grad", None))
        protected = metrics_alone(module)
        protected.__enter__()
        self._undo.append(lambda: protected.__exit__(None, None, None))

    def model_to_device(self) -> None:
        """Do nothing: each process moves its own stages."""

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Make the optimizer and the schedulers that Lightning sees; they step the options of the stages' own."""
        super().setup_optimizers(trainer)
        refuse_optimizers(self.optimizers)
        self.optimizers[0].__dict__["zero_grad"] = _nothing

    def _built(self, example: StepExamples) -> Pipeline:
        # The pipeline, built for the first batch: its tensors are the example that the forward is cut with.
        if self._pipeline is not None:
            return self._pipeline
        module, trainer = self.lightning_module, self._trainer
        assert module is not None
        options = {"seed": int(os.environ.get("PL_GLOBAL_SEED", "0")), **self._options}
        mesh = options.get("mesh") or Mesh()
        clip = trainer.gradient_clip_val
        settings = PipelineSettings(
            method=self._method,
            stages=mesh.pipeline(self.world_size) if self._stages is None else self._stages,
            network=self._network,
            split=self._split,
            clip=float(clip) if clip else None,
            options={**options, "precision": precision_of(str(self.precision_plugin.precision))},
            device=self.root_device,
        )
        fitting = trainer.state.fn == TrainerFn.FITTING  # after a fit, its optimizer is still there
        reference = self.optimizers[0] if fitting and self.optimizers else None
        with torch.inference_mode(False), torch.enable_grad(), training_modes(module, self._modes):
            self._pipeline = Pipeline(module, settings, self.processes, reference, example)
        if reference is not None:
            rank_zero_info(f"{self._pipeline.trainer}\n{self._pipeline.network.stages.explanation}")
        if self._resumed is not None and reference is not None:
            self._resume(self._pipeline, self._resumed)
        self._resumed = None
        return self._pipeline

    def _resume(self, pipeline: Pipeline, saved: dict[str, Any]) -> None:
        mine = {"method": str(pipeline.trainer.method), "num_stages": len(pipeline.trainer.stages)}
        others = {key: saved.get(key) for key, value in mine.items() if saved.get(key) != value}
        if others:
            advice, exactly = pipeline.trainer.method.advice, ""
            if advice is not None and "method" in others:
                exactly = (
                    f". {advice.asked!r} stood for another method: give method={others['method']!r} to go on exactly"
                )
            rank_zero_info(
                f"The checkpoint was trained with {others}, this is {mine}: it goes on with the weights and the state "
                f"of the optimizer alone{exactly}"
            )
        else:
            pipeline.trainer.load_state_dict(saved)

    # -- steps ------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a minibatch, once all of its batches are here; returns the loss that is known by then, else nan."""
        batch, *arguments = (*args, *kwargs.values())
        trainer = self._trainer
        self._group.append((batch, tuple(arguments)))
        if trainer.fit_loop._should_accumulate():
            return torch.tensor(math.nan)
        group, self._group = self._group, []
        with self.precision_plugin.train_step_context():
            example = StepExamples("training_step", 0, group[0][0], [group[0][1]], size=size_of(group[0][0]))
            pipeline = self._built(example)
            number = pipeline.trainer.entered
            self._entered_at[number] = trainer.fit_loop.epoch_loop._batches_that_stepped
            batches, given = zip(*group, strict=True)
            steps = pipeline.step(batches, given, trainer.accumulate_grad_batches)
            if pipeline.trainer.lag and self._is_last_of_epoch:
                steps += pipeline.flush()
        return self._told(steps, number, pipeline.trainer.lag)

    @property
    def _is_last_of_epoch(self) -> bool:
        loop = self._trainer.fit_loop.epoch_loop
        return loop._num_ready_batches_reached() or 0 <= loop.max_steps <= loop.global_step + 1

    def _told(self, steps: Sequence[FinishedMinibatch], number: int, lag: int) -> Any:
        # Logs what is known now, as training_step did where the loss is.
        module = self.lightning_module
        assert module is not None
        returned: Any = torch.tensor(math.nan)
        for step in steps:
            for record in step.records:
                replay(module, record, current=step.number == number and len(step.records) == 1)
                returned = {"loss": record.loss, **record.returned} if record.returned else record.loss
            entered_at = self._entered_at.pop(step.number, None)
            if lag and entered_at is not None:
                module.log("step", float(entered_at), on_step=True, on_epoch=False, logger=True)
                if step is not steps[-1]:  # several in one batch, at an epoch's end: Lightning would write the last one
                    self._write(entered_at + lag)
        return returned

    def _write(self, step: int) -> None:
        # Gives loggers what was logged, if they are to have it where Lightning is at this step.
        every: int = getattr(self._trainer, "log_every_n_steps")  # noqa: B009 - set by a connector
        if every and (step + 1) % every == 0:
            self._trainer._logger_connector.log_metrics(self._trainer._logger_connector.metrics["log"])

    def _write_late(self, step: FinishedMinibatch) -> None:
        # Gives loggers what a step has logged that was under way when training stopped in the middle of an epoch.
        entered_at = self._entered_at.pop(step.number, None)
        every: int = getattr(self._trainer, "log_every_n_steps")  # noqa: B009 - set by a connector
        if entered_at is None or not every or (entered_at + 1) % every:
            return
        for record in step.records:
            self._trainer._logger_connector.log_metrics(logged_on_step(record), step=entered_at)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Call the hooks around a backward, which the pipeline has run."""
        assert self.lightning_module is not None
        self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the minibatch, in which the stages' optimizers step; the one that Lightning sees does not."""
        result = closure()
        assert self.lightning_module is not None
        self.precision_plugin._after_closure(self.lightning_module, optimizer)
        optimizer._opt_called = True  # type: ignore[attr-defined] # a scheduler looks whether it has stepped
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch: what the step returns, on every process."""
        return self._evaluated("validation_step", *args, *kwargs.values())

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Test on a batch: what the step returns, on every process."""
        return self._evaluated("test_step", *args, *kwargs.values())

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict for a batch: what the step returns, on every process."""
        return self._evaluated("predict_step", *args, *kwargs.values())

    def _evaluated(self, kind: str, batch: Any, *arguments: Any) -> Any:
        assert self.lightning_module is not None
        with self.precision_plugin.forward_context():
            pipeline = self._built(StepExamples(kind, 0, batch, [arguments], size=size_of(batch)))
            record = pipeline.evaluate(kind, batch, arguments)
        replay(self.lightning_module, record, current=True)
        return record.returned

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's weights, whole on rank 0. A collective."""
        assert self.lightning_module is not None
        if self._pipeline is None:
            return self.lightning_module.state_dict()
        self._snapshot = self._pipeline.snapshot()
        if self._snapshot is None:
            return self.lightning_module.state_dict()
        return self._pipeline.named(self._snapshot)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of all stages' optimizers as that of one; called after `lightning_module_state_dict`."""
        if self._finished is not None:
            return self._finished[1]
        if self._pipeline is None or self._snapshot is None or self._pipeline.optimizers is None:
            return super().optimizer_state(optimizer)
        state: dict[str, Any] = self._pipeline.optimizers.whole_state(
            self._snapshot.optimizer_states(), self._snapshot.numbers
        )
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint of Lightning, which also holds what the method needs to go on to the last bit."""
        snapshot = self._snapshot if self._finished is None else self._finished[0]
        if snapshot is not None and "optimizer_states" in checkpoint:
            checkpoint["stretto"] = snapshot.state
        self._snapshot = None
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *given: Any, **named: Any) -> dict[str, Any]:
        """Read a checkpoint, with or without Stretto's own part. (Lightning 2.6 also gives weights_only.)"""
        checkpoint = super().load_checkpoint(checkpoint_path, *given, **named)
        self._resumed = checkpoint.pop("stretto", None)
        return checkpoint

    # -- ends -------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other processes, which may wait for this one, if it ends. (Tuners end trials by other errors.)"""
        super().on_exception(exception)
        if isinstance(exception, SystemExit):
            fail(exception)

    def on_train_end(self) -> None:
        """Finish what is in flight, and give the module its trained weights, in every process."""
        if self._pipeline is not None:
            for step in self._pipeline.flush():
                self._write_late(step)
            snapshot, optimizers = self._pipeline.snapshot(), self._pipeline.optimizers
            if snapshot is not None and optimizers is not None:  # for checkpoints that are saved after the fit
                self._finished = snapshot, optimizers.whole_state(snapshot.optimizer_states(), snapshot.numbers)
            self._pipeline.finish()

    def teardown(self) -> None:
        """Forget the pipeline."""
        while self._undo:
            self._undo.pop()()
        self._pipeline, self._snapshot, self._resumed, self._group = None, None, None, []
        self._entered_at.clear()
        self._modes = {}
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register "stretto", "stretto_spawn" and "stretto_fork"."""
        for start_method in LAUNCHED:
            name = cls.strategy_name if start_method == "popen" else f"{cls.strategy_name}_{start_method}"
            strategy_registry.register(
                name, cls, description=f"Stretto's pipelines, processes by {start_method}", start_method=start_method
            )


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for zero_grad."""


StrettoStrategy.register_strategies(StrategyRegistry)
