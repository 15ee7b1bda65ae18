"""A transformers model cut into stages, and the stretto.Trainer that trains them."""

import copy
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.losses import Loss
from stretto.losses.value import mean_and_weight, understand
from stretto.methods import Method
from stretto.nn.preserve import device_of
from stretto.optim.from_function import NamedOptimizer
from stretto.splitting import Stages, split
from stretto.trainer.host import evaluator
from stretto.trainer.trainer import Trainer
from stretto.transformers.minibatch import Inputs, Padding, joined
from stretto.transformers.model_loss import Outputs, kind_of, one_of, outputs_of, telling_rows

COMPARED = 4  # batches on which a loss is compared with the model's own, and on every new kind
AT_MOST = 8  # examples of each of them
ROWS = 2  # examples of a first batch that the model is cut with
FOLDER = "stretto"  # Stretto's checkpoint inside transformers' checkpoint-N
STATE = "trainer_state.json"  # written last
OPTIMIZER = "optimizer.pt"


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """What StrettoTrainer was given for Stretto: method, stages, and further arguments of stretto.Trainer."""

    method: str | Method  # a string only where it is "async" or "local", for the Trainer to settle
    stages: int | Sequence[int] | Stages
    options: Mapping[str, Any]
    padding: Padding
    label_names: tuple[str, ...]


class Pipeline:
    """The stages of one model, and their Trainer: `begin` makes it for training, `idle` one that only evaluates.

    `example` is a batch of the data collator's: the model is cut with its inputs.
    """

    def __init__(self, model: nn.Module, settings: PipelineSettings, example: Inputs) -> None:
        self.owner = model
        self.model = core_of(model)
        self.prefix = "" if self.model is model else "base_model.model."  # of names in a PEFT model
        inputs, _ = parted(example, settings.label_names)
        if not inputs:
            raise UsageError(f"the first batch has no inputs, only {', '.join(example)}")
        self.names = tuple(inputs)
        few = self._few(inputs)
        self.outputs, _ = outputs_of(self.model, few)
        asked = settings.stages
        model.train()  # as transformers does before each step, whatever was frozen
        self.stages = asked if isinstance(asked, Stages) else split(self.model, asked, example=few)
        for stage in self.stages:
            stage.train()
        self.settings = settings
        if self.stages.exported:
            lengths = {name: value.shape[1] for name, value in example.items() if value.dim() == 2}
            self.settings = replace(settings, padding=replace(settings.padding, lengths=lengths))
        self.loss: Loss | None = None
        self._compared = 0  # batches on which the loss was compared with the model's own, and their kinds
        self._kinds: set[tuple[Any, ...]] = set()
        self.trainer: Trainer | None = None
        self.is_idle = True
        self._former_norms: list[float | None] = [None] * len(self.stages)

    def _few(self, part: Inputs) -> Inputs:
        device = device_of([self.model])
        return {name: value[:ROWS].to(device) for name, value in part.items()}

    def learn_loss(self, example: Inputs, find: Callable[[nn.Module, Inputs, Inputs, Outputs], Loss]) -> None:
        """Find the loss on a batch with labels, unless it is known."""
        inputs, labels = parted(example, self.settings.label_names)
        if self.loss is None and labels:
            self.loss = find(self.model, self._few(inputs), self._few(labels), self.outputs)
            self.trainer = self.trainer if not self.is_idle else None  # an idle one may have been made without

    def compare_loss(self, batch: Inputs, compare: Callable[[nn.Module, Inputs, Inputs], None]) -> None:
        """Compare the loss with the model's own on the first batches with labels, and on every new kind of batch.

        Where stages have left the model, that is done on a copy: the weights do not matter.
        """
        inputs, labels = parted(batch, self.settings.label_names)
        kind = kind_of(batch)
        if not labels or (self._compared >= COMPARED and kind in self._kinds):
            return
        if self.trainer is not None and self.trainer.sync.sharding is not None:
            return  # no process has the whole model any more
        places = {(each.device, each.dtype) for each in self.model.parameters() if each.is_floating_point()}
        model = self.model
        if len(places) > 1 or any(dtype not in (torch.float32, torch.float64) for _, dtype in places):
            model = copy.deepcopy(model).to("cpu", torch.float32)
        device, rows = device_of([model]), telling_rows(labels, AT_MOST)
        some = [
            {name: value[rows.to(value.device)].to(device) for name, value in part.items()} for part in (inputs, labels)
        ]
        compare(model, *some)
        self._compared += 1
        self._kinds.add(kind)

    def begin(
        self, optimizer: NamedOptimizer, scheduler: Callable[[Any], Any], clip: float, example: Inputs
    ) -> Trainer:
        """The Trainer for a new training."""
        assert self.loss is not None, "learn_loss came before"
        inputs, _ = parted(example, self.settings.label_names)
        self.trainer = Trainer(
            self.stages,
            self.loss,
            optimizer,
            self.settings.method,
            example={name: value[:ROWS] for name, value in inputs.items()},
            scheduler=scheduler,
            clip=clip,
            **self.settings.options,
        )
        self.is_idle = False
        self._former_norms = [None] * len(self.stages)
        return self.trainer

    def ready(self) -> Trainer:
        """The Trainer; where nothing has been trained yet, one that evaluates."""
        if self.trainer is None:
            options = {name: value for name, value in self.settings.options.items() if name not in ("sync", "heads")}
            if options.get("precision") == "bf16":  # would round the weights before training
                options["precision"] = "bf16-autocast"
            self.trainer = evaluator(self.stages, self.loss or no_loss, self.settings.method, **options)
        return self.trainer

    def join(self, batches: Sequence[Inputs]) -> Inputs:
        """The batches as one minibatch, in the order of the first batch's inputs."""
        minibatch = joined(batches, self.settings.padding)
        inputs, labels = parted(minibatch, self.settings.label_names)
        if set(inputs) != set(self.names):
            raise UsageError(
                f"a batch has the inputs {', '.join(inputs)}, but the model was cut with {', '.join(self.names)}: the "
                "data collator has to give the same ones in every batch"
            )
        return {**{name: inputs[name] for name in self.names}, **labels}

    def step(self, batches: Sequence[Inputs]) -> float | None:
        """Train on one minibatch, the given batches together; as `Trainer.step`."""
        trainer = self.ready()
        inputs, labels = parted(self.join(batches), self.settings.label_names)
        if not labels:
            raise UsageError(
                f"a training batch has no labels ({', '.join(self.settings.label_names)}), only {', '.join(inputs)}"
            )
        return trainer.step(inputs, one_of(labels))

    def mean_loss(self, batch: Inputs) -> Tensor:
        """The mean loss of a batch, in evaluation mode, on every process."""
        inputs, labels = parted(self.join([batch]), self.settings.label_names)
        return torch.tensor(self.ready().evaluate([(inputs, one_of(labels))])["loss"])

    def predict(self, batch: Inputs) -> tuple[Tensor | None, dict[str, Tensor]] | None:
        """The mean loss, None without labels, and the outputs by name, in float32; on rank 0, None elsewhere."""
        inputs, labels = parted(self.join([batch]), self.settings.label_names)
        trainer = self.ready()
        predicted = trainer.predict([inputs])
        if predicted is None:
            return None
        loss = None
        if labels:
            examples = next(iter(inputs.values())).shape[0]
            on_cpu = {name: value.cpu() for name, value in labels.items()}
            mean, _ = mean_and_weight(understand(trainer.loss), predicted[0], one_of(on_cpu), examples)
            loss = mean.detach()
        named = self.outputs.named(predicted[0])
        return loss, {name: value.float() if value.is_floating_point() else value for name, value in named.items()}

    def model_state(self) -> dict[str, Tensor] | None:
        """All trained weights by their names in the model, on rank 0; None elsewhere. A collective."""
        gathered = self.ready().gather()
        if gathered is None:
            return None
        return {self.prefix + name: value for name, value in self.stages.model_state(gathered).items()}

    def grad_norms(self) -> list[float | None]:
        """The norm of each stage's last gradients; those of the checkpoint until there are newer ones. A collective."""
        pairs = zip(self.ready().grad_norms(), self._former_norms, strict=True)
        return [former if norm is None else norm for norm, former in pairs]

    def grad_norm(self) -> float | None:
        """The norm of all stages' last gradients together, before they are shrunk. A collective."""
        norms = [norm for norm in self.grad_norms() if norm is not None]
        return math.hypot(*norms) if norms else None

    def save(self, folder: str) -> None:
        """Write Stretto's checkpoint into transformers' folder. A collective."""
        trainer = self.ready()
        trainer.flush()
        trainer.save(Path(folder) / FOLDER, {"grad_norms": self.grad_norms()})

    def load(self, folder: str) -> None:
        self._former_norms = self.ready().load(Path(folder) / FOLDER)["grad_norms"]


def core_of(model: nn.Module) -> nn.Module:
    """The transformers model inside PEFT's, whose layers hold the adapters; any other model as it is."""
    base = getattr(model, "get_base_model", None)
    if not hasattr(model, "peft_config") or base is None:
        return model
    core = base()
    assert isinstance(core, nn.Module)
    return core


def parted(batch: Mapping[str, Tensor], label_names: Sequence[str]) -> tuple[Inputs, Inputs]:
    inputs = {name: value for name, value in batch.items() if name not in label_names}
    return inputs, {name: batch[name] for name in label_names if name in batch}


def no_loss(output: Any, target: Any) -> Tensor:
    """The loss of a model that has only been given batches without labels."""
    raise UsageError("the loss of the model is not known: no batch had labels")


def last_whole(output_dir: str) -> str:
    """The newest checkpoint that was written to its end. Raises UsageError if there is none."""
    numbered = {
        int(found[1]): path
        for path in Path(output_dir).glob("checkpoint-*")
        if (found := re.search(r"-(\d+)$", path.name))
    }
    for number in sorted(numbered, reverse=True):
        if is_whole(numbered[number]):
            return str(numbered[number])
    raise UsageError(
        f"resume_from_checkpoint=True, but {output_dir} holds no whole checkpoint"
        + (f" ({len(numbered)} of them were cut short while they were written)" if numbered else "")
    )


def is_whole(folder: Path) -> bool:
    try:
        json.loads((folder / STATE).read_text())
    except (OSError, ValueError):
        return False
    return True


def has_training(folder: str) -> bool:
    """Whether a checkpoint holds Stretto's, with which training goes on exactly.

    False for one of weights alone (save_only_model=True). Raises UsageError for one of transformers' own Trainer, whose
    optimizer state belongs to no stages.
    """
    if (Path(folder) / FOLDER).is_dir():
        return True
    if (Path(folder) / OPTIMIZER).exists():
        raise UsageError(
            f"{folder} was written by transformers' own Trainer: its optimizer state is that of a whole model. Load "
            "its weights, model = AutoModel....from_pretrained(folder), and train from there"
        )
    return False
