"""What is wrong with one step of training: its gradients beside those of plain PyTorch, and beside known mistakes.

A gradient is a sum over parts of the batch and over uses of a weight (`passes`). A mistake changes what the parts are
computed with (a `Condition`), or how they are put together (a `Scenario`). `hypotheses` has one file a kind of mistake;
`search` looks for the fewest that explain what was given (`evidence`), and `answer` says so.
"""
