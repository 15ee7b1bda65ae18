"""Checkpoints on disk: a folder that is complete or absent.

    run/
      manifest.json           what was trained and how far, and the size and CRC-32 of each file below; written last
      stage-0/
        .metadata, __0_0.distcp   the stage's tensors, as torch.distributed.checkpoint writes them
        state.json                the state without its tensors: nested dicts and lists, numbers, tensors' names
        replica-1/                the same files for another replica of the stage: its own state.json, and the tensors
                                  that differ from those of the first replica; absent if the whole state is equal
      stage-1/ ...

Each worker writes its own stages without messages to others, so that any number of workers can read them::

    partial = begin(path)                             # one worker; then a barrier
    digest = write_stage(partial, index, state)       # every worker, for each of its stages; then a barrier
    finish(partial, path, Manifest(..., stages=...))  # one worker, with all digests

Other replicas write with `replica=` and `first=`, the first replica's `contents(index, state)`; the digests of all
replicas of a stage are merged. If any of this fails, one worker calls `discard(path)` once no other writes any more.

Until `finish`, all files are in `.run.partial`. A checkpoint that is replaced is in `.run.former` between two renames,
and every function that reads finds it there.
"""

from stretto.checkpoint.folder import (
    begin,
    contents,
    discard,
    exists,
    finish,
    newest,
    partial_of,
    prune,
    read_manifest,
    read_stage,
    verify,
    write,
    write_stage,
)
from stretto.checkpoint.manifest import Contents, Digest, FileDigest, Manifest

__all__ = [
    "Contents",
    "Digest",
    "FileDigest",
    "Manifest",
    "begin",
    "contents",
    "discard",
    "exists",
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
