"""Transformers, perceptrons and residual networks on a tensor axis, beside one device; what is refused."""

import pytest

from runtime.processes import launch


@pytest.mark.parametrize(("processes", "share"), [(2, 6), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_modules_equal_one_device(processes, share):
    launch(processes, "parallel.operator_scripts:everything", processes, share)


def test_refusals_name_the_numbers_the_layer_and_the_remedy():
    first, second = launch(2, "parallel.operator_scripts:refusals")
    assert first == second
    for message, parts in zip(
        first,
        (
            ("('data',)", 'none of them "tensor"', "init_device_mesh"),
            ("prepared already",),
            ("parameters='plain'", "dtensor, local"),
            ("'11'", "no such layer", "did you mean"),
            ("'rows'", "did you mean 'row'"),
            ('plan["1"] is "row"', "ReLU is neither"),
            ("1 outputs for 2 processes", "at most 1"),
            ("3 groups", 'only "column"'),
            ("no plain nn.Embedding", "padding_idx"),
            ("attention has 1 heads for 2 processes", 'plan={"attention": "replicate"}'),
            ("self_attn has 1 key and value heads for 2 processes",),
            ("0 has 1 heads for 2 processes", 'plan={"0": "replicate"}'),
            ("no transformer block", "nn.TransformerEncoderLayer", "attn, ln_1, ln_2, mlp", "sequence=False"),
            ("no transformer block whose attention and MLP are cut",),
            ("is_causal=True without a mask", "attn_mask="),
        ),
        strict=True,
    ):
        assert all(part in message for part in parts), message
