"""Pipelines in the turn form, from their published description: the core must carry them before a method is one."""

from stretto.schedule import Action, Schedule


def pb_clock(S):
    """One forward and one backward every tick: F(n) B(n-D) U(n-D) with D = 2(S-1-s)."""
    return delayed([2 * (S - 1 - s) for s in range(S)])


def async_1f1b(S):
    """PipeDream: as many forwards ahead as there are stages above, D = S-1-s."""
    return delayed([S - 1 - s for s in range(S)])


def delayed(delays):
    return Schedule(tuple((Action("F", s, 0), Action("B", s, -D), Action("U", s, -D)) for s, D in enumerate(delays)))


def gpipe(S, M):
    """All forwards, all backwards, one update."""
    return Schedule(
        tuple(
            (*(Action("F", s, i) for i in range(M)), *(Action("B", s, i) for i in range(M)), Action("U", s, M - 1))
            for s in range(S)
        ),
        per_turn=M,
    )


def one_f_one_b(S, M):
    """The same minibatch with min(M, S-s) forwards ahead."""

    def body(s):
        ahead = min(M, S - s)
        actions = [Action("F", s, i) for i in range(ahead)]
        for i in range(M):
            actions.append(Action("B", s, i))
            if i + ahead < M:
                actions.append(Action("F", s, i + ahead))
        return (*actions, Action("U", s, M - 1))

    return Schedule(tuple(body(s) for s in range(S)), per_turn=M)
