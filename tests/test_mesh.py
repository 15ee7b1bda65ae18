"""Axes, places, and what is said of lengths that do not fit."""

import pytest

from stretto import Mesh, UsageError
from stretto.mesh import Placement


def test_every_process_has_a_place_of_its_own():
    placement = Placement(Mesh(data=3), 4)
    places = [placement.at(rank) for rank in range(placement.size)]
    assert places == [(replica, worker) for replica in range(3) for worker in range(4)]
    assert all(placement.rank(*placement.at(rank)) == rank for rank in range(placement.size))
    assert placement.replicas_of(1) == [1, 5, 9]
    assert placement.workers_of(2) == [8, 9, 10, 11]


def test_those_that_share_a_stage_are_neighbours():
    placement = Placement(Mesh(data=2, tensor=2, space=(1, 3)), 2)
    assert placement.axes == {"data": 2, "pipeline": 2, "tensor": 2, "height": 1, "width": 3}
    assert placement.size == 24
    assert [placement.at(rank) for rank in (0, 5, 6, 11, 12, 23)] == [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 1)]
    assert placement.workers_of(1) == [12, 18]


def test_the_picture():
    """As in the docstring of `Placement.describe`."""
    text = Placement(Mesh(data=2), 2).describe({0: 0, 1: 0, 2: 1})
    assert text.splitlines() == [
        "data 2 x pipeline 2 = 4 processes",
        "process 0: replica 0, worker 0 (stages 0, 1)",
        "process 1: replica 0, worker 1 (stage 2)",
        "process 2: replica 1, worker 0 (stages 0, 1)",
        "process 3: replica 1, worker 1 (stage 2)",
    ]


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"data": 0}, "data=0: the length of an axis"),
        ({"data": 1.5}, "data=1.5: the length of an axis"),
        ({"tensor": True}, "tensor=True: the length of an axis"),
        ({"space": 2}, "space=2: give two numbers"),
        ({"space": (0, 1)}, r"space=\(0, 1\): the length of an axis"),
    ],
)
def test_lengths_are_whole(axes, words):
    with pytest.raises(UsageError, match=words):
        Mesh(**axes)


@pytest.mark.parametrize(
    ("mesh", "processes", "words"),
    [
        (Mesh(data=4), 6, "start 4 or 8, or choose data from 1, 2, 3, 6"),
        (Mesh(data=4), 3, "start 4, or choose data from 1, 3"),
        (Mesh(data=2, tensor=3), 4, r"start 6$"),
    ],
)
def test_axes_multiply_to_the_number_of_processes(mesh, processes, words):
    with pytest.raises(UsageError, match=words):
        mesh.pipeline(processes)


def test_where_processes_stand():
    placement = Placement(Mesh(data=2, tensor=2, space=(1, 3)), 2)
    assert placement.inner == {"tensor": 2, "width": 3}
    assert [placement.part(rank) for rank in (0, 5, 6, 23)] == [0, 5, 0, 5]
    assert placement.place(11) == {"tensor": 1, "width": 2}
    assert placement.place(14) == {"tensor": 0, "width": 2}
    assert placement.at(14) == (1, 0)
    assert placement.parts_of(1, 0) == [12, 13, 14, 15, 16, 17]
    assert placement.slabs_of(1, 0) == [[12, 13, 14], [15, 16, 17]]
    assert placement.weights_of(1, 0) == [[12, 15], [13, 16], [14, 17]]
    assert placement.workers_of(1, 2) == [14, 20]
    assert placement.replicas_of(0, 2) == [2, 14]
    assert "process 23: replica 1, worker 1, tensor 1, width 2 (stage 1)" in placement.describe({0: 0, 1: 1})


def test_the_pipeline_is_what_is_left():
    assert Mesh(data=2).pipeline(8) == 4
    assert Mesh(data=2, tensor=2, space=(2, 1)).pipeline(8) == 1
