"""bfloat16 with masters, and autocast, against loops written out by hand."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, mse_loss

import stretto
from laws.networks import NETWORKS
from pairwise import paired, thinned
from stretto.errors import UsageError
from stretto.methods.table import METHODS

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW}
LOW = torch.bfloat16
STEPS = 8


def stages(seed=0, norm=True):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        batch_norm = nn.BatchNorm1d(8) if norm else nn.Tanh()
        return [
            nn.Sequential(nn.Linear(6, 8), nn.Tanh()),
            nn.Sequential(nn.Linear(8, 8), batch_norm, nn.LayerNorm(8), nn.ReLU()),
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)),
        ]


def batches(count=STEPS, n=8):
    g = torch.Generator().manual_seed(1)
    teacher = torch.randn(6, 4, generator=g)
    inputs = [torch.randn(n, 6, generator=g) for _ in range(count)]
    return [(x, (x @ teacher).argmax(1)) for x in inputs]


def make(method="backprop", precision="bf16", optimizer=SGD, parts=None, loss=cross_entropy, **options):
    options = {"example": batches(1)[0][0], **options}
    return stretto.Trainer(
        stages() if parts is None else parts, loss, optimizer, method, precision=precision, **options
    )


def losses_of(trainer, data):
    losses = [trainer.step(x, y) for x, y in data]
    return [loss for loss in losses if loss is not None] + trainer.flush()


def assert_weights(trainer, wanted):
    found = trainer.model.state_dict()
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


# -- bfloat16 ---------------------------------------------------------------------------------------------------------


class Plain:
    """A model in bfloat16 with its batch norms in float32, and float32 copies of what is in bfloat16."""

    def __init__(self, parts, optimizer):
        self.model = nn.Sequential(*copy.deepcopy(parts)).train()
        exact = [p.detach().clone() for p in self.model.parameters()]
        for module in self.model.modules():
            if not list(module.children()) and not isinstance(module, nn.BatchNorm1d):
                module.to(LOW)
        self.parameters = list(self.model.parameters())
        self.masters = [p if p.dtype == torch.float32 else nn.Parameter(q)
                        for p, q in zip(self.parameters, exact, strict=True)]  # fmt: skip
        self.optimizer = optimizer(self.masters)

    def step(self, x, y, pieces=1):
        total, sums = 0.0, [None] * len(self.masters)
        for xs, ys in zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True):
            loss = cross_entropy(self.model(xs.to(LOW)).float(), ys) * (len(xs) / len(x))
            gradients = torch.autograd.grad(loss, self.parameters)
            sums = [g.float() if s is None else s + g.float() for s, g in zip(sums, gradients, strict=True)]
            total += loss.item()
        for master, gradient in zip(self.masters, sums, strict=True):
            master.grad = gradient
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)
        return total


SYNCHRONOUS = ["backprop", "gpipe(microbatches=4)", "1f1b(microbatches=4)"]


@pytest.mark.parametrize(("method", "cut", "optimizer"), paired(SYNCHRONOUS, [1, 3], OPTIMIZERS))
def test_synchronous_training_is_the_plain_loop_bit_for_bit(method, cut, optimizer):
    parts = stages() if cut == 3 else [nn.Sequential(*stages())]
    plain = Plain(parts, OPTIMIZERS[optimizer])
    trainer = make(method, optimizer=OPTIMIZERS[optimizer], parts=parts)
    data = batches()
    assert losses_of(trainer, data) == [plain.step(x, y, trainer.schedule.per_turn) for x, y in data]
    assert_weights(trainer, plain.model.state_dict())


class Delayed:
    """Backprop where stage s sees its weights of `delays[s]` updates ago, in either precision."""

    def __init__(self, parts, delays, precision):
        self.parts, self.delays, self.low = copy.deepcopy(parts), delays, precision == "bf16"
        self.autocast = partial(torch.autocast, "cpu", dtype=LOW, enabled=not self.low)
        self.masters = [[nn.Parameter(p.detach().clone()) for p in part.parameters()] for part in self.parts]
        self.optimizers = [SGD(each) for each in self.masters]
        self.history = [[self.weights(part, each)] for part, each in zip(self.parts, self.masters, strict=True)]

    def weights(self, part, masters):
        names = [name for name, _ in part.named_parameters()]
        return {name: m.detach().to(LOW if self.low else m.dtype, copy=True).requires_grad_()
                for name, m in zip(names, masters, strict=True)}  # fmt: skip

    def step(self, x, y):
        value = x.to(LOW) if self.low else x
        seen = [h[max(0, len(h) - 1 - delay)] for h, delay in zip(self.history, self.delays, strict=True)]
        with self.autocast():
            for part, weights in zip(self.parts, seen, strict=True):
                value = functional_call(part, weights, (value,))
            loss = cross_entropy(value.float() if self.low else value, y)
        gradients = iter(torch.autograd.grad(loss, [leaf for weights in seen for leaf in weights.values()]))
        for part, masters, optimizer, history in zip(
            self.parts, self.masters, self.optimizers, self.history, strict=True
        ):
            for master in masters:
                master.grad = next(gradients).float()
            optimizer.step()
            history.append(self.weights(part, masters))
        return loss.item()


@pytest.mark.parametrize("precision", ["bf16", "bf16-autocast"])
@pytest.mark.parametrize(("method", "delays"), [("pipedream", (2, 1, 0)), ("pb(stash=True)", (4, 2, 0))])
def test_a_stash_in_low_precision_is_its_definition_bit_for_bit(method, delays, precision):
    parts, data = stages(norm=False), batches(12)
    reference = Delayed(parts, delays, precision)
    trainer = make(method, precision, parts=parts)
    assert losses_of(trainer, data) == [reference.step(x, y) for x, y in data]
    assert_weights(trainer, {f"{s}.{name}": w.detach() for s, history in enumerate(reference.history)
                             for name, w in history[-1].items()})  # fmt: skip


FAMILIES = [*METHODS, "pb(predict=velocity, stash=True)", "pb-lwp(horizon=decayed)", "pipemare(reschedule=20)",
            "overlapping(delay=1, combine=mean)"]  # fmt: skip


@pytest.mark.parametrize("method", thinned(FAMILIES, 6))
def test_every_method_trains_nearly_as_in_float32(method):
    torch.manual_seed(0)
    data = batches(24, n=16)
    optimizer = partial(torch.optim.NAdam, lr=0.03) if method == "nesterov" else partial(SGD, lr=0.05)
    parts = stages() if method not in ("zb-v", "dualpipe-v") else [*stages(), nn.Linear(4, 4)]
    exact = make(method, None, optimizer, copy.deepcopy(parts))
    trainer = make(method, "bf16", optimizer, parts)
    wanted, found = losses_of(exact, data), losses_of(trainer, data)
    assert sum(found[-4:]) < 0.95 * sum(found[:4])
    assert sum(found[-4:]) == pytest.approx(sum(wanted[-4:]), rel=0.05)
    for stage in trainer._stages.values():
        assert stage.masters.copies
        for parameter, master in stage.masters.copies.items():
            assert (parameter.dtype, master.dtype) == (LOW, torch.float32)
            assert torch.equal(parameter, master.to(LOW))
            assert parameter.grad is None
            assert master.grad is None


@pytest.mark.parametrize("method", ["pb-lwp", "pb-lwpw", "pb-lwp-sc", "spectrain", "pipemare"])
def test_a_method_gets_its_values_from_the_masters(method):
    """A weight that bfloat16 cannot move is predicted, or corrected, all the same."""
    torch.manual_seed(0)
    parts = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)]
    trainer = make(method, parts=parts, optimizer=partial(torch.optim.SGD, lr=1e-5, momentum=0.9))
    weights, masters = trainer._stages[0].weights, trainer._stages[0].masters
    start = parts[0].weight.detach().clone()
    losses_of(trainer, batches(8))
    rule = weights.backward_rule if method == "pipemare" else weights.forward_rule
    master = masters.of(parts[0].weight)
    with torch.no_grad():
        value, exact = rule.value("weight", parts[0].weight), rule.rule.value("weight", master)
    assert (start == parts[0].weight).float().mean() > 0.9
    assert 1e-7 < (exact - master).abs().max() < 1e-3
    assert torch.equal(value, exact.to(LOW))


class Spy(nn.Module):
    """Notes the dtype of what comes in, and of its gradient."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.seen = inner, []

    def forward(self, x):
        self.seen.append(x.dtype)
        if x.requires_grad:
            x.register_hook(lambda gradient: self.seen.append(gradient.dtype))
        return self.inner(x)


def test_messages_are_bfloat16_and_the_loss_is_float32():
    seen = []

    def loss(output, target):
        seen.append(output.dtype)
        return cross_entropy(output, target)

    parts = [Spy(stage) for stage in stages()]
    trainer = make("greedy", parts=parts, loss=loss)
    for part in parts:
        part.seen.clear()  # of the shapes' trace, before anything is converted
    losses_of(trainer, batches(3))
    trainer = make("pb", parts=[Spy(stage) for stage in stages()], loss=loss, example=None)
    losses_of(trainer, batches(3))
    assert set(seen) == {torch.float32}
    assert {dtype for part in (*parts, *trainer.stages) for dtype in part.seen} == {LOW}
    assert len(trainer.stages[1].seen) == 6


def test_whole_numbers_are_left_alone():
    network = NETWORKS["transformer"]
    parts = [stage.float() for stage in network.stages(3)]
    data = network.batches(8)
    trainer = stretto.Trainer(parts, network.loss, SGD, "pb-lwp", precision="bf16")
    losses = losses_of(trainer, data * 4)
    assert losses[-1] < losses[0]
    assert {p.dtype for p in trainer.model.parameters()} == {LOW}


def test_targets_outputs_of_several_tensors_and_frozen_weights():
    class Two(nn.Linear):
        def forward(self, x):
            return super().forward(x), x[:, 0]

    parts = [nn.Linear(6, 6), Two(6, 4)]
    parts[1].bias.requires_grad_(False)

    def loss(outputs, target):
        assert [output.dtype for output in outputs] == [torch.float32] * 2
        return mse_loss(outputs[0], target) + outputs[1].square().mean()

    trainer = make(parts=parts, loss=loss)
    target = torch.randn(8, 4)
    trainer.step(batches(1)[0][0], target)
    assert parts[1].bias.dtype == LOW
    assert trainer.evaluate([(batches(1)[0][0], target)])["loss"] > 0


def test_norms_with_statistics_stay_in_float32():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(8))
            self.register_buffer("index", torch.arange(8))

        def forward(self, x):
            return x[:, self.index] * self.scale

    parts = [nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), Table()),
             nn.Sequential(nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 4))]  # fmt: skip
    for method in ("backprop", "pb", "pb-lwp", "pipemare", "pipedream"):
        trainer = make(method, parts=copy.deepcopy(parts))
        losses_of(trainer, batches(4))
        dtypes = {key: value.dtype for key, value in trainer.model.state_dict().items()}
        high = {key for key, dtype in dtypes.items() if dtype == torch.float32}
        assert high == {f"0.1.{name}" for name in ("weight", "bias", "running_mean", "running_var")}
        assert dtypes["0.2.index"] == torch.long
        assert len(trainer._stages[0].masters.copies) == 2


def test_evaluation_is_that_of_the_model():
    trainer, (x, y) = make("pb"), batches(1)[0]
    losses_of(trainer, batches(3))
    model = trainer.model.eval()
    with torch.no_grad():
        output = model(x.to(LOW)).float()
    assert trainer.evaluate([(x, y)]) == {"loss": cross_entropy(output, y).item(),
                                          "accuracy": (output.argmax(1) == y).float().mean().item()}  # fmt: skip


def test_a_model_that_is_in_bfloat16_already_gets_masters_too():
    parts = [nn.Linear(6, 4).to(LOW)]
    trainer = stretto.Trainer(parts, cross_entropy, partial(torch.optim.SGD, lr=1e-5), precision="bf16")
    before = parts[0].weight.detach().clone()
    for x, y in batches(20):
        trainer.step(x, y)
    (master, _) = trainer._stages[0].masters.copies.values()
    assert 0 < (master - before.float()).abs().max() < 2**-9


def test_a_minibatch_that_failed_leaves_no_gradient_behind():
    """1F1B: two micro-batches' gradients are with the masters when the third one's loss fails."""
    data, countdown = batches(4, n=16), []

    def loss(output, target):
        if countdown and countdown.pop():
            raise ArithmeticError
        return cross_entropy(output, target)

    clean, tried = (
        make("1f1b(microbatches=4)", optimizer=ADAMW),
        make("1f1b(microbatches=4)", optimizer=ADAMW, loss=stretto.mean(loss)),
    )
    for trainer in (clean, tried):
        for part in trainer.stages:
            part.eval()  # statistics have moved by then, as in plain PyTorch
    losses_of(clean, data)
    tried.step(*data[0])
    countdown.extend([True, False, False])
    with pytest.raises(ArithmeticError):
        tried.step(*data[1])
    assert any(master.grad is not None for stage in tried._stages.values() for master in stage.masters.copies.values())
    losses_of(tried, data[1:])
    assert_weights(tried, clean.model.state_dict())


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", thinned([*METHODS, "pb(predict=velocity, stash=True)"], 6, first=3))
def test_a_resumed_run_is_the_run_that_went_on(method, tmp_path):
    data = batches(10)
    optimizer = partial(torch.optim.NAdam, lr=0.01) if method == "nesterov" else SGD
    more = [nn.Linear(4, 4)] if method in ("zb-v", "dualpipe-v") else []
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5)

    def fresh(seed):
        return make(method, "bf16", optimizer, [*stages(seed), *copy.deepcopy(more)], scheduler=scheduler, seed=0)

    one, other = fresh(0), fresh(7)
    for x, y in data[:5]:
        one.step(x, y)
    one.save(tmp_path / "run.pt")
    other.load(tmp_path / "run.pt")
    assert losses_of(one, data[5:]) == losses_of(other, data[5:])
    for a, b in zip(one._stages.values(), other._stages.values(), strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.masters.copies.values(), b.masters.copies.values(), strict=True))
    assert_weights(other, one.model.state_dict())


def test_a_checkpoint_of_another_precision_is_refused(tmp_path):
    make(precision=None).save(tmp_path / "exact.pt")
    make().save(tmp_path / "low.pt")
    with pytest.raises(UsageError, match="saved with precision None, this trainer has precision bf16"):
        make().load(tmp_path / "exact.pt")
    with pytest.raises(UsageError, match="saved with precision bf16, this trainer has precision bf16-autocast"):
        make(precision="bf16-autocast").load(tmp_path / "low.pt")


# -- autocast ---------------------------------------------------------------------------------------------------------


def train_under_autocast(parts, optimizer, data, pieces):
    """Plain PyTorch: forward and loss inside, backward and step outside."""
    model = nn.Sequential(*copy.deepcopy(parts)).train()
    made, losses = optimizer(model.parameters()), []
    for x, y in data:
        made.zero_grad()
        losses.append(0.0)
        for xs, ys in zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True):
            with torch.autocast("cpu", dtype=LOW):
                loss = cross_entropy(model(xs), ys)
            loss = loss * (len(xs) / len(x)) if pieces > 1 else loss
            loss.backward()
            losses[-1] += loss.item()
        made.step()
    return model, losses


@pytest.mark.parametrize(("method", "around", "optimizer"), paired(SYNCHRONOUS, [False, True], OPTIMIZERS))
def test_autocast_is_plain_autocast_bit_for_bit(method, optimizer, around):
    parts, data = stages(), batches()
    trainer = make(method, "bf16-autocast", OPTIMIZERS[optimizer], parts)
    model, losses = train_under_autocast(parts, OPTIMIZERS[optimizer], data, trainer.schedule.per_turn)
    with torch.autocast("cpu", dtype=LOW, enabled=around):
        found = losses_of(trainer, data)
    assert found == losses
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert_weights(trainer, model.state_dict())
    x, y = data[0]
    with torch.no_grad(), torch.autocast("cpu", dtype=LOW):
        wanted = cross_entropy(model.eval()(x), y)
    assert trainer.evaluate([(x, y)])["loss"] == wanted.item()


@pytest.mark.parametrize(
    "method",
    thinned(["greedy", "overlapping", "overlapping(delay=1)", "chunked", "zb-h1", "pipedream-2bw",
             "pb(predict=weight, stash=True)", "nesterov"], 4),
)  # fmt: skip
def test_other_methods_train_under_autocast(method):
    data = batches(24, n=16)
    optimizer = partial(torch.optim.NAdam, lr=0.03) if method == "nesterov" else partial(SGD, lr=0.05)
    exact, trainer = make(method, None, optimizer), make(method, "bf16-autocast", optimizer)
    wanted, found = losses_of(exact, data), losses_of(trainer, data)
    assert found != wanted
    assert sum(found[-4:]) == pytest.approx(sum(wanted[-4:]), rel=0.05)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["pb", "pb-sc", "pb-lwp", "pb-lwpw", "pb-lwp-sc", "paci", "spectrain", "pipemare"])
def test_autocast_is_refused_where_a_backward_sees_other_weights(method):
    message = rf"method {method} cannot train under precision='bf16-autocast': .*stage 0.*Use precision='bf16', or"
    with pytest.raises(UsageError, match=message):
        make(method, "bf16-autocast")
    make(method, "bf16-autocast", parts=[nn.Linear(6, 4)])  # one stage: nothing is delayed


def test_a_refused_trainer_leaves_the_modules_as_they_were():
    parts = stages()
    with pytest.raises(UsageError, match=r"velocity prediction wants torch\.optim\.SGD"):
        make("pb-lwp", parts=parts, optimizer=ADAMW)
    assert {p.dtype for part in parts for p in part.parameters()} == {torch.float32}


@pytest.mark.parametrize(("precision", "message"), [
    ("bf17", "unknown precision 'bf17': did you mean 'bf16'"), ("float32", "None for the modules' own"),
    *[(name, "no float16.* Take bf16") for name in ("fp16", "float16", "half", "fp16-autocast", "16-mixed", 16,
                                                     torch.float16)],
])  # fmt: skip
def test_unknown_precisions(precision, message):
    with pytest.raises(UsageError, match=message):
        make(precision=precision)


def test_an_optimizer_that_was_made_of_the_model_is_refused():
    parts = stages()
    with pytest.raises(UsageError, match="steps the low-precision parameters themselves"):
        make(parts=parts, optimizer=lambda params: torch.optim.SGD(parts[0].parameters(), lr=0.1))
