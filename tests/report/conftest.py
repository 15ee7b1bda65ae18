import pytest

from stretto.report import Record, build
from stretto.report.frontier import PNG, SVG

from .synthetic import make_page, make_records


@pytest.fixture(scope="session")
def records() -> tuple[Record, ...]:
    return make_records()


@pytest.fixture(scope="session")
def page(tmp_path_factory, records) -> str:
    """The page of a whole study, without the program that draws it or pictures beside it; no test changes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.report.frontier.pictures", lambda page: {SVG: b"<svg/>", PNG: b""})
        path = build(make_page(records), tmp_path_factory.mktemp("out") / "new" / "report.html")
    assert {each.name for each in path.parent.iterdir()} == {"report.html", SVG, PNG}
    return path.read_text(encoding="utf-8")
