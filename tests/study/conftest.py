"""What the measurements for a plan have in common: a small model, and the file of a cluster that is this machine."""

import platform

import pytest

from cluster_text import cluster_text
from stretto.settings.runs import TrainSettings
from stretto.study.model_costs import CostRequest, costed


@pytest.fixture
def here(tmp_path):
    """A cluster file of this machine."""
    file = tmp_path / "cluster.toml"
    file.write_text(cluster_text(platform.node()))
    return file


@pytest.fixture(scope="session")
def model():
    requested = TrainSettings(model="mlp", model_options={"depth": 4}, data="digits", optimizer="sgd")
    return costed(requested, CostRequest(sharing=(2,)))


@pytest.fixture
def no_pictures(monkeypatch):
    """Nothing is drawn beside a page: it takes longer than the page, and is tested with other pages."""
    monkeypatch.setattr("stretto.report.frontier.pictures", lambda page: {})
