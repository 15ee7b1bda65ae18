import pytest

from stretto.report import Record

from .synthetic import make_records


@pytest.fixture(scope="session")
def records() -> tuple[Record, ...]:
    return make_records()
