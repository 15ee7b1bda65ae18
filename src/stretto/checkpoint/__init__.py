"""Checkpoints on disk: a folder that is whole or not there.

    run/
      manifest.json           what was trained and how far, and how each file below must look; written last
      stage-0/
        .metadata, __0_0.distcp   the stage's tensors, as torch.distributed.checkpoint writes them
        state.json                what is built of them: nested dicts and lists, numbers, names
        replica-1/                the same two of a replica of the stage: its own state.json, and those tensors that
                                  are not those of the stage above; nothing if it is all the same
      stage-1/ ...

Each worker writes its own stages and none speaks to another, so that any number of workers can read them::

    partial = begin(path)                             # one worker; then a barrier
    digest = write_stage(partial, index, state)       # every worker, for each of its stages; then a barrier
    finish(partial, path, Manifest(..., stages=...))  # one worker, with the digests of all

Other replicas write with `replica=` and `first=`, the first one's `contents(index, state)`; the digests of a stage are
put together. And `discard(path)`, by one worker when no other writes any more, if any of this has failed.

Until `finish`, everything stands in `.run.partial`; what it replaces is `.run.former` for the moment between two
renames, and is found there by every function that reads.
"""

from stretto.checkpoint.digest import Digest, FileDigest
from stretto.checkpoint.folder import (
    begin,
    contents,
    discard,
    finish,
    partial_of,
    read_manifest,
    read_stage,
    verify,
    write,
    write_stage,
)
from stretto.checkpoint.manifest import Manifest
from stretto.checkpoint.state_hashes import Contents
from stretto.checkpoint.steps import newest, prune

__all__ = [
    "Contents",
    "Digest",
    "FileDigest",
    "Manifest",
    "begin",
    "contents",
    "discard",
    "finish",
    "newest",
    "partial_of",
    "prune",
    "read_manifest",
    "read_stage",
    "verify",
    "write",
    "write_stage",
]
