"""The placeholder of a stage whose module lives in another process."""

from typing import Any, NoReturn

from torch import nn

from stretto.errors import UsageError


class RemoteStage(nn.Module):
    """A stage of another process, without parameters here; a call raises UsageError that names its worker."""

    def __init__(self, stage: int, worker: int) -> None:
        super().__init__()
        self.stage = stage
        self.worker = worker

    def forward(self, *inputs: Any) -> NoReturn:
        """Raise UsageError: the stage runs in its worker's process only."""
        raise UsageError(
            f"stage {self.stage} lives in the process of worker {self.worker}: use trainer.evaluate, or "
            "trainer.gather() and load the weights into a model of your own on rank 0"
        )

    def extra_repr(self) -> str:
        """The stage and its worker, for repr."""
        return f"stage {self.stage} on worker {self.worker}"
