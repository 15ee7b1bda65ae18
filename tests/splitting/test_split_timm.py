"""timm's own networks where it is installed, which is not so with the locked torch; habits/ has some in their style."""

import pytest
import torch

import stretto
from stretto.nn.chain import Chain


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


TIMM = {  # side of the images, options
    "resnet10t": (64, {}),
    "convnext_atto": (64, {}),
    "mobilenetv3_small_050": (64, {}),
    "vit_tiny_patch16_224": (32, {"img_size": 32, "patch_size": 8, "depth": 6, "drop_path_rate": 0.2}),
    "swin_tiny_patch4_window7_224": (32, {"img_size": 32, "window_size": 4, "depths": (1, 1, 2, 1), "embed_dim": 24}),
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
