"""The encoder-decoder against torch's own, in parts, and learning to translate."""

import copy
from itertools import islice

import pytest
import torch
from torch import nn

from pairwise import thinned
from stretto import Trainer
from stretto.data import Dataset, Split, forever, load
from stretto.data.translation import PAD
from stretto.errors import UsageError
from stretto.measure.layer_counting import faking
from stretto.models import build
from stretto.models.encoder_decoder import encoder_decoder, find_bleu, score
from stretto.models.table import padded_cross_entropy
from stretto.nn.batch import IGNORED
from stretto.nn.chain import Chain


def pairs(examples=8, length=5, vocabulary=11):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(4, vocabulary, (examples, 2, length), generator=generator)
    y = torch.randint(4, vocabulary, (examples, length), generator=generator)
    for row in range(examples):
        x[row, :, length - row % 3 :], y[row, length - row % 3 :] = PAD, IGNORED
    split = Split(x, y)
    return Dataset("pairs", "translation", vocabulary, split, split, split, "Pairs.", {})


def torch_with(layers, width, heads, depth):
    """torch's transformer, pre-norm, with our weights but for embeddings and the last layer."""
    made = nn.Transformer(
        width, heads, depth, depth, 4 * width, 0.0, nn.functional.gelu, batch_first=True, norm_first=True
    ).double()
    ours = {}
    for index, layer in enumerate(layers):
        side, block = ("encoder", index) if index < depth else ("decoder", index - depth)
        for name, value in layer.state_dict().items():
            head = name.partition(".")[0]
            ours[f"{side}.{block}.{name.removeprefix(f'{head}.') if head.isdigit() else name}"] = value
    made.load_state_dict({name: ours_for(name, ours, depth) for name in made.state_dict()})
    return made


def ours_for(name, ours, depth):
    """The weight of ours that torch's transformer calls `name`."""
    side, where, *rest = name.split(".")
    if where == "norm":
        return ours[f"{'decoder.0' if side == 'encoder' else f'decoder.{depth - 1}.unembedding'}.norm.{rest[0]}"]
    block, part, *end = rest
    if part.startswith("norm"):
        norms = ("attention", "mlp") if side == "encoder" else ("attention", "cross", "mlp")
        return ours[f"{side}.{block}.{norms[int(part[4]) - 1]}_norm.{end[0]}"]
    parts = {"self_attn": "attention", "multihead_attn": "cross", "linear1": "mlp.0", "linear2": "mlp.2"}
    own = f"{side}.{block}.{parts[part]}"
    if end[0].startswith("in_proj"):
        return torch.cat([ours[f"{own}.{each}.{end[0][8:]}"] for each in ("query", "key", "value")])
    return ours[f"{own}.output.{end[1]}" if end[0] == "out_proj" else f"{own}.{end[0]}"]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_it_is_the_transformer_of_torch():
    width, heads, depth, data = 8, 2, 2, pairs()
    layers = [layer.double() for layer in build("encoder-decoder", data, depth=depth, width=width, heads=heads).layers]
    torch_own = torch_with(layers, width, heads, depth)
    source, target = data.train.x.unbind(1)
    embed, begin, end = layers[0][0].embedding, layers[depth][0].embedding, layers[-1][-1].unembedding
    causal = nn.Transformer.generate_square_subsequent_mask(5).isinf()
    made = torch_own(
        embed(source), begin(target), tgt_mask=causal, src_key_padding_mask=source == PAD,
        memory_key_padding_mask=source == PAD, tgt_is_causal=True,
    )  # fmt: skip
    assert torch.allclose(Chain(*layers)(data.train.x), end.score(made), atol=1e-10)


def test_it_has_as_many_parameters_as_torch_has():
    """The base model of Vaswani et al. 2017; 44,140,544 is what torch's nn.Transformer() has, of the same sizes."""
    vocabulary, length, width = 100, 7, 512
    data = pairs(length=length, vocabulary=vocabulary)
    with faking():
        size = sum(p.numel() for make in encoder_decoder(data, width=width, heads=8) for p in make().parameters())
    assert size == 44_140_544 + (3 * vocabulary + 2 * length) * width
    assert len(encoder_decoder(data)) == 12


def both_cuts(**options):
    """The network in blocks and in layers, with the weights of the first: both hold them in the same order."""
    data = pairs()
    made = [Chain(*build("encoder-decoder", data, cut=cut, **options).layers).double() for cut in ("blocks", "layers")]
    weights = [list(network.parameters()) for network in made]
    spreads = [[p.std().item() for p in each] for each in weights]
    with torch.no_grad():
        for mine, other in zip(*weights, strict=True):
            other.copy_(mine)
    return data, made, spreads


def test_cut_into_layers_it_is_the_same_network():
    data, (blocks, layers), _ = both_cuts(depth=2, width=8, heads=2)
    assert len(layers) == 15 * 2 + 5
    found = []
    for network in (blocks, layers):
        loss = padded_cross_entropy(network(data.train.x), data.train.y)
        loss.backward()
        found.append([loss, *(p.grad for p in network.parameters())])
    assert all(torch.equal(mine, other) for mine, other in zip(*found, strict=True))


def test_cut_into_layers_it_begins_with_weights_as_large():
    _, _, spreads = both_cuts(depth=2, width=64, heads=2)
    for mine, other in zip(*spreads, strict=True):
        assert other == pytest.approx(mine, rel=0.15)


def test_in_its_finest_cut_every_layer_has_weights():
    """Yang et al. 2021 cut by weights: no stage is there only to pass something on."""
    layers = build("encoder-decoder", pairs(), cut="layers").layers
    assert len(layers) == 95
    assert all(any(True for _ in layer.parameters()) for layer in layers)


@pytest.mark.parametrize("method", ["1f1b(microbatches=4)", "greedy"])
def test_cut_into_layers_it_trains(method):
    data, (_, layers), _ = both_cuts(depth=1, width=8, heads=2)
    alone, whole = copy.deepcopy(layers), data.train
    trainer = Trainer(layers, padded_cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1), method, example=whole.x)
    before = trainer.evaluate([(whole.x, whole.y)])["loss"]
    for _ in range(3):
        trainer.step(whole.x, whole.y)
    trainer.flush()
    assert trainer.evaluate([(whole.x, whole.y)])["loss"] < before
    if method != "greedy":
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            padded_cross_entropy(alone(whole.x), whole.y).backward()
            optimizer.step()
        pairs_of = zip(alone.parameters(), layers.parameters(), strict=True)
        assert all(torch.allclose(p, q, atol=1e-12) for p, q in pairs_of)


def test_padding_of_the_source_is_not_seen_and_no_token_looks_ahead():
    data = pairs()
    network = Chain(*build("encoder-decoder", data, depth=1, width=8, heads=2).layers)
    x = data.train.x[2:3].clone()  # two padded
    longer = torch.cat([x, torch.full((1, 2, 0), PAD)], 2)
    y = network(longer)
    other = x.clone()
    other[0, 1, 2] = 5 + (other[0, 1, 2] == 5)
    assert torch.allclose(network(other)[0, :2], y[0, :2], atol=1e-6)
    assert not torch.allclose(network(other)[0, 2], y[0, 2])
    assert torch.allclose(network(x[:, :, :3])[0], y[0, :3], atol=1e-6), "what pads is as if it were not there"


def test_the_loss_leaves_padding_out_and_adds_up_over_micro_batches():
    torch.manual_seed(0)
    output, target = torch.randn(6, 5, 11), pairs().train.y[:6]
    whole = padded_cross_entropy(output, target)
    halves = [padded_cross_entropy(*each) for each in zip(output.split(3), target.split(3), strict=True)]
    assert torch.allclose(whole, sum(halves) / 2)
    by_hand = [
        torch.stack([-output[n, t].log_softmax(0)[y] for t, y in enumerate(row) if y != IGNORED]).mean()
        for n, row in enumerate(target.tolist())
    ]
    assert torch.allclose(whole, torch.stack(by_hand).mean())


def test_accuracy_counts_no_padding():
    data = pairs()
    model = build("encoder-decoder", data, depth=1, width=8, heads=2)
    trainer = Trainer(model.layers, model.loss, lambda p: torch.optim.SGD(p, lr=0.1))
    found = trainer.evaluate([(data.train.x, data.train.y)])
    right = Chain(*model.layers)(data.train.x).argmax(-1) == data.train.y
    assert found["accuracy"] == right.sum() / (data.train.y != IGNORED).sum()


@pytest.mark.parametrize("method", ["gpipe(microbatches=3)", "1f1b"])
def test_pipelined_without_staleness_it_is_plain_training(method):
    data, made = pairs(9), []
    for name in ("backprop", method):
        model = build("encoder-decoder", data, depth=2, width=8, heads=2)
        layers = [layer.double() for layer in model.layers]
        trainer = Trainer(layers, model.loss, lambda p: torch.optim.SGD(p, lr=0.1), name)
        for _ in range(3):
            trainer.step(data.train.x, data.train.y)
        trainer.flush()
        made.append(trainer.gather())
    assert all(torch.allclose(value, made[1][key], atol=1e-12) for key, value in made[0].items())


@pytest.mark.parametrize("method", thinned(["greedy", "overlapping", "chunked(chunks=2)"], 2))
def test_local_methods_train_every_block(method):
    """An encoder's head says the translation position by position: it reads the first of the tensors that pass."""
    data = pairs()
    model = build("encoder-decoder", data, depth=2, width=8, heads=2)
    trainer = Trainer(model.layers, model.loss, lambda p: torch.optim.SGD(p, lr=0.1), method, example=data.train.x)
    before = [[p.clone() for p in layer.parameters()] for layer in model.layers]
    for _ in range(12):
        trainer.step(data.train.x, data.train.y)
    for old, layer in zip(before, model.layers, strict=True):
        assert any(not torch.equal(p, q) for p, q in zip(old, layer.parameters(), strict=True))


@pytest.mark.slow
def test_it_learns_to_translate():
    data = load("number-words", limit=1000, examples=1000)
    model = build("encoder-decoder", data, depth=1, width=32)
    network, bleu = Chain(*model.layers), find_bleu()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    test = data.test.x, data.test.y, data.text, bleu
    assert score(network, *test) < 10
    for x, y in islice(forever(data.train, 32, 0), 200):
        optimizer.zero_grad()
        model.loss(network(x), y).backward()
        optimizer.step()
    assert score(network, *test) > 60


def test_heads_must_divide_the_width():
    with pytest.raises(UsageError, match="model 'encoder-decoder': heads=3 does not divide width=64; take heads=2"):
        build("encoder-decoder", pairs(), heads=3)


def test_a_cut_that_is_none():
    with pytest.raises(UsageError, match=r"model 'encoder-decoder': cut='halves'; .*blocks"):
        build("encoder-decoder", pairs(), cut="halves")


def test_it_is_for_translation():
    with pytest.raises(UsageError, match=r"is for translation, but data set 'digits' .* take one of: mlp"):
        build("encoder-decoder", load("digits"))
