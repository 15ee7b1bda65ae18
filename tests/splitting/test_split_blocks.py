import copy
import random

import pytest
import torch
import torch.nn.functional as F
from splitting_models import GPT, Pairs, Skip
from torch import fx, nn

import stretto
from pairwise import in_turn
from stretto.errors import UsageError
from stretto.nn.chain import Chain


def tokens(*shape):
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(0))


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def assert_same(model, stages, *inputs):
    """Output and every gradient, bit for bit, in training (with dropout drawn alike) and in evaluation."""
    whole = Chain(*stages)
    parameters = list(model.parameters())
    assert {id(p) for p in whole.parameters()} == {id(p) for p in parameters}
    for training in (True, False):
        model.train(training)
        results = []
        for module in (model, whole):
            torch.manual_seed(3)
            output = module(*inputs)
            results.append((output, *torch.autograd.grad(output.square().sum(), parameters)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("num_stages", "shown"), in_turn([1, 2, 3, 5], [True, False], rounds=2, slow=1))
def test_a_gpt_is_the_same_in_stages(num_stages, shown):
    model, x = GPT(dropout=0.3).double(), tokens(3, 7)
    stages = stretto.split(model, num_stages, path="transformer.h", example=x if shown else None)
    assert len(stages) == num_stages
    assert all(isinstance(stage, fx.GraphModule) for stage in stages)
    assert_same(model, stages, x)
    assert_same(model, stages, tokens(2, 11))  # traced for any length


def test_stages_hold_the_models_own_modules_under_their_own_names():
    model = GPT()
    stages = stretto.split(model, 3, path="transformer.h", by="parameters")
    assert [key for stage in stages for key in stage.state_dict()] == list(model.state_dict())
    owned = {id(module) for module in model.modules()}
    assert all(id(stages[0].get_submodule(f"transformer.{name}")) in owned for name in ("wte", "drop", "h.0"))
    assert stages[0].position is model.position
    assert stages[0].transformer.steps is model.transformer.steps


def test_what_travels_comes_behind_what_the_last_block_gave():
    model, x = GPT(), tokens(3, 7)
    stages = stretto.split(model, 3, path="transformer.h", example=x)
    assert "carried from stage 0 to stage 1: transformer_h_1, tril" in stages.explanation
    hidden, mask = stages[0](x)
    assert hidden.shape == (3, 7, 8)
    assert mask.dtype == torch.bool
    again = stages[1](hidden, mask)
    assert again[1] is mask


def test_a_single_value_travels_bare():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x):
            return self.body(x.flatten(1)) * 2

    model, x = Plain().double(), numbers(3, 2, 2)
    stages = stretto.split(model, 3, path="body", example=x)
    assert isinstance(stages[0](x), torch.Tensor)
    assert_same(model, stages, x)


@pytest.mark.parametrize("by", ["flops", "time", "parameters"])
def test_a_skip_from_the_first_block_to_the_last_stage(by):
    model, x = Skip().double(), numbers(5, 6)
    stages = stretto.split(model, 4, path="blocks", example=x, by=by)
    assert_same(model, stages, x)
    assert_same(model, stages, numbers(2, 6))  # the number of examples is read anew, not frozen
    assert_same(model, stretto.split(model, 4, path="blocks"), x)


def test_nested_tuples_and_lists_travel_as_their_tensors():
    model, x = Pairs().double(), numbers(3, 4)
    stages = stretto.split(model, 3, path="blocks", example=x)
    assert [tensor.shape for tensor in stages[0](x)] == [(3, 4), (3, 4)]
    assert_same(model, stages, x)


def test_optional_arguments_take_what_the_example_gives():
    model, x, scale = GPT().double(), tokens(2, 5), numbers(1)
    assert_same(model, stretto.split(model, 2, path="transformer.h", example=(x, scale)), x, scale)


def test_assertions_stay_in_force():
    stages = stretto.split(GPT(), 2, path="transformer.h", example=tokens(2, 5))
    with pytest.raises(AssertionError, match=r"splitting_models\.py"):
        stages[0](tokens(2, 17))


ASSERTS = {  # a statement, and shapes that it refuses; (8, 4) is what all of them take
    "x.shape[0] < 9 and x.shape[1] == 4, 'both'": [(9, 4), (8, 5)],
    "not x.dim() == 3": [(8, 4, 4)],
    "4 != x.dim() - 1": [(1, 1, 1, 1, 4)],
    "0 < x.shape[0] < 9": [(0, 4), (9, 4)],
    "1 < x.shape[0] <= 8, 'between'": [(1, 4), (9, 4)],
    "x.shape[1] == 4, f'" + "{x}{self}" * 200 + "'": [(8, 5)],  # so far a jump that its distance takes two instructions
}


def forward_with(*lines):
    """A forward with these lines, as Python compiles it: pytest rewrites the assert statements of this file."""
    namespace = {}
    blocks = "return self.blocks[2](self.blocks[1](self.blocks[0](x)))"
    exec("\n    ".join(["def forward(self, x):", *lines, blocks]), namespace)
    return namespace["forward"]


@pytest.mark.parametrize("statement", ASSERTS, ids=lambda statement: statement[:30])
def test_which_asserts_are_seen(statement):
    stages = stretto.split(Around(forward_with(f"assert {statement}")), 2, path="blocks")
    stages[0](torch.ones(8, 4))
    for shape in ASSERTS[statement]:
        with pytest.raises(AssertionError, match="assertion at"):
            stages[0](torch.ones(shape))


@pytest.mark.parametrize(
    "lines",
    [
        ["large = bool(x.shape[0] > 3)", "assert large"],
        ["assert x.shape[0] < 9 or x.shape[1] == 4"],
        ["assert (x.shape[0], 1) != (9, 1)"],
        ["assert x.shape[0] in (7, 8)"],
        ["if x.shape[0] == 9: raise ValueError"],
    ],
    ids=str,
)
def test_what_is_decided_is_no_assertion(lines):
    with pytest.raises(UsageError, match="cannot be traced"):
        stretto.split(Around(forward_with(*lines)), 2, path="blocks")


def test_the_trainer_takes_the_stages():
    torch.manual_seed(0)
    model, x, y = GPT().double(), tokens(4, 6), tokens(4, 6)
    reference = copy.deepcopy(model)
    stages = stretto.split(model, 3, path="transformer.h", example=x)

    @stretto.mean  # without padding
    def loss(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    trainer = stretto.Trainer(stages, loss=loss, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), example=x)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        trainer.step(x, y)
        optimizer.zero_grad()
        loss(reference(x), y).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_the_model_is_left_as_it_was():
    model = GPT(dropout=0.5)
    model.transformer.drop.eval()
    modes, attributes = [m.training for m in model.modules()], set(vars(model))
    generator = torch.get_rng_state()
    ones = torch.ones
    stages = stretto.split(model, 2, path="transformer.h", example=tokens(2, 5))
    assert torch.equal(torch.get_rng_state(), generator)
    assert [m.training for m in model.modules()] == modes
    assert set(vars(model)) == attributes
    assert torch.ones is ones
    assert "transformer.steps" not in model.state_dict()
    assert "transformer.steps" not in stages[0].state_dict()


def test_tied_embeddings_come_apart_unless_told_otherwise():
    model = GPT(tie=True)
    message = (
        r"h\.0 \(Block\) with what comes before it and .*h\.4 \(Block\) with what comes after it share the parameter "
        r"'transformer\.wte\.weight' alias 'head\.weight'.*untie"
    )
    with pytest.raises(UsageError, match=message):
        stretto.split(model, 2, path="transformer.h", example=tokens(2, 5), tied="together")
    stages = stretto.split(model, 2, path="transformer.h", example=tokens(2, 5))
    assert stages[0].transformer.wte.weight is stages[1].head.weight
    assert "tied: stages 0 and 1 share the parameter" in stages.explanation
    assert_same(model, stages, tokens(2, 5))
    assert len(stretto.split(model, 1, path="transformer.h", example=tokens(2, 5))) == 1


class Around(nn.Module):
    """A model whose forward, between blocks, is what a test makes of it."""

    def __init__(self, forward, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(depth)])
        self.scale = nn.Parameter(torch.ones(4))
        self.table = torch.arange(4.0)  # a plain attribute, no buffer
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


def test_a_parameter_of_the_model_keeps_its_users_together():
    def forward(model, x):
        a, b, c, d = model.blocks
        return d(c(b(a(x)) * model.scale) * model.scale)

    model, x = Around(forward, depth=4).double(), numbers(2, 4)
    stages = stretto.split(model, 3, path="blocks", example=x, tied="together")
    assert stages.bounds == [0, 1, 3, 4]
    assert "share the parameter 'scale'" in stages.explanation
    assert_same(model, stages, x)
    apart = stretto.split(model, 4, path="blocks", example=x)
    assert apart[1].scale is apart[2].scale
    assert_same(model, apart, x)


def test_what_a_forward_keeps_is_not_left_on_the_model():
    def forward(model, x):
        model.last = x
        return model.blocks[2](model.blocks[1](model.blocks[0](x)))

    model = Around(forward)
    model.last = None
    stretto.split(model, 2, path="blocks")
    assert model.last is None


def test_one_module_under_two_names():
    model = Around(again)
    model.blocks[2] = model.blocks[1]
    with pytest.raises(UsageError, match="called more than once"):
        stretto.split(model, 2, path="blocks")


def test_buffers_and_constants_are_taken_not_sent():
    def forward(model, x):
        for block in model.blocks:
            x = block(x) + model.table + torch.ones(4)
        return x

    model, x = Around(forward).double(), numbers(2, 4)
    stages = stretto.split(model, 3, path="blocks", example=x)
    assert isinstance(stages[0](x), torch.Tensor)
    assert stages[2].table is model.table
    assert all("table" not in stage.state_dict() for stage in stages)
    assert_same_but_for_scale(model, stages, x)


def assert_same_but_for_scale(model, stages, x):
    del model.scale  # no stage needs it
    assert_same(model, stages, x)


class Positioned(nn.Module):
    """Adds its positions in its own forward, between its modules."""

    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(9, 4), nn.Parameter(torch.randn(6, 4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return x


def test_an_input_that_does_not_fit_is_told_by_the_error_alone(capfd):
    stages = stretto.split(Positioned(), 2, example=torch.ones(2, 6, dtype=torch.int64))
    trainer = stretto.Trainer(stages, lambda output, _: output.mean(), lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.raises(UsageError, match=r"stage 0 .* cannot take what it is given, \[2, 7\] int64: RuntimeError"):
        trainer.step(torch.ones(2, 7, dtype=torch.int64), torch.ones(2))
    assert capfd.readouterr() == ("", ""), "torch.fx prints a traceback"


def test_blocks_that_pass_what_cannot_travel_stay_together():
    class Named(nn.Module):
        def forward(self, state):
            return {"x": state["x"] * 2}

    def forward(model, x):
        state = {"x": model.blocks[0](x)}
        for block in model.blocks[1:]:
            state = block(state)
        return state["x"]

    model, x = Around(forward).double(), numbers(2, 4)
    model.blocks = nn.ModuleList([model.blocks[0], Named(), Named()])
    stages = stretto.split(model, 2, path="blocks", example=x)
    assert stages.bounds == [0, 1, 3]
    assert torch.equal(Chain(*stages)(x), model(x))
    with pytest.raises(UsageError, match="'blocks_1' on, which is neither a tensor nor"):
        stretto.split(model, 3, path="blocks", example=x)


def by_value(model, x):
    if x.sum() > 0:
        x = -x
    return model.blocks[2](model.blocks[1](model.blocks[0](x)))


def backwards(model, x):
    return model.blocks[0](model.blocks[1](model.blocks[2](x)))


def again(model, x):
    return model.blocks[1](model.blocks[2](model.blocks[1](model.blocks[0](x))))


def early(model, x):
    return model.blocks[1](model.blocks[0](x))


def by_mode(model, x):
    return model.blocks[2](F.dropout(model.blocks[1](model.blocks[0](x)), 0.5, model.training))


def noisy(model, x):
    return model.blocks[2](model.blocks[1](model.blocks[0](x) + torch.randn(4)))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (by_value, r"cannot be traced at .*test_split_blocks\.py:\d+ \(if x\.sum\(\) > 0:\).*list of layers"),
        (backwards, "once each.*called in the order blocks.2, blocks.1, blocks.0"),
        (again, "once each.*blocks.1 called more than once"),
        (early, "once each.*blocks.2 not called"),
        (by_mode, r"reads self\.training between its blocks.*dropout.*nn\.Dropout"),
        (noisy, "draws random numbers"),
    ],
)
def test_what_cannot_be_traced_says_where_and_what_to_do(forward, message):
    with pytest.raises(UsageError, match=message):
        stretto.split(Around(forward), 2, path="blocks", example=numbers(2, 4))


def by_shape(model, x):
    examples, *width = x.shape
    if x.ndim > 2 and x.dtype == torch.float64:
        x = x.flatten(2)
    for block in model.blocks:
        x = block(x.view(examples, *width))
    return -x if width[-1] != 4 else x


def test_what_shapes_decide_is_decided_as_the_example_has_it():
    model, x = Around(by_shape).double(), numbers(3, 4)
    with pytest.raises(UsageError, match=r"cannot be traced at .*test_split_blocks\.py:\d+"):
        stretto.split(model, 2, path="blocks")  # nothing says what the shapes are
    stages = Chain(*stretto.split(model, 3, path="blocks", example=x))
    for examples in (3, 5):
        assert torch.equal(stages(numbers(examples, 4)), model(numbers(examples, 4)))
    other = r"decides by its batch's shapes or types at .*blocks\.py:\d+: .* gave 2, this batch gives 3\. Split"
    with pytest.raises(UsageError, match=other):
        stages(numbers(3, 2, 4))


def scaled(x, factor, blocks=None):
    """Decides by numbers and returns several values; as a helper function it may."""
    if x.sum() > 10**9:
        return x, factor
    return x * factor, (factor.exp() if isinstance(factor, torch.Tensor) else factor)


def twice(block, x):
    return block(block(x))


class Helped(Around):
    def forward(self, x):
        for block in self.blocks:
            x, scale = scaled(x, factor=self.scale)
            x = block(x) + scale
        return x


def test_helper_functions_are_not_looked_into():
    model, x = Helped(None).double(), numbers(3, 4)
    before = scaled
    for shown in (x, None):
        stages = stretto.split(model, 3, example=shown, by="parameters")
        assert [sum("scaled" in node.name for node in stage.graph.nodes) for stage in stages] == [2, 1, 0]
        assert_same(model, stages, x)
    assert scaled is before


def test_a_function_that_is_handed_a_block_is_looked_into():
    class Handed(Around):
        def forward(self, x):
            return twice(self.blocks[2], self.blocks[1](self.blocks[0](x)))

    with pytest.raises(UsageError, match=r"blocks\.2 called more than once"):
        stretto.split(Handed(None), 2)


def masked(x):
    """A mask where some number is below 0, None elsewhere."""
    return x < 0 if (x < 0).any() else None


class Masked(Around):
    def forward(self, x):
        mask = masked(x)
        for block in self.blocks:
            x = block(x, mask)
        return x * self.scale


class Masking(nn.Linear):
    def forward(self, x, mask):
        return super().forward(x if mask is None else x.masked_fill(mask, 1.0))


def test_what_a_helper_makes_for_some_batches_only_travels_with_them():
    model = Masked(None).double()
    model.blocks = nn.ModuleList([Masking(4, 4) for _ in range(3)]).double()
    for example in (numbers(3, 4), numbers(3, 4).abs()):
        stages = stretto.split(model, 3, example=example)
        for x in (numbers(2, 4), numbers(2, 4).abs()):
            assert_same(model, stages, x)


def test_frozen_weights_may_be_thawed():
    """Their outputs go on as what gradients flow through, whatever was frozen when the model was split."""
    model, x = GPT().double(), tokens(2, 5)
    for parameter in model.transformer.wte.parameters():
        parameter.requires_grad_(False)
    model.transformer.h[0].requires_grad_(False)
    stages = stretto.split(model, 3, example=x)
    assert not model.transformer.wte.weight.requires_grad
    model.requires_grad_(True)
    assert_same(model, stages, x)


def test_the_list_of_blocks_is_found():
    model, x = GPT().double(), tokens(2, 5)
    found, named = stretto.split(model, 3, example=x), stretto.split(model, 3, example=x, path="transformer.h")
    assert found.explanation == named.explanation
    assert_same(model, found, x)
    model = Skip()
    model.stem = nn.Sequential(nn.Linear(2, 1), nn.ReLU())  # few parameters beside those of the blocks
    assert len(stretto.split(model, 4, by="parameters")) == 4
    assert len(stretto.split(Pairs().double(), 3, example=numbers(3, 4))) == 3  # in two lists, one of them plain


def by_kind(model, x):
    x = x + 1 if isinstance(x, torch.Tensor) else x
    return model.blocks[2](model.blocks[1](model.blocks[0](x)))


def test_what_tracing_changes_is_found_out():
    with pytest.raises(UsageError, match=r"stages of Around do not train as the model does.*isinstance"):
        stretto.split(Around(by_kind), 2, path="blocks", example=numbers(2, 4).float())


def test_the_example_must_fit():
    with pytest.raises(UsageError, match=r"example has 3 tensors, but GPT\.forward\(tokens, scale\) takes 1 to 2"):
        stretto.split(GPT(), 2, path="transformer.h", example=(tokens(2, 5),) * 3)
    with pytest.raises(UsageError, match=r"fails on the example in transformer\.wte \(Embedding\): "):
        stretto.split(GPT(), 2, path="transformer.h", example=torch.randn(2, 5))


def test_without_required_arguments_an_example_is_needed():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x=None):
            return self.blocks[1](self.blocks[0](x))

    with pytest.raises(UsageError, match=r"every argument of Optional\.forward\(x\) has a default"):
        stretto.split(Optional(), 2, path="blocks")
    assert len(stretto.split(Optional(), 2, path="blocks", example=torch.randn(2, 4))) == 2


def test_leaves_around_the_blocks_are_not_looked_into():
    """Embeddings with control flow, functions that read self.training: all right in modules of their own."""

    class Entry(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5, self.training) if x.sum() < 10**9 else random.random() * x

    def forward(model, x):
        x = model.entry(x)
        for block in model.blocks:
            x = block(x) * model.scale if block is model.blocks[0] else block(x)
        return x

    model, x = Around(forward).double(), numbers(2, 4)
    model.entry = Entry()
    assert_same(model, stretto.split(model, 2, path="blocks", example=x), x)
