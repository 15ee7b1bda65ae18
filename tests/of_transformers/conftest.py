"""What tests of this folder have in common."""

import gc

import pytest

from late_imports import no_garbage


@pytest.fixture(scope="package", autouse=True)
def _imported():
    """What is imported stays: after each training a Trainer of transformers looks for garbage in all that may go."""
    with no_garbage():
        import accelerate  # noqa: F401 (where one of these is missing, tests are skipped by its name)
        import transformers  # noqa: F401

        import stretto.transformers  # noqa: F401

    gc.freeze()  # as tests/conftest.py does with what was collected; to undo it would undo that
