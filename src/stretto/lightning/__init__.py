"""Lightning's Trainer trains with any method of Stretto: `Trainer(strategy=StrettoStrategy(method="1f1b", stages=2))`.

Importing this module also registers the strategy by the names "stretto", "stretto_spawn" and "stretto_fork". It needs
`pip install "stretto[lightning]"`; `import stretto` does not import it.
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
