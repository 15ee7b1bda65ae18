"""Lightning's Trainer trains with any method of Stretto: `Trainer(strategy=StrettoStrategy(method="1f1b", stages=2))`.

Importing this module also registers the strategy by the names "stretto", "stretto_spawn" and "stretto_fork". It needs
`pip install ".[lightning]"` in the checkout; `import stretto` does not import it.

`training_step` runs twice, up to `self(...)` where stage 0 is, and whole where the output is, instead of being
suspended in a thread: grad mode, autocast and generators belong to a thread. What it logs is recorded there and
replayed on every process. Lightning keeps the optimizer of `configure_optimizers`, which steps nothing; copies of it
step the stages, with the options of its groups as they were when their update's minibatch entered.
"""

from importlib.util import find_spec

from stretto.errors import UsageError

if find_spec("lightning") is None:
    other = find_spec("pytorch_lightning") is not None
    raise UsageError(
        'stretto.lightning needs the package lightning: pip install "stretto[lightning]"'
        + ". pytorch_lightning is installed, but its Trainer takes its own classes only: "
        "write `import lightning.pytorch as pl`" * other
    )

from stretto.lightning.strategy import StrettoStrategy

__all__ = ["StrettoStrategy"]
