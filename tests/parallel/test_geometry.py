"""Which rows travel: against torch's own sizes and against walking through every row, without processes."""

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from stretto.parallel.space.geometry import (
    RowRange,
    SlidingWindow,
    TransposedWindow,
    cells,
    cuts,
    padded_rows,
    want,
    want_rows,
)
from stretto.parallel.space.halo import axis_rows, halo, route

SMALL = st.integers(1, 4)
WINDOWS = st.builds(SlidingWindow, st.integers(1, 6), SMALL, SMALL, st.integers(0, 4), st.integers(0, 4))


@given(st.integers(0, 40), st.integers(1, 9))
def test_cuts_are_those_of_tensor_split(size, parts):
    wanted = [piece.tolist() for piece in torch.arange(size).tensor_split(parts)]
    assert [list(range(*span)) for span in cuts(size, parts)] == wanted


@given(WINDOWS, st.integers(1, 30), st.integers(1, 5))
def test_a_hull_is_what_the_windows_of_its_outputs_see(window, size, parts):
    count = window.outputs(size)
    assume(count >= parts)
    for out in cuts(count, parts):
        seen = {
            o * window.stride - window.before + window.dilation * j for o in range(*out) for j in range(window.kernel)
        }
        assert (min(seen), max(seen) + 1) == window.hull(out)


@given(WINDOWS, st.integers(1, 20), st.integers(0, 20), st.integers(1, 9))
def test_outputs_that_see_rows(window, size, start, length):
    count = window.outputs(size)
    assume(count > 0)
    rows, every = RowRange(start, start + length), RowRange(0, count)
    touching = [o for o in range(count) if window.hull(RowRange(o, o + 1)).intersection(rows).size]
    assert list(range(*window.outputs_touching(rows, every))) == touching


@given(st.integers(1, 5), SMALL, st.integers(0, 2), st.booleans(), st.integers(1, 20))
def test_output_sizes_are_torchs(kernel, stride, padding, ceil, size):
    padding = min(padding, kernel // 2)
    assume(size + 2 * padding >= kernel)
    window = SlidingWindow(kernel, stride, 1, padding, padding, ceil)
    pooled = torch.nn.functional.max_pool1d(torch.zeros(1, 1, size), kernel, stride, padding, ceil_mode=ceil)
    assert window.outputs(size) == pooled.shape[-1]


@given(st.integers(1, 5), SMALL, SMALL, st.integers(0, 3), st.integers(1, 12), st.integers(1, 4))
def test_inputs_that_reach_an_output(kernel, stride, dilation, padding, size, parts):
    window = TransposedWindow(kernel, stride, dilation, padding)
    count = window.outputs(size)
    assume(count >= parts)
    for out in cuts(count, parts):
        inside = window.hull(out).intersection(RowRange(0, size))
        assert list(range(*inside)) == [
            i for i in range(size) if window.covered(RowRange(i, i + 1)).intersection(out).size
        ]


@given(st.integers(1, 30), st.integers(1, 12))
def test_adaptive_cells_are_torchs(size, count):
    rows = torch.arange(float(size)).view(1, 1, -1)
    wanted = torch.nn.functional.adaptive_avg_pool1d(rows, count).flatten().tolist()
    assert [(a + b - 1) / 2 for a, b in cells(size, count)] == wanted


@given(st.integers(4, 9), st.integers(0, 3), st.integers(0, 3), st.sampled_from(("reflect", "replicate", "circular")))
def test_padded_rows_are_torchs(size, before, after, mode):
    rows = torch.arange(float(size)).view(1, 1, -1)
    wanted = torch.nn.functional.pad(rows, (before, after), mode).flatten().tolist()
    assert padded_rows(size, before, after, mode) == wanted


@given(st.lists(st.none() | st.integers(0, 6), max_size=12))
def test_segments_stand_for_their_rows(sources):
    wanted = want_rows(sources)
    buffer = [None] * wanted.length
    for source, at in wanted.segments:
        buffer[at : at + source.size] = range(*source)
    assert buffer == sources


def delivered(axes, parts):
    """What lies in each process's buffer after an exchange of numbered rows, by the routes alone."""
    grid = [(i, j) for i in range(parts[0]) for j in range(parts[1])]
    exchanges = [route(axes, place) for place in grid]
    slabs = [[[(r, c) for c in range(*axes[1].own[j])] for r in range(*axes[0].own[i])] for i, j in grid]
    buffers = [[[None] * exchange.shape[1] for _ in range(exchange.shape[0])] for exchange in exchanges]
    mail = {}
    for rank, exchange in enumerate(exchanges):
        for box in exchange.sends:
            mail.setdefault((rank, box.peer), []).append(
                [row[slice(*box.source[1])] for row in slabs[rank][slice(*box.source[0])]]
            )
    for rank, exchange in enumerate(exchanges):
        arrived = [(box, mail[box.peer, rank].pop(0)) for box in exchange.receives]
        own = [
            (box, [row[slice(*box.source[1])] for row in slabs[rank][slice(*box.source[0])]]) for box in exchange.keep
        ]
        for box, rows in arrived + own:
            for at, row in zip(range(*box.target[0]), rows, strict=True):
                buffers[rank][at][slice(*box.target[1])] = row
    assert not any(mail.values()), "everything that was sent has been taken"
    return grid, buffers


@given(
    WINDOWS, WINDOWS, st.integers(1, 12), st.integers(1, 12), st.sampled_from(((2, 1), (1, 3), (2, 2), (3, 2), (1, 4)))
)
def test_every_process_gets_its_hull(high, wide, height, width, parts):
    """Halos wider than a neighbour, none at all, corners: every row of the hull that is in the image, and no other."""
    counts = high.outputs(height), wide.outputs(width)
    assume(all(count >= p for count, p in zip(counts, parts, strict=True)))
    assume(height >= parts[0])
    assume(width >= parts[1])
    axes = axis_rows((high, wide), (height, width), parts)
    for (i, j), buffer in zip(*delivered(axes, parts), strict=True):
        rows, columns = high.hull(cuts(counts[0], parts[0])[i]), wide.hull(cuts(counts[1], parts[1])[j])
        wanted = [
            [(r, c) if 0 <= r < height and 0 <= c < width else None for c in range(*columns)] for r in range(*rows)
        ]
        assert buffer == wanted


@given(WINDOWS, st.integers(2, 30), st.integers(2, 4), st.sampled_from((0.1, 0.5, 1.0)))
def test_processes_agree_whether_halos_are_added(window, size, parts, thin):
    assume(window.outputs(size) >= parts)
    assume(size >= parts)
    plans = [halo((window,), (size,), (parts,), (place,), thin) for place in range(parts)]
    assert len({plan is None for plan in plans}) == 1


def test_a_plain_three_by_three_has_one_row_from_each_neighbour():
    window = SlidingWindow(3, 1, 1, 1, 1)
    middle = halo((window,), (12,), (3,), (1,), 0.5)
    assert middle.padding == (1,)
    assert [(box.peer, box.source, box.target) for box in middle.exchange.receives] == [
        (0, ((3, 4),), ((0, 1),)),
        (2, ((0, 1),), ((5, 6),)),
    ]
    assert [(strip.outs, strip.shape) for strip in middle.strips] == [(((0, 1),), (3,)), (((3, 4),), (3,))]


def test_stride_two_needs_a_row_from_above_only():
    exchange = route(axis_rows((SlidingWindow(3, 2, 1, 1, 1),), (8,), (2,)), (1,))
    assert [(box.peer, box.source) for box in exchange.receives] == [(0, ((3, 4),))]
    assert exchange.sends == ()


def test_a_want_beyond_the_border_is_filled():
    assert want(RowRange(-2, 3), 10).segments == ((RowRange(0, 3), 2),)
    assert want(RowRange(11, 14), 10).segments == ()
