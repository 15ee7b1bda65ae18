"""What the loss looks like where training stands: how noisy its gradient is, how sharp it bends.

Pure functions of a model, a loss and batches; nothing of the model changes, and no global random state.
"""
