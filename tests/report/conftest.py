import pytest

from stretto.report import Record, build

from .synthetic import make_page, make_records


@pytest.fixture(scope="session")
def records() -> tuple[Record, ...]:
    return make_records()


@pytest.fixture(scope="session")
def page(tmp_path_factory, records) -> str:
    """The page of a whole study, which no test changes."""
    path = build(make_page(records), tmp_path_factory.mktemp("out") / "new" / "report.html")
    assert {each.name for each in path.parent.iterdir()} == {"report.html", "frontier.svg", "frontier.png"}
    return path.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _without_vega(monkeypatch):
    """Of all pages but the whole study's: bundling it takes seconds."""
    monkeypatch.setattr("stretto.report.html._bundle", lambda: "// Vega")
