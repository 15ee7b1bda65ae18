"""What is compared with processes of one thread is computed with one."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["launcher", "whole"])
def whole(request):
    """Whether processes that fail have nothing but each other (`processes.run`)."""
    return request.param
