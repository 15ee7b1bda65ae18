"""Properties of the loss at given weights: gradient noise, sharpness, gradient cosines, linear probes, filters.

Pure functions of a model, a loss and batches: the model and the global random state stay as they are. `stable_rate`
needs none of them: how large a rate is stable under delay.
"""
