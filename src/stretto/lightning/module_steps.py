"""Runs a LightningModule's steps with `self(...)` replaced: by what catches its arguments, or by the pipeline's output.

training_step(batch)                 where stage 0 is: ends at self(...), whose arguments are the pipeline's input
training_step(batch), output given   where the last stage is: the loss, what is logged and what is returned
"""

import copy
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from stretto.errors import UsageError, nearest
from stretto.lightning.batch_parts import StepExamples, members
from stretto.lightning.logged_values import LogRecorder, StepRecord, detached, metrics_protected
from stretto.lightning.network import Arguments, bind
from stretto.nn.devices import generator_of
from stretto.nn.preserve import python_generators_restored
from stretto.nn.seeding import FixedDraws, PreservedGenerator, derive
from stretto.options.checks import shown


class Caught(BaseException):
    """Ends a step at its call of self(...); no `except Exception` of a user stops it."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments


class ModuleSteps:
    """The steps of one module. `name` is what the steps call: "" for `self(...)`, "net" for `self.net(...)`."""

    def __init__(self, module: LightningModule, name: str, seed: int, device: torch.device) -> None:
        self.module = module
        known = dict(module.named_modules())  # that of "" is the module itself
        if name not in known:
            raise UsageError(f"StrettoStrategy: network={name!r}: {nearest(name, filter(None, known))}")
        self.target: nn.Module = known[name]
        self._called = f"self.{name}(...)" if name else "self(...)"
        self._seed, self._device = seed, device
        self._logs = LogRecorder(module)
        self._is_trial = False

    def caught(self, examples: StepExamples) -> Arguments:
        """The arguments of the step's call of self(...)."""

        def catch(*args: Any, **kwargs: Any) -> Any:
            raise Caught(bind(type(self.target).forward.__get__(self.target), args, kwargs))

        try:
            with self._running(examples, catch, None):
                self._call(examples)
        except Caught as caught:
            for name, tensor in caught.arguments.items():
                if tensor.requires_grad:
                    raise UsageError(
                        f"{examples.kind} computes {name} of {self._called} from parameters: gradients end at the "
                        "pipeline's input, so what needs them belongs into forward"
                    ) from None
            return caught.arguments
        raise UsageError(
            f"{examples.kind} does not call {self._called}, which is what runs as a pipeline: write "
            f"`output = self(...)`, or name the module that it calls, StrettoStrategy(network='net') for self.net(...)"
        )

    def run(self, examples: StepExamples, output: Any, record: StepRecord | None) -> Any:
        """What the step returns where self(...) gives `output`; what it logs goes into the record, if there is one."""
        calls = 0

        def give(*_: Any, **__: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise UsageError(
                    f"{examples.kind} calls {self._called} twice: its batch goes through the pipeline once. Call it "
                    "once, on all examples together (torch.cat), and divide the output"
                )
            return output

        with self._running(examples, give, record) as drew, FixedDraws() if self._is_trial else nullcontext():
            returned = self._call(examples)
            if self._is_trial and drew():
                raise RuntimeError(f"{examples.kind} draws random numbers otherwise than from torch")
            return returned

    def loss(self, examples: StepExamples, output: Any, record: StepRecord | None, *, verify: bool) -> Tensor:
        """The loss of training_step, from the pipeline's `output`. `verify`: look whether it depends on it alone."""
        returned = self.run(examples, output, record)
        loss, others = returned, {}
        if isinstance(returned, Mapping):
            loss, others = returned.get("loss"), {key: value for key, value in returned.items() if key != "loss"}
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError(
                f"training_step returned {shown(returned)}: give the loss, one number as a tensor, or a dict with it "
                "as 'loss'; a step cannot be skipped, as its micro-batches are under way"
            )
        if verify:
            refuse_other_parameters(self.module, loss, output)
        if record is not None:
            record.loss, record.returned = loss.detach().clone().reshape(()), detached(others)
        return loss

    def trial(self, examples: StepExamples, output: Any) -> Tensor:
        """The loss of training_step for a check, called on a stand-in for the module, on which no trace of it is left.

        Torch's random numbers are the same for all examples. Raises RuntimeError if the step draws others.
        """
        steps = copy.copy(self)
        steps.module = stand_in(self.module)
        steps.target = steps.module if self.target is self.module else self.target
        steps._logs, steps._is_trial = LogRecorder(steps.module), True
        with metrics_protected(self.module):
            return steps.loss(examples, output, None, verify=False)

    def _call(self, examples: StepExamples) -> Any:
        return getattr(self.module, examples.kind)(examples.batch, *examples.arguments[examples.owner])

    @contextmanager
    def _running(
        self, examples: StepExamples, forward: Callable[..., Any], record: StepRecord | None
    ) -> Iterator[Callable[[], bool]]:
        seed = derive(self._seed, examples.kind, examples.number, *examples.path)
        self.target.__dict__["forward"] = forward
        try:
            with seeded(seed, self._device) as drew, self._logs.recording(record):
                yield drew
        finally:
            del self.target.__dict__["forward"]


def stand_in(module: LightningModule) -> LightningModule:
    """An object with the module's parts and values: what is set, or put into its lists and dicts, stays here."""
    found = object.__new__(type(module))
    copied = (list, dict, set, deque)
    vars(found).update(
        {name: copy.copy(value) if isinstance(value, copied) else value for name, value in vars(module).items()}
    )
    return found


def refuse_other_parameters(module: nn.Module, loss: Tensor, output: Any) -> None:
    """Raise UsageError if the loss depends on parameters otherwise than through the output."""
    outputs = [output] if isinstance(output, Tensor) else members(output)
    ends = {tensor.grad_fn for tensor in outputs if isinstance(tensor, Tensor)}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    seen: set[Any] = {None, *ends}
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise UsageError(
                f"the loss of training_step depends on the parameter {name!r} beside the output of self(...): it may "
                "live in another process, and its gradient would be lost. Use it in forward; a penalty on weights is "
                "the optimizer's weight_decay"
            )
        waiting += [following for following, _ in node.next_functions] if node is not None else []


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[Callable[[], bool]]:
    """In this block torch, NumPy and random draw from `seed`; afterwards they go on as if nothing had been drawn.

    Yields a function that says whether anything has been drawn.
    """
    cpu = torch.device("cpu")
    with python_generators_restored(), PreservedGenerator(cpu) as on_cpu, PreservedGenerator(device) as on_device:
        on_cpu.seed(seed)
        if device != cpu:
            on_device.seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        begins = states(device)
        yield lambda: states(device) != begins


def states(device: torch.device) -> list[bytes]:
    """The states of all generators that a step may draw from."""
    of_torch = [generator_of(each).get_state().numpy().tobytes() for each in {torch.device("cpu"), device}]
    return [*of_torch, repr(random.getstate()).encode(), pickle.dumps(np.random.get_state())]
