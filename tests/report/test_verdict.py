from stretto.report.verdict import verdict

from .synthetic import make_records, run


def study(*runs):
    return [run(losses, method=method, costs=costs) for method, losses, costs in runs]


def test_the_whole_paragraph(records):
    assert verdict(records) == (
        "The best validation accuracy at the end of a run is 97.2 % (96.9 % on test data), by backprop; "
        "chunked(chunks=2) reaches the same. "
        "At validation accuracy 85 %, overlapping needs 2.3× less serial compute than backprop "
        "(2.1 to 2.3× over 3 seeds), for 1.4× the total compute (1.4 to 1.5×), in a run that diverged later. "
        "At validation accuracy 96 %, overlapping needs 2.1× less serial compute than backprop "
        "(1.4 to 2.3× over 3 seeds), for 1.5× the total compute (1.4 to 2.3×), in a run that diverged later. "
        "At validation accuracy 97.25 %, only backprop gets there: greedy, overlapping and chunked(chunks=2) do not."
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
    assert "At no validation loss compared is any method more than 5 % faster than backprop." in text
    assert "needs" not in text


def test_local_methods_that_get_nowhere():
    text = verdict(study(("backprop", [2.0, 0.1], [(1, 1), (2, 2)]), ("greedy", [2.0, 2.0], [(1, 1), (2, 2)])))
    assert "No method but backprop reaches any" in text


def test_backprop_that_gets_nowhere():
    text = verdict(study(("greedy", [2.0, 0.1], [(1, 1), (2, 2)]), ("backprop", [2.0, 2.0], [(1, 1), (2, 2)])))
    assert "At validation loss 1.2, 0.9, 0.3 and 0.1, only greedy gets there: backprop does not." in text


def test_no_progress_at_all():
    text = verdict(study(("greedy", [2.0, 2.0], [(1, 1), (2, 2)]), ("backprop", [2.0, 2.0], [(1, 1), (2, 2)])))
    assert text.startswith("All 2 runs learned nothing")
