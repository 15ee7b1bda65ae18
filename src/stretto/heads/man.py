"""MAN (Su et al. 2024, arXiv 2407.05623): a head leads its stage's output through an average of layers of the next one.

As in the authors' code (github.com/JunhaoSu0/MAN), a classifier reads E(x) + B(x). E is the next stage's first layer
with an exponential moving average of its weights, E <- momentum E + (1 - momentum) W, which the head's loss does not
train. B, the paper's learnable bias, is a copy of that layer, which it trains, as it trains the classifier. Running
statistics of norms in E are its own, not averages.

The next stage sends its weights after each `every`-th update. The forward of micro-batch m on stage s reads the average
of the first weights and of all that were sent up to the update with micro-batch m - 2, in their order; m - 3 under
`overlapping(delay=1)`. With every=1 m - 2 is what the authors' loop over all modules reads. Nobody waits, and placement
does not change the results. A flush brings in all that have been sent.

Ours: E and B start as copies of the layer (there they are drawn anew), the classifier has two layers, and for language
models it is a copy of the readout. InfoPro's decoder, which the authors keep beside it, is left out.
"""

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.heads.auglocal import Copies
from stretto.heads.head import REMEDY, First, ReadingHead, Site, Tensors, WeightReading
from stretto.heads.plain import layered, two_layer
from stretto.heads.solo import flattened, readout
from stretto.nn import deferred
from stretto.nn.batch import as_tuple
from stretto.nn.deferred import RemoteStage
from stretto.nn.preserve import undisturbed
from stretto.options.named import whole


def man(at: Site, *, momentum: float = 0.995, every: int = 1, depth: int = 1) -> nn.Module:
    """A head behind copies of the next stage's first `depth` layers, or of all of them if it has fewer.

    Layers without parameters belong to the one before them, and the last stage's readout is not among them: in front of
    a last stage that is nothing else the head is a classifier alone. The default momentum is that of the authors'
    commands. Raises UsageError if the next stage has no parameters or lives in another process, if several processes
    share a stage, or if no classifier fits.
    """
    if isinstance(momentum, bool) or not isinstance(momentum, int | float) or not 0 <= momentum < 1:
        raise UsageError(f"head 'man': momentum={momentum!r} must be a number from 0 to below 1")
    whole("head 'man'", "depth", depth)
    network, following = at.network, at.stage + 1
    assert network is not None, "the head is made of the next stage's layers"
    owner, last = network.stages[following], following == len(network.stages) - 1
    if why := network.why_unreadable(following):
        raise UsageError(
            f"head 'man' behind stage {at.stage} averages layers of stage {following}, but {why}. {REMEDY}"
        )
    layers = first_layers(owner, last, depth=depth)
    if layers is None and last:
        alone = classifier(at, at.features[0])
        return First(alone) if len(at.features) > 1 else alone
    if layers is None:
        raise UsageError(
            f"head 'man' behind stage {at.stage} averages the weights of stage {following}'s first layers, but that "
            f"stage has no parameters: cut the model elsewhere, or take another head. {REMEDY}"
        )
    if momentum and any(p.is_floating_point() and p.dtype.itemsize < 4 for p in layers.parameters()):
        raise UsageError(f"head 'man': {LOW_PRECISION}")
    device = at.features[0].device
    average, bias = (Copies(deferred.deep_copy(layers)).to(device) for _ in range(2))
    through = passed(average, at, following)
    return MomentumAuxiliary(average, bias, classifier(at, through), momentum)


LOW_PRECISION = (
    "a moving average stands still in bfloat16 or float16, whose digits end above its steps: use "
    "precision='bf16-autocast', or momentum=0, which copies"
)


def first_layers(stage: nn.Module, last: bool, *, depth: int, **others: object) -> nn.Sequential | None:
    """The stage's own first `depth` layers with parameters, and those without behind each; None if there are none.

    Those of the `last` stage end before its readout, or else before its last layer with parameters.
    """
    layers = list(flattened(stage))
    if last:
        end = readout(stage)
        if end is None:
            end = next((layer for layer in reversed(layers) if has_parameters(layer)), None)
        stop = end[0] if isinstance(end, nn.Sequential) else end
        layers = layers[: next((n for n, layer in enumerate(layers) if layer is stop), 0)]
    taken: list[nn.Module] = []
    for layer in layers:
        if has_parameters(layer) and sum(map(has_parameters, taken)) == depth:
            break
        taken.append(layer)
    return nn.Sequential(*taken) if any(map(has_parameters, taken)) else None


def has_parameters(layer: nn.Module) -> bool:
    return any(True for _ in layer.parameters())


def passed(average: Copies, at: Site, following: int) -> Tensor:
    """What the copied layers make of the stage's output, its first tensor. Raises UsageError if they cannot take it."""
    try:
        with undisturbed([average], at.features[0].device), torch.no_grad():
            output: Tensor = as_tuple(average(*at.features))[0]
    except (RuntimeError, TypeError, ValueError) as error:
        names = ", ".join(type(layer).__name__ for layer in average.layers)
        raise UsageError(
            f"head 'man' leads the output of stage {at.stage} through copies of stage {following}'s first layers "
            f"({names}), which cannot take it: {error}. Take another head. {REMEDY}"
        ) from error
    return output


def classifier(at: Site, through: Tensor) -> nn.Module:
    """A classifier of the copied layers' output: of tokens a copy of the model's readout, else two linear layers.

    Raises UsageError if neither fits.
    """
    network = at.network
    assert network is not None
    last = network.stages[-1]
    end = readout(last) if at.output.dim() == 3 and not isinstance(last, RemoteStage) else None
    linear = [layer for layer in end.modules() if isinstance(layer, nn.Linear)] if end is not None else []
    if end is not None and through.dim() == 3 and linear[-1].in_features == through.shape[-1]:
        return deferred.deep_copy(end).to(through.device).requires_grad_(True)
    if at.output.dim() == 2 and layered(through.dim(), 2):
        return two_layer(Site(at.stage, (through,), at.output, network))
    raise UsageError(
        f"head 'man' behind stage {at.stage} leads to {list(through.shape)} and needs a classifier to "
        f"{list(at.output.shape)}: for tokens [N, T, d] that is a copy of the model's readout, a norm and a Linear, or "
        f"a Linear, but the last stage does not end in one of this width: use head='language'. {REMEDY}"
    )


class MomentumAuxiliary(ReadingHead):
    """A moving average of the next stage's layers beside trained copies of them, and a classifier of their sum."""

    def __init__(self, average: nn.Module, bias: nn.Module, classifier: nn.Module, momentum: float) -> None:
        super().__init__()
        self.average = average.requires_grad_(False)
        self.bias = bias.requires_grad_(True)
        self.classifier = classifier
        self.momentum = momentum

    @property
    def copied(self) -> nn.Module:
        return self.average

    def forward(self, *features: Tensor) -> Tensor:
        """The classifier's output for the first tensor of both."""
        sides: tuple[Tensors, ...] = tuple(as_tuple(layers(*features)) for layers in (self.average, self.bias))
        output: Tensor = self.classifier(sides[0][0] + sides[1][0])
        return output

    def newer(self, weight: Tensor, arrived: Tensor) -> Tensor:
        """The average with the weight that has arrived; exactly that weight for momentum 0."""
        return weight.lerp(arrived, 1 - self.momentum)

    def extra_repr(self) -> str:
        return f"momentum={self.momentum:g}"


READING = WeightReading(
    lambda stage, num_stages: stage + 1, first_layers, "the next stage's first layers", averages=True
)
