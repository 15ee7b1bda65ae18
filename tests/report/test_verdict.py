from stretto.report.verdict import verdict

from .synthetic import make_records, run


def study(*runs):
    return [run(losses, method=method, costs=costs) for method, losses, costs in runs]


def test_the_whole_paragraph(records):
    assert verdict(records) == (
        "At train loss 0.5, overlapping needs 2.5× less serial compute than backprop, for 1.3× the total compute "
        "(in a run that diverged later). "
        "At train loss 0.01, chunked(chunks=2) needs 1.6× less serial compute than backprop, "
        "for 1.2× the total compute. "
        "Train loss 0.001 is reached by backprop only. "
        "The best validation accuracy is 97.2 % (96.9 % on test data), by backprop; "
        "chunked(chunks=2) reaches the same."
    )


def test_nothing_to_say():
    assert verdict([]).startswith("No run has finished yet")
    assert verdict([run([1.0], status="diverged")]).startswith("The only run diverged")
    assert verdict([run([1.0], status="diverged", seed=s) for s in (0, 1)]).startswith("All 2 runs diverged")


def test_one_method(records):
    assert verdict(make_records(("greedy",))).startswith("Only greedy was run")


def test_no_backprop():
    text = verdict(make_records(("greedy", "overlapping")))
    assert "Backprop is not among the methods" in text
    assert "overlapping is fastest" in text or "greedy is fastest" in text


def test_local_methods_that_are_slower_are_called_so():
    text = verdict(
        study(
            ("backprop", [2.0, 0.5, 0.1], [(1, 1), (2, 2), (3, 3)]),
            ("greedy", [2.0, 0.5, 0.1], [(2, 2), (4, 4), (6, 6)]),
        )
    )
    assert "At no train loss compared is any method more than 5 % faster than backprop." in text
    assert "needs" not in text


def test_local_methods_that_get_nowhere():
    text = verdict(study(("backprop", [2.0, 0.1], [(1, 1), (2, 2)]), ("greedy", [2.0, 2.0], [(1, 1), (2, 2)])))
    assert "No method but backprop reaches any" in text


def test_backprop_that_gets_nowhere():
    text = verdict(study(("greedy", [2.0, 0.1], [(1, 1), (2, 2)]), ("backprop", [2.0, 2.0], [(1, 1), (2, 2)])))
    assert "backprop reaches none" in text


def test_no_progress_at_all():
    text = verdict(study(("greedy", [2.0, 2.0], [(1, 1), (2, 2)]), ("backprop", [2.0, 2.0], [(1, 1), (2, 2)])))
    assert text.startswith("No run improved")
