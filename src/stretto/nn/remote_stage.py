"""What stands for a stage that lives in another process."""

from typing import Any, NoReturn

from torch import nn

from stretto.errors import UsageError


class RemoteStage(nn.Module):
    """A stage without parameters here; calling it says where it is."""

    def __init__(self, stage: int, worker: int) -> None:
        super().__init__()
        self.stage = stage
        self.worker = worker

    def forward(self, *inputs: Any) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(
            f"stage {self.stage} lives in the process of worker {self.worker}: use trainer.evaluate, or "
            "trainer.gather() and load the weights into a model of your own on rank 0"
        )

    def extra_repr(self) -> str:
        """Where it is."""
        return f"stage {self.stage} on worker {self.worker}"
