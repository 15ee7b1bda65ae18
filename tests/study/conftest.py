"""What the measurements for a plan have in common: a small model, and the file of a cluster that is this machine."""

import platform

import pytest

from cluster_text import cluster_text
from stretto.study.model_costs import costed


@pytest.fixture
def here(tmp_path):
    """A cluster file of this machine."""
    file = tmp_path / "cluster.toml"
    file.write_text(cluster_text(platform.node()))
    return file


@pytest.fixture(scope="session")
def model():
    return costed("mlp", {"depth": 4}, "digits", {}, "sgd", sharing=(2,))


@pytest.fixture
def no_pictures(monkeypatch):
    """Nothing is drawn beside a page: it takes longer than the page, and is tested with other pages."""
    monkeypatch.setattr("stretto.report.frontier.pictures", lambda page: {})
