"""Costs of networks are counted once for all tests here."""

import pytest

from cli import counted_costs


@pytest.fixture(scope="package", autouse=True)
def _counted_once():
    with counted_costs.counted_once():
        yield
