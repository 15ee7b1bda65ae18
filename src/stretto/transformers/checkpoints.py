"""transformers' checkpoint-N folders with Stretto's checkpoint inside: which of them are whole."""

import json
import re
from pathlib import Path

from stretto.errors import UsageError
from stretto.transformers.pipeline import FOLDER

STATE = "trainer_state.json"  # written last
OPTIMIZER = "optimizer.pt"


def last_whole(output_dir: str) -> str:
    """The newest checkpoint that was written to its end. Raises UsageError if there is none."""
    numbered = {
        int(found[1]): path
        for path in Path(output_dir).glob("checkpoint-*")
        if (found := re.search(r"-(\d+)$", path.name))
    }
    for number in sorted(numbered, reverse=True):
        if is_whole(numbered[number]):
            return str(numbered[number])
    raise UsageError(
        f"resume_from_checkpoint=True, but {output_dir} holds no whole checkpoint"
        + (f" ({len(numbered)} of them were cut short while they were written)" if numbered else "")
    )


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint's last file is there, and can be read."""
    try:
        json.loads((folder / STATE).read_text())
    except (OSError, ValueError):
        return False
    return True


def has_training(folder: str) -> bool:
    """Whether a checkpoint holds Stretto's, with which training goes on exactly.

    False for one of weights alone (save_only_model=True). Raises UsageError for one of transformers' own Trainer, whose
    optimizer state belongs to no stages.
    """
    if (Path(folder) / FOLDER).is_dir():
        return True
    if (Path(folder) / OPTIMIZER).exists():
        raise UsageError(
            f"{folder} was written by transformers' own Trainer: its optimizer state is that of a whole model. Load "
            "its weights, model = AutoModel....from_pretrained(folder), and train from there"
        )
    return False
