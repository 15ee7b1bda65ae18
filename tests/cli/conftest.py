"""Costs of the built-in networks, counted once for all tests: each `stretto plan` would count them again."""

import pytest

from stretto.study import model_costs

WITHOUT_FILES = (None, "digits", "digit-masks", "number-words", "pydoc")


@pytest.fixture(scope="session", autouse=True)
def counted_once():
    """The costs of networks and data that no file can change; what a function of a file makes is counted each time."""
    known, costed = {}, model_costs.costed

    def remembered(name, model_options, data, data_options, optimizer, **others):
        words = (name, optimizer, others.get("loss", ""), *others.get("heads", ()), *others.get("metric", ()))
        if data not in WITHOUT_FILES or any(":" in word for word in words):
            return costed(name, model_options, data, data_options, optimizer, **others)
        key = repr((name, sorted(model_options.items()), data, sorted(data_options.items()), optimizer, others))
        if key not in known:
            known[key] = costed(name, model_options, data, data_options, optimizer, **others)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_costs, "costed", remembered)
        yield
