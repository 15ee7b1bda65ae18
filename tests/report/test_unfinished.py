"""The page of a study whose runs are not all there: it says so, and loads itself again while they are made."""

import re

import pytest

from stretto.report.html import render
from stretto.report.page import StudyProgress, time_told

from .synthetic import make_page, run

RECORDS = tuple(run([2.0, 1.0], method="greedy", seed=seed) for seed in range(8))


def test_a_page_that_is_complete_says_nothing_of_it():
    text = render(make_page(RECORDS))
    assert 'class="unfinished"' not in text
    assert 'http-equiv="refresh"' not in text


def test_a_page_that_is_live():
    progress = StudyProgress(share=0.5, seconds_left=7200, reload=12.4, written=1000)
    text = render(make_page(RECORDS, planned=16, progress=progress))
    (shown,) = re.findall(r'<p class="unfinished" id="unfinished"[^>]*>.*?</p>', text)
    for told in ("8 of 16 runs are finished", "about 2 hours left", 'data-reload="12"', 'data-written="1000"', "50 %"):
        assert told in shown, told
    assert '<noscript><meta http-equiv="refresh" content="12"></noscript>' in text
    assert "<title>8/16 " in text
    assert "frontier.svg" not in text  # the pictures are made at the end


def test_a_page_that_is_not_complete_and_not_live():
    text = render(make_page(RECORDS, planned=16))
    assert '<p class="unfinished"><b>8 of 16 runs are finished</b>' in text
    assert 'http-equiv="refresh"' not in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, ""), (0, "less than a minute left"), (55, "about 1 minute left"), (100, "about 2 minutes left"),
     (3600, "about 1 hour left"), (5400, "about 2 hours left"), (200000, "about 2 days left")],
)  # fmt: skip
def test_the_time_left_in_words(seconds, words):
    assert time_told(seconds) == words
