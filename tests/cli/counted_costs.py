"""Costs of networks, counted once for all tests of a process: each `stretto plan` would count them again."""

from contextlib import contextmanager

import pytest

WITHOUT_FILES = (None, "digits", "digit-masks", "number-words", "pydoc")
known, first = {}, {}  # costs; what has run layers first, on the meta device and elsewhere


@contextmanager
def counted_once():
    """Costs of networks and data that no file can change are kept, and of layers that are alike one is run.

    What a function of a file makes is counted each time, but of layers that were seen before.
    """
    from stretto.measure import layer_counting, layer_flops, tensor_costs  # noqa: F401 (they keep the class itself)
    from stretto.study import model_costs

    costed, begin = model_costs.costed, layer_counting.LayerCounting.__init__

    def remembered(name, model_options, data, data_options, optimizer, **others):
        words = (name, optimizer, others.get("loss", ""), *others.get("heads", ()), *others.get("metric", ()))
        if data not in WITHOUT_FILES or any(":" in word for word in words):
            return costed(name, model_options, data, data_options, optimizer, **others)
        key = repr((name, sorted(model_options.items()), data, sorted(data_options.items()), optimizer, others))
        if key not in known:
            known[key] = costed(name, model_options, data, data_options, optimizer, **others)
        return known[key]

    def sharing(self, **options):
        """Go on with the layers that the first such object has run, as calls with one object do."""
        begin(self, **options)
        if layer_counting.current() is None:
            vars(self).update(vars(first.setdefault(self.on_meta, self)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_costs, "costed", remembered)
        patch.setattr(layer_counting.LayerCounting, "__init__", sharing)
        yield
