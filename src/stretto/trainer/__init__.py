"""`Trainer`, the object that a user's script needs, and what it is built from.

A user's changes after the Trainer was made (`changes.py`): objects are compared by identity, attributes by value, and
only those that the code of a traced forward mentions, so a counter of the user's is no change. Weights that a user
sets are looked for only where something has copies of them (`changes.py`): by the object, its memory and its version
counter. `parameter.data.copy_` has no version: values are compared before the first step, and before steps 2, 3, 5,
9, ..., where it is refused.

Rows (`row_check.py`): outputs and gradients of a few examples with and without others behind them, in evaluation,
once.

Losses by number: a Trainer tells listeners each minibatch's loss by its number, whoever calls `step` and `flush`, so
`fit` knows its own. It logs from a counter that is saved with a checkpoint: a step whose logging was interrupted is
logged again, twice rather than never.
"""
