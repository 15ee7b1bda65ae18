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

    def remembered(requested, asked):
        words = (requested.model, requested.optimizer, requested.loss, *asked.heads, *requested.metric)
        if requested.data not in WITHOUT_FILES or any(":" in word for word in words):
            return costed(requested, asked)
        key = repr((requested.to_json(), asked))
        if key not in known:
            known[key] = costed(requested, asked)
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
