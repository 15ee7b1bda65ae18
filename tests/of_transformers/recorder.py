"""A callback that writes down all that callbacks are told."""

from transformers import TrainerCallback

CLOCKS = ("runtime", "per_second", "preparation_time")
EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


def timeless(values):
    return {key: value for key, value in values.items() if not key.endswith(CLOCKS)}


class Recorder(TrainerCallback):
    """Every event with the state, the control and what else it comes with."""

    def __init__(self):
        self.events = []

    def record(self, event, args, state, control, **given):
        seen = {key: value for key, value in vars(state).items() if key not in ("log_history", "stateful_callbacks")}
        seen["best_model_checkpoint"] = str(seen["best_model_checkpoint"]).rpartition("/")[2]
        logged = [timeless(entry) for entry in state.log_history]
        rates = None if given.get("optimizer") is None else [group["lr"] for group in given["optimizer"].param_groups]
        told = {name: timeless(given[name]) for name in ("logs", "metrics") if given.get(name) is not None}
        self.events.append((event, seen, vars(control).copy(), logged, rates, told, sorted(given)))


for name in EVENTS:
    setattr(Recorder, name, lambda self, *args, event=name, **given: self.record(event, *args, **given))
