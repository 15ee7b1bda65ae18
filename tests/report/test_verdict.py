import pytest

from stretto.report.metric import VALIDATION_LOSS
from stretto.report.panel import panel
from stretto.report.speedup import first_panel, leading
from stretto.report.verdict import sentences, verdict

from .synthetic import make_records, run
from .test_terminal import shown


def study(*runs):
    return [run(losses, method=method, costs=costs) for method, losses, costs in runs]


def test_the_whole_paragraph(records):
    assert verdict(records) == (
        "At validation accuracy 96 %, overlapping at lr 1.0, batch_size 128 needs 2.1× less serial compute than "
        "backprop at lr 1.0, batch_size 128 (1.4 to 2.3× over 3 seeds), for 1.5× the total compute (1.4 to 2.3×), in a "
        "run that diverged later; a run of backprop diverged later. "
        "Then come chunked(chunks=2) with 1.7× (lr 1.0, batch_size 128, 1.7 to 1.8× over 3 seeds, diverged later) and "
        "greedy with 1.1× (lr 1.0, batch_size 128, 1.0 to 1.3× over 3 seeds). "
        "The best validation accuracy at the end of a run is 97.2 % (96.9 % on test data), by backprop; "
        "chunked(chunks=2) reaches the same. "
        "At other cut-offs: 85 %, overlapping 2.3× (2.1 to 2.3× over 3 seeds, diverged later); "
        "94 %, overlapping 2.3× (1.5 to 2.4× over 3 seeds, diverged later). "
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
    assert "At validation accuracy 96 %, overlapping at lr 1.0, batch_size 128 is fastest" in text


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


PLAIN = [run([2.0, 1.0, 0.5, 0.1], seed=seed) for seed in (0, 1)]
QUICK = [(0.5, 1.0), (1.0, 2.0), (1.5, 3.0), (2.0, 4.0)]


def greedy(*losses, **values):
    return [run(each, method="greedy", seed=seed, costs=QUICK, **values) for seed, each in enumerate(losses)]


LAST = [2.0, 1.0, 0.5, 0.1], [2.0, 1.0, 0.5, 0.3]
SURE = greedy(*LAST)
LOST = run([2.0, 0.7], method="greedy", seed=0, costs=[(0.1, 1.0), (0.2, 2.0)], status="diverged")
SLOW = [
    run([2.0, 1.0, 0.5, 0.4], method="pb", seed=seed, costs=[(1.0, 1.0), (1.5, 2.0), (2.5, 3.0), (4.0, 4.0)])
    for seed in (0, 1)
]


@pytest.mark.parametrize(
    ("records", "cutoff"),
    [
        pytest.param([*PLAIN, *SURE], 0.5, id="the strictest that all seeds reach"),
        pytest.param([*PLAIN, *SURE, LOST], 0.5, id="a run that diverged after an easier one"),
        pytest.param(
            [*PLAIN, *SURE, run([2.0, 1.9], seed=2)], 0.1, id="none is clean: a seed of backprop gets nowhere"
        ),
        pytest.param([*PLAIN, *greedy(*LAST, status="diverged")], 0.1, id="none is clean: all diverged later"),
        pytest.param([*PLAIN, *SURE, *SLOW], 0.5, id="others do not count"),
        pytest.param([*SURE, *SLOW], 0.5, id="without the baseline the two fastest are compared"),
        pytest.param(SURE, 0.5, id="a single method"),
        pytest.param([*PLAIN, *greedy([2.0, 1.0, 0.5, 0.1])], 0.1, id="one seed of greedy, which is all of its seeds"),
    ],
)
def test_which_cutoff_leads(records, cutoff):
    """Clean before unclean, then the strictest."""
    names = tuple(dict.fromkeys(record.method for record in records))
    panels = [panel(records, VALIDATION_LOSS, value) for value in (1.0, 0.5, 0.1)]
    assert leading(panels, names).cutoff == cutoff


def test_the_clean_answer_is_said_first_everywhere():
    """In the verdict, above the first chart and below the terminal's table, with the best rate of each method."""
    fast = greedy(*LAST, options={"lr": 0.3})
    records = [*PLAIN, *fast, LOST]
    answer, quality, others, *limits = sentences(records)
    lead = first_panel(records)
    assert answer == (
        f"At validation loss {lead.cutoff:g}, greedy at lr 0.3 needs 2× less serial compute than backprop at lr 0.1 "
        "(1.8 to 2.0× over 2 seeds), for the same total compute (1.0 to 1.1×)."
    )
    assert quality.startswith("The best validation loss")
    assert "0.8, greedy 12.5× (2.0 to 12.5× over 2 seeds, diverged later)" in others
    assert limits == []
    text = " ".join(shown(records).split())
    assert answer in text
    assert f"Compute: until {lead.goal}." in text
    assert "1.75 FLOP 3.50 FLOP" in text
