"""Models: checkpoints to hidden states to logits. They know nothing of paging.

What `shard` says of a model takes no torch, which is why nothing is imported here.
"""
