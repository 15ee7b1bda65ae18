"""What each process does in the tests of whole modules on a tensor axis."""

import copy
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import stretto
from laws.operator_cases import check, close, mesh_of, same, turns
from parallel.networks import ResNet
from parallel.scripts import begin, end
from parallel.transformer_blocks import GPT2, BertLayer, GPT2Block, Llama, LlamaDecoderLayer, LlamaModel, ViTLayer
from stretto.models.published import DecoderOptions, block_shape
from stretto.models.residual_block import blocks
from stretto.models.transformer import Block, Embedding, Unembedding
from stretto.parallel.operator.piece import pieces
from stretto.trainer.backend import in_one_process


def made(make):
    torch.manual_seed(0)
    module = make().double()
    for each in module.parameters():
        nn.init.normal_(each, std=0.3)
    return module


def sequence(width, length=5):
    return torch.randn(2, length, width, dtype=torch.float64)


def tokens(vocabulary, length=5):
    return torch.randint(vocabulary, (2, length))


def own(width=16, heads=4, vocabulary=12):
    """Stretto's own language model."""
    return nn.Sequential(
        Embedding(vocabulary, 8, width), Block(width, heads, 2), Block(width, heads, 2), Unembedding(vocabulary, width)
    )


def mlp(width, hidden, bias=True):
    return nn.Sequential(
        nn.Linear(width, hidden, bias), nn.ReLU(inplace=True), nn.Linear(hidden, width, bias), nn.Tanh(),
        nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.Sequential(nn.GELU(), nn.Linear(hidden, 3)),
        nn.Linear(3, 5), nn.ReLU(inplace=True),
    )  # fmt: skip


def residual(width, heads, kv_heads, gated):
    """Two blocks of networks that are planned for without data."""
    options = DecoderOptions(
        depth=2, width=width, heads=heads, kv_heads=kv_heads, hidden=2 * width, context=8, dropout=0.0, gated=gated,
        norm="rms" if gated else "layer", bias=not gated,
    )  # fmt: skip
    shape = block_shape("decoder", options, causal=True)
    return nn.Sequential(*(make() for make in blocks(shape)))


class Masked(nn.Module):
    """torch's attention with everything that it can be given; its weights are part of the output."""

    def __init__(self, average=True, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 4, **options)
        self.average = average

    def forward(self, x):
        batch = x.size(0) if self.attention.batch_first else x.size(1)
        length = x.size(1) if self.attention.batch_first else x.size(0)
        masks = torch.zeros(batch * 4, length, length).bernoulli(0.3, generator=torch.Generator().manual_seed(0))
        padding = torch.zeros(batch, length, dtype=x.dtype)
        padding[0, -1] = -torch.inf
        out, weights = self.attention(
            x, 2 * x[..., : self.attention.kdim], x[..., : self.attention.vdim], padding,
            attn_mask=-masks.to(x.dtype), average_attn_weights=self.average,
        )  # fmt: skip
        return torch.cat([out.flatten(), weights.flatten()])


class Plain(nn.Module):
    """torch's attention of one sequence with itself, weights not wanted."""

    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 4, **options)

    def forward(self, x):
        causal = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        return self.attention(x, x, x, attn_mask=causal, is_causal=True, need_weights=False)[0]


class Decoded(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 4, 24, 0.0, batch_first=True), 1)

    def forward(self, x):
        return self.layers(x, x.flip(1))


def encoder(norm_first=False):
    layer = nn.TransformerEncoderLayer(12, 4, 24, 0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


ALL = {  # module, its input, and how many parameters and buffers are cut at least
    "own": (own, lambda: tokens(12), 22),
    "own, uneven": (partial(own, 20, 5, 11), lambda: tokens(11), 22),
    "residual": (partial(residual, 16, 4, 4, False), lambda: sequence(16), 12),
    "residual, grouped and gated, uneven": (partial(residual, 20, 10, 5, True), lambda: sequence(20), 8),
    "mlp": (partial(mlp, 6, 12), lambda: torch.randn(4, 6).double(), 10),
    "mlp, uneven, without bias": (partial(mlp, 6, 7, False), lambda: torch.randn(4, 6).double(), 8),
    "gpt-2": (partial(GPT2, 12, 16, 4), lambda: tokens(12), 12),
    "gpt-2, uneven": (partial(GPT2Block, 20, 5), lambda: sequence(20), 6),
    "llama": (partial(Llama, 12, 16, 8, 4, 24), lambda: tokens(12), 9),
    "llama, uneven": (partial(Llama, 11, 20, 10, 5, 13), lambda: tokens(11), 9),
    "bert": (partial(BertLayer, 16, 4), lambda: sequence(16), 10),
    "attention": (Masked, lambda: sequence(12).transpose(0, 1), 3),
    "attention, each head": (
        partial(Masked, False, batch_first=True, bias=False, kdim=5, vdim=7), lambda: sequence(12), 4),
    "attention, extra keys": (
        partial(Masked, add_bias_kv=True, add_zero_attn=True), lambda: sequence(12).transpose(0, 1), 5),
    "attention, one sequence": (Plain, lambda: sequence(12)[0], 3),
    "encoder": (encoder, lambda: sequence(12), 12),
    "encoder, norms first": (partial(encoder, True), lambda: sequence(12), 12),
    "decoder": (Decoded, lambda: sequence(12), 9),
    "resnet": (partial(ResNet, (1, 1), 8), lambda: torch.randn(2, 3, 16, 16).double(), 30),
}  # fmt: skip


class Causal(nn.Module):
    """Torch's encoder layers in turn, with both kinds of masks."""

    def __init__(self, batch_first=True, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 4, 24, 0.0, batch_first=batch_first, **options)
        self.layers = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(12), enable_nested_tensor=False)
        self.batch_first = batch_first

    def forward(self, x):
        batch, length = x.shape[:2] if self.batch_first else x.shape[1::-1]
        padding = torch.zeros(batch, length, dtype=torch.bool)
        padding[0, -1] = True
        return self.layers(x, torch.ones(length, length, dtype=torch.bool).triu(1), padding)


BLOCKS = {  # known transformer blocks, and their input: a length of 5 divides by neither 2, 3 nor 4
    "own": (own, lambda: tokens(12)),
    "own, uneven": (partial(own, 20, 5, 11), lambda: tokens(11, 7)),
    "encoder": (encoder, lambda: sequence(12)),
    "encoder, norms first": (partial(encoder, True), lambda: sequence(12)),
    "encoder, no biases, masked": (lambda: Causal(bias=False), lambda: sequence(12)),
    "encoder, sequence first": (partial(Causal, batch_first=False), lambda: sequence(12).transpose(0, 1)),
    "layer, one sequence": (lambda: nn.TransformerEncoderLayer(12, 4, 24, 0.0), lambda: sequence(12)[0]),
    "shorter than the axis": (partial(GPT2Block, 16, 4), lambda: sequence(16, 1)),
    "gpt-2": (partial(GPT2, 12, 16, 4), lambda: tokens(12)),
    "llama": (partial(LlamaModel, 16, 8, 4, 24), lambda: sequence(16)),
    "bert": (lambda: nn.Sequential(BertLayer(16, 4), BertLayer(16, 4)), lambda: sequence(16)),
    "vit": (lambda: nn.Sequential(ViTLayer(16, 4), nn.LayerNorm(16), ViTLayer(16, 4)), lambda: sequence(16)),
}


def everything(processes, share):
    """Every module on 2 processes and on 3 or 4; whatever else wants four processes. Two pairs share out the work.

    Of the cases one in `share`; on two processes without what wants more of them.
    """
    world = begin(processes, names=("tensor",))
    pairs = mesh_of(2)
    for size, kind, some in ((2, "dtensor", list(ALL)), (3, "local", list(ALL)[::2]), (4, "local", list(ALL)[1::2])):
        mesh = pairs if size == 2 else mesh_of(size) if size <= processes else None
        chosen = [] if mesh is None else turns(mesh, some[::share])
        for name, (make, given, least) in ((each, ALL[each]) for each in chosen):
            try:
                torch.manual_seed(2)
                assert check(made(make), given(), mesh, parameters=kind) >= least
            except Exception as error:
                raise AssertionError(f"{name} on {size} processes, {kind}") from error
        in_parts = [] if mesh is None or size == 4 else turns(mesh, list(BLOCKS.items())[::share])
        for name, (make, given) in in_parts:
            try:
                torch.manual_seed(2)
                check(made(make), given(), mesh, parameters=kind, sequence=True)
            except Exception as error:
                raise AssertionError(f"{name} on {size} processes, {kind}, parts of the sequence") from error
    planned(world)
    for kind in ("dtensor", "local")[::share]:
        trained(pairs, kind, share)
    methods = product(("pb-lwp-sc", "pipedream", "1f1b"), (True, False))
    training = [partial(emulated, method=method, sequence=sequence) for method, sequence in methods]
    others = [*(partial(each, share=share) for each in (masks, kept, parts_of_masks)), parts_pass]
    for each in (*turns(pairs, training[::share]), *turns(pairs, others)):
        each(pairs)
    end()


def planned(mesh):
    """What the user says instead."""
    make, x = partial(mlp, 8, 12), torch.randn(3, 8).double()
    plan = {"0": "replicate", "2": "row", "4": "column-sliced", "5": "replicate", "6": "replicate", "7": "column"}
    del plan["4"], plan["5"]
    module = stretto.parallel.tensor(made(make), mesh, plan=plan)
    assert sorted(name for name, each in module.named_parameters() if isinstance(each, DTensor)) == [
        "2.bias", "2.weight", "4.bias", "4.weight"]  # fmt: skip
    assert sorted(name for name, _ in pieces(module)) == ["7.bias", "7.weight"]
    check(made(make), x, mesh, plan=plan)
    pair = {"0": "column-sliced", "2": "row-sliced", "4": "replicate", "6.1": "row"}
    assert check(made(make), x, mesh, plan=pair, parameters="local") == 6
    table = lambda: nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9))  # noqa: E731
    assert check(made(table), tokens(9), mesh, plan={"0": "vocabulary"}, parameters="local") == 3


def trained(mesh, kind, share):
    """Replicas of two processes each: some steps of AdamW and of momentum on a part of a batch, gradients averaged."""
    replica, rows, right = mesh.get_local_rank("data"), 4 // mesh.size(0), made(own)
    module = stretto.parallel.tensor(copy.deepcopy(right), mesh, parameters=kind)
    torch.manual_seed(4)
    x, y = torch.randint(12, (3, 4, 6)), torch.randint(12, (3, 4, 6))
    optimizers = partial(torch.optim.AdamW, lr=0.01), partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    for make in optimizers[::share]:
        single, parallel = make(right.parameters()), make(module.parameters())
        for step in range(3):
            nn.functional.cross_entropy(right(x[step]).flatten(0, 1), y[step].flatten()).backward()
            part = slice(rows * replica, rows * (replica + 1))
            nn.functional.cross_entropy(module(x[step, part]).flatten(0, 1), y[step, part].flatten()).backward()
            for each in module.parameters():
                gradient = each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad
                dist.all_reduce(gradient, group=mesh.get_group("data"))
                gradient /= mesh.size(0)
            same(module, right)
            for optimizer in (single, parallel):
                optimizer.step()
                optimizer.zero_grad()
    same(module, right)
    whole = stretto.parallel.gather(module)
    assert all(type(each) is torch.Tensor for each in whole.values())
    for name, each in right.state_dict().items():
        close(name, whole[name], each)
    made(own).load_state_dict(whole)


def emulated(mesh, method, *, sequence=False):
    """Stages of a pipeline, each on the tensor axis: what a trainer does to weights it does to parts of them."""
    torch.manual_seed(5)
    batches = [(torch.randint(12, (4, 6)), torch.randint(12, (4, 6))) for _ in range(5)]

    def losses(stages):
        trainer = stretto.Trainer(
            stages, loss=stretto.losses.token_cross_entropy,
            optimizer=lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9), method=method,
            example=batches[0][0],
        )  # fmt: skip
        found = [trainer.step(*batch) for batch in batches]
        return [loss for loss in [*found, *trainer.flush()] if loss is not None]

    right = made(own)
    mine = copy.deepcopy(right)
    for stage in mine:
        blocks = isinstance(stage, Block) and sequence
        stretto.parallel.tensor(stage, mesh, parameters="local", sequence=blocks)
    with in_one_process():
        close(method, losses(list(mine)), losses(list(right)))
    same(mine, right)


def masks(mesh, share):
    """Dropout: alike where activations are whole, the generators alike afterwards, heads and slices apart."""
    group = mesh.get_group("tensor")
    torch.manual_seed(8)
    for make, given in (
        (partial(GPT2, 12, 20, 5, 0.3), tokens(12)), (partial(BertLayer, 20, 5, 0.3), sequence(20)),
        (lambda: nn.TransformerEncoderLayer(20, 5, 21, 0.3), sequence(20)),
        (lambda: nn.Sequential(nn.Linear(20, 21), nn.Dropout(0.3), nn.Linear(21, 20), nn.Dropout(0.3)), sequence(20)),
    )[::share]:  # fmt: skip
        module = stretto.parallel.tensor(made(make), mesh)
        torch.manual_seed(9)
        given = alike(given.double() if given.is_floating_point() else given, group)
        outs = [module(given), module(given)]
        assert not torch.equal(*outs)
        for out in outs:
            alike(out.detach(), group)
        alike(torch.get_rng_state(), group)
        module.eval()
        torch.testing.assert_close(module(given), module(given))
    apart = stretto.parallel.tensor(nn.Sequential(nn.Linear(4, 64), nn.Dropout(), nn.Linear(64, 4)), mesh)
    seen = []
    apart[1].register_forward_hook(lambda layer, args, out: seen.append(out.detach() == 0))
    torch.manual_seed(0)
    apart(torch.randn(8, 4))
    assert not torch.equal(*gathered(seen[0].to(torch.uint8), group))
    before = torch.get_rng_state()
    apart.eval()(torch.randn(8, 4, generator=torch.Generator()))
    assert torch.equal(before, torch.get_rng_state())


def parts_of_masks(mesh, share):
    """Dropout on parts of the sequence: again the same from the same seed, other masks on each process, and whoever
    has no part leaves the generators alike.
    """
    group, seen = mesh.get_group("tensor"), []
    for make in (
        lambda: nn.TransformerEncoderLayer(20, 5, 21, 0.3, batch_first=True), partial(GPT2Block, 20, 5, 0.3),
        partial(BertLayer, 20, 5, 0.3), partial(ViTLayer, 20, 5, 0.3),
    )[::share]:  # fmt: skip
        module = stretto.parallel.tensor(made(make), mesh, sequence=True)
        for length in (6, 1):
            given = alike(torch.ones(2, length, 20, dtype=torch.float64), group)
            outs = []
            for seed in (9, 9, 10):
                torch.manual_seed(seed)
                outs.append(alike(module(given).detach(), group))
                alike(torch.get_rng_state(), group)
            assert torch.equal(outs[0], outs[1])
            assert not torch.equal(outs[0], outs[2])
        assert torch.equal(module.eval()(given), module(given))
    layer = stretto.parallel.tensor(nn.TransformerEncoderLayer(20, 5, 21, 0.3), mesh, sequence=True)
    layer.dropout2.register_forward_hook(lambda layer, args, out: seen.append(out.detach() == 0))
    layer(torch.ones(6, 2, 20))
    assert seen[0].shape == (3, 2, 20)
    assert not torch.equal(*gathered(seen[0].to(torch.uint8), group))


def parts_pass(mesh):
    """From block to block where they follow each other for certain; everything else sees wholes."""
    own = 3 - mesh.get_local_rank("tensor")
    for container, run in ((nn.Sequential, True), (nn.ModuleList, False)):
        blocks = [Block(12, 4, 3) for _ in range(3)]
        module = stretto.parallel.tensor(container(*blocks) if run else container(blocks), mesh, sequence=True)
        seen, x = [], torch.randn(2, 5, 12)
        for block in blocks:
            block.register_forward_hook(lambda block, args, out, seen=seen: seen.append(out.size(1)))
        if run:
            module(x)
        for block in blocks:  # each by itself
            x = block(x)
        assert seen == [*([own, own, 5] if run else []), 5, 5, 5]


def kept(mesh, share):
    """What a graph keeps for the backward, parameters aside, is exactly a process's share of one device's."""
    for make, width in (
        (encoder, 12), (partial(Block, 16, 4, 2), 16), (partial(GPT2Block, 16, 4), 16), (partial(BertLayer, 16, 4), 16),
        (partial(LlamaDecoderLayer, 16, 8, 4, 24), 16), (partial(ViTLayer, 16, 4), 16),
    )[::share]:  # fmt: skip
        x = sequence(width, 6).requires_grad_()
        tensor = partial(stretto.parallel.tensor, mesh=mesh, parameters="local")
        whole, part = (saved(tensor(made(make), sequence=each), x) for each in (False, True))
        assert 2 * part == saved(made(make), x) < 2 * whole


def saved(module, x):
    """Bytes of the storages that a graph saves, parameters aside."""
    own = {each.untyped_storage().data_ptr() for each in module.parameters()}
    seen = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = module(x)
    assert out is not None
    return sum(storage.nbytes() for pointer, storage in seen.items() if pointer not in own)


def gathered(x, group):
    every = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(every, x.contiguous(), group=group)
    return every


def alike(x, group):
    """What every process has, the same to the last bit."""
    first, *others = gathered(x, group)
    assert all(torch.equal(first, each) for each in others)
    return x


def refusals():
    """What is refused, on every process alike; returns the messages."""
    mesh = begin(2, names=("tensor",))
    once = stretto.parallel.tensor(nn.Sequential(nn.Linear(2, 2)), mesh)
    convolution = nn.Sequential(nn.Conv2d(6, 6, 1, groups=3))
    x = torch.randn(3, 1, 4)
    attempts = [
        lambda: stretto.parallel.tensor(nn.Linear(2, 2), init_device_mesh("cpu", (2,), mesh_dim_names=("data",))),
        lambda: stretto.parallel.tensor(once, mesh),
        lambda: stretto.parallel.tensor(nn.Linear(2, 2), mesh, parameters="plain"),
        lambda: stretto.parallel.tensor(mlp(4, 4), mesh, plan={"11": "row"}),
        lambda: stretto.parallel.tensor(mlp(4, 4), mesh, plan={"0": "rows"}),
        lambda: stretto.parallel.tensor(mlp(4, 4), mesh, plan={"1": "row"}),
        lambda: stretto.parallel.tensor(nn.Sequential(nn.Linear(4, 1)), mesh, plan={"0": "column"}),
        lambda: stretto.parallel.tensor(convolution, mesh, plan={"0": "row"}),
        lambda: stretto.parallel.tensor(
            nn.Sequential(nn.Embedding(4, 2, padding_idx=0)), mesh, plan={"0": "vocabulary"}
        ),
        lambda: stretto.parallel.tensor(Block(8, 1, 1), mesh),
        lambda: stretto.parallel.tensor(Llama(12, 16, 4, 1, 8), mesh),
        lambda: stretto.parallel.tensor(nn.Sequential(nn.MultiheadAttention(4, 1)), mesh),
        lambda: stretto.parallel.tensor(mlp(4, 4), mesh, sequence=True),
        lambda: stretto.parallel.tensor(Block(8, 2, 1), mesh, sequence=True, plan={"mlp": "replicate"}),
        lambda: stretto.parallel.tensor(nn.Sequential(nn.MultiheadAttention(4, 2)), mesh)[0](x, x, x, is_causal=True),
    ]
    messages = []
    for attempt in attempts:
        with pytest.raises(stretto.UsageError) as caught:
            attempt()
        messages.append(str(caught.value))
    whole = stretto.parallel.tensor(Block(8, 1, 1), mesh, plan={"attention": "replicate"})
    assert not any(isinstance(each, DTensor) for each in whole.attention.parameters())
    end()
    return messages
