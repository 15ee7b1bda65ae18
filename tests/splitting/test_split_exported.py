"""Models that only torch.export can cut. Each is exported once: its stages serve several tests."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from branching_models import Branching, Counting, Moody, Regions, Shared, Tied

import stretto
from late_imports import Late
from pairwise import slow_where
from stretto.nn.chain import Chain
from stretto.nn.preserve import without_fused_transformers
from stretto.splitting.export.modes import Switch
from stretto.splitting.export.repairs import masks_as_given

transformers = Late("transformers")


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def tokens(*shape):
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(0))


def hugging_face(kind, task, **options):
    """A model of transformers, without words on the special tokens that a small vocabulary lacks."""
    transformers.logging.set_verbosity_error()
    return getattr(transformers, f"{kind}For{task}")(getattr(transformers, f"{kind}Config")(**options))


def t5():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_heads": 2, "num_layers": 1, "relative_attention_num_buckets": 8}
    return hugging_face("T5", "ConditionalGeneration", vocab_size=11, dropout_rate=0.0, **sizes)


def swin():
    sizes = {"image_size": 8, "patch_size": 2, "embed_dim": 4, "depths": [1, 1], "num_heads": [1, 1], "window_size": 2}
    drops = {"drop_path_rate": 0.3, "hidden_dropout_prob": 0.1}
    return hugging_face("Swin", "ImageClassification", **sizes, **drops, num_labels=3)


def mamba():
    """In float64 it casts parameters in vain while it trains, and gives views of parameters from piece to piece."""
    sizes = {"hidden_size": 4, "state_size": 2, "num_hidden_layers": 1, "use_mambapy": False}
    return hugging_face("Mamba", "CausalLM", vocab_size=11, tie_word_embeddings=True, **sizes)


def texts(rows):
    mask = torch.ones(rows, 6, dtype=torch.long)
    mask[0, 4:] = 0
    return {"input_ids": tokens(rows, 6), "attention_mask": mask, "decoder_input_ids": tokens(rows, 5)}


KINDS = {  # a model, a batch of so many rows, and the number of stages
    "branching": (functools.partial(Branching, dropout=0.3), lambda rows: {"x": numbers(rows, 3, 8, 8)}, 3),
    "dropless": (Branching, lambda rows: {"x": numbers(rows, 3, 8, 8)}, 2),
    "tied": (Tied, lambda rows: {"tokens": tokens(rows, 5), "mask": numbers(rows, 5)}, 2),
    "counting": (Counting, lambda rows: {"x": numbers(rows, 6)}, 3),
    "moody": (Moody, lambda rows: {"x": numbers(rows, 6)}, 3),
    "shared": (Shared, lambda rows: {"x": numbers(rows, 6)}, 2),
    "regions": (Regions, lambda rows: {"x": numbers(rows, 6)}, 3),
    "t5": (t5, texts, 3),
    "mamba": (mamba, lambda rows: {"input_ids": tokens(rows, 4)}, 4),
    "swin": (swin, lambda rows: {"pixel_values": numbers(rows, 3, 8, 8)}, 3),
}


SLOW = ("dropless", "t5", "mamba", "swin")
CHOSEN = slow_where(SLOW.__contains__, KINDS)


@functools.cache
def exported(kind):
    build, batch, num_stages = KINDS[kind]
    torch.manual_seed(3)
    model = build().double()
    return model, batch, stretto.split(model, num_stages, example=batch(4)), copy.deepcopy(model.state_dict())


def given(kind):
    """A model as it was when it was split."""
    model, batch, stages, state = exported(kind)
    model.load_state_dict(state)
    for module in (model, *stages):
        module.train()
    return model, batch, stages


def outcome(module, state, parameters, *inputs, **named):
    """Outputs, gradients and buffers of one pass, with what is drawn drawn alike."""
    torch.manual_seed(3)
    output = module(*inputs, **named)
    tensors = tuple(output.values()) if isinstance(output, dict) else output if isinstance(output, tuple) else (output,)
    loss = sum(tensor.square().sum() for tensor in tensors)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [*tensors, *gradients, *(value.clone() for value in state().values())]


@pytest.mark.parametrize("rows", [7, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (4, 1))])
@pytest.mark.parametrize("kind", CHOSEN)
def test_stages_give_what_the_model_gives(kind, rows):
    """Bit for bit, for any number of rows, in training (dropout, statistics) and in evaluation."""
    model, batch, stages = given(kind)
    whole, parameters, inputs = Chain(*stages), list(model.parameters()), batch(rows)
    uncached = {"use_cache": False} if kind in ("t5", "mamba") else {}
    for training in (True, False):
        model.train(training)
        whole.train(training)
        before = copy.deepcopy(model.state_dict())
        wanted = outcome(model, model.state_dict, parameters, **inputs, **uncached)
        model.load_state_dict(before)
        found = outcome(whole, model.state_dict, parameters, *inputs.values())
        for one, other in zip(wanted, found, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("kind", CHOSEN)
def test_stages_hold_the_models_own_weights(kind):
    model, _, stages = given(kind)
    own = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items()}
    held = {id(tensor) for stage in stages for tensor in stage.state_dict(keep_vars=True).values()}
    assert held <= own.keys()
    assert {name for address, name in own.items() if address not in held} == (
        {"unused.weight", "unused.bias"} if kind in ("branching", "dropless") else set()
    )
    gathered = {
        f"{index}.{key}": value for index, stage in enumerate(stages) for key, value in stage.state_dict().items()
    }
    assert stages.model_state(gathered).keys() == model.state_dict().keys()


def test_evaluation_has_no_dropout_and_the_running_statistics():
    _, batch, stages = given("branching")
    whole, x = Chain(*stages), batch(4)["x"]
    with torch.no_grad():
        whole.train()
        assert not torch.equal(whole(x), whole(x))
        whole.eval()
        alone = torch.cat([whole(row) for row in x.split(1)])
        torch.testing.assert_close(whole(x), alone, rtol=0, atol=1e-12)
    assert sum(isinstance(module, Switch) for module in whole.modules()) == 6  # four norms, depth, dropout


@stretto.mean  # without padding
def loss_of(output, target):
    logits = output[0] if isinstance(output, tuple) else output
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("method", ["1f1b(microbatches=3)", "pb"])
@pytest.mark.parametrize("kind", slow_where(SLOW.__contains__, ["dropless", "tied", "counting", "t5"]))
def test_methods_train_the_model(kind, method):
    """1F1B as one device does on the same micro-batches, for norms see one at a time; pb runs."""
    model, batch, stages = given(kind)
    reference = copy.deepcopy(model)
    target = tokens(6, 5) if kind in ("tied", "t5") else tokens(6) % 4
    inputs = tuple(batch(6).values())
    trainer = stretto.Trainer(stages, loss_of, sgd, method, example=inputs)
    optimizer = sgd(reference.parameters())
    names = list(batch(6))
    for _ in range(3):
        loss = trainer.step(inputs, target)
        if method == "pb":
            continue
        optimizer.zero_grad()
        total = 0.0
        for part in zip(target.chunk(3), *(x.chunk(3) for x in inputs), strict=True):
            output = reference(**dict(zip(names, part[1:], strict=True)))
            own = loss_of(output.logits if kind == "t5" else output, part[0]) / 3
            own.backward()
            total += own.item()
        optimizer.step()
        assert loss == pytest.approx(total, abs=1e-12)
    trainer.flush()
    if method != "pb":
        for mine, theirs in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
    scores = trainer.evaluate([(inputs, target)])
    assert scores == trainer.evaluate([(inputs, target)])
    assert stages.model_state(trainer.gather()).keys() == reference.state_dict().keys()


class Tagger(torch.nn.Module):
    """torch's own transformer, as it comes, on padded sequences: no tracer sees its blocks."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(11, 8, padding_idx=0)
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2)
        self.out = torch.nn.Linear(8, 3)

    def forward(self, words):
        return self.out(self.encoder(self.words(words), src_key_padding_mask=words == 0))


@pytest.mark.slow
def test_a_transformer_of_torch_is_cut_though_its_fused_kernel_gives_other_numbers_for_padding():
    model, words = Tagger(), tokens(4, 6)
    words[:, 4:] = 0
    stages = stretto.split(model, 2, example=words)
    with torch.no_grad(), without_fused_transformers():
        expected = model.eval()(words)
        torch.testing.assert_close(Chain(*stages).eval()(words), expected)
    assert torch.backends.mha.get_fastpath_enabled()


class Noting(torch.nn.Module):
    """A block that puts what it gives on a list."""

    def __init__(self, noted):
        super().__init__()
        self.linear, self.noted = torch.nn.Linear(6, 6), noted

    def forward(self, x):
        self.noted.append(torch.tanh(self.linear(x)))
        return self.noted[-1]


class Gathering(torch.nn.Module):
    """Adds up what its blocks have put on a list: a trace, which runs no block, finds it empty."""

    def __init__(self):
        super().__init__()
        self.noted = []
        self.blocks = torch.nn.ModuleList(Noting(self.noted) for _ in range(3))
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x):
        self.noted.clear()
        for block in self.blocks:
            x = block(x)
        return self.head(gathered(self.noted, x))


def gathered(noted, x):
    return torch.stack([*noted]).sum(0).to(x.dtype)


def test_a_record_that_lacks_what_blocks_keep_is_no_fault_of_the_example():
    said = r"Gathering\.forward is recorded without .*the model takes the example and the record fails at %gathered"
    with pytest.raises(stretto.UsageError, match=said):
        stretto.split(Gathering(), 2, example=numbers(4, 6).float())


def test_a_graph_does_not_look_at_the_elements_of_a_mask():
    """torch.nn's encoder and decoder look whether a mask is causal: a graph uses any mask as it is."""
    decide = torch.nn.modules.transformer._detect_is_causal_mask
    mask = torch.nn.Transformer.generate_square_subsequent_mask(3)
    with masks_as_given():
        asked = torch.nn.modules.transformer._detect_is_causal_mask
        assert [asked(mask), asked(mask, None, 3), asked(mask, True), asked(mask, False), asked(None)] == [
            False, False, True, False, False,
        ]  # fmt: skip
    assert torch.nn.modules.transformer._detect_is_causal_mask is decide
    assert decide(mask)
