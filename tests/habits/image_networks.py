"""Image networks in the style of torchvision and timm, tiny: what their forwards do between modules is as there."""

from collections import namedtuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 5
AuxOutputs = namedtuple("AuxOutputs", ["logits", "aux_logits"])


def make_divisible(value, divisor=4):
    """Channels as MobileNet rounds them."""
    return max(divisor, int(value + divisor / 2) // divisor * divisor)


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inputs, planes, stride=1, downsample=None):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x):
        identity = x
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 2

    def __init__(self, inputs, planes, stride=1, downsample=None):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv3, self.bn3 = nn.Conv2d(planes, planes * 2, 1, bias=False), nn.BatchNorm2d(planes * 2)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """torchvision's: a stem, four layers, a pool, flatten, fc."""

    def __init__(self, block=BasicBlock, layers=(1, 2, 1, 1), norm=nn.BatchNorm2d):
        super().__init__()
        self.inplanes = 4
        self.conv1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False)
        self.bn1 = norm(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._make_layer(block, 4, layers[0])
        self.layer2 = self._make_layer(block, 4, layers[1], 2)
        self.layer3 = self._make_layer(block, 8, layers[2], 2)
        self.layer4 = self._make_layer(block, 8, layers[3])
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * block.expansion, CLASSES)

    def _make_layer(self, block, planes, blocks, stride=1):
        downsample = None
        if stride != 1 or self.inplanes != planes * block.expansion:
            conv = nn.Conv2d(self.inplanes, planes * block.expansion, 1, stride, bias=False)
            downsample = nn.Sequential(conv, nn.BatchNorm2d(planes * block.expansion))
        layers = [block(self.inplanes, planes, stride, downsample)]
        self.inplanes = planes * block.expansion
        layers += [block(self.inplanes, planes) for _ in range(1, blocks)]
        return nn.Sequential(*layers)

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_impl(x)


class SqueezeExcite(nn.Module):
    def __init__(self, channels, reduced):
        super().__init__()
        self.conv_reduce, self.conv_expand = nn.Conv2d(channels, reduced, 1), nn.Conv2d(reduced, channels, 1)
        self.act1, self.gate = nn.SiLU(inplace=True), nn.Sigmoid()

    def forward(self, x):
        scale = x.mean((2, 3), keepdim=True)
        return x * self.gate(self.conv_expand(self.act1(self.conv_reduce(scale))))


def drop_path(x, drop_prob: float = 0.0, training: bool = False, scale_by_keep: bool = True):
    """Whole paths, by example."""
    if drop_prob == 0.0 or not training:
        return x
    keep_prob = 1 - drop_prob
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    random_tensor = x.new_empty(shape).bernoulli_(keep_prob)
    if keep_prob > 0.0 and scale_by_keep:
        random_tensor.div_(keep_prob)
    return x * random_tensor


class DropPath(nn.Module):
    def __init__(self, drop_prob=0.0):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        return drop_path(x, self.drop_prob, self.training)


class SEBlock(nn.Module):
    """Squeeze-excite in a residual branch."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.se = SqueezeExcite(channels, 2)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.se(self.bn(self.conv(x))) + x
        return self.act(x)


class SENet(nn.Module):
    """timm's order: forward_features, forward_head, whose dropout is a function."""

    def __init__(self, width=6, drop_rate=0.2):
        super().__init__()
        self.drop_rate = drop_rate
        self.layer0 = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.layer1 = nn.Sequential(SEBlock(width), SEBlock(width))
        self.layer2 = nn.Sequential(SEBlock(width), SEBlock(width))
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.last_linear = nn.Linear(width, CLASSES)

    def forward_features(self, x):
        return self.layer2(self.layer1(self.layer0(x)))

    def forward_head(self, x, pre_logits: bool = False):
        x = self.global_pool(x).flatten(1)
        if self.drop_rate > 0.0:
            x = F.dropout(x, p=self.drop_rate, training=self.training)
        return x if pre_logits else self.last_linear(x)

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


class BasicConv2d(nn.Module):
    def __init__(self, inputs, outputs, **options):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, bias=False, **options)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)), inplace=True)


class InceptionA(nn.Module):
    """Branches that are concatenated."""

    def __init__(self, inputs, pooled):
        super().__init__()
        self.branch1x1 = BasicConv2d(inputs, 4, kernel_size=1)
        self.branch3x3_1 = BasicConv2d(inputs, 3, kernel_size=1)
        self.branch3x3_2 = BasicConv2d(3, 4, kernel_size=3, padding=1)
        self.branch_pool = BasicConv2d(inputs, pooled, kernel_size=1)

    def _forward(self, x):
        branch_pool = F.avg_pool2d(x, kernel_size=3, stride=1, padding=1)
        return [self.branch1x1(x), self.branch3x3_2(self.branch3x3_1(x)), self.branch_pool(branch_pool)]

    def forward(self, x):
        return torch.cat(self._forward(x), 1)


class InceptionAux(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.conv0, self.fc = BasicConv2d(inputs, 4, kernel_size=1), nn.Linear(4, CLASSES)

    def forward(self, x):
        x = F.adaptive_avg_pool2d(self.conv0(F.avg_pool2d(x, kernel_size=2)), (1, 1))
        return self.fc(torch.flatten(x, 1))


class Inception(nn.Module):
    """torchvision's: auxiliary logits in training, a record of two. `always` gives them in evaluation, too."""

    def __init__(self, aux_logits=True, transform_input=True, always=False):
        super().__init__()
        self.aux_logits, self.transform_input, self.always = aux_logits, transform_input, always
        self.Conv2d_1a_3x3 = BasicConv2d(3, 4, kernel_size=3, stride=2, padding=1)
        self.Mixed_5b, self.Mixed_5c = InceptionA(4, 4), InceptionA(12, 4)
        self.AuxLogits = InceptionAux(12) if aux_logits else None
        self.Mixed_6a, self.Mixed_6b = InceptionA(12, 4), InceptionA(12, 4)
        self.avgpool, self.dropout = nn.AdaptiveAvgPool2d((1, 1)), nn.Dropout(0.5)
        self.fc = nn.Linear(12, CLASSES)

    def _transform_input(self, x):
        if self.transform_input:
            x_ch0 = torch.unsqueeze(x[:, 0], 1) * (0.229 / 0.5) + (0.485 - 0.5) / 0.5
            x_ch1 = torch.unsqueeze(x[:, 1], 1) * (0.224 / 0.5) + (0.456 - 0.5) / 0.5
            x_ch2 = torch.unsqueeze(x[:, 2], 1) * (0.225 / 0.5) + (0.406 - 0.5) / 0.5
            x = torch.cat((x_ch0, x_ch1, x_ch2), 1)
        return x

    def _forward(self, x):
        x = self.Mixed_5c(self.Mixed_5b(self.Conv2d_1a_3x3(x)))
        aux = None
        if self.AuxLogits is not None and (self.training or self.always):
            aux = self.AuxLogits(x)
        x = self.dropout(self.avgpool(self.Mixed_6b(self.Mixed_6a(x))))
        return self.fc(torch.flatten(x, 1)), aux

    def forward(self, x):
        x, aux = self._forward(self._transform_input(x))
        if self.aux_logits and (self.training or self.always):
            return (x, aux) if self.always else AuxOutputs(x, aux)
        return x


class PatchEmbed(nn.Module):
    def __init__(self, side, patch, dim):
        super().__init__()
        self.img_size, self.num_patches = (side, side), (side // patch) ** 2
        self.proj, self.norm = nn.Conv2d(3, dim, patch, patch), nn.Identity()

    def forward(self, x):
        _, _, H, W = x.shape
        assert H == self.img_size[0], f"Input height ({H}) doesn't match model ({self.img_size[0]})."  # noqa: SIM300
        assert W == self.img_size[1], f"Input width ({W}) doesn't match model ({self.img_size[1]})."  # noqa: SIM300
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


class Attention(nn.Module):
    def __init__(self, dim, num_heads, attn_drop):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(attn_drop), nn.Dropout(0.1)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        attn = self.attn_drop((q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1))
        return self.proj_drop(self.proj((attn @ v).transpose(1, 2).reshape(B, N, C)))


class LayerScale(nn.Module):
    def __init__(self, dim, init_values=0.1, inplace=False):
        super().__init__()
        self.inplace, self.gamma = inplace, nn.Parameter(init_values * torch.ones(dim))

    def forward(self, x):
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class Block(nn.Module):
    def __init__(self, dim, num_heads, drop, path):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn, self.ls1, self.ls2 = Attention(dim, num_heads, drop), LayerScale(dim), LayerScale(dim)
        self.drop_path1 = DropPath(path) if path > 0.0 else nn.Identity()
        self.drop_path2 = DropPath(path) if path > 0.0 else nn.Identity()
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(drop), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class VisionTransformer(nn.Module):
    """timm's: patches, a class token, positions, dropped paths that grow with depth, pooling by token or mean."""

    def __init__(self, depth=4, dim=8, drop_rate=0.1, drop_path_rate=0.3, global_pool="token"):
        super().__init__()
        self.global_pool, self.num_prefix_tokens, self.grad_checkpointing = global_pool, 1, False
        self.patch_embed = PatchEmbed(8, 4, dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, dim))
        self.pos_drop, self.patch_drop, self.norm_pre = nn.Dropout(drop_rate), nn.Identity(), nn.Identity()
        rates = [x.item() for x in torch.linspace(0, drop_path_rate, depth)]
        self.blocks = nn.Sequential(*[Block(dim, 2, drop_rate, rate) for rate in rates])
        self.norm, self.fc_norm = nn.LayerNorm(dim), nn.Identity()
        self.head_drop, self.head = nn.Dropout(drop_rate), nn.Linear(dim, CLASSES)

    def _pos_embed(self, x):
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return self.pos_drop(x + self.pos_embed)

    def forward_features(self, x):
        x = self.norm_pre(self.patch_drop(self._pos_embed(self.patch_embed(x))))
        if self.grad_checkpointing and not torch.jit.is_scripting():
            raise NotImplementedError
        return self.norm(self.blocks(x))

    def forward_head(self, x):
        x = x[:, self.num_prefix_tokens :].mean(dim=1) if self.global_pool == "avg" else x[:, 0]
        return self.head(self.head_drop(self.fc_norm(x)))

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


class DenseLayer(nn.Module):
    """torchvision's: its input is a list, or one tensor; dropout is a function."""

    def __init__(self, inputs, growth, drop_rate):
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, 4, 1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4, growth, 3, padding=1, bias=False)
        self.drop_rate = float(drop_rate)

    def bn_function(self, inputs):
        return self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1))))

    def forward(self, input):
        prev_features = [input] if isinstance(input, Tensor) else input
        new_features = self.conv2(self.relu2(self.norm2(self.bn_function(prev_features))))
        if self.drop_rate > 0:
            new_features = F.dropout(new_features, p=self.drop_rate, training=self.training)
        return new_features


class DenseBlock(nn.ModuleDict):
    def __init__(self, layers, inputs, growth, drop_rate):
        super().__init__()
        for i in range(layers):
            self.add_module(f"denselayer{i + 1}", DenseLayer(inputs + i * growth, growth, drop_rate))

    def forward(self, init_features):
        features = [init_features]
        for _name, layer in self.items():  # noqa: PERF102 (as there)
            features.append(layer(features))
        return torch.cat(features, 1)


class Transition(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm, self.relu = nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)
        self.conv, self.pool = nn.Conv2d(inputs, outputs, 1, bias=False), nn.AvgPool2d(2, 2)


class DenseNet(nn.Module):
    def __init__(self, growth=3, drop_rate=0.1):
        super().__init__()
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(3, 4, 3, padding=1, bias=False))
        self.features.add_module("norm0", nn.BatchNorm2d(4))
        self.features.add_module("denseblock1", DenseBlock(2, 4, growth, drop_rate))
        self.features.add_module("transition1", Transition(10, 5))
        self.features.add_module("denseblock2", DenseBlock(2, 5, growth, drop_rate))
        self.features.add_module("norm5", nn.BatchNorm2d(11))
        self.classifier = nn.Linear(11, CLASSES)

    def forward(self, x):
        features = self.features(x)
        out = F.relu(features, inplace=True)
        out = F.adaptive_avg_pool2d(out, (1, 1))
        return self.classifier(torch.flatten(out, 1))


class ConvNormActivation(nn.Sequential):
    def __init__(self, inputs, outputs, kernel=3, stride=1, groups=1, activation=nn.ReLU6):
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        act = [] if activation is None else [activation(inplace=True)]
        super().__init__(conv, nn.BatchNorm2d(outputs), *act)


class InvertedResidual(nn.Module):
    def __init__(self, inputs, outputs, stride, expand_ratio):
        super().__init__()
        hidden = round(inputs * expand_ratio)
        self.use_res_connect = stride == 1 and inputs == outputs
        layers = [] if expand_ratio == 1 else [ConvNormActivation(inputs, hidden, 1)]
        layers += [ConvNormActivation(hidden, hidden, 3, stride, hidden), nn.Conv2d(hidden, outputs, 1, bias=False)]
        self.conv = nn.Sequential(*layers, nn.BatchNorm2d(outputs))

    def forward(self, x):
        return x + self.conv(x) if self.use_res_connect else self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self, dropout=0.2):
        super().__init__()
        features, inputs = [ConvNormActivation(3, 4, 3, 2)], 4
        for t, c, n, s in ((1, 4, 1, 1), (2, 6, 2, 2), (2, 8, 2, 1)):
            for i in range(n):
                features.append(InvertedResidual(inputs, make_divisible(c), s if i == 0 else 1, t))
                inputs = make_divisible(c)
        self.features = nn.Sequential(*features, ConvNormActivation(inputs, 12, 1))
        self.classifier = nn.Sequential(nn.Dropout(p=dropout), nn.Linear(12, CLASSES))

    def forward(self, x):
        x = self.features(x)
        x = nn.functional.adaptive_avg_pool2d(x, (1, 1))
        return self.classifier(torch.flatten(x, 1))


class LayerNorm2d(nn.LayerNorm):
    """Over channels."""

    def forward(self, x):
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class StochasticDepth(nn.Module):
    """torchvision's: a row of the batch, or the batch."""

    def __init__(self, p, mode):
        super().__init__()
        self.p, self.mode = p, mode

    def forward(self, input):
        if not self.training or self.p == 0.0:
            return input
        size = [input.shape[0]] + [1] * (input.ndim - 1) if self.mode == "row" else [1] * input.ndim
        noise = torch.empty(size, dtype=input.dtype, device=input.device).bernoulli_(1.0 - self.p)
        return input * noise.div_(1.0 - self.p)


class Permute(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.dims = dims

    def forward(self, x):
        return torch.permute(x, self.dims)


class CNBlock(nn.Module):
    def __init__(self, dim, path, layer_scale=0.1):
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(dim, dim, 3, padding=1, groups=dim), Permute([0, 2, 3, 1]), nn.LayerNorm(dim, eps=1e-6),
            nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim), Permute([0, 3, 1, 2]),
        )  # fmt: skip
        self.layer_scale = nn.Parameter(torch.ones(dim, 1, 1) * layer_scale)
        self.stochastic_depth = StochasticDepth(path, "row")

    def forward(self, input):
        result = self.layer_scale * self.block(input)
        result = self.stochastic_depth(result)
        result += input
        return result


class ConvNeXt(nn.Module):
    def __init__(self, path=0.3):
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, 6, 2, 2), LayerNorm2d(6, eps=1e-6))
        down = nn.Sequential(LayerNorm2d(6, eps=1e-6), nn.Conv2d(6, 8, 2, 2))
        first = nn.Sequential(CNBlock(6, 0.1), CNBlock(6, path))
        second = nn.Sequential(CNBlock(8, path), CNBlock(8, path))
        self.features = nn.Sequential(stem, first, down, second)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(LayerNorm2d(8, eps=1e-6), nn.Flatten(1), nn.Linear(8, CLASSES))

    def _forward_impl(self, x):
        return self.classifier(self.avgpool(self.features(x)))

    def forward(self, x):
        return self._forward_impl(x)


class MBConv(nn.Module):
    def __init__(self, inputs, outputs, stride, path):
        super().__init__()
        self.use_res_connect = stride == 1 and inputs == outputs
        hidden = 2 * inputs
        self.block = nn.Sequential(
            ConvNormActivation(inputs, hidden, 1, activation=nn.SiLU),
            ConvNormActivation(hidden, hidden, 3, stride, hidden, activation=nn.SiLU),
            SqueezeExcite(hidden, 2), ConvNormActivation(hidden, outputs, 1, activation=None),
        )  # fmt: skip
        self.stochastic_depth = StochasticDepth(path, "row")

    def forward(self, input):
        result = self.block(input)
        if self.use_res_connect:
            result = self.stochastic_depth(result)
            result += input
        return result


class EfficientNet(nn.Module):
    def __init__(self, path=0.3, dropout=0.2):
        super().__init__()
        self.features = nn.Sequential(
            ConvNormActivation(3, 4, 3, 2, activation=nn.SiLU),
            nn.Sequential(MBConv(4, 6, 1, 0.1), MBConv(6, 6, 1, path)),
            nn.Sequential(MBConv(6, 8, 2, path), MBConv(8, 8, 1, path)),
            ConvNormActivation(8, 12, 1, activation=nn.SiLU),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(p=dropout, inplace=True), nn.Linear(12, CLASSES))

    def forward(self, x):
        x = self.avgpool(self.features(x))
        x = torch.flatten(x, 1)
        return self.classifier(x)


class DoubleConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x):
        return self.double_conv(x)


class Up(nn.Module):
    """Pads what is smaller, concatenates, convolves."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.up, self.conv = nn.ConvTranspose2d(inputs, outputs, 2, stride=2), DoubleConv(2 * outputs, outputs)

    def forward(self, x1, x2):
        x1 = self.up(x1)
        diffY, diffX = x2.size()[2] - x1.size()[2], x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [diffX // 2, diffX - diffX // 2, diffY // 2, diffY - diffY // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    """Skips over all that is below; a class for each pixel. No list of blocks."""

    def __init__(self):
        super().__init__()
        self.inc = DoubleConv(3, 4)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(4, 6))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(6, 8))
        self.up1, self.up2 = Up(8, 6), Up(6, 4)
        self.outc = nn.Conv2d(4, CLASSES, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.up1(x3, x2)
        x = self.up2(x, x1)
        return self.outc(x)


class Counting(nn.Module):
    """Batch norms that average over all batches (momentum=None), one without statistics, one without weights; PReLU."""

    def __init__(self):
        super().__init__()
        norms = [nn.BatchNorm2d(6, momentum=None), nn.BatchNorm2d(6, track_running_stats=False),
                 nn.BatchNorm2d(6, affine=False), nn.BatchNorm2d(6, momentum=None, eps=1e-3)]  # fmt: skip
        self.stem = nn.Conv2d(3, 6, 3, 2, 1)
        self.stages = nn.ModuleList([nn.Sequential(nn.Conv2d(6, 6, 3, 1, 1), norm, nn.PReLU(6)) for norm in norms])
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x) + x
        return self.head(x.mean([-2, -1]))


class GhostModule(nn.Module):
    """Cheap features beside primary ones, of which as many are kept as there are channels."""

    def __init__(self, inputs, outputs, relu=True):
        super().__init__()
        self.out_chs, half = outputs, outputs // 2
        self.primary_conv = nn.Sequential(nn.Conv2d(inputs, half, 1, bias=False), nn.BatchNorm2d(half))
        self.cheap_operation = nn.Sequential(
            nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False), nn.BatchNorm2d(half),
            nn.ReLU(inplace=True) if relu else nn.Identity(),
        )  # fmt: skip

    def forward(self, x):
        x1 = self.primary_conv(x)
        x2 = self.cheap_operation(x1)
        return torch.cat([x1, x2], dim=1)[:, : self.out_chs, :, :]


class ShuffleUnit(nn.Module):
    """Half of the channels pass, the other half is convolved, then all are shuffled."""

    def __init__(self, channels):
        super().__init__()
        half = channels // 2
        self.branch2 = nn.Sequential(
            nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(inplace=True),
            nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False), nn.BatchNorm2d(half),
        )  # fmt: skip

    def forward(self, x):
        x1, x2 = x.chunk(2, dim=1)
        out = torch.cat((x1, self.branch2(x2)), dim=1)
        batchsize, num_channels, height, width = out.size()
        out = out.view(batchsize, 2, num_channels // 2, height, width)
        return torch.transpose(out, 1, 2).contiguous().view(batchsize, num_channels, height, width)


class GhostShuffle(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.bn1, self.act1 = nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.stage2 = nn.Sequential(GhostModule(8, 8), ShuffleUnit(8))
        self.stage3 = nn.Sequential(GhostModule(8, 8), ShuffleUnit(8))
        self.conv_head, self.act2 = nn.Conv2d(8, 10, 1), nn.Hardswish(inplace=True)
        self.fc = nn.Linear(10, CLASSES)

    def forward(self, x):
        x = self.act1(self.bn1(self.conv_stem(x)))
        x = self.stage3(self.stage2(x))
        x = x.mean([2, 3], keepdim=True)
        x = self.act2(self.conv_head(x))
        x = x.view(x.size(0), -1)
        return self.fc(x)


def window_partition(x, window: int):
    B, H, W, C = x.shape
    x = x.view(B, H // window, window, W // window, window, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window, window, C)


def window_reverse(windows, window: int, H: int, W: int):
    C = windows.shape[-1]
    x = windows.view(-1, H // window, W // window, window, window, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, H, W, C)


class SwinBlock(nn.Module):
    """Windows, shifted in every other block, and a table of relative positions."""

    def __init__(self, dim, side, shift, path):
        super().__init__()
        self.window, self.shift, self.side = 2, shift, side
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.relative_position_bias_table = nn.Parameter(torch.randn(9, 2) * 0.1)
        coords = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + 1
        self.register_buffer("relative_position_index", relative[..., 0] * 3 + relative[..., 1], persistent=False)
        self.drop_path = DropPath(path) if path > 0.0 else nn.Identity()
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def _attn(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, 2, C // 2).permute(2, 0, 3, 1, 4)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
        attn = (q @ k.transpose(-2, -1)) * (C // 2) ** -0.5 + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        return self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(B, N, C))

    def forward(self, x):
        _, H, W, C = x.shape
        shortcut, x = x, self.norm1(x)
        if self.shift > 0:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        windows = window_partition(x, self.window).view(-1, self.window * self.window, C)
        windows = self._attn(windows).view(-1, self.window, self.window, C)
        x = window_reverse(windows, self.window, H, W)
        if self.shift > 0:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        x = shortcut + self.drop_path(x)
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PatchMerging(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x):
        B, H, W, C = x.shape
        x = x.reshape(B, H // 2, 2, W // 2, 2, C).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.reduction(self.norm(x))


class Swin(nn.Module):
    def __init__(self, path=0.2):
        super().__init__()
        self.patch_embed = nn.Sequential(nn.Conv2d(3, 4, 2, 2), Permute([0, 2, 3, 1]), nn.LayerNorm(4))
        self.layers = nn.Sequential(
            nn.Sequential(SwinBlock(4, 4, 0, path), SwinBlock(4, 4, 1, path)),
            nn.Sequential(PatchMerging(4), SwinBlock(8, 2, 0, path), SwinBlock(8, 2, 1, path)),
        )
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.norm(self.layers(self.patch_embed(x)))
        return self.head(x.mean(dim=(1, 2)))


NETWORKS = {
    "ResNet, basic blocks": ResNet,
    "ResNet, bottlenecks": lambda: ResNet(Bottleneck, (1, 1, 1, 1)),
    "squeeze-excite": SENet,
    "Inception without auxiliary logits": lambda: Inception(aux_logits=False),
    "Inception, auxiliary logits in training": Inception,
    "Inception, auxiliary logits always": lambda: Inception(always=True),
    "ViT, class token, dropped paths": VisionTransformer,
    "ViT, mean of patches": lambda: VisionTransformer(global_pool="avg"),
    "Swin, shifted windows": Swin,
    "DenseNet": DenseNet,
    "MobileNet, inverted residuals": MobileNetV2,
    "ConvNeXt, layer scale": ConvNeXt,
    "EfficientNet, stochastic depth": EfficientNet,
    "U-Net": UNet,
    "batch norms that count": Counting,
    "Ghost and shuffle units": GhostShuffle,
}


BLOCKS = {  # where all that a later block needs is the output of the one before it
    "ViT, class token, dropped paths": "blocks",
    "ViT, mean of patches": "blocks",
    "MobileNet, inverted residuals": "features",
    "ConvNeXt, layer scale": "features",
    "EfficientNet, stochastic depth": "features",
}


def network(name, seed=0):
    """A network in float64, in training mode."""
    torch.manual_seed(seed)
    return NETWORKS[name]().double()
