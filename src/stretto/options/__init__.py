"""What a user writes, read and checked: names with options, arguments, objects by their names. No torch.

A script's objects are registered under a name such as `given:model`, and travel to processes by cloudpickle; no other
code knows the difference. A run is identified by the digest of a function's file and of the files beside it that it
imports, since the called code counts as well. A data function is called on one thread with seeded generators, because
each process calls it. New processes do not run the user's script again: what they need is in the registry.
"""
