"""Cases that hypothesis draws here, for processes to check."""

from hypothesis import assume, given, settings


def drawn(strategy, number, cases):
    """As many cases as asked, of those that plain torch can do."""
    found = []

    @settings(max_examples=number)
    @given(strategy)
    def draw(case):
        assume(cases.possible(case))
        found.append(case)

    draw()
    return found
