"""Schedules of the library on random stages and workers, and what a few random changes make of them: broken or not."""

import stretto
from stretto.errors import ScheduleError, StrettoError
from stretto.schedule import Action, Rules, Schedule

ANY = [
    "backprop", "greedy", "overlapping", "overlapping(delay=1)", "chunked", "pb", "pipedream", "paci",
    "pb(recompute=True)", "pipedream(recompute=2)",
]  # fmt: skip
CUT = [
    "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "pipedream-2bw",
    "1f1b(recompute=True)", "gpipe(recompute=True)", "zb-h1(recompute=True)",
]  # fmt: skip


def with_microbatches(method, count):
    return method.replace("(", f"(microbatches={count},") if "(" in method else f"{method}(microbatches={count})"


def planned(method, num_stages, workers, **options):
    """A method's schedule and rules, or None where it cannot be laid out so."""
    try:
        return stretto.method(method).plan(num_stages, workers, **options)
    except StrettoError:
        return None


def some_plan(rng):
    """A schedule of the library, at random."""
    while True:
        num_stages = rng.randint(1, 5)
        method = rng.choice([*ANY, *(with_microbatches(method, rng.randint(1, 5)) for method in CUT)])
        options = {"agreement": rng.choice([None, None, "A", "M", "AM"]), "reduce": rng.random() < 0.2}
        if num_stages > 1 and rng.random() < 0.3:
            low, high = sorted(rng.sample(range(num_stages), 2))
            asynchronous = method in ("greedy", "overlapping", "overlapping(delay=1)")
            options |= {"reads": [(high, low, rng.randint(1, 4))]} if asynchronous else {"ties": [(low, high)]}
        plan = planned(method, num_stages, rng.randint(1, num_stages), **options)
        if plan is not None:
            return plan


def swap(rng, body, per_turn):
    first = rng.randrange(len(body))
    second = min(len(body) - 1, max(0, first + rng.choice([-2, -1, 1, 2])))
    body[first], body[second] = body[second], body[first]


def drop(rng, body, per_turn):
    del body[rng.randrange(len(body))]


def double(rng, body, per_turn):
    action = rng.choice(body)
    earlier = action._replace(microbatch=action.microbatch - rng.randint(1, 2 * per_turn))
    body.insert(rng.randrange(len(body) + 1), earlier)


def move_one(rng, body, per_turn):
    index = rng.randrange(len(body))
    body[index] = body[index]._replace(microbatch=body[index].microbatch + rng.choice([-per_turn, -1, 1]))


def move_all_of_a_kind(rng, body, per_turn):
    kind, stage, _ = rng.choice(body)
    by = rng.choice([-2, -1, 1]) * rng.choice([1, per_turn])
    body[:] = [Action(k, s, m + by) if (k, s) == (kind, stage) else Action(k, s, m) for k, s, m in body]


def move_a_stage(rng, body, per_turn):
    stage, by = rng.choice(body).stage, -rng.randint(1, 2) * per_turn
    body[:] = [action._replace(microbatch=action.microbatch + by * (action.stage == stage)) for action in body]


def begin_elsewhere(rng, body, per_turn):
    first = rng.randrange(len(body))
    by = rng.choice([0, -per_turn])
    body[:] = body[first:] + [action._replace(microbatch=action.microbatch + by) for action in body[:first]]


def shuffle_microbatches(rng, body, per_turn):
    kind, stage, _ = rng.choice(body)
    places = [place for place, action in enumerate(body) if (action.kind, action.stage) == (kind, stage)]
    for place, action in zip(places, rng.sample([body[place] for place in places], len(places)), strict=True):
        body[place] = action


CHANGES = [swap, swap, swap, drop, double, move_one, move_all_of_a_kind, move_a_stage, begin_elsewhere,
           shuffle_microbatches]  # fmt: skip


def changed(rng, schedule, rules):
    """The schedule with up to three changes, or None where it is none any more; now and then other rules, too."""
    bodies = [list(body) for body in schedule.body]
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        rng.choice(CHANGES)(rng, rng.choice([body for body in bodies if body]), schedule.per_turn)
    try:
        other = Schedule(tuple(map(tuple, bodies)), schedule.per_turn)
    except (ScheduleError, IndexError):
        return None
    per_update = rng.randint(1, 4) if rng.random() < 0.1 else rules.per_update
    ties = rules.ties
    if rng.random() < 0.2:
        ties = tuple(tie._replace(behind=tuple(max(0, b + rng.randint(-2, 2)) for b in tie.behind)) for tie in ties)
    return other, Rules.of(other, rules.reach, per_update, ties)
