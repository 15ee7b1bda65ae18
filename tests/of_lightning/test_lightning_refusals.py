"""What cannot work is refused by name before a weight has changed."""

import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import stretto
from late_imports import Late
from runtime.nursery import Forked
from stretto.trainer.feed import digest_of_batch

callbacks, lit, piped = Late("lightning.pytorch.callbacks"), Late("lit_modules"), Late("stretto.lightning")
batch_parts, pipeline = Late("stretto.lightning.batch_parts"), Late("stretto.lightning.pipeline")
pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch", "ignore::FutureWarning")


def changed(**members):
    """Makes a module that has these functions of its own."""
    return lambda: type("Module", (lit.Classifier,), members)()


def step(function):
    return changed(training_step=function)


def twice(self, batch, batch_idx):
    return cross_entropy(self(batch[0]) + self(-batch[0]), batch[1])


def never(self, batch, batch_idx):
    return cross_entropy(self.net(batch[0]), batch[1])


def penalized(self, batch, batch_idx):
    return cross_entropy(self(batch[0]), batch[1]) + self.net[0][0].weight.square().sum()


def encoded(self, batch, batch_idx):
    return cross_entropy(self(self.net[0][0](batch[0])[:, :6]), batch[1])


def nothing(self, batch, batch_idx):
    self(batch[0])


def detached(self, batch, batch_idx):
    return cross_entropy(self(batch[0]).detach(), batch[1])


def flagged(self, batch, batch_idx):
    return cross_entropy(self(batch[0], True), batch[1])


def by_flag(self, x, raw=False):
    return self.net(x)


def manual():
    module = lit.Classifier()
    module.automatic_optimization = False
    return module


def hooked(name):
    return changed(**{name: lambda self, *_: None})


MODULES = [
    (manual, "sets automatic_optimization = False"),
    (hooked("on_after_backward"), "on_after_backward looks at gradients"),
    (hooked("on_before_optimizer_step"), "on_before_optimizer_step looks at gradients"),
    (hooked("configure_gradient_clipping"), "configure_gradient_clipping changes gradients"),
    (hooked("backward"), "backward runs the backward itself"),
    (hooked("optimizer_step"), "optimizer_step steps the optimizer itself"),
    (hooked("optimizer_zero_grad"), "optimizer_zero_grad drops gradients itself"),
    (step(lambda self, dataloader_iter: None), "takes dataloader_iter"),
    (step(twice), r"training_step calls self\(...\) twice"),
    (step(never), r"training_step does not call self\(...\)"),
    (step(penalized), r"depends on the parameter 'net.0.0.weight'"),
    (step(encoded), "computes x of self"),
    (step(nothing), "training_step returned None"),
    (step(detached), "without a gradient"),
    (changed(training_step=flagged, forward=by_flag), r"self\(raw=True\): only tensors travel"),
]


@pytest.mark.parametrize(("make", "message"), MODULES, ids=[message for _, message in MODULES])
def test_modules(make, message):
    module = make()
    before = [value.clone() for value in lit.weights(module)]
    with pytest.raises(stretto.UsageError, match=message):
        lit.fitted(piped.StrettoStrategy("1f1b", stages=2), module, limit_val_batches=0)
    assert all(map(torch.equal, before, lit.weights(module)))


class Noting(nn.Module):
    """Leaves a number for the step."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.noted = inner, None

    def forward(self, x):
        x = self.inner(x)
        self.noted = x.detach().square().mean()
        return x


def test_a_step_that_reads_what_forwards_leave_is_refused():
    module = step(lambda self, batch, batch_idx: cross_entropy(self(batch[0]), batch[1]) * self.net[0].noted)()
    module.net[0] = Noting(module.net[0])
    with pytest.raises(stretto.UsageError, match=r"training_step reads Sequential\.0\.noted, which forwards assign"):
        lit.fitted(piped.StrettoStrategy("1f1b(microbatches=2)", stages=2), module, train=lit.loader())


def around(parameters):
    class Around(torch.optim.SGD):
        def __init__(self, inner):
            super().__init__([p for group in inner.param_groups for p in group["params"]], lr=0.1)
            self.inner = inner

    return Around(torch.optim.SGD(parameters, lr=0.1))


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (lambda parameters: None, "configure_optimizers returned None"),
        (around, "around another optimizer, inner="),
        (lambda parameters: torch.optim.SGD(list(parameters)[-2:], lr=0.1), "leaves out all parameters of stage 0"),
        (lambda parameters: torch.optim.LBFGS(parameters), "LBFGS"),
    ],
)
def test_optimizers(configure, message):
    with pytest.raises(stretto.UsageError, match=message):
        lit.fitted(piped.StrettoStrategy("1f1b", stages=2), lit.Classifier(configure=configure), limit_val_batches=0)


def looks():
    return type("Looks", (callbacks.Callback,), {"on_after_backward": lambda self, trainer, pl_module: None})()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": looks}, "Looks has on_after_backward"),
        (
            {"callbacks": lambda: callbacks.StochasticWeightAveraging(0.1)},
            "StochasticWeightAveraging averages all weights",
        ),
        ({"callbacks": lambda: callbacks.LearningRateFinder()}, "LearningRateFinder trains the whole module"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "gradient_clip_algorithm='value'"),
        ({"precision": "16-true"}, "precision='16-true' cannot be trained in stages"),
        ({"sync_batchnorm": True}, "sync_batchnorm=True"),
    ],
)
def test_arguments_of_lightnings_trainer(options, message):
    given = options | ({"callbacks": [options["callbacks"]()]} if "callbacks" in options else {})
    with pytest.raises(stretto.UsageError, match=message):
        lit.fitted(piped.StrettoStrategy("1f1b", stages=2), **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf16"}, "it comes from precision= of Lightning's Trainer"),
        ({"clip": 1.0}, "gradient_clip_val"),
        ({"mesh": stretto.Mesh(tensor=2)}, "processes share no stage here"),
        ({"sync": "shard-optimizer"}, "optimizers of configure_optimizers step whole stages"),
        ({"sync": "parameter-server"}, "optimizers of configure_optimizers step whole stages"),
        ({"method": "1f2b"}, "unknown method"),
        ({"start_method": "thread"}, "start_method='thread'"),
    ],
)
def test_arguments_of_the_strategy(options, message):
    with pytest.raises(stretto.UsageError, match=message):
        piped.StrettoStrategy(**options)


def test_small_batches_and_unequal_tensors_are_refused():
    with pytest.raises(stretto.UsageError, match=r"a batch of 4 examples cannot be cut into 8 .* drop_last=True"):
        lit.fitted(piped.StrettoStrategy("1f1b(microbatches=8)", stages=2), limit_val_batches=0)
    rows = DataLoader([(torch.zeros(4, 6).double(), torch.zeros(2).long())], batch_size=None)
    with pytest.raises(stretto.UsageError, match=r"batch\[1\] is Tensor \[2\] .*, and the batch has 4 examples"):
        lit.fitted(piped.StrettoStrategy("1f1b", stages=2), train=rows, limit_val_batches=0)


def test_stretto_does_not_import_lightning_and_says_what_to_install():
    code = "import sys, stretto.trainer.trainer; print('lightning' in sys.modules)\n"
    code += "sys.modules['lightning'] = None\nfrom importlib import util\nutil.find_spec = lambda name, *_: None\n"
    code += "try:\n    import stretto.lightning\nexcept stretto.UsageError as error:\n    print(error)"
    told, _ = Forked([sys.executable, "-c", code], dict(os.environ)).communicate(60)
    assert told.splitlines() == [
        "False",
        'stretto.lightning needs the package lightning: pip install "stretto[lightning]"',
    ]


def test_a_layer_that_a_method_cannot_train_is_named():
    net = lit.network()
    net[1][0] = nn.utils.parametrizations.weight_norm(net[1][0])
    with pytest.raises(stretto.UsageError, match="weight"):
        lit.fitted(piped.StrettoStrategy("pb", stages=2), lit.Classifier(net), limit_val_batches=0)


def test_a_process_that_reads_other_batches_is_named():
    """By Trainer.step, which is given the whole batch as its target."""
    one, other, same = (
        digest_of_batch(
            batch_parts.StepExamples("training_step", 0, [torch.arange(4.0), {"y": torch.tensor([row])}], ())
        )
        for row in (1, 2, 1)
    )
    assert one == same != other


def test_metrics_of_replicas_on_several_processes_are_named():
    replicas = SimpleNamespace(processes=SimpleNamespace(size=4), trainer=SimpleNamespace(mesh=stretto.Mesh(data=2)))
    with pytest.raises(stretto.UsageError, match="torchmetrics objects accuracy, of which each of 2 replicas"):
        pipeline.Pipeline._refuse_metrics_of_replicas(replicas, ["accuracy", "accuracy"])
    pipeline.Pipeline._refuse_metrics_of_replicas(replicas, [])


@pytest.mark.parametrize(
    ("member", "part"),
    [
        (list("abcd"), ["c", "d"]),
        (tuple("abcd"), ("c", "d")),
        ((1, 2, 3, 4), (3, 4)),
        (np.arange(4), np.array([2, 3])),
        ([{"box": torch.ones(7)}, {}, {"box": 1}, {"box": 2}], [{"box": 1}, {"box": 2}]),
        ("a text", "a text"),
        (None, None),
        (2.5, 2.5),
        (torch.tensor(3.0), torch.tensor(3.0)),
        ({"names": list("abcd"), "none": {}}, {"names": ["c", "d"], "none": {}}),
    ],
)
def test_what_is_no_tensor_is_cut_with_its_rows(member, part):
    batch = {"x": torch.arange(4), "member": member}
    cut = batch_parts.rows(batch, 2, 4, 4)
    assert cut["x"].tolist() == [2, 3]
    assert np.array_equal(cut["member"], part) if isinstance(part, np.ndarray) else cut["member"] == part
    whole = batch_parts.joined([batch_parts.rows(batch, 0, 2, 4), cut])
    assert np.array_equal(whole["member"], member) if isinstance(part, np.ndarray) else whole["member"] == member


@pytest.mark.parametrize(
    "member", [list("abc"), tuple("abcde"), np.arange(3), SimpleNamespace(y=torch.arange(4)), {1, 2, 3, 4}]
)
def test_what_has_no_row_for_each_example_is_refused(member):
    with pytest.raises(stretto.UsageError, match=r"batch\['member'\] is .*micro-batches"):
        batch_parts.rows({"x": torch.arange(4), "member": member}, 2, 4, 4)


def test_what_is_for_all_and_differs_is_not_joined():
    with pytest.raises(stretto.UsageError, match="'a' differs from batch to batch"):
        batch_parts.joined([{"x": torch.arange(4), "name": name} for name in "ab"])
