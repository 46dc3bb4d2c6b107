"""Models: checkpoints to hidden states to logits. They know nothing of paging."""
