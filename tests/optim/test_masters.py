"""Masters against what they are for: nothing that an optimizer does is lost to rounding."""

import pytest
import torch
from torch import nn

from stretto.errors import UsageError
from stretto.optim import Masters


def one(value=1.0):
    parameter = nn.Parameter(torch.full((3,), value, dtype=torch.bfloat16))
    masters = Masters({parameter: nn.Parameter(parameter.detach().float())})
    return parameter, masters, masters.of(parameter)


def test_a_step_too_small_for_the_weight_moves_it_in_the_end():
    """bfloat16 has 8 bits: 1 - 0.001 is 1, a hundred times over; with a master it is 0.9."""
    parameter, masters, master = one()
    with torch.no_grad():
        assert torch.equal(parameter - 1e-3, parameter)
    optimizer = torch.optim.SGD([master], lr=1e-3)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        masters.step(optimizer.step)
        optimizer.zero_grad()
    torch.testing.assert_close(master.detach(), torch.full((3,), 0.9))
    assert torch.equal(parameter.detach(), master.bfloat16())


def test_gradients_add_up_in_float32():
    """In bfloat16 1 + 1/512 is 1 again, however often."""
    parameter, masters, master = one()
    for gradient in [1.0, *[1 / 512] * 256]:
        parameter.grad = torch.full_like(parameter, gradient)
        masters.collect()
        assert parameter.grad is None
    assert master.grad.tolist() == [1.5] * 3


def test_a_step_takes_what_has_not_been_collected():
    parameter, masters, master = one()
    parameter.grad = torch.full_like(parameter, 0.5)
    masters.collect()
    parameter.grad = torch.full_like(parameter, 0.25)
    masters.step(torch.optim.SGD([master], lr=1.0).step)
    assert parameter.tolist() == [0.25] * 3


def test_the_parameter_changes_in_place_and_where_no_gradient_came_not_at_all():
    parameter, masters, master = one()
    place = parameter.data_ptr()
    masters.step(torch.optim.AdamW([master], weight_decay=0.5).step)
    assert (parameter.data_ptr(), parameter.tolist()) == (place, [1.0] * 3)


def test_others_are_their_own_masters():
    masters, parameter = Masters(), nn.Parameter(torch.ones(2))
    assert masters.of(parameter) is parameter
    parameter.grad = torch.ones(2)
    masters.collect()
    masters.step(torch.optim.SGD([parameter], lr=0.5).step)
    assert parameter.tolist() == [0.5, 0.5]


def test_what_the_parameter_cannot_hold_is_in_the_state():
    parameter, masters, master = one()
    with torch.no_grad():
        master.add_(1e-4)
    _, copy, its = one(2.0)
    copy.load_state_dict(masters.state_dict())
    assert torch.equal(its, master)
    assert not torch.equal(its, parameter.float())
    small = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"masters of shapes \[\(3,\)\], expected \[\(2,\)\]"):
        Masters({small: nn.Parameter(torch.ones(2))}).load_state_dict(masters.state_dict())


def test_an_optimizer_of_the_parameters_themselves_is_refused():
    parameter, masters, master = one()
    masters.check(torch.optim.SGD([master]))
    with pytest.raises(UsageError, match="build it on what it is given, which are their float32 masters"):
        masters.check(torch.optim.SGD([parameter]))
