"""Law 7 on processes: every all-reduce is the sum, and what is sent is what the plan and the formula say."""

import pytest

from collectives.scripts import LENGTHS, PIECE
from runtime.processes import launch
from stretto.collectives import ALGORITHMS, formula, plan, traffic
from stretto.collectives.step import SEND

ITEM = 4  # bytes


@pytest.fixture(scope="module", params=[4, pytest.param(8, marks=pytest.mark.slow)])
def told(request):
    return launch(request.param, "collectives.scripts:every_algorithm", timeout=200)


def test_every_algorithm_is_the_sum_for_one_to_that_many_processes(told):
    assert [wrong for wrong, _ in told] == [[]] * len(told)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_messages_and_elements_of_the_run_are_those_of_the_plan(algorithm, told):
    cases = 0
    for rank, (_, sent) in enumerate(told):
        for (name, size, length), counted in sent.items():
            if name == algorithm:
                made = plan(name, rank, size, length)
                pieces = sum(max(1, round(step.length * ITEM / PIECE)) for step in made if step.kind == SEND)
                assert counted == (pieces, traffic(made).elements), (size, length)
                cases += 1
    assert cases == len(LENGTHS) * sum(range(1, len(told) + 1))


def test_bytes_of_the_run_are_those_of_the_formula(told):
    # Of those whose every process sends all the time. Uneven parts: at most one element a message more.
    for size in range(1, len(told) + 1):
        names = ["ring", "parameter-server", *(["recursive-doubling", "rabenseifner"] if size in (1, 2, 4, 8) else [])]
        for name in names:
            messages, elements, _ = formula(name, size, 1000)
            counted = [sent[name, size, 1000] for _, sent in told[:size]]
            assert max(each[1] for each in counted) == pytest.approx(elements, abs=messages)
            messages, elements, _ = formula(name, size, 7)
            assert {sent[name, size, 7][0] for _, sent in told[:size]} == {messages} or size == 8
        assert sum(sent["single-master", size, 1000][1] for _, sent in told[:size]) == 2 * (size - 1) * 1000


def test_groups_and_a_users_own_messages_do_not_mix():
    for sums, theirs in launch(2, "collectives.scripts:several_at_once"):
        assert sums == {(n, turn): [2.0 * (turn + 100 * n) + 1] for n in range(2) for turn in range(4)}
        assert len(theirs) == 1
        assert theirs[0] in (7.0, 8.0)


def test_mistakes_are_refused():
    for rank, told in enumerate(launch(2, "collectives.scripts:mistakes")):
        assert "there is no process group: call torch.distributed.init_process_group" in told["alone"]
        assert "torch.bool has no sum" in told["bool"]
        assert "torch.sparse_coo tensor on cpu" in told["sparse"]
        assert "algorithm='rings': did you mean 'ring'" in told["name"]
        assert ("rank 1 is not in the group" in told.get("member", "")) == (rank == 1)
        assert f"CollectiveError all_reduce of {4 + rank} elements of torch.float32 by ring failed" in told["mismatch"]
        assert 0.5 < told["seconds"] < 30
