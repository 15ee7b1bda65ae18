"""One stage's work: what each action of a schedule does to its module, its weights and its optimizer.

Losses that are a sum and a count: the head's forward knows the count. A minibatch in one micro-batch is divided
before its backward, by the count of all replicas. One in several cannot be: under 1F1B the first backward comes
before the last forward. Its sums are divided by the number of targets, which is the count if nothing is left out, and
the rest, count over targets, goes down the pipeline with the gradients of the micro-batch that completes it.

Recomputation of a stage: C runs a forward again, for its backward, on the weights that the forward saw where the
policy keeps them. Buffers are taken back to what the first forward found, as objects and not by copying. In a
pipeline that does not drain, stages form segments of about sqrt(S) (PipeMare).

Whole and split backwards on one stage (DualPipeV): a micro-batch whose backward stays whole makes one graph for
output and loss, the others cut it between them.
"""
