"""`StrettoTrainer`: transformers' Trainer whose steps are those of a stretto.Trainer."""

import inspect
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import EvalLoopOutput, SaveStrategy, has_length

from stretto.errors import UsageError
from stretto.losses import Loss
from stretto.mesh import Mesh
from stretto.methods import Method
from stretto.methods import method as find_method
from stretto.methods.table import check_written, is_advised, with_microbatches
from stretto.nn.preserve import python_generators_restored
from stretto.nn.seeding import PreservedGenerator
from stretto.optim.from_function import NamedOptimizer
from stretto.options.checks import positive
from stretto.runtime import membership
from stretto.splitting import Stages
from stretto.trainer.host import cut_of
from stretto.trainer.trainer import Trainer as PipelineTrainer
from stretto.transformers.arguments import (
    as_first,
    defaults,
    parted_options,
    refuse_adapters,
    refuse_arguments,
    refuse_overridden,
    show_one_process,
)
from stretto.transformers.late_logs import LateLog, LateLogs
from stretto.transformers.minibatch import Inputs, Padding, tensors_of
from stretto.transformers.model_loss import OfTrainer, Outputs, divided_loss, own_loss, refuse_another, trial
from stretto.transformers.pipeline import COMPARED, Pipeline, PipelineSettings, has_training, last_whole
from stretto.transformers.stage_optimizers import HuggingFaceOptimizers, ShownOptimizer, scheduler_like

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
NEVER_CALLED = {
    "compute_loss": "the loss is computed where the last stage is; give compute_loss_func=",
    "get_batch_samples": "give another data collator, or override get_train_dataloader",
    "create_optimizer_and_scheduler": "override create_optimizer and create_scheduler",
    "compute_loss_context_manager": "stages compute in the precision of TrainingArguments(bf16=True)",
    "autocast_smart_context_manager": "stages compute in the precision of TrainingArguments(bf16=True)",
}
SCHEDULER = "scheduler.pt"


class StrettoTrainer(Trainer):
    """transformers.Trainer, trained by a Stretto method on one process, or on several (torchrun, SLURM).

    Args:
        model, args, ...: as transformers.Trainer takes them.
        method: a method's name, "1f1b", "pb", "chunked(chunks=2)", "async", or what stretto.method returned.
        stages: into how many the model is cut; or where stages begin, [0, 2, 4]; or what stretto.split returned. By
            default one for each worker of the pipeline, and two on one process, which emulates two workers.
        options: further arguments of transformers.Trainer, and of stretto.Trainer: mesh, sync, precision, heads,
            workers, device, seed, timeout.

    The batches of gradient_accumulation_steps are one minibatch, and as many micro-batches where the method takes
    `microbatches` and was not given it. Every process reads all batches; with mesh=Mesh(data=R) each minibatch is
    divided among R replicas. Losses are counted by tokens over the whole minibatch.

    `pipeline.trainer` is the stretto.Trainer, `pipeline.stages` the cut, once there has been a batch to cut with.

    Raises UsageError for what cannot work, before anything is trained.
    """

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        method: str | Method = "1f1b",
        stages: int | list[int] | Stages | None = None,
        **options: Any,
    ) -> None:
        args = TrainingArguments("tmp_trainer") if args is None else args
        given, own = parted_options(options)
        refuse_arguments(args)
        refuse_overridden(self, Trainer, NEVER_CALLED)
        refuse_adapters(model)
        positive("StrettoTrainer: timeout", own.get("timeout", 600))
        member = membership(own.get("timeout", 600))
        self._rank, self._local_rank = (member.world.rank, member.world.local_rank) if member is not None else (0, 0)
        self._is_alone = member is None
        show_one_process(args, self._rank, self._local_rank)
        config: Any = args.accelerator_config
        if config.dispatch_batches is None:
            config.dispatch_batches = False  # would read an IterableDataset on rank 0 alone
        check_written(method)
        chosen = method if is_advised(method) else find_method(method)
        if isinstance(chosen, Method) and args.gradient_accumulation_steps > 1:
            chosen = with_microbatches(chosen, args.gradient_accumulation_steps)
        if stages is None:
            mesh = own.get("mesh")
            stages = 2 if member is None else (mesh if isinstance(mesh, Mesh) else Mesh()).pipeline(member.world.size)
        self._chosen = chosen, stages, {**defaults(args), **own}
        self.pipeline: Pipeline | None = None
        self._batches: list[Inputs] = []
        self._late = LateLogs()
        self._optimizers: HuggingFaceOptimizers | None = None
        super().__init__(model, args, *positional, **given)
        self._given_scheduler = None if self.lr_scheduler is None else scheduler_like(self.lr_scheduler)

    # -- the pipeline -----------------------------------------------------------------------------------------------

    def _piped(self, example: Mapping[str, Any] | None = None) -> Pipeline:
        """The pipeline of the present model, cut with this batch if there is none yet."""
        show_one_process(self.args, self._rank, self._local_rank)
        if self.pipeline is None or self.pipeline.owner is not self.model:
            if example is None:
                raise UsageError("there has been no batch to cut the model with")
            method, stages, options = self._chosen
            settings = PipelineSettings(
                method=method,
                stages=stages,
                options=options,
                padding=self._padding(),
                label_names=tuple(self.label_names),
            )
            self.pipeline, self._optimizers = Pipeline(self._whole, settings, tensors_of(example)), None
        if example is not None:
            self.pipeline.learn_loss(tensors_of(example), self._find_loss)
        return self.pipeline

    @property
    def _whole(self) -> nn.Module:
        assert self.model is not None, "transformers refuses None"
        return self.model

    def _padding(self) -> Padding:
        reader = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        config = getattr(self.model, "config", None)
        tokens = [getattr(each, "pad_token_id", None) for each in (reader, config)]
        token = next((token for token in tokens if token is not None), 0)
        left = getattr(reader, "padding_side", "right") == "left"
        return Padding(token=token, left=left, encoder_decoder=bool(getattr(config, "is_encoder_decoder", False)))

    def _find_loss(self, model: nn.Module, inputs: Inputs, labels: Inputs, outputs: Outputs) -> Loss:
        if self.compute_loss_func is not None:
            with trial(model):
                given = model(**inputs)
            function, shifts = self.compute_loss_func, self._counts_without_first
            return divided_loss(outputs, function, labels, given, shifts=shifts)
        if self.label_smoother is not None and "labels" in labels:
            shifts = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            options = {"shift_labels": True} if shifts else {}
            divides = "num_items_in_batch" in inspect.signature(self.label_smoother.__call__).parameters
            return OfTrainer(outputs, self.label_smoother, shifts, options, divides)
        shifts, takes_count = self._counts_without_first, self.model_accepts_loss_kwargs
        return own_loss(model, inputs, labels, shifts=shifts, takes_count=takes_count)

    @property
    def _counts_without_first(self) -> bool:
        # Whether transformers leaves the first label of each text out of num_items_in_batch; older versions never do.
        return bool(getattr(self, "_loss_shifts_labels", False))

    def _compare_loss(self, model: nn.Module, inputs: Inputs, labels: Inputs) -> None:
        # The model's own loss with the one that replaces it.
        if self.compute_loss_func is None and (self.label_smoother is None or "labels" not in labels):
            loss = None if self.pipeline is None else self.pipeline.loss
            assert loss is not None, "it was found on the first batch"
            refuse_another(model, loss, inputs, labels, takes_count=self.model_accepts_loss_kwargs)

    def _first_batches(self) -> list[Inputs]:
        """The first batches of the training data; the random numbers of the first epoch are left alone."""
        with PreservedGenerator(torch.device("cpu")), python_generators_restored():
            loader = self.get_train_dataloader()
            batches = list(itertools.islice(loader, COMPARED))
        end = getattr(loader, "end", None)
        if callable(end):  # accelerate counts the loaders that are read
            end()
        if not batches:
            raise UsageError("train_dataset has no examples")
        return [self._completed(batch) for batch in batches]

    def _completed(self, inputs: Mapping[str, Any]) -> Inputs:
        """A collator's batch with the decoder's inputs, which the model would make of the labels."""
        tensors = tensors_of(self._prepare_inputs(dict(inputs)))
        make = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        encoder_decoder = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        if encoder_decoder and make is not None and "labels" in tensors and "decoder_input_ids" not in tensors:
            labels = tensors.pop("labels")
            tensors = {**tensors, "decoder_input_ids": make(labels=labels), "labels": labels}
        return tensors

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: each stage moves to its own process's device."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: DataLoader[Any] | None = None) -> Any:
        return OutsideModel(self._whole)

    # -- data -------------------------------------------------------------------------------------------------------

    def _get_dataloader(self, *args: Any, **options: Any) -> DataLoader[Any]:
        show_one_process(self.args, self._rank, self._local_rank)
        with as_first(self.args):
            return super()._get_dataloader(*args, **options)

    # -- training ---------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """As transformers.Trainer.train; True goes on from the newest checkpoint that is whole.

        On several processes rank 0's `model` holds all trained weights afterwards, the others' only their own stages'.
        """
        show_one_process(self.args, self._rank, self._local_rank)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole(str(self.args.output_dir))
        output = super().train(resume_from_checkpoint, *args, **options)
        self._complete_model()
        return output

    def hyperparameter_search(self, *args: Any, **options: Any) -> Any:
        """As transformers' own, on one process."""
        if not self._is_alone:
            raise UsageError("hyperparameter_search draws trials on one process: start one, which emulates the others")
        return super().hyperparameter_search(*args, **options)

    def _complete_model(self) -> None:
        """Give rank 0's model the weights of the other processes' stages."""
        if self._is_alone or self.pipeline is None or self.pipeline.ready().sync.sharding is not None:
            return
        state = self.pipeline.model_state()
        if state is not None:
            self._whole.load_state_dict(state, strict=False)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader[Any], resume_from_checkpoint: str | None
    ) -> tuple[Any, DataLoader[Any]]:
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        batches = self._first_batches()
        example = batches[0]
        pipeline = self._piped(example)
        if pipeline.loss is None:
            raise UsageError(
                f"the training batches have no labels ({', '.join(self.label_names)}): {', '.join(example)}"
            )
        for batch in batches:
            pipeline.compare_loss(batch, self._compare_loss)
        whole = self._whole_optimizer(pipeline)
        assert self._optimizers is not None
        if not pipeline.is_idle:
            self._optimizers.keep(pipeline.ready().optimizers)
        self.optimizer = ShownOptimizer(whole)
        trainer = pipeline.begin(
            NamedOptimizer(self._optimizers),
            lambda optimizer: self._stage_scheduler(optimizer, max_steps),
            self.args.max_grad_norm or float("inf"),
            example,
        )
        self._refuse_small_minibatch(trainer, train_dataloader, max_steps)
        if self._given_scheduler is not None:
            self.lr_scheduler = self._given_scheduler(self.optimizer)
        self.create_scheduler(num_training_steps=max_steps, optimizer=self.optimizer)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        self._batches = []
        self._offset = self.state.global_step - trainer.entered
        self._late = LateLogs(first=self.state.global_step)
        return OutsideModel(self._whole), train_dataloader

    def _refuse_small_minibatch(self, trainer: PipelineTrainer, loader: DataLoader[Any], max_steps: int) -> None:
        """Raise UsageError if a minibatch has too few examples for all micro-batches: any, or the last of an epoch."""
        rebalanced = self.args.train_sampling_strategy == "batch_rebalance"  # batches of sizes of its own
        size = self._train_batch_size * self.args.gradient_accumulation_steps
        cut = cut_of(trainer)
        which, examples, remedy = "a minibatch", size, "a larger per_device_train_batch_size"
        if size >= cut.parts and has_length(self.train_dataset) and not self.args.dataloader_drop_last:
            total = self.num_examples(loader)
            if total % size and max_steps > total // size:
                which, examples = "the last minibatch of an epoch", total % size
                remedy = "TrainingArguments(dataloader_drop_last=True)"
        if examples < cut.parts and not rebalanced:
            raise cut.too_few(
                examples,
                f"{which} has {examples} examples, but {trainer.method} on {trainer.mesh.data} replicas cuts it into "
                f"{cut.parts} parts, of at least one each",
                remedy,
            )

    def _whole_optimizer(self, pipeline: Pipeline) -> torch.optim.Optimizer:
        """The optimizer of the whole model, as transformers or the user makes it, and what makes those of stages."""
        if isinstance(self.optimizer, ShownOptimizer):
            self.optimizer = self.optimizer.whole
        whole = self.create_optimizer()
        if self._optimizers is None:
            self._optimizers = HuggingFaceOptimizers(whole, pipeline.model, pipeline.stages.first_name_in_model)
        return whole

    def _stage_scheduler(self, optimizer: torch.optim.Optimizer, max_steps: int) -> Any:
        if self._given_scheduler is not None:
            return self._given_scheduler(optimizer)
        shown, self.lr_scheduler = self.lr_scheduler, None
        made = self.create_scheduler(num_training_steps=max_steps, optimizer=optimizer)
        self.lr_scheduler = shown
        return made

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        self._batches = []
        with self._piped().ready().backend.abort_all_on_error():
            super()._run_epoch(*args, **options)  # type: ignore[no-untyped-call]

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Keep a batch; with the last one of gradient_accumulation_steps, train on all of them as one minibatch.

        Returns that minibatch's loss, 0 for the batches before it. Under asynchronous methods always 0: their losses
        come later, and are logged under their own steps.
        """
        if self._tr_loss.dtype != torch.float64:
            self._tr_loss = self._tr_loss.to("cpu", torch.float64)
        self._batches.append(self._completed(inputs))
        self._piped().compare_loss(self._batches[-1], self._compare_loss)
        if not self.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), dtype=torch.float64)
        batches, self._batches = self._batches, []
        pipeline = self._piped()
        loss = pipeline.step(batches)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        trainer = pipeline.ready()
        if trainer.lag:
            if loss is not None:
                self._late.know(self._offset + trainer.entered - 1 - trainer.lag, loss)
            loss = 0.0  # for transformers' sum
        assert loss is not None, "a synchronous method knows its loss"
        return torch.tensor(loss, dtype=torch.float64)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Do nothing: the stages have clipped."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float | None:
        return None  # asked of all processes only where it is logged

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *args: Any, **options: Any) -> None:
        trainer = self._piped().ready()
        self._agree(trainer)
        logs = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        if logs:
            grad_norm = self._piped().grad_norm()
        if trainer.lag:
            self._log_late(trainer, options.get("learning_rate"), grad_norm, wants=logs)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **options)
        self._agree(trainer)  # on what callbacks of these events have decided

    def _agree(self, trainer: PipelineTrainer) -> None:
        """What a callback of one process wants (to stop, save, evaluate or log) all of them do.

        Processes of an asynchronous method are not stopped for that: their callbacks have to decide alike.
        """
        if trainer.processes > 1 and not trainer.lag:
            with trainer.backend.abort_all_on_error():
                wanted = trainer.backend.all_reduce_max([getattr(self.control, flag) for flag in FLAGS])
            for flag, value in zip(FLAGS, wanted, strict=True):
                setattr(self.control, flag, bool(value))

    # -- logs of asynchronous methods -------------------------------------------------------------------------------

    def _log_late(self, trainer: PipelineTrainer, rate: float | None, grad_norm: float | None, *, wants: bool) -> None:
        if wants:
            norm = {} if grad_norm is None else {"grad_norm": grad_norm}
            values: dict[str, float] = {**norm, "learning_rate": self._get_learning_rate() if rate is None else rate}
            self._late.wait(self.state.global_step, self.state.epoch, values)
            self._globalstep_last_logged = self.state.global_step
            self.store_flos()
        self.control.should_log = False
        saves = self.control.should_save or (
            self.args.save_strategy == SaveStrategy.BEST and self.control.should_evaluate
        )
        if saves or self.control.should_training_stop:
            self._flush(trainer)
        for entry in self._late.ready():
            self._log_entry(entry)

    def _flush(self, trainer: PipelineTrainer) -> None:
        losses = trainer.flush()
        for step, loss in enumerate(losses, start=self._offset + trainer.entered - len(losses)):
            self._late.know(step, loss)

    def _log_entry(self, entry: LateLog) -> None:
        now: Any = self.state
        step, epoch = now.global_step, now.epoch
        now.global_step, now.epoch = entry.step, entry.epoch
        self.log(entry.values)
        now.global_step, now.epoch = step, epoch

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        trainer = self._piped().ready()
        if trainer.lag:
            self._flush(trainer)
            for entry in self._late.ready():
                self._log_entry(entry)
            self._total_loss_scalar, self._tr_loss = self._late.total, torch.tensor(self._late.rest())
        return super()._finalize_training(*args, **options)  # type: ignore[no-untyped-call]

    # -- evaluation -------------------------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **options: Any) -> EvalLoopOutput:
        """As transformers' own. Predictions are on rank 0, None elsewhere; the metrics of rank 0 on every process."""
        show_one_process(self.args, self._rank, self._local_rank)
        if self._is_alone:
            return super().evaluation_loop(*args, **options)
        member = membership()
        assert member is not None
        with member.abort_all_on_error():
            output = super().evaluation_loop(*args, **options)
            metrics = self._piped().ready().backend.broadcast(output.metrics)
        return output._replace(metrics=metrics)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """The loss, the outputs and the labels of a batch; the outputs, and the loss if they are wanted, on rank 0."""
        batch = self._completed(inputs)
        pipeline = self._piped(batch)
        has_labels = bool(self.label_names) and all(name in batch for name in self.label_names)
        if prediction_loss_only:
            return pipeline.mean_loss(batch) if has_labels else None, None, None
        labels: Any = None
        if has_labels:
            padded = pipeline.join([batch])
            of_batch = tuple(padded[name].cpu() for name in self.label_names)
            labels = of_batch[0] if len(of_batch) == 1 else of_batch
        predicted = pipeline.predict(batch)
        if predicted is None:
            return None, None, labels
        loss, named = predicted
        ignored = self._ignored() if ignore_keys is None else ignore_keys
        logits = tuple(value for name, value in named.items() if name not in ignored)
        return loss if has_labels else None, logits[0] if len(logits) == 1 else logits, labels

    def _ignored(self) -> list[str]:
        return list(getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", ["past_key_values"]))

    # -- saving -----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder that from_pretrained reads: each process sends its stages to rank 0. On every process."""
        output_dir = self.args.output_dir if output_dir is None else output_dir
        if self.pipeline is None or self.pipeline.trainer is None:
            self._save(output_dir)
        else:
            with self.pipeline.ready().backend.abort_all_on_error():
                state = self.pipeline.model_state()
                if state is not None:
                    self._save(output_dir, state_dict=state)
                self.pipeline.ready().backend.broadcast(None)  # until then nobody reads it
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._piped().save(output_dir)
        if self.args.should_save:
            shown: Any = self.lr_scheduler
            torch.save(shown.state_dict(), Path(output_dir) / SCHEDULER)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # that of all processes
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not has_training(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not has_training(checkpoint):
            return
        self._piped().load(checkpoint)
        shown: Any = self.lr_scheduler
        shown.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))
        for group, rate in zip(shown.optimizer.param_groups, shown.get_last_lr(), strict=True):
            group["lr"] = rate

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        if has_training(best):
            self._piped().load(best)
        else:
            super()._load_best_model()


class OutsideModel:
    """The model as transformers' loop sees it: its modes and gradients are the stages' own affair."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients under way belong to the stages."""

    def train(self, mode: bool = True) -> "OutsideModel":
        return self

    def eval(self) -> "OutsideModel":
        return self
