"""Models built as timm builds them, and timm's own where it is installed, which is not so with the locked torch."""

import pytest
import torch
from torch import nn

import stretto
from stretto.nn.chain import Chain


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, dim: int, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, 2)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(drop), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj, self.norm = nn.Conv2d(3, dim, 4, 4), nn.Identity()

    def forward(self, x):
        _, _, H, _ = x.shape
        assert H % 4 == 0, f"height {H}"
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


class VisionTransformer(nn.Module):
    """patch_embed, cls_token, pos_embed, blocks, norm, fc_norm, head: a block list, and parameters on the model."""

    def __init__(self, depth: int = 4, dim: int = 8, drop: float = 0.2) -> None:
        super().__init__()
        self.grad_checkpointing = False
        self.patch_embed = PatchEmbed(dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, dim))
        self.pos_drop, self.norm_pre = nn.Dropout(drop), nn.Identity()
        self.blocks = nn.Sequential(*[Block(dim, drop) for _ in range(depth)])
        self.norm, self.fc_norm = nn.LayerNorm(dim), nn.Identity()
        self.head_drop, self.head = nn.Dropout(drop), nn.Linear(dim, 3)

    def forward_features(self, x):
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.norm_pre(self.pos_drop(x + self.pos_embed))
        if self.grad_checkpointing and not torch.jit.is_scripting():
            raise NotImplementedError
        return self.norm(self.blocks(x))

    def forward_head(self, x):
        return self.head(self.head_drop(self.fc_norm(x[:, 0])))

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, 1, bias=False)
        self.bn1, self.act1 = nn.BatchNorm2d(planes), nn.ReLU(inplace=True)
        self.downsample = nn.Conv2d(inputs, planes, 1, stride) if stride > 1 else None

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn1(self.conv1(x))
        x += shortcut
        return self.act1(x)


class ResNet(nn.Module):
    """conv1, bn1, act1, maxpool, layer1, layer2, global_pool, fc: lists of blocks, none of which is the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(BasicBlock(4, 4, 1), BasicBlock(4, 4, 1))
        self.layer2 = nn.Sequential(BasicBlock(4, 5, 2), BasicBlock(5, 5, 1))
        self.global_pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
        self.fc = nn.Linear(5, 3)

    def forward(self, x):
        x = self.maxpool(self.act1(self.bn1(self.conv1(x))))
        return self.fc(self.global_pool(self.layer2(self.layer1(x))))


def assert_exact(model, stages, x):
    """Outputs and gradients, bit for bit, in training (dropout drawn alike) and in evaluation; no weight is new."""
    parameters = list(model.parameters())
    for training in (True, False):
        model.train(training)
        state, results = {key: value.clone() for key, value in model.state_dict().items()}, []
        for module in (model, Chain(*stages).train(training)):
            model.load_state_dict(state)
            torch.manual_seed(3)
            output = module(x)
            results.append((output, *torch.autograd.grad(output.square().sum(), parameters), *model.buffers()))
            results[-1] = [tensor.clone() for tensor in results[-1]]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    own = {id(value) for value in model.state_dict(keep_vars=True).values()}
    assert {id(value) for stage in stages for value in stage.state_dict(keep_vars=True).values()} == own


@pytest.mark.parametrize("build", [VisionTransformer, ResNet])
def test_they_split_as_they_are(build):
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    stages = stretto.split(model, 3, example=x)
    assert ("cut by torch.export" in stages.explanation) == (build is ResNet)
    assert_exact(model, stages, x)


TIMM = {  # side of the images, options
    "resnet10t": (64, {}),
    "convnext_atto": (64, {}),
    "mobilenetv3_small_050": (64, {}),
    "vit_tiny_patch16_224": (32, {"img_size": 32, "patch_size": 8, "depth": 6, "drop_path_rate": 0.2}),
    "swin_tiny_patch4_window7_224": (
        32,
        {"img_size": 32, "window_size": 4, "depths": (1, 1, 2, 1), "embed_dim": 24},
    ),
}


@pytest.mark.filterwarnings("ignore:stage . of 3 has")  # how even the stages are is not asked here
@pytest.mark.parametrize("name", TIMM)
def test_timms_own_networks(name):
    timm = pytest.importorskip("timm", reason="timm is not installed: it comes with torchvision, which pins torch")
    side, options = TIMM[name]
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **options).double()
    x = torch.randn(4, 3, side, side, dtype=torch.float64)
    assert_exact(model, stretto.split(model, 3, example=x), x)
