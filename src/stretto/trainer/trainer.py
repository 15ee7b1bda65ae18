"""`Trainer`: trains stages with a loss, an optimizer and a method, step by step."""

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Self

import torch
from torch import Tensor, nn

from stretto.checkpoint import Manifest, read_manifest, read_stage
from stretto.errors import StrettoError, UsageError
from stretto.losses import Loss, understand
from stretto.losses.network_reads import network_of, refuse_network_reads
from stretto.mesh import Mesh
from stretto.methods import Method
from stretto.methods.advice import explained, idle_chunks, other_advice
from stretto.nn.batch import Batches, InputBatches
from stretto.nn.chain import Chain
from stretto.nn.group_norm import parted_norms, uses_batch_statistics
from stretto.nn.hooks import refuse_lost_hooks
from stretto.nn.seeding import PreservedGenerator
from stretto.nn.sharded_modules import is_sharded
from stretto.options.checks import function, mapping, of_kind, positive, refuse, whole
from stretto.options.checks import path as check_path
from stretto.replicas import Order, Sync
from stretto.replicas import find as find_sync
from stretto.replicas.sync_options import refuse_other
from stretto.runtime.process_memory import most_held
from stretto.stage.interpreter import Interpreter
from stretto.stage.precision import Precision
from stretto.stage.trainer_arguments import Specification, StageLike, check_kinds, check_mesh, check_number
from stretto.system.destinations import check_folder
from stretto.tracing import Recording
from stretto.tracing.recording import PAUSE
from stretto.trainer.backend import State
from stretto.trainer.build import Construction, chosen_method, refuse_hidden_norms
from stretto.trainer.changes import SetByHand, settled
from stretto.trainer.evaluate import named_metrics
from stretto.trainer.feed import Needs, cut_rows, digest_of_batch, paired
from stretto.trainer.fit import Callback, FitArguments, FitLoop, Log
from stretto.trainer.history import EarlyStop, History
from stretto.trainer.row_check import RowCheck
from stretto.trainer.tracking import bubble_of
from stretto.trainer.weight_files import NAMES, write_index, write_part
from stretto.trainer.weight_observer import Observer

Batch = Any  # stretto.nn.batch.FORMS
SAME_BATCHES = (
    "Every process gives step the same batches, whole, or None for what it does not read: do not divide data by rank, "
    "and seed what shuffles or changes them alike"
)


class Trainer:
    """Trains `stages`, one module after the other, with any method, on one device.

    Args:
        stages: one nn.Module per stage, in order, or a function that builds it (seeded by `seed` and the stage's index
            alone). Modules are trained in place, in the modes (training, evaluation) that they have. A stage that
            returns a tuple hands its members to the next stage as arguments. One may be compiled,
            `torch.compile(stage)`, but not where a method's backward sees other weights than its forward; `_orig_mod.`
            is then part of its keys, in `model`, `gather` and checkpoints.
        loss: (output, target) -> mean loss over the examples of a batch, or (sum, count): a sum over the entries that
            count (tokens that are not padding, say) and their number. The gradient is then that of the whole
            minibatch's sum over its count, however it is cut. Every auxiliary head uses it too. torch's cross_entropy,
            as a function or a module, is used with its sum and count. A mean that is not over examples is refused where
            minibatches are cut into micro-batches or among replicas, unless `stretto.mean(loss)` says that it is. An
            nn.Module with parameters is trained with the last stage.
        optimizer: called once a stage with the parameters of the stage and its head. Stages without trainable
            parameters have none.
        method: a name, "chunked(chunks=4)", or what `stretto.method` returned. "async" and "local" are settled here, by
            the optimizer and the number of stages: what was first at a loss by simulated time in this package's
            studies, or 1f1b (`stretto.advised`; where stages have batch norms, methods that cut minibatches are left
            out). Unless `optimizer` is a class, it is called once more for that, for the parameters of one stage.
            `method` tells for what they stand. Checkpoints keep that: where the advice has changed since, `load` says
            what to name.
        example: one input batch, as `step` takes them. From it come the shapes that auxiliary heads need, and the check
            that the stages fit each other. May be left out if no heads are needed, if all are given, or if every stage
            begins and ends in a Linear.
        heads: None to build them as the method says; or one entry a stage: a module, or None to have it built.
            A module that is a stretto.LocalLoss makes its own loss, of the model's inputs, too: x is then also read in
            its process. The last stage's output is the model's output: its entry is None.
        scheduler: optimizer -> learning-rate scheduler, stepped at each update of its stage.
        clip: the largest norm that the gradients of all stages together may have; they are shrunk to it. Exact for
            synchronous methods, as torch.nn.utils.clip_grad_norm_ over the whole model. Where stages update at
            different times, each is limited to clip / sqrt(number of stages), which keeps all of them within clip.
        workers: how many workers the schedule is laid out for; one a stage unless said otherwise. It changes costs,
            never numbers.
        device: "auto" takes an accelerator (a GPU) if there is one, else the CPU.
        seed: decides the weights of auxiliary heads and of stages given as functions, and all random numbers that
            stages draw in training (dropout). These depend on the stage and the micro-batch only; the global generator
            is left alone.
        precision: None computes as the modules are. "bf16" converts stages, heads and floating-point inputs to bfloat16
            (norms with running statistics stay in float32); the optimizer steps float32 masters, and the loss gets
            float32 outputs. `stages` and `model` hold the bfloat16 weights, which follow the masters; weights that are
            set between steps are taken over by these, rounded. "bf16-autocast" leaves the weights and runs forwards,
            heads and losses under torch.autocast; methods whose backward sees other weights than its forward are
            refused.

        mesh: how processes share the work besides the pipeline: Mesh(data=2) trains two replicas of it, each on its
            part of every minibatch's examples; Mesh(tensor=2) lets two processes share the weights of each stage
            (`stretto.parallel.tensor`), Mesh(space=(2, 1)) the rows of each image (`stretto.parallel.spatial`; tensors
            of three dims and more are images, the loss gets whole outputs), and both together tensor x height x width
            processes: a part of the weights on a slab of each image. The axes multiply to the number of
            processes. On one process replicas are emulated, at the price of their memory, and stages are not shared.
        sync: how replicas stay together. "all-reduce" adds up their gradients before each update of a stage: the same
            gradient as without replicas, however the examples divide. "shard-optimizer" does the same, and on processes
            each replica updates its share of the weights and keeps no more of the optimizer's state. With "fully-shard"
            it keeps only its share of weights and gradients, too: `stages` hold shares then, and `gather` makes whole
            weights of them. "local-sgd(every=8)" and "diloco(every=8)", or stretto.LocalSGD(...),
            stretto.DiLoCo(...), let each train by itself and merge weights now and then.
            "parameter-server(staleness=4)", or stretto.ParameterServer(...), lets none wait for another's gradients.
            Statistics of BatchNorm are each replica's own; those of replica 0 count in evaluation.
        recompute: "none"; "full", with which every layer of a stage keeps its input alone, and computes the rest again
            in its backward; "selective", with which modules marked by `recompute_selectively = True` do so, such as
            the scores of this package's attention. A stage's layers are the members of an nn.Sequential, or the
            modules that a traced stage calls; another stage is one layer. Numbers stay the same to the last bit. (A
            method's own option, "1f1b(recompute=True)", runs whole stages again.)
        timeout: on several processes, how many seconds a worker waits for another before it gives up.

    Raises UsageError when the parts do not fit, before anything is trained.
    """

    def __init__(
        self,
        stages: Sequence[StageLike] | nn.Sequential | nn.ModuleList,
        loss: Loss,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        method: str | Method = "backprop",
        *,
        example: Batch | None = None,
        heads: Sequence[nn.Module | None] | None = None,
        scheduler: Callable[[Any], Any] | None = None,
        clip: float | None = None,
        workers: int | None = None,
        device: str | torch.device = "auto",
        seed: int = 0,
        precision: str | None = None,
        mesh: Mesh | None = None,
        sync: str | Sync = "all-reduce",
        recompute: str = "none",
        timeout: float = 600,
    ) -> None:
        from stretto.trainer.distributed import find_backend  # slow to import

        positive("timeout", timeout)
        mesh = Mesh() if mesh is None else mesh
        of_kind("mesh", mesh, Mesh, "stretto.Mesh(data=2)")
        self.backend = find_backend(timeout, mesh)
        with self.backend.abort_all_on_error():
            check_kinds(stages, loss, scheduler, heads, workers, seed, clip)
            given, stages = stages, list(stages)
            check_number(stages, workers)
            if isinstance(given, nn.Sequential | nn.ModuleList):
                refuse_lost_hooks(given, [*given])
            sync = find_sync(sync)
            check_mesh(mesh, sync, recompute)
            self.specification = Specification(
                method=chosen_method(method, optimizer, stages),
                loss=understand(loss),
                optimizer=optimizer,
                scheduler=scheduler,
                clip=clip,
                precision=Precision(precision),
                device=self.backend.device(device),
                seed=seed,
                mesh=mesh,
                sync=sync,
                recompute=recompute,
            )
            with explained(self.method):
                sync.check(self.method, precision)
                built = Construction(self.specification, self.backend, stages, example, heads, workers)
                refuse_hidden_norms(self.method, built.schedule.per_turn, built.stages)
            if len(stages) > 1 or built.schedule.per_turn * mesh.data > 1:
                refuse_network_reads(self.loss, network_of(given))
        parts = built.schedule.per_turn * mesh.data
        self._take_over(built)
        self._warn(stages, parts, in_evaluation=built.in_evaluation)
        self._begin()
        self._settled = settled(self._stages, given, in_parts=self.schedule.per_turn > 1)
        self._row_check = RowCheck(stages, parts)
        self._by_hand = SetByHand(self._replicas, sync, data=mesh.data, lag=self.lag)

    def _warn(self, given: Sequence[StageLike], parts: int, *, in_evaluation: bool) -> None:
        known = [] if self.backend.rank else given
        if parts > 1 and uses_batch_statistics([*known, *self.stages]):
            warnings.warn(parted_norms(f"{parts} parts of a minibatch (micro-batches, replicas)"), stacklevel=3)
        idles = None if self.method.advice is None else idle_chunks(self.method, bubble_of(self) or 0.0)
        if idles is not None and not self.backend.rank:
            warnings.warn(idles, stacklevel=3)
        if in_evaluation:
            warnings.warn(
                "all layers are in evaluation mode, and train so, as in a plain loop: without dropout, with the "
                "statistics that batch norms have; call model.train() before the Trainer is made unless that is meant",
                stacklevel=3,
            )

    def _take_over(self, built: Construction) -> None:
        self.stages, self.heads = built.stages, built.heads
        self.schedule, self.rules = built.schedule, built.rules
        self.lag, self.placement = built.lag, built.placement
        #: Bytes of the weights that one stage sends another after an update, by (owner, user): those that stages share
        #: (tied weights, `share_top`), and those that heads read (`solo`, `man`). Shared weights that the user trains
        #: have as many bytes of gradients on their way back.
        self.weight_bytes = built.weight_bytes
        self._replicas = built.replicas
        self._stages = built.replicas[0]
        self._summed_replicas = built.summed_replicas
        self._splitter = built.splitter
        self._phases = built.phases

    def _begin(self) -> None:
        # What trains, before the first minibatch.
        self._generator = PreservedGenerator(self.device)
        self._phase = self._phases[self.method.phases.synchronous(0)]
        self._interpreter: Interpreter = self._phase.interpreter
        with self.backend.abort_all_on_error():
            self._phase.begin(0)
        self._entered, self._finished = 0, 0  # minibatches that have begun, and those whose loss is known
        self._since = 0  # minibatches that had begun in the checkpoint that was loaded
        self._drained = True
        self._broken: str | None = None
        self._sums = False  # whether the weights are the plain sums of their steps, in a block of plain_sums
        self._recordings: list[Recording] = []
        self._pausing = False
        self._losses: dict[int, list[Tensor]] = {}  # of the minibatches that `step` may still return
        self.listeners: list[Callable[[int, float], None]] = []  # told each loss, whoever calls `step` and `flush`

    @property
    def method(self) -> Method:
        """The method that trains."""
        return self.specification.method

    @property
    def loss(self) -> Loss:
        """The loss; torch's own cross entropy as a `stretto.losses.CrossEntropy`."""
        return self.specification.loss

    @property
    def clip(self) -> float | None:
        """The largest norm of all stages' gradients together."""
        return self.specification.clip

    @property
    def precision(self) -> Precision:
        """The precision it computes in."""
        return self.specification.precision

    @property
    def device(self) -> torch.device:
        """The device of this process's stages."""
        return self.specification.device

    @property
    def seed(self) -> int:
        """The seed of all random numbers that training draws."""
        return self.specification.seed

    @property
    def mesh(self) -> Mesh:
        """The mesh: how processes share the work besides the pipeline."""
        return self.specification.mesh

    @property
    def sync(self) -> Sync:
        """The strategy that keeps replicas together."""
        return self.specification.sync

    # -- training ---------------------------------------------------------------------------------------------------

    def step(self, x: Batch, y: Any) -> float | None:
        """Train on one minibatch: inputs x [N, ...], and y as the loss takes it.

        x is a tensor, a tuple or list of tensors for stage 0's arguments in their order, or a dict of them for its
        arguments by name (`{"input_ids": ids, "attention_mask": mask}`); y may be such a tuple or dict, too, and the
        loss gets it so. NumPy arrays are tensors. All are cut into micro-batches along their first dimension. Where
        nothing is cut, x may have tensors of several lengths and y may be a list of dicts; on one process y may be
        None, which the loss then gets.

        Every process passes the same x and y, or None for what it does not read. They are compared at steps 0, 1, 2, 4,
        8, ..., but with a parameter server. Raises UsageError, on every process, where they differ.

        Returns the output head's mean loss of the minibatch `lag` steps ago: of this one for synchronous methods, of
        the one 2S steps ago for the others, and None before there is one. (A parameter server of staleness k adds k to
        the lag: replicas may be so many steps apart.) Where the loss gives (sum, count) it is sum over count, nan if
        nothing counts: then no weights change, with a warning.
        """
        if self._broken is not None or self._sums:
            self._refuse_halted()
        n = self._entered
        with self.backend.abort_all_on_error():
            self._settled.check()
            self._by_hand.check(n, drained=self._drained)
            loads = self._splitter.loads(x, y)
            self._row_check.check(loads)
            if self.processes > 1 and self.sync.serving is None:  # else each replica has a pace of its own
                self._compare_batch(n, x, y)
        with self._running("step", n):
            if len(self._phases) > 1:
                self._change_phase(n)
            self._interpreter.step(n, loads)
        self._entered += 1
        self._drained = False
        with self.backend.abort_all_on_error():
            self._collect_losses()
        parts = self._losses.pop(n - self.lag, None)
        if parts is None:
            return None
        return self._tell(n - self.lag, self._mean_loss(parts))  # only now does the host wait for the device

    def _tell(self, minibatch: int, loss: float) -> float:
        for listener in self.listeners:
            listener(minibatch, loss)
        return loss

    def _compare_batch(self, n: int, x: Any, y: Any) -> None:
        # At steps 0, 1, 2, 4, 8, ... of this process. None is no difference.
        number = n - self._since
        if not number & (number - 1):
            said = {
                f"{name} of step {n + 1}": None if part is None else digest_of_batch(part)
                for name, part in (("x", x), ("y", y))
            }
            self.backend.compare(said, "is given another batch", SAME_BATCHES)

    def flush(self) -> list[float]:
        """Finish what is in flight. Returns, in order, the losses that `step` has not returned yet.

        Replicas that train by themselves merge their weights.

        Should training go on, later steps return them in their turn: collect from `step`, or from the last `flush`.
        """
        if self._broken is not None or self._sums:
            self._refuse_halted()
        if not self._drained:
            with self._running("flush"):
                self._interpreter.drain(self._entered)
                self._interpreter.pause()
                self._collect_losses()
                self._interpreter.settle()
            self._drained = True
        return [self._tell(n, self._mean_loss(self._losses[n])) for n in sorted(self._losses)]

    def order(self) -> Order | None:
        """Which replica made each update of each stage on a parameter server, and how stale it was; flushes first.

        With several processes the order is on rank 0, None elsewhere; None without a parameter server, too. Another run
        with `stretto.ParameterServer(order=...)`, given the order or the path of its file, comes to the same numbers.
        """
        self._pause()
        with self.backend.abort_all_on_error():
            return self.backend.order()

    def _pause(self) -> None:
        # Before a collective: a server's staleness bound may make one process wait for an update of another.
        if self.sync.serving is not None and self.mesh.data > 1 and self._broken is None and not self._sums:
            self.flush()

    def fit(
        self,
        train: Any,
        validation: Any = None,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        evaluate_every: int | None = None,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
        callbacks: Iterable[Callback] = (),
        log: Log | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        early_stop: int | EarlyStop | None = None,
        quiet: bool = False,
    ) -> History:
        """Go through `train` for some `epochs`, or for so many `steps`: `step` after `step`, and a `flush` at the end.

        Args:
            train: a pair (x, y) of tensors or arrays (x may be a tuple or a dict of them), a torch Dataset, a Hugging
                Face dataset, or a RowReader. The order of the examples is drawn anew in each epoch, from the trainer's
                `seed` alone. So it is for a DataLoader of a TensorDataset that shuffles, without other arguments. Any
                other DataLoader, and any other iterable of batches (x, y), such as a list, is gone through as it is. A
                last, smaller batch is trained, too, unless it has fewer examples than there are micro-batches times
                replicas.
            validation: such data, evaluated at each epoch's end, and after the last of `steps`.
            batch_size: examples of a minibatch; 32 unless said otherwise, or the DataLoader's own.
            evaluate_every: with `steps`, evaluate after so many steps each instead of at each epoch's end.
            metrics: as `evaluate` takes them; their values are `validation_<name>`.
            callbacks: functions of (trainer, entry), called on every process whenever an entry of the history is
                complete; one that returns True stops training, on all processes.
            log: an experiment tracker: "tensorboard", "wandb", "mlflow" or "csv", with options as "wandb(project=mine)"
                or stretto.trackers.WandB(project="mine"), or several. One run there, whatever the number of processes:
                settings, schedule, the loss of every step, entries, learning rates, gradient norm, memory; with
                `checkpoint` a call that goes on goes on there. Or a function, called on rank 0 with {"step": from 1,
                "loss": of that step, "examples_per_second": lately}, in order.
            checkpoint: a folder, saved at each epoch's end (with `steps` whenever it is evaluated). If it is there
                already, training goes on from it as if it had never stopped, to the last bit. Ctrl-C and SIGTERM save
                it after the current step.
            checkpoint_every: save it after so many steps each, too.
            early_stop: an EarlyStop, or its patience: how many entries in a row may not better the validation loss.
            quiet: no progress on stderr.

        Under asynchronous methods the loss of a step is known `lag` steps later; in the history, in `log` and for
        `early_stop` it belongs to its own step. An entry is complete, and callbacks are called, once its last loss is
        known. Saving drains the pipeline, so that with `checkpoint` there is a `flush` before each of them: for these
        methods that changes numbers, and an interrupt in the middle of an epoch adds a flush there.

        On several processes each gives the same data. Where neither inputs nor targets are needed, nothing is read; an
        iterable of batches is gone through everywhere.

        Raises UsageError for wrong arguments, for data without batches, where processes give different data, and for a
        checkpoint of other data; KeyboardInterrupt, once all is saved, if it was asked to stop.
        """
        with self.backend.abort_all_on_error():
            given = FitArguments(
                batch_size=batch_size,
                epochs=epochs,
                steps=steps,
                evaluate_every=evaluate_every,
                metrics=metrics,
                callbacks=callbacks,
                log=log,
                checkpoint=checkpoint,
                checkpoint_every=checkpoint_every,
                early_stop=early_stop,
                quiet=quiet,
            )
            needs = Needs(self._splitter.reads_x, self._splitter.reads_y, self._splitter.cut)
            fit = FitLoop(self, needs, train, validation, given)
            history = fit.run()
        if fit.interrupted is not None:  # said here, since it parts no processes
            raise KeyboardInterrupt(fit.interrupted)
        return history

    @property
    def entered(self) -> int:
        """How many minibatches have entered the pipeline."""
        return self._entered

    def _change_phase(self, n: int) -> None:
        phase = self._phases[self.method.phases.synchronous(n)]
        if phase is not self._phase:
            self._pause()
            if not self._drained:
                self._interpreter.drain(n)
                self._drained = True
                self._collect_losses()
            self._phase.end()
            phase.begin(n)
            self._phase, self._interpreter = phase, phase.interpreter

    @contextmanager
    def _running(self, what: str, number: int | None = None) -> Iterator[None]:
        before, idle = self._interpreter.updates, self._interpreter.idle
        try:
            with self.backend.abort_all_on_error(), torch.enable_grad(), self._generator:
                yield
            self._by_hand.remember()
        except BaseException as error:
            what = what if number is None else f"{what} {number}"
            if self.backend.can_retry and idle and before == self._interpreter.updates:
                # Nothing was in flight before, and nothing was updated: as if the step had not been tried.
                for stage in self._interpreter.every_stage:
                    stage.abandon()
                self._interpreter.restart(self._entered)
            else:
                self._broken = f"{what} was cut short by {type(error).__name__}: {error}"
            raise

    def _refuse_halted(self) -> None:
        self.backend.abort_all_on_error()  # says so if it has been closed
        if self._sums:
            raise UsageError(
                "weights are the plain sums of steps here: train, flush, save and load outside of the block of "
                "plain_sums()"
            )
        raise StrettoError(
            f"training cannot go on: {self._broken}. Some stages have finished that minibatch and others have not; "
            "go on from a checkpoint (trainer.load), or make a new Trainer"
        )

    def _collect_losses(self) -> None:
        pieces = self.schedule.per_turn
        while self._finished < self._entered:
            first = self._finished * pieces
            edges = list(map(self.rules.loss, range(first, first + pieces)))
            if not self._interpreter.has(edges):
                return
            self._losses[self._finished] = self._interpreter.losses(edges)
            self._finished += 1

    def _mean_loss(self, losses: Sequence[Tensor]) -> float:
        # `losses` of a minibatch's micro-batches are shares of its mean (summed over replicas that train by
        # themselves), or (sum, count) pairs.
        if not losses[0].dim():
            total = 0.0
            for loss in losses:
                total += float(loss) / self._summed_replicas
            return total
        summed, count = torch.stack(list(losses)).sum(0).tolist()
        return summed / count if count else math.nan

    def close(self) -> None:
        """Finish what is in flight, as `flush` does, and leave threads and connections to the next Trainer.

        On several processes this is a collective. `with stretto.Trainer(...) as trainer:` closes it at the end of the
        block. What it has trained can still be read; whatever trains, evaluates or saves raises UsageError from then
        on. A Trainer that nobody refers to any more, in any process, is used again in the same way, but later.
        """
        if self.backend.closed:
            return
        if self._broken is None:
            self.flush()
        self._broken = "it was closed"
        self.backend.close()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close it. After an error it is given up: other processes may be elsewhere."""
        if error is None:
            self.close()
        else:
            self._broken = self._broken or "an error ended its with block"
            self.backend.give_up()

    # -- using what was trained -------------------------------------------------------------------------------------

    @property
    def model(self) -> Chain:
        """The trained stages as one nn.Sequential: plain PyTorch from here on, without auxiliary heads."""
        return Chain(*self.stages)

    def evaluate(
        self, batches: Any, metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None
    ) -> dict[str, float]:
        """Mean loss over the examples of `batches`, with the current weights; drains nothing (but a parameter server).

        `batches` are pairs (x, y), or any other data that `fit` takes, dicts with a target among them.

        If targets are classes, whole numbers below the output's number of columns, with one dimension less than it,
        "accuracy" is the share of targets that the output's largest entry hits; targets below 0 are padding and do not
        count. For one column it is that of targets 0 and 1, if the loss is their binary cross entropy, of logits or of
        chances. There is no such key for others (counts, say): give a metric. Raises UsageError without examples.

        Each of `metrics`, by name, takes (output, target) of a batch and returns a mean over its examples, or (sum,
        count); or it is an object with reset(), update(output, target) and compute(), as those of torchmetrics are. Its
        value is under its name; the function is called where the last stage is. A warning names a loss or function that
        returns one number which is no mean over examples.
        """
        given = Batches("evaluate", cut_rows(batches, "evaluate: batches"), partial(paired, batches))
        measured = named_metrics("evaluate: metrics", metrics)
        self._pause()
        with self.backend.abort_all_on_error(), given.explaining_misfits(), self.pausing("evaluation"):
            self._refresh()
            with self._by_hand.own_work():
                return self.backend.evaluate(self.stages, self.specification, given, measured)

    def predict(self, batches: Iterable[Batch]) -> list[Any] | None:
        """The model's output for each batch of inputs x, on the CPU, in evaluation mode, with the current weights.

        A batch is what `step` takes as x; a DataLoader of pairs goes as `predict(x for x, _ in loader)`. Drains nothing
        (but a parameter server). Under "bf16" outputs are float32, as the loss gets them. On several processes this is
        a collective, and the outputs, tensors or tuples of them, are on rank 0, None elsewhere.
        """
        given = InputBatches("predict", batches)
        self._pause()
        with self.backend.abort_all_on_error(), given.explaining_misfits(), self.pausing("prediction"):
            self._refresh()
            with self._by_hand.own_work():
                return self.backend.predict(self.stages, self.specification, given)

    def _refresh(self) -> None:
        # On several processes, bring borrowed weights up to date.
        with self._by_hand.own_work():
            self.backend.refresh(self._stages, self.rules)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer | None]:
        """Each stage's optimizer; None for one that has nothing to train, or lives in another process.

        With precision="bf16" they step the float32 masters. On a parameter server it is that of the shard in this
        process.
        """
        return [self._stages[index].stepping if index in self._stages else None for index in range(len(self.stages))]

    @property
    def lr(self) -> list[float | list[float] | None]:
        """Each stage's learning rate now; a list where its optimizer has several groups, None where there is none.

        A rate that the method changes for delays within its step (`pipemare`) is the optimizer's own here.
        """
        return [None if optimizer is None else _rates(optimizer) for optimizer in self.optimizers]

    @property
    def updates(self) -> list[int | None]:
        """How many updates each stage has finished; None for one that lives in another process."""
        return [self._stages[index].updates if index in self._stages else None for index in range(len(self.stages))]

    @property
    def grad_norm(self) -> float | None:
        """The norm of the gradients of all stages at their last updates, before `clip` shrinks them.

        It is measured where `clip` needs it, clip=math.inf only measures, and while `fit` logs to a tracker. None where
        it is not measured, and before the first update. Reading it waits for the device. Where stages are clipped
        together, as synchronous methods do, every process knows it; on several processes it raises UsageError
        elsewhere: `grad_norms` asks them.
        """
        for stage in self._stages.values():
            if stage.joint_norms is not None:
                return float(torch.linalg.vector_norm(stage.joint_norms.double()))
        norms = self.backend.grad_norms()
        if norms and len(self._stages) < len(self.stages):
            raise UsageError(
                f"grad_norm: this process knows only the gradients of its own stages, {sorted(self._stages)}, since "
                f"{self.method} does not clip all stages together here: call trainer.grad_norms() on every process, "
                "which gives the norm of each stage; math.hypot(*norms) is that of all"
            )
        return math.hypot(*norms.values()) if norms else None

    def grad_norms(self) -> list[float | None]:
        """The norm of each stage's gradients at its last update, before `clip` shrinks them, the same on every process.

        It is measured as `grad_norm` is; None for a stage that has nothing to train or has made no update here. Of
        replicas, replica 0's. A collective.
        """
        norms = self.backend.grad_norms() if 0 in self.backend.replicas else {}
        with self.backend.abort_all_on_error():
            told = self.backend.all_reduce_max([norms.get(index, -1.0) for index in range(len(self.stages))])
        return [None if norm < 0 else norm for norm in told]

    def __repr__(self) -> str:
        parameters = dict.fromkeys(parameter for stage in self.stages for parameter in stage.parameters())
        count = f"{sum(parameter.numel() for parameter in parameters):,}"
        where = f"{self.processes} processes, this is rank {self.rank}" if self.processes > 1 else "one process"
        return (
            f"Trainer({self.method}: {_counted(len(self.stages), 'stage')} on "
            f"{_counted(self.schedule.num_workers, 'worker')}, {where}, {count} parameters"
            f"{' here' if self.processes > 1 else ''}, {self.device}, {_counted(self._entered, 'step')} done)"
        )

    @property
    def rank(self) -> int:
        """The rank of this process; 0 if it is the only one."""
        return self.backend.rank

    @property
    def processes(self) -> int:
        """How many processes train together; 1 emulates all workers."""
        return self.backend.size

    def observe(self, minibatches: int = 2) -> Observer:
        """Measure which weights the next minibatches see and how much stages hold; `step` trains the same numbers.

        Figures are those of the steady state from minibatch 2 `schedule.drain` + 1 on. The observer returned has `done`
        and `figures()`.
        """
        whole("observe: minibatches", minibatches, 1, 1_000_000)
        self.backend.abort_all_on_error()  # says so if it has been closed
        if any(map(is_sharded, self.stages)):
            raise UsageError(
                f"sync={self.sync.name}: no process has whole weights to observe; observe on one process, where the "
                "numbers are the same"
            )
        return Observer(self._interpreter, self._entered, minibatches)

    def record(self) -> list[Recording]:
        """Record the actions of each worker of this process from now on, with their times; one recording a worker.

        `recording.write(folder)` writes it. Training comes to the same numbers; each action takes some 20 microseconds
        more, and on an accelerator the host waits for each to end, so that its time is known. On several processes this
        is a collective: they compare their clocks.
        """
        self._pause()
        with self.backend.abort_all_on_error():
            self._recordings = self.backend.record(self.device)
        return self._recordings

    @contextmanager
    def pausing(self, what: str) -> Iterator[None]:
        """The context for work that is no part of a step: recordings mark it, so that it counts for none.

        `evaluate`, `predict` and `save` do so themselves.
        """
        if not self._recordings or self._pausing:
            yield
            return
        start, self._pausing = perf_counter_ns(), True
        try:
            yield
        finally:
            self._pausing = False
            for recording in self._recordings:
                recording.span(PAUSE, what, start, perf_counter_ns())

    def peak_memory(self) -> list[int] | None:
        """The most bytes that each process has held since it started, by rank; on rank 0, None elsewhere. A collective.

        On an accelerator those of tensors there; on the CPU all of the process's resident memory. -1 where the system
        does not tell.
        """
        self._pause()
        most = most_held(self.device)
        with self.backend.abort_all_on_error():
            told = self.backend.collect(torch.tensor(-1 if most is None else most))
        return [int(each) for each in told] if told else None

    @contextmanager
    def plain_sums(self) -> Iterator[None]:
        """In this block `stages`, `model`, `evaluate`, `predict`, `gather` and `write_weights` are of the plain sums.

        With a method's `feedback=c` the weights that train are an extrapolation, c last steps ahead of the plain sum of
        steps; outside of the block all of these give them as they are. Training, `flush` and checkpoints are refused in
        the block. Without feedback, before the first step and after a synchronous one there is no difference. On
        several processes it is a collective.
        """
        if self._sums:
            self._refuse_halted()
        self._pause()
        with ExitStack() as sums:
            for stage in self._stages.values():
                sums.enter_context(stage.plain_sums())
            self._sums = True
            try:
                yield
            finally:
                self._sums = False
        with self.backend.abort_all_on_error():
            self._refresh()

    def gather(self) -> dict[str, Tensor] | None:
        """The trained weights under the keys of `model.state_dict()`, and those of heads as `heads.<s>.<name>`.

        Extra state of modules (get_extra_state) that is no tensor is left out: checkpoints have it. On several
        processes this is a collective, and the result is on rank 0, None elsewhere.
        """
        self._pause()
        with self.backend.abort_all_on_error():
            self._refresh()
            gathered = self.backend.gather({index: self._weights_of(index) for index in self._stages})
        if gathered is None:
            return None
        state = {key: value for weights in gathered.values() for key, value in weights.items()}
        return dict(sorted(state.items(), key=lambda item: item[0].startswith("heads.")))

    def write_weights(
        self, folder: str | os.PathLike[str], names: Callable[[str], str | None] | None = None
    ) -> dict[str, Tensor] | None:
        """Write the trained weights as safetensors, each process its own stages: none needs room for all.

        The folder gets model-00001-of-00004.safetensors for each stage and model.safetensors.index.json; all processes
        have to see it. Extra state of modules that is no tensor is left out. `names` gives each weight that `gather`
        would name its name in the files, or None to leave it out. Returns the weights of heads as `gather` does, on
        rank 0; None elsewhere. A collective.
        """
        check_path("write_weights: folder", folder)
        check_folder(Path(folder), "folder")
        if names is not None:
            function("write_weights: names", names, NAMES, 1)
        self._pause()
        with self.backend.abort_all_on_error():
            self._refresh()
            states = {index: self._weights_of(index) for index in self._stages}
            written: dict[int, State] = {}
            for index, state in states.items():
                weights = {key: value for key, value in state.items() if not key.startswith("heads.")}
                heads = {key: value for key, value in state.items() if key.startswith("heads.")}
                sizes = {}
                if self.backend.writes:
                    sizes = write_part(Path(folder), index, len(self.stages), weights, names)
                written[index] = heads | sizes
            gathered = self.backend.gather(written)  # when it returns, all have written
            if gathered is None:
                return None
            write_index(Path(folder), gathered)
        return {key: value for state in gathered.values() for key, value in state.items() if key.startswith("heads.")}

    def _weights_of(self, index: int) -> State:
        parts = ((f"{index}.", self.stages[index]), (f"heads.{index}.", self.heads[index]))
        return {
            prefix + name: value
            for prefix, module in parts
            if module is not None
            for name, value in self.backend.sharing.state(module).items()
            if isinstance(value, Tensor)  # extra state is in checkpoints
        }

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Write everything training needs to go on; drains first. The folder appears whole or not at all.

        `extra` is the caller's: numbers, text, lists and dicts, which `load` returns. A checkpoint at `path` is
        replaced; if that fails (UsageError, OSError) it is still there. On several processes this is a collective: each
        writes its own stages, into a folder that all of them see.
        """
        check_path("save: path", path)
        if extra is not None:
            of_kind("save: extra", extra, Mapping, "a dict of numbers, text, lists and dicts")
        self.flush()
        manifest = self._manifest(extra or {})
        with self.backend.abort_all_on_error(), self.pausing("checkpoint"):
            self.backend.save(path, self._states(), manifest)

    def _manifest(self, extra: Mapping[str, Any]) -> Manifest:
        return Manifest(
            method=str(self.method),
            seed=self.seed,
            precision=self.precision.name,
            entered=self._entered,
            losses={n: [self._mean_loss(losses)] for n, losses in self._losses.items()},
            extra=extra,
            parts=self.backend.sharing.parts,
            replicas=self.mesh.data,
            sync=self.sync.checkpoint_name(self.mesh.data),
        )

    def _states(self) -> list[dict[int, dict[str, Any]]]:
        # The states of this process's stages, one dict for each of its replicas.
        return [
            {self._checkpoint_index(index): stage.state_dict() for index, stage in stages.items()}
            for stages in self._replicas
        ]

    def state_dict(self) -> dict[str, Any]:
        """What `save` writes, as objects, of this process's stages; drains first. A collective.

        Its "stages" have the states by replica and stage. Those of all processes together, in one dict with any
        process's other entries, are what `load_state_dict` takes. Tensors are those of training, which the next step
        changes.
        """
        self.flush()
        with self.backend.abort_all_on_error():
            states = self._states()
        stages = dict(zip(self.backend.replicas, states, strict=True))
        return {**vars(self._manifest({})), "stages": stages, "num_stages": len(self.stages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` of all processes returned, as `load` does from a folder, and refused alike."""
        mapping("load_state_dict: state", state, "what state_dict returned")
        if not {"stages", "num_stages"} <= state.keys():
            refuse("load_state_dict: state", list(state), "what state_dict returned, with its stages and num_stages")
        where, stages = "the state", state["stages"]
        if self._sums:
            self._refuse_halted()
        manifest = Manifest(**{key: value for key, value in state.items() if key not in ("stages", "num_stages")})
        self._pause()
        with self.backend.abort_all_on_error():
            self._refuse_other(where, manifest, state["num_stages"])

            def read(index: int, replica: int) -> dict[str, Any]:
                known: dict[str, Any] = copy.deepcopy(stages[replica][index])  # an optimizer would keep the tensors
                return known

            self._resume(where, manifest, read)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Go on from `save`, on any number of workers; what is in flight is dropped. Returns `extra`.

        The same number of replicas under the same `sync` goes on exactly: each has its own statistics (buffers),
        optimizer state and state of its `sync`. Where all replicas had the same optimizer state (all-reduce without
        powersgd, shard-optimizer, fully-shard, a single replica) any number may go on, also under local-sgd or diloco,
        all of them from replica 0's state. In all other cases UsageError says which replicas could go on.

        Raises UsageError, and changes nothing, if a file is damaged or missing, or if the checkpoint is of other
        stages, another seed or precision, a method with another name or options, or other replicas.
        """
        check_path("load: path", path)
        if self._sums:
            self._refuse_halted()
        self._pause()
        with self.backend.abort_all_on_error():
            manifest = read_manifest(path)
            self._refuse_other(str(path), manifest, len(manifest.stages) // manifest.parts)
            self._resume(str(path), manifest, partial(read_stage, path))
        return dict(manifest.extra)

    def _refuse_other(self, where: str, manifest: Manifest, stages: int) -> None:
        own = {"method": str(self.method), "seed": self.seed, "precision": self.precision.name}
        for name, value in own.items():
            if getattr(manifest, name) != value:
                if name == "method" and self.method.advice is not None:
                    raise UsageError(other_advice(self.method, where, manifest.method))
                raise UsageError(
                    f"{where} was saved with {name} {getattr(manifest, name)}, this trainer has {name} {value}: give "
                    f"{name}={getattr(manifest, name)!r}"
                )
        parts = self.backend.sharing.parts
        if stages != len(self.stages):
            raise UsageError(f"{where} holds {stages} stages, this trainer has {len(self.stages)}")
        if manifest.parts != parts:
            raise UsageError(
                f"{where} holds stages whose weights {manifest.parts} processes share, here {parts} do: go on with "
                f"mesh=Mesh(tensor={manifest.parts})" + " on processes" * (parts == 1)
            )
        refuse_other(where, manifest.sync, manifest.replicas, self.sync, self.mesh.data)

    def _resume(self, where: str, manifest: Manifest, read: Callable[[int, int], dict[str, Any]]) -> None:
        # `read` returns the state of a stage, by its number in the checkpoint and its replica's.
        if self.listeners and self._broken is None:
            self.flush()  # they wait for the losses of what is in flight
        self._load_stages(where, manifest.entered, read, alike=manifest.replicas != self.mesh.data)
        self._entered = manifest.entered
        self._finished = self._since = self._entered
        self._losses = {  # a mean loss as the sum of one entry
            n: [torch.tensor([sum(losses), 1.0], dtype=torch.float64)] for n, losses in manifest.losses.items()
        }
        self._drained, self._broken = True, None
        self._interpreter.restart(self._entered)

    def _checkpoint_index(self, index: int) -> int:
        sharing = self.backend.sharing
        return index * sharing.parts + sharing.part

    def _load_stages(
        self, where: str, entered: int, read: Callable[[int, int], dict[str, Any]], *, alike: bool
    ) -> None:
        # Loads each replica's own state, or replica 0's into all of them if `alike`.
        loads = [
            (stage, read(self._checkpoint_index(index), 0 if alike else replica))
            for replica, stages in zip(self.backend.replicas, self._replicas, strict=True)
            for index, stage in stages.items()
        ]
        for stage, state in loads:
            if state.get("updates") != entered:
                raise UsageError(
                    f"{where}: stage {stage.index} has made {state.get('updates')!r} updates in {entered} minibatches"
                )
        before = copy.deepcopy([stage.state_dict() for stage, _ in loads])
        try:
            for stage, state in loads:
                stage.load_state_dict(state, where)
        except UsageError:
            for (stage, _), state in zip(loads, before, strict=True):
                stage.load_state_dict(state, "the state before")
            raise
        finally:
            self._by_hand.remember()


def _rates(optimizer: torch.optim.Optimizer) -> float | list[float] | None:
    given = [group.get("lr") for group in optimizer.param_groups]
    rates = [float(rate) for rate in given if rate is not None]  # some optimizers find their rate themselves
    if len(rates) < len(given):
        return None
    return rates[0] if len(rates) == 1 else rates


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
