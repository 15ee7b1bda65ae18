"""The simulator's model once more, as processes of simpy; shares no code with it but the meaning of actions.

A worker's lanes and the shared links are simpy resources, taken and given back. Who asks for a resource at the same
instant is served by worker, then by program order: requests are put off until nothing else happens in that instant.
"""

import simpy

OVERLAPPING = "AM"


def lanes_of(schedule, turns, overlap):
    """Every lane's actions: [(worker, actions)]."""
    lists = [schedule.unroll(worker, turns) for worker in range(schedule.num_workers)]
    found = [(w, [a for a in own if not (overlap and a.kind in OVERLAPPING)]) for w, own in enumerate(lists)]
    if overlap:
        found += [(w, [a for a in own if a.kind in OVERLAPPING]) for w, own in enumerate(lists)]
    return found


def before_in_stage(schedule, turns):
    """Of each action: the merge before it in its stage's order; of each merge: the action before it."""
    waits = {}
    for worker in range(schedule.num_workers):
        last, merged = {}, {}
        for action in schedule.unroll(worker, turns):
            waits[action] = [last[action.stage]] if action.kind == "M" and action.stage in last else []
            if action.kind != "M" and action.stage in merged:
                waits[action].append(merged[action.stage])
            last[action.stage] = action
            if action.kind == "M":
                merged[action.stage] = action
    return waits


class Oracle:
    """Runs a schedule; `starts` of actions, and (sent, arrival) of messages by edge."""

    def __init__(self, schedule, rules, turns, times, *, links, sizes, sends, overlap):
        self.env = simpy.Environment()
        self.schedule, self.rules, self.times = schedule, rules, times
        self.links, self.sizes, self.sends = links, sizes, sends
        self.starts, self.messages, self.resources, self.events = {}, {}, {}, {}
        self.loaded = {edge for m in range(turns * schedule.per_turn) for edge in rules.loads(m)}
        self.rank = {}
        for worker in range(schedule.num_workers):
            for action in schedule.unroll(worker, turns):
                self.rank[action] = (worker, len(self.rank))
        self.after = before_in_stage(schedule, turns) if overlap else {}
        for _, actions in lanes_of(schedule, turns, overlap):
            self.env.process(self.lane(actions))
        self.env.run()
        assert len(self.starts) == len(self.rank)

    def event(self, key):
        return self.events.setdefault(key, self.env.event())

    def happens(self, key):
        if not self.event(key).triggered:
            self.event(key).succeed()

    def lane(self, actions):
        for action in actions:
            needs = [edge for edge in self.rules.needs(action) if edge not in self.loaded]
            for edge in needs:
                self.happens(("wanted", edge))
            for edge in needs:
                yield self.event(("there", edge))
            for other in self.after.get(action, []):
                yield self.event(("done", other))
            self.starts[action] = self.env.now
            yield self.env.timeout(self.times(action))
            self.happens(("done", action))
            for number, edge in enumerate(dict.fromkeys(self.rules.makes(action))):
                own, home = (self.schedule.worker_of.get(stage) for stage in (action.stage, edge.stage))
                if home in (None, own):
                    self.happens(("there", edge))
                else:
                    self.env.process(self.message(edge, own, home, number))

    def message(self, edge, sender, receiver, number):
        latency, per_byte, shared, gap = self.links(sender, receiver)
        hold = self.sizes(edge) * per_byte
        keeps = self.sizes(edge) * max(per_byte, gap)
        rank = (*self.rank[edge.source], number)
        if self.sends == "rendezvous":
            yield self.event(("wanted", edge))
        yield from self.occupy(("send", sender), keeps, rank)
        sent = self.env.now
        if shared:
            yield from self.occupy(("link", shared), keeps, rank)
        yield self.env.timeout(latency)
        yield from self.occupy(("receive", receiver), keeps, rank)
        yield self.env.timeout(hold)
        self.messages[edge] = (sent, self.env.now)
        self.happens(("there", edge))

    def occupy(self, name, hold, rank):
        """Come to a resource; go on when it is ours, and give it back after `hold`."""
        worker, position, number = rank
        turn_comes = self.env.event()
        turn_comes._ok, turn_comes._value = True, None
        self.env.schedule(turn_comes, priority=10 + (worker * len(self.rank) + position) * 100 + number)
        yield turn_comes
        resource = self.resources.setdefault(name, simpy.Resource(self.env))
        request = resource.request()
        yield request

        def give_back():
            yield self.env.timeout(hold)
            resource.release(request)

        self.env.process(give_back())
